"""CNCF's own package for CDI takes our documents, and does with them what they mean."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from driver_tree import DEBIAN, VERSION, lay, write

from _nvplug.config import Config, read_config
from _nvplug.container import cdi_names, edits_for
from _nvplug.container.cdi_files import renew
from _nvplug.container.extras import Extra
from _nvplug.container.facts import NodeFacts, Terms
from _nvplug.drivers.description import decode
from _nvplug.health import Health
from _nvplug.resources import Offer, next_offer

MACHINE: Final = b'{"machine": "2xH100", "count": 2, "gpus": [{}, {"mig": ["1g.10gb"]}]}'
HARDWARE: Final = decode(MACHINE, "machine.json").hardware
GPU: Final = HARDWARE.gpus[0].uuid
MIG: Final = HARDWARE.gpus[1].mig_devices[0].uuid
NODES: Final = ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps/nvidia-cap19", "nvidia-caps/nvidia-cap20")
MOUNTED: Final = ["ro", "nosuid", "nodev", "rbind", "rprivate"]


class Node:
    """A host with documents, and the package that injects what is in them."""

    def __init__(self, program: Path, root: Path) -> None:
        self._program = program
        self.root = root
        self._directory = root / "var/run/cdi"
        self._directory.parent.mkdir(parents=True)
        for minor, name in enumerate(NODES):
            path = root / "dev" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            os.mknod(path, stat.S_IFCHR, os.makedev(195, minor))
            path.chmod(0o666)

    def write(self, *flags: str, facts: NodeFacts = NodeFacts()) -> Config:  # noqa: B008 - frozen
        """Has nvplug write its documents."""
        config = read_config(["--mig-strategy=mixed", *flags], {})
        offer = next_offer(Offer(), HARDWARE, Health(), config)
        renew(self._directory, HARDWARE, offer.uuids, Terms(config, facts), root=str(self.root))
        return config

    def inject(self, *names: str, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The OCI specification of a container with these devices; GPUs may be named without their kind."""
        return self.outcome(*names, annotations=annotations)["spec"]  # type: ignore[no-any-return]  # JSON

    def outcome(self, *names: str, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
        """All that the package says. No document may have an error, or a higher version than it needs."""
        qualified = [name if "=" in name else cdi_names.qualified(cdi_names.GPU, name) for name in names]
        command = [str(self._program), str(self._directory), json.dumps(dict(annotations or {})), *qualified]
        done = subprocess.run(command, check=True, capture_output=True, timeout=60)
        outcome: dict[str, Any] = json.loads(done.stdout)

        assert outcome["errors"] == {}
        assert [each for each in outcome["versions"].values() if each[0] != each[1]] == []
        assert outcome["failure"] == ""
        return outcome


@pytest.fixture
def node(inject: Path, tmp_path: Path) -> Node:
    """One without a driver's files yet."""
    return Node(inject, tmp_path)


def device(path: str, minor: int) -> dict[str, Any]:
    """A device node as the runtime makes it."""
    return {"path": path, "type": "c", "major": 195, "minor": minor, "fileMode": 0o666}


def mount(path: str, source: str = "", *more: str) -> dict[str, Any]:
    """A mount as the runtime makes it."""
    return {"destination": path, "source": source or path, "options": [*MOUNTED, *more]}


def rules(*minors: int) -> list[dict[str, Any]]:
    """What the device cgroup allows."""
    return [{"allow": True, "type": "c", "major": 195, "minor": minor, "access": "rw"} for minor in minors]


def test_a_container_gets_exactly_what_its_devices_need(node: Node) -> None:
    """Nodes, rules for them, variables and mounts, and nothing else; without hooks every library under its names."""
    lay(node.root, libraries="/usr/lib64")
    for stem in ("libcudadebugger.so", "libnvidia-ptxjitcompiler.so", "libnvidia-gpucomp.so"):
        for file in (node.root / "usr/lib64").glob(f"{stem}*"):
            file.unlink()
    write(node.root / "run/nvidia-persistenced/socket")
    node.write()
    machine = f"{os.uname().machine}-linux-gnu"
    cuda, ml = (f"/usr/lib64/{stem}.so.{VERSION}" for stem in ("libcuda", "libnvidia-ml"))

    spec = node.inject(MIG)

    assert sorted(spec.pop("mounts"), key=lambda each: each["destination"]) == sorted(
        [
            *(mount(path, cuda) for path in (cuda, "/usr/lib64/libcuda.so", "/usr/lib64/libcuda.so.1")),
            *(mount(f"/usr/lib/{machine}/{name}", cuda) for name in ("libcuda.so", "libcuda.so.1")),
            *(
                mount(path, ml)
                for path in (ml, "/usr/lib64/libnvidia-ml.so.1", f"/usr/lib/{machine}/libnvidia-ml.so.1")
            ),
            mount("/usr/bin/nvidia-debugdump"),
            mount("/usr/bin/nvidia-smi"),
            mount(f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"),
            mount("/run/nvidia-persistenced/socket", "", "noexec"),
        ],
        key=lambda each: each["destination"],
    )
    assert spec == {
        "ociVersion": "",
        "process": {
            "cwd": "",
            "env": ["NVIDIA_CTK_LIBCUDA_DIR=/usr/lib64", "NVIDIA_VISIBLE_DEVICES=void"],
            "user": {"uid": 0, "gid": 0},
        },
        "linux": {
            "devices": [
                device("/dev/nvidia-uvm", 3),
                device("/dev/nvidiactl", 2),
                device("/dev/nvidia1", 1),
                device("/dev/nvidia-caps/nvidia-cap19", 4),
                device("/dev/nvidia-caps/nvidia-cap20", 5),
            ],
            "resources": {"devices": rules(3, 2, 1, 4, 5)},
        },
    }


def test_every_name_of_a_device_means_the_same(node: Node) -> None:
    """UUID and index; and all is every device, each node once."""
    lay(node.root)
    node.write()
    paths = [each["path"] for each in node.inject("all")["linux"]["devices"]]

    assert node.inject(GPU) == node.inject("0")
    assert node.inject(MIG) == node.inject("1:0")
    assert sorted(paths) == sorted(f"/dev/{name}" for name in NODES)
    assert node.outcome()["devices"] == sorted(
        cdi_names.qualified(cdi_names.GPU, name) for name in (GPU, "0", MIG, "1:0", "all")
    )


def test_told_by_annotations_and_by_the_cri_at_once_each_thing_is_there_once(node: Node) -> None:
    """As the GPU Operator has it by default: a container is the same as if it were told by one of them."""
    lay(node.root)
    config = node.write("--device-list-strategy=cdi-annotations,cdi-cri")
    offer = next_offer(Offer(), HARDWARE, Health(), config)
    devices = [each for resource in offer.resources for each in resource.devices]
    edits = edits_for(devices, (), config)

    outcome = node.outcome(*edits.cdi_devices, annotations=edits.annotations)

    assert outcome["annotated"] == list(edits.cdi_devices)
    assert len(edits.cdi_devices) == 2
    spec = outcome["spec"]
    once = node.inject(*edits.cdi_devices)
    assert spec["mounts"] == once["mounts"]
    assert spec["process"] == once["process"]
    for each in (spec, once):
        each["linux"]["devices"].sort(key=lambda node: node["path"])
    assert spec["linux"]["devices"] == once["linux"]["devices"]
    assert len({each["path"] for each in spec["linux"]["devices"]}) == len(spec["linux"]["devices"]) == len(NODES)
    assert len({each["destination"] for each in spec["mounts"]}) == len(spec["mounts"])


def test_hooks_arrive_as_they_are_meant(node: Node) -> None:
    """In the phase in which NVIDIA's toolkit expects them; libraries are mounted once."""
    lay(node.root)
    write(node.root / "usr/bin/nvidia-ctk", "#!/bin/sh")
    node.write("--cdi-disable-hooks=update-application-profile,enable-cuda-compat")
    spec = node.inject("0")

    assert spec["hooks"] == {
        "createContainer": [
            {
                "path": "/usr/bin/nvidia-ctk",
                "args": ["nvidia-ctk", "hook", *words],
                "env": ["NVIDIA_CTK_DEBUG=false"],
            }
            for words in (
                ["create-symlinks", "--link", f"libcuda.so.1::{DEBIAN}/libcuda.so"],
                ["update-ldcache", "--folder", DEBIAN],
                ["disable-device-node-modification"],
            )
        ]
    }
    assert {each["destination"] for each in spec["mounts"] if "libcuda.so" in each["destination"]} == {
        f"{DEBIAN}/libcuda.so.{VERSION}"
    }


@pytest.mark.parametrize(
    ("flags", "place", "libraries", "source"),
    [
        ((), "", "/usr/lib64", "/usr/lib64"),
        ((), "", "/usr/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu"),
        ((), "run/nvidia/driver", DEBIAN, f"/run/nvidia/driver{DEBIAN}"),
        (("--driver-root=/run/nvidia/driver",), "driver-root", DEBIAN, f"/run/nvidia/driver{DEBIAN}"),
        ((), "home/kubernetes/bin/nvidia", "/lib64", "/home/kubernetes/bin/nvidia/lib64"),
    ],
    ids=["lib64", "aarch64", "below the host's root", "mounted", "Container-Optimized OS"],
)
def test_a_driver_in_any_layout_is_given(
    node: Node, flags: tuple[str, ...], place: str, libraries: str, source: str
) -> None:
    """From where the host has it, to where a container looks for it."""
    lay(node.root / place, libraries)
    node.write(*flags)
    found = {each["source"] for each in node.inject("0")["mounts"] if each["destination"].endswith("/libcuda.so.1")}

    assert found == {f"{source}/libcuda.so.{VERSION}"}


def test_what_containers_get_besides_is_found_by_its_name(node: Node) -> None:
    """IMEX channels, GDRCopy and the like; from the driver's root, where their mounts are concerned."""
    for name in ("gdrdrv", "nvidia-caps-imex-channels/channel0"):
        path = node.root / "dev" / name
        path.parent.mkdir(exist_ok=True)
        os.mknod(path, stat.S_IFCHR, os.makedev(195, 200))
    facts = NodeFacts(("0",), (Extra("gdrcopy", ("/dev/gdrdrv",), ("/etc/x",)),))
    config = node.write("--device-list-strategy=cdi-cri", "--imex-channel-ids=0", facts=facts)
    offer = next_offer(Offer(), HARDWARE, Health(), config)
    edits = edits_for(offer.resources[0].devices, (), config, facts)
    spec = node.inject(*edits.cdi_devices)

    paths = {each["path"] for each in spec["linux"]["devices"]}
    assert {"/dev/gdrdrv", "/dev/nvidia-caps-imex-channels/channel0", "/dev/nvidia0"} < paths
    assert mount("/etc/x") in spec["mounts"]
