# ruff: noqa: ASYNC240 - small files
"""The CDI task: what is handed on, when, and what is in the directory by then."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest
import trio
import trio.testing

from _nvplug.config import Config
from _nvplug.container.cdi_files import read_document
from _nvplug.container.describing import Pace, keep_described
from _nvplug.container.facts import Terms
from _nvplug.happenings import (
    DevicesNotDescribed,
    DocumentNotWritten,
    DocumentRemoved,
    DocumentWritten,
    Happening,
    Publish,
)
from _nvplug.hardware import Gpu, Hardware
from _nvplug.latest import Latest
from _nvplug.resources import Device, Offer, Resource

GPU_FILE: Final = "k8s.device-plugin.nvidia.com-gpu.json"
GPUS: Final = tuple(Gpu(number, f"GPU-{number}", "H100", "", number, None, 0) for number in range(3))
CDI: Final = Config(device_list_strategy=("cdi-cri",), device_discovery_strategy="simulated:3xH100")
QUICK: Final = Pace(look_again=0.02, retry=0.01, patience=0.1)
PATIENT: Final = Pace(look_again=0.02, retry=0.01, patience=60.0)

DEADLINE: Final = 20.0


def offer_of(count: int, trouble: str = "") -> Offer:
    """So many GPUs."""
    return Offer((Resource("nvidia.com/gpu", tuple(Device(gpu.uuid, gpu, trouble) for gpu in GPUS[:count])),))


@dataclass
class Task:
    """The task, and the cells around it."""

    directory: Path
    root: Path = Path("/nowhere")
    hardware: Latest[Hardware] = field(default_factory=lambda: Latest(Hardware()))
    offer: Latest[Offer] = field(default_factory=lambda: Latest(Offer()))
    terms: Latest[Terms] = field(default_factory=lambda: Latest(Terms(CDI)))
    described: Latest[Offer] = field(default_factory=lambda: Latest(Offer()))
    agreed: Latest[Terms] = field(default_factory=lambda: Latest(Terms(CDI)))
    happenings: list[Happening] = field(default_factory=list)

    def show(self, count: int, trouble: str = "") -> None:
        """The driver finds so many GPUs."""
        self.hardware.set(Hardware(GPUS[:count]))
        self.offer.set(offer_of(count, trouble))

    def names(self) -> list[str]:
        """What runtimes find."""
        document = read_document(self.directory / GPU_FILE)
        return [entry.name for entry in document.devices] if document else []

    def said(self, kind: type[Happening]) -> list[Any]:
        """What was published of a kind."""
        return [each for each in self.happenings if isinstance(each, kind)]

    async def hands_on(self, offer: Offer) -> None:
        """Waits until it does."""
        await until(lambda: self.described.value == offer)


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that must come."""
    with trio.fail_after(DEADLINE):
        while not condition():  # noqa: ASYNC110 - what is waited for may be on the disk
            await trio.sleep(0.002)


