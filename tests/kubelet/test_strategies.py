"""What containers are given, seen from behind the kubelet: each strategy's answer arrives whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest
from driver_tree import DEBIAN, VERSION, lay
from needs import lacking

from kubelet.device_manager import DeviceNode, Mount, running
from kubelet.plugins import GPU, UUIDS, nvplug

pytestmark = pytest.mark.conformance

SHARED: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
KIND: Final = "k8s.device-plugin.nvidia.com/gpu"
TOLD: Final = "/var/run/nvidia-container-devices"

# Documents are written to a directory that only this nvplug has.
ALONE: Final = (
    *("unshare", "--mount", "sh", "-c"),
    'mkdir -p /run/cdi && mount -t tmpfs cdi /run/cdi && exec "$@"',
    "sh",
)

REFERENCE: Final = ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri")


@pytest.mark.parametrize(
    "strategies",
    [("volume-mounts",), ("cdi-annotations",), ("cdi-cri",), ("direct",), (*REFERENCE, "direct")],
    ids=",".join,
)
async def test_an_answer_arrives_whole(kdm: Path, directory: Path, tmp_path: Path, strategies: tuple[str, ...]) -> None:
    """Variables, mounts, nodes, annotations and CDI names: what the runtime would be told, and nothing besides."""
    by_name = any(each.startswith("cdi-") for each in strategies)
    if by_name and os.geteuid():
        lacking("mounting needs root")
    lay(tmp_path)
    flags = ["--device-list-strategy", ",".join(strategies), f"--driver-root-ctr-path={tmp_path}", "--dev-root=/srv"]
    if {*strategies} & {"envvar", "volume-mounts"}:
        flags.append("--pass-device-specs")
    async with running(kdm, directory) as kubelet, nvplug(kubelet, "8xH100", *flags, under=ALONE if by_name else ()):
        await kubelet.await_allocatable(GPU, 8)
        container = (await kubelet.admit("pod", {GPU: 2}))["main"]
    indices = sorted(UUIDS.index(one) for one in container.device_ids[GPU])
    uuids = [UUIDS[index] for index in indices]
    names = [f"{KIND}={uuid}" for uuid in uuids]

    by_nvidia, by_us = {"envvar", "volume-mounts"} & {*strategies}, "direct" in strategies
    assert container.envs == ({"NVIDIA_VISIBLE_DEVICES": TOLD} if by_nvidia else {})
    paths = [*SHARED, *(f"/dev/nvidia{index}" for index in indices)] if by_nvidia or by_us else []
    assert {*container.device_nodes} == {DeviceNode(f"/srv{path}", path, "rw") for path in paths}
    told = {Mount("/dev/null", f"{TOLD}/{uuid}", read_only=False) for uuid in uuids} if by_nvidia else set()
    assert {mount for mount in container.mounts if not mount.read_only} == told
    cuda = Mount(f"{DEBIAN}/libcuda.so.{VERSION}", "/usr/lib64/libcuda.so.1", read_only=True)
    assert ({*container.mounts} > told, cuda in container.mounts) == (by_us, by_us)
    assert {*container.cdi_devices} == ({*names} if "cdi-cri" in strategies else set())
    key = f"cdi.k8s.io/nvidia-device-plugin_{uuids[0]}"
    assert container.annotations == ({key: ",".join(names)} if "cdi-annotations" in strategies else {})
