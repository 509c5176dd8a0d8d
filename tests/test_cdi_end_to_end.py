# ruff: noqa: ASYNC240 - small files
"""``nvplug run`` where containers are told their devices by CDI names: what is written, and when."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from needs import lacking
from node import GPUS, MACHINE, Node, node_in

from _nvplug.container.cdi_files import read_document
from _nvplug.container.cdi_names import GPU, document_file, qualified

pytestmark = pytest.mark.process

CDI: Final = "--device-list-strategy=cdi-annotations,cdi-cri"


@asynccontextmanager
async def node_with(directory: Path, *flags: str, options: str = "rw") -> AsyncGenerator[tuple[Node, Path], None]:
    """A node whose /var/run/cdi is a directory of the test, mounted with these options."""
    if os.geteuid():
        lacking("mounting needs root")
    documents = directory.with_name("cdi")
    documents.mkdir(exist_ok=True)
    Path("/run/cdi").mkdir(exist_ok=True)
    script = f'mount --bind {documents} /run/cdi && mount -o remount,bind,{options} /run/cdi && exec "$@"'
    async with node_in(directory, MACHINE, *flags, under=("unshare", "--mount", "sh", "-c", script, "sh")) as node:
        yield node, documents / document_file(GPU)


async def test_every_name_in_an_answer_can_be_found(disk: Path) -> None:
    """From the first answer on, and for as long as pods may start again with it: also when nvplug has ended."""
    async with node_with(disk, CDI) as (node, file):
        kubelet = node.kubelet
        ids = kubelet.lists[-1].healthy
        answer = (await kubelet.allocate(ids[:2])).container
        document = read_document(file)
        assert document is not None
        names = [qualified(GPU, device.name) for device in document.devices]

        assert list(answer.cdi_devices) == [qualified(GPU, device) for device in ids[:2]]
        assert list(answer.annotations.values()) == [",".join(answer.cdi_devices)]
        assert answer.envs == {}
        assert set(answer.cdi_devices) < set(names)
        assert len(names) == 2 * GPUS + 1
        await node.nvplug.wait_for_line(f" INFO wrote a CDI document file=/var/run/cdi/{file.name}")
        written = file.stat()

    assert file.stat() == written
    content = file.read_bytes()
    async with node_with(disk, CDI, "--cdi-remove-at-exit") as (node, file):
        assert (file.stat().st_ino, file.read_bytes()) == (written.st_ino, content)
        assert "wrote a CDI document" not in node.nvplug.log()
    assert not file.exists()


async def test_a_directory_that_is_read_only_takes_no_gpus_away(disk: Path) -> None:
    """One line says so and what to do; other strategies go on."""
    async with node_with(disk, CDI, "--device-list-strategy=envvar", options="ro") as (node, file):
        kubelet = node.kubelet
        answer = (await kubelet.allocate(kubelet.lists[-1].healthy[:1])).container
        lines = [line for line in node.nvplug.lines if "CDI" in line]

        assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": kubelet.lists[-1].healthy[0]}
        assert not file.exists()
        assert len([line for line in lines if "ERROR" in line]) == 1
        await node.nvplug.wait_for_line("ERROR .*Read-only file system.* remedy=.*mount the host's")