@asynccontextmanager
async def running(task: Task, pace: Pace = PATIENT, publish: Publish | None = None) -> AsyncGenerator[Task, None]:
    """Runs it for as long as the block."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: keep_described(
                task.hardware,
                task.offer,
                task.terms,
                task.described,
                task.agreed,
                publish or task.happenings.append,
                directory=str(task.directory),
                root=str(task.root),
                pace=pace,
            )
        )
        yield task
        nursery.cancel_scope.cancel()


async def test_no_device_is_offered_before_a_runtime_can_find_it(tmp_path: Path) -> None:
    """The first ones, and those that come later: at the moment of each offer the document names all of it."""
    async with running(Task(tmp_path / "cdi")) as task:
        seen: list[list[str]] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(task.described.follow, lambda _offer: seen.append(task.names()))
            for count in (1, 3):
                task.show(count)
                await task.hands_on(offer_of(count))
            await until(lambda: len(seen) == 3)
            nursery.cancel_scope.cancel()

        assert seen == [[], ["GPU-0", "0", "all"], ["GPU-0", "0", "GPU-1", "1", "GPU-2", "2", "all"]]
        assert task.happenings == [DocumentWritten(str(tmp_path / "cdi" / GPU_FILE))] * 2


async def test_health_is_handed_on_at_once_and_changes_no_document(tmp_path: Path) -> None:
    """Without a look at the disk."""
    async with running(Task(tmp_path)) as task:
        task.show(2)
        await task.hands_on(offer_of(2))
        before = (tmp_path / GPU_FILE).stat()
        task.offer.set(offer_of(2, "XID 79"))
        await trio.testing.wait_all_tasks_blocked()

        assert task.described.value == offer_of(2, "XID 79")
        assert (tmp_path / GPU_FILE).stat() == before


async def test_a_directory_that_cannot_be_written_to_holds_nothing_back_for_long(tmp_path: Path) -> None:
    """It is said once; when it can be written to, the document is there."""
    (tmp_path / "cdi").write_text("in the way")
    async with running(Task(tmp_path / "cdi"), QUICK) as task:
        task.show(2)
        await until(lambda: bool(task.happenings))

        assert task.described.value == Offer()
        await task.hands_on(offer_of(2))
        assert task.names() == []
        (trouble,) = task.happenings
        assert isinstance(trouble, DocumentNotWritten)
        assert "Not a directory" in trouble.reason
        task.offer.set(offer_of(2, "XID 79"))
        await task.hands_on(offer_of(2, "XID 79"))
        (tmp_path / "cdi").unlink()
        await until(lambda: bool(task.names()))

        assert len(task.said(DocumentNotWritten)) == 1


async def test_what_is_not_offered_yet_is_no_trouble(tmp_path: Path) -> None:
    """GPUs are known a moment before they are offered."""
    async with running(Task(tmp_path)) as task:
        task.hardware.set(Hardware(GPUS))
        await trio.sleep(5 * PATIENT.look_again)

        assert task.happenings == []
        assert task.names() == []


async def test_a_fault_in_what_makes_documents_holds_no_news_back(tmp_path: Path) -> None:
    """Health is handed on, devices are offered, and documents are not taken away for it."""

    def faulty(happening: Happening) -> None:
        if isinstance(happening, DocumentWritten):
            raise ZeroDivisionError("a bug")

    task = Task(tmp_path, terms=Latest(Terms(replace(CDI, cdi_remove_at_exit=True))))
    async with running(task, publish=faulty):
        task.show(2)
        await task.hands_on(offer_of(2))
        task.offer.set(offer_of(2, "XID 79"))
        await task.hands_on(offer_of(2, "XID 79"))

        assert task.names() == ["GPU-0", "0", "GPU-1", "1", "all"]


async def test_where_no_names_are_used_nothing_is_written(tmp_path: Path) -> None:
    """Every offer is handed on; a configuration that wants documents later gets them."""
    plain = Terms(replace(CDI, device_list_strategy=("envvar",)))
    async with running(Task(tmp_path, terms=Latest(plain))) as task:
        task.show(2)
        await task.hands_on(offer_of(2))
        assert list(tmp_path.iterdir()) == []
        task.terms.set(Terms(CDI))
        await until(lambda: bool(task.names()))


async def test_nobody_is_told_a_name_before_a_runtime_can_find_it(tmp_path: Path) -> None:
    """When a new configuration wants names, allocations are answered by the old one until there is the document."""
    plain = Terms(replace(CDI, device_list_strategy=("envvar",)))
    async with running(Task(tmp_path, terms=Latest(plain), agreed=Latest(plain))) as task:
        task.show(1)
        await task.hands_on(offer_of(1))
        seen: list[tuple[Terms, list[str]]] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(task.agreed.follow, lambda terms: seen.append((terms, task.names())))
            task.terms.set(Terms(CDI))
            await until(lambda: len(seen) == 2)
            task.terms.set(plain)
            await until(lambda: len(seen) == 3)
            nursery.cancel_scope.cancel()

        assert seen == [(plain, []), (Terms(CDI), ["GPU-0", "0", "all"]), (plain, ["GPU-0", "0", "all"])]


async def test_a_document_that_cannot_be_written_holds_back_no_news_and_a_configuration_not_for_long(
    tmp_path: Path,
) -> None:
    """Health is handed on while the new configuration waits; that waits for the document, or has waited enough."""
    plain = Terms(replace(CDI, device_list_strategy=("envvar",)))
    for pace, directory in ((PATIENT, tmp_path / "patient"), (QUICK, tmp_path / "quick")):
        directory.write_text("in the way")
        async with running(Task(directory, terms=Latest(plain), agreed=Latest(plain)), pace) as task:
            task.show(2)
            await task.hands_on(offer_of(2))
            task.terms.set(Terms(CDI))
            task.offer.set(offer_of(2, "XID 79"))
            await task.hands_on(offer_of(2, "XID 79"))
            await until(lambda: bool(task.said(DocumentNotWritten)))
            if pace is PATIENT:
                assert task.agreed.value == plain
                directory.unlink()
            await until(lambda: task.agreed.value == Terms(CDI))

            assert bool(task.names()) == (pace is PATIENT)


async def test_a_document_outlasts_the_driver_and_nvplug(tmp_path: Path) -> None:
    """While there is no driver, the one of an earlier life stays; without anything to offer, nothing is emptied."""
    async with running(Task(tmp_path)) as task:
        task.show(2)
        await task.hands_on(offer_of(2))
    content = (tmp_path / GPU_FILE).read_bytes()
    async with running(Task(tmp_path)) as task:
        task.offer.set(Offer((Resource("nvidia.com/gpu"),)))
        await task.hands_on(Offer((Resource("nvidia.com/gpu"),)))
        await trio.sleep(5 * PATIENT.look_again)

        assert (tmp_path / GPU_FILE).read_bytes() == content
        assert task.happenings == []


async def test_a_document_that_somebody_removes_is_made_again(tmp_path: Path) -> None:
    """Within the time between two looks."""
    async with running(Task(tmp_path)) as task:
        task.show(2)
        await task.hands_on(offer_of(2))
        content = (tmp_path / GPU_FILE).read_bytes()
        (tmp_path / GPU_FILE).unlink()
        await until(lambda: bool(task.names()))

        assert (tmp_path / GPU_FILE).read_bytes() == content


async def test_documents_are_removed_at_the_end_on_request(tmp_path: Path) -> None:
    """And only then."""
    for wanted in (False, True):
        terms = Terms(replace(CDI, cdi_remove_at_exit=wanted))
        async with running(Task(tmp_path, terms=Latest(terms))) as task:
            task.show(2)
            await task.hands_on(offer_of(2))

        assert (tmp_path / GPU_FILE).exists() != wanted
        assert task.said(DocumentRemoved) == ([DocumentRemoved(str(tmp_path / GPU_FILE))] if wanted else [])


async def test_an_nvplug_that_ends_leaves_the_next_ones_documents_alone(tmp_path: Path) -> None:
    """In an upgrade the new one may begin before the old one ends, and have nothing else to say."""
    removing = Terms(replace(CDI, cdi_remove_at_exit=True))
    async with running(Task(tmp_path, terms=Latest(removing))) as new:
        async with running(Task(tmp_path, terms=Latest(removing))) as old:
            for task in (old, new):
                task.show(2)
                await task.hands_on(offer_of(2))
            # A look of the old one finds nothing to do, and that does not make them its own again.
            await trio.sleep(5 * PATIENT.look_again)

        assert old.said(DocumentRemoved) == []
        assert (tmp_path / GPU_FILE).exists()

    assert not (tmp_path / GPU_FILE).exists()


async def test_documents_that_are_not_wanted_any_more_are_removed_at_the_end_on_request(tmp_path: Path) -> None:
    """Those that this nvplug wrote, before a reload that switched to another strategy."""
    terms = Terms(replace(CDI, cdi_remove_at_exit=True))
    async with running(Task(tmp_path, terms=Latest(terms))) as task:
        task.show(2)
        await task.hands_on(offer_of(2))
        task.terms.set(Terms(replace(terms.config, device_list_strategy=("envvar",))))
        await until(lambda: task.agreed.value == task.terms.value)

        assert (tmp_path / GPU_FILE).exists()

    assert not (tmp_path / GPU_FILE).exists()


async def test_a_device_that_cannot_be_described_is_named(tmp_path: Path) -> None:
    """It has no device node. It is said once, the others are described, and after a while all are offered."""
    root = tmp_path / "host"
    (root / "dev").mkdir(parents=True)
    try:
        os.mknod(root / "dev/nvidia0", 0o600 | stat.S_IFCHR, os.makedev(195, 0))
    except PermissionError:
        pytest.skip("device nodes can only be made by root")
    real = Terms(replace(CDI, device_discovery_strategy="nvml"))
    async with running(Task(tmp_path / "cdi", root, terms=Latest(real)), QUICK) as task:
        task.show(2)
        await task.hands_on(offer_of(2))

        assert task.names() == ["GPU-0", "0", "all"]
        assert task.said(DevicesNotDescribed) == [DevicesNotDescribed("GPU-1")]
