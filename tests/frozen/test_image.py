from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest
import trio
from node import GPUS, MACHINE
from peer.kubelet import kubelet_in

from frozen.conftest import ROOT, skipping
from frozen.containers import Containers

LARGEST: Final = 15_000_000
IMAGE: Final = "localhost/nvplug:test"


@pytest.fixture(scope="module")
def containers() -> Generator[Containers]:
    """With the image built from this checkout; the base image is kept for the next time."""
    with skipping():
        containers = Containers(ROOT / "build" / "containers")
        containers.make_base()
    containers.build(ROOT, IMAGE, "commit-of-the-test")
    try:
        yield containers
    finally:
        containers.run("podman", "rm", "--all", "--force", "--time=0")
        containers.run("buildah", "rm", "--all")
        containers.run("podman", "rmi", "--force", IMAGE, "localhost/nvplug:dev")
        containers.run("podman", "image", "prune", "--force")


def test_it_holds_the_executable_and_nothing_else(containers: Containers, tmp_path: Path) -> None:
    """Two names, at most 15 MB, and what NVIDIA's runtime goes by."""
    facts = json.loads(containers.must("podman", "image", "inspect", IMAGE))[0]
    containers.must("podman", "save", "--quiet", "--format=oci-dir", "--output", tmp_path / "image", IMAGE)
    layers = [
        subprocess.run(["tar", "--list", "--gzip", "--file", blob], check=False, text=True, capture_output=True)
        for blob in (tmp_path / "image" / "blobs" / "sha256").iterdir()
    ]
    if not any(layer.returncode == 0 for layer in layers):
        layers = [
            subprocess.run(["tar", "--list", "--file", blob], check=False, text=True, capture_output=True)
            for blob in (tmp_path / "image" / "blobs" / "sha256").iterdir()
        ]
    files = {
        name for layer in layers if layer.returncode == 0 for name in layer.stdout.split() if not name.endswith("/")
    }

    assert facts["Size"] <= LARGEST
    assert files == {"usr/bin/nvplug", "usr/bin/nvidia-device-plugin"}
    variables = dict(pair.split("=", 1) for pair in facts["Config"]["Env"])
    assert variables["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert variables["NVIDIA_DRIVER_CAPABILITIES"] == "utility"
    assert facts["Config"]["Labels"]["org.opencontainers.image.revision"] == "commit-of-the-test"


async def test_it_runs_as_a_daemon_set_would(containers: Containers) -> None:
    """Read-only, without capabilities, new privileges, network or a place for files; as process 1, and yet it stops."""
    with tempfile.TemporaryDirectory(prefix="nvi") as scratch:
        directory = Path(scratch) / "k"
        async with kubelet_in(directory) as kubelet:
            name = await trio.to_thread.run_sync(
                lambda: containers.must(
                    *("podman", "run", "--detach", "--network=none", "--read-only", "--read-only-tmpfs=false"),
                    *("--cap-drop=all", "--security-opt=no-new-privileges"),
                    *("--volume", f"{directory}:/var/lib/kubelet/device-plugins", IMAGE, MACHINE),
                )
            )
            await kubelet.await_allocatable(GPUS)
            # As a probe asks.
            for words in ([], ["--ready"]):
                health = await trio.to_thread.run_sync(
                    containers.run, "podman", "exec", name, "nvplug", "health", *words
                )
                assert (health.returncode, health.stdout) == (
                    0,
                    f"nvidia.com/gpu: registered, {GPUS} of {GPUS} healthy\n",
                )
            started = time.monotonic()
            await trio.to_thread.run_sync(lambda: containers.must("podman", "stop", "--time=10", name))
            seconds = time.monotonic() - started
            state = json.loads(containers.must("podman", "inspect", name))[0]["State"]

            assert state["ExitCode"] == 0, containers.run("podman", "logs", name).stderr
            assert seconds < 5
            assert not kubelet.plugin_sockets()


def test_it_answers_to_the_name_of_nvidias_program(containers: Containers) -> None:
    """Charts and manifests made for NVIDIA's image name its program."""
    command = ("podman", "run", "--rm", "--network=none", "--read-only", "--entrypoint=nvidia-device-plugin")

    assert "commit commit-of-the-test" in containers.must(*command, IMAGE, "--version")
