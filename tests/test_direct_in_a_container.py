"""The strategy direct in a container that runc runs, from the root of a Debian that knows nothing of NVIDIA."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest
import trio
from driver_tree import DEBIAN, VERSION, lay
from frozen.containers import Containers
from frozen.roots import MissingError, debian
from needs import lacking
from node import node_in

pytestmark = pytest.mark.process

SOURCES: Final = Path(__file__).parent


@pytest.fixture(scope="module")
def containers() -> Generator[Containers]:
    """podman, with runc below it."""
    with tempfile.TemporaryDirectory(prefix="nvc") as directory:
        try:
            yield Containers(Path(directory))
        except MissingError as missing:
            lacking(str(missing))


@pytest.fixture(scope="module")
def root() -> Path:
    """Debian 13, with its essential packages and no others."""
    try:
        return debian("trixie")
    except MissingError as missing:
        lacking(str(missing))


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """The root of a driver: stand-ins for its files and its device nodes."""
    place = tmp_path / "host"
    lay(place)
    for stem, soname, words in (
        ("libcuda.so", "libcuda.so.1", [str(SOURCES / "libcuda.c")]),
        ("libnvidia-ptxjitcompiler.so", "libnvidia-ptxjitcompiler.so.1", ["-x", "c", "/dev/null"]),
    ):
        made = place / DEBIAN[1:] / f"{stem}.{VERSION}"
        subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", made, *words], check=True, timeout=60)
    (place / "usr/bin/nvidia-smi").write_text("#!/bin/sh\necho nvidia-smi runs\n")
    (place / "usr/bin/nvidia-smi").chmod(0o755)
    subprocess.run(["cc", "-o", tmp_path / "finds-cuda", SOURCES / "finds_cuda.c"], check=True, timeout=60)
    (place / "dev").mkdir()
    for number, name in enumerate(("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia0")):
        try:
            os.mknod(place / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(1, (3, 5, 7, 8, 9)[number]))
        except PermissionError:
            lacking("making device nodes needs root")
    return place


async def test_a_program_finds_the_driver_by_name_alone(
    disk: Path, host: Path, root: Path, containers: Containers, tmp_path: Path
) -> None:
    """No runtime of NVIDIA, no CDI, no script, no variable: the dynamic loader finds what nvplug answered."""
    flags = ("--device-discovery-strategy=simulated:1xT4", "--device-list-strategy=direct", f"--driver-root={host}")
    async with node_in(disk, *flags, f"--driver-root-ctr-path={host}", devices=1) as node:
        answer = (await node.kubelet.allocate(node.kubelet.lists[-1].healthy)).container
    command = ["podman", "run", "--rm", "--network=none", "--env=LD_LIBRARY_PATH=/opt/own"]
    command += [f"--volume={source}:{place}:ro" for place, source, _ in answer.mounts]
    command += [f"--device={each.host_path}:{each.container_path}:{each.permissions}" for each in answer.devices]
    command += [f"--volume={tmp_path / 'finds-cuda'}:/finds-cuda:ro", "--rootfs", f"{root}:O"]
    script = "/finds-cuda && nvidia-smi && ls /dev && echo $LD_LIBRARY_PATH && touch /usr/lib64/libcuda.so.1"
    done = await trio.to_thread.run_sync(lambda: containers.run(*command, "sh", "-c", script))
    said = done.stdout.splitlines()

    assert answer.envs == {}
    assert all(read_only for _, _, read_only in answer.mounts)
    assert said[:2] == ["cuInit says 42", "nvidia-smi runs"], done.stdout + done.stderr
    assert {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia0"} <= {*said}
    assert said[-1] == "/opt/own"
    assert "Read-only file system" in done.stderr
