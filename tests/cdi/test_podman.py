"""podman starts containers with devices from the document that nvplug prints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from driver_tree import DEBIAN, VERSION, lay, link
from frozen.containers import Containers
from frozen.roots import MissingError, require
from needs import lacking
from peer.program import ROOT

from _nvplug.container.cdi_document import decode
from cdi.world import NODES, make_container, make_host

MACHINE: Final = {"machine": "2xH100", "count": 2, "gpus": [{}, {"mig": ["1g.10gb"]}]}
KIND: Final = "k8s.device-plugin.nvidia.com/gpu"
SHARED: Final = {"/dev/nvidiactl", "/dev/nvidia-uvm"}
MIG: Final = {"/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap19", "/dev/nvidia-caps/nvidia-cap20"}

# podman of Debian 12 looks nowhere else.
_WITH_DOCUMENTS: Final = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /run/cdi && exec "$@"')


class Seen(NamedTuple):
    """What a container has."""

    libraries: dict[str, str]
    nodes: dict[str, str]
    variables: set[str]
    mounts: dict[str, str]


class Host:
    """A driver, GPUs, an image, and podman."""

    def __init__(self, directory: Path) -> None:
        require("cc", "ldconfig", "unshare")
        self._containers = Containers(directory / "podman")
        self.root = directory / "host"
        self.documents = directory / "cdi"
        self._image = directory / "image"
        self._machine = directory / "machine.json"
        self._machine.write_text(json.dumps(MACHINE))
        self.documents.mkdir()
        Path("/run/cdi").mkdir(exist_ok=True)
        make_container(self._image)

    def describe(self, *flags: str) -> list[str]:
        """Has nvplug print the document of this host, and puts it where podman looks. Returns the names in it."""
        command: list[str | Path] = [
            *(sys.executable, ROOT / "nvplug.py", "cdi", f"--device-discovery-strategy=simulated:{self._machine}"),
            *(f"--driver-root={self.root}", f"--dev-root={self.root}", "--mig-strategy=mixed", *flags),
        ]
        printed = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
        (self.documents / "nvplug.json").write_bytes(printed)
        return [each.name for each in decode(printed).devices]

    def run(self, device: str, *libraries: str, under: tuple[str, ...] = _WITH_DOCUMENTS) -> Seen:
        """Starts a container with a device, and returns what it sees."""
        # Mounts make files in it.
        image = self._image.with_name("running")
        shutil.rmtree(image, ignore_errors=True)
        subprocess.run(["cp", "--archive", self._image, image], check=True)
        command: list[str | Path] = [
            "podman",
            "run",
            "--rm",
            "--network=none",
            f"--device={KIND}={device}",
            "--rootfs",
            image,
        ]
        done = self._containers.run(*command, "/probe", *libraries, under=(*under, str(self.documents)))
        assert done.returncode == 0, done.stderr
        words = [line.split(" ", 2) for line in done.stdout.splitlines()]
        found = {
            kind: {each[1]: each[-1] for each in words if each[0] == kind} for kind in ("library", "node", "mount")
        }
        return Seen(
            found["library"],
            {path: numbers for path, numbers in found["node"].items() if path.startswith("/dev/nvidia")},
            {line.removeprefix("variable ") for line in done.stdout.splitlines() if line.startswith("variable ")},
            found["mount"],
        )


@pytest.fixture
def host() -> Generator[Host]:
    """Where this machine has what it takes."""
    # Not tmp_path: where paths are long, podman waits 20 s for the end of each container.
    directory = Path(tempfile.mkdtemp(prefix="nvc"))
    try:
        try:
            host = Host(directory)
        except MissingError as missing:
            lacking(str(missing))
        yield host
    finally:
        remove(directory)


def remove(directory: Path) -> None:
    """Removes all of it, when what podman leaves behind to clean up has done so."""
    deadline = time.monotonic() + 20
    while True:
        try:
            shutil.rmtree(directory)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def named(host: Host, prefix: str) -> str:
    """The first device whose name begins so."""
    return next(name for name in host.describe() if name.startswith(prefix))


def test_a_container_sees_what_its_device_stands_for(host: Host) -> None:
    """By index, by UUID, all, and a MIG device: exactly these nodes, which it can open, with their numbers."""
    make_host(host.root)
    everything = {"/dev/nvidia0", *MIG}
    for name, own in (
        ("0", {"/dev/nvidia0"}),
        (named(host, "GPU-"), {"/dev/nvidia0"}),
        (named(host, "MIG-"), MIG),
        ("1:0", MIG),
        ("all", everything),
    ):
        seen = host.run(name)

        assert seen.nodes == {
            f"/dev/{node}": f"{numbers[0]}:{numbers[1]} 666 open"
            for node, numbers in NODES.items()
            if f"/dev/{node}" in own | SHARED
        }
        assert "NVIDIA_VISIBLE_DEVICES=void" in seen.variables


@pytest.mark.parametrize("libraries", [DEBIAN, "/usr/lib64", f"{DEBIAN}/nvidia/current"])
def test_libraries_are_found_by_name_without_any_hook(host: Host, libraries: str) -> None:
    """Wherever the host has them, and though the image's loader was never told; and what one of them needs, too."""
    make_host(host.root, libraries)
    (host.root / libraries[1:] / "libcuda.so.1").unlink()
    link(host.root / libraries[1:] / f"libnvidia-cfg.so.{VERSION}", "gone")
    host.describe()
    seen = host.run("0", "libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnone.so")
    ours = {path: options for path, options in seen.mounts.items() if "nvidia" in path or "libcuda" in path}

    assert {name: os.path.basename(path) for name, path in seen.libraries.items()} == {  # noqa: PTH119 - of a container
        "libcuda.so.1": "libcuda.so.1",
        "libcuda.so": "libcuda.so.1",
        "libnvidia-ml.so.1": "libnvidia-ml.so.1",
        "libnone.so": "-",
    }
    assert {"/usr/bin/nvidia-smi", f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"} < {*ours}
    for path, options in ours.items():
        if not path.startswith("/dev/"):
            assert {"ro", "nosuid", "nodev"} <= {*options.split(",")}, path


def test_with_nvidias_toolkit_its_hooks_make_the_libraries_known(host: Host) -> None:
    """A stand-in that does what they document of theirs. Libraries are mounted once."""
    make_host(host.root)
    toolkit = host.root.with_name("nvidia-ctk")
    shutil.copy(Path(__file__).with_name("toolkit.sh"), toolkit)
    host.describe(f"--nvidia-cdi-hook-path={toolkit}")
    seen = host.run("0", "libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1")

    assert seen.libraries == {
        "libcuda.so.1": f"{DEBIAN}/libcuda.so.1",
        "libcuda.so": f"{DEBIAN}/libcuda.so.1",
        "libnvidia-ml.so.1": f"{DEBIAN}/libnvidia-ml.so.1",
    }
    assert [path for path in seen.mounts if "libcuda.so" in path] == [f"{DEBIAN}/libcuda.so.{VERSION}"]
    assert toolkit.with_name("nvidia-ctk.log").read_text().splitlines() == [
        f"hook create-symlinks --link libcuda.so.1::{DEBIAN}/libcuda.so",
        f"hook enable-cuda-compat --host-driver-version={VERSION}",
        f"hook update-ldcache --folder {DEBIAN}",
        "hook disable-device-node-modification",
        "hook update-application-profile",
    ]


def test_a_driver_in_a_container_is_given_from_its_root(host: Host) -> None:
    """Absolute links in it lead to its own files, which on the host would be others."""
    driver = host.root / "run/nvidia/driver"
    make_host(driver, "/opt/libraries")
    lay(host.root / "elsewhere")
    (driver / DEBIAN[1:]).mkdir(parents=True)
    for file in (driver / "opt/libraries").iterdir():
        link(driver / DEBIAN[1:] / file.name, f"/opt/libraries/{file.name}")
    host.describe(f"--driver-root={driver}", f"--dev-root={driver}")

    assert host.run("0", "libcuda.so.1").libraries == {"libcuda.so.1": f"{DEBIAN}/libcuda.so.1"}
