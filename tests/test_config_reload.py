# ruff: noqa: ASYNC240 - small files
"""The config task, in this process, with real files and signals."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import trio

from _nvplug.config import Config, read_settings
from _nvplug.config.watching import keep_config
from _nvplug.happenings import ConfigApplied, ConfigKeysObeyed, ConfigRefused, ConfigWaits, Happening
from _nvplug.latest import Latest

INTERVAL: Final = 0.1
"""Seconds between the looks of the tasks under test."""


class Task:
    """A config task that runs."""

    def __init__(self, file: Path, config: Latest[Config]) -> None:
        self.file = file
        self.config = config
        self.told: list[Happening] = []
        self._more = trio.Event()

    def publish(self, happening: Happening) -> None:
        """Notes what is published."""
        self.told.append(happening)
        more, self._more = self._more, trio.Event()
        more.set()

    async def tells(self, kind: type[Happening], *, after: int = 0) -> Happening:
        """Waits for a happening, not among the first so many."""
        with trio.fail_after(20):
            while True:
                for happening in self.told[after:]:
                    if isinstance(happening, kind):
                        return happening
                await self._more.wait()

    async def looks_again(self) -> None:
        """Waits until every change of the file so far has been taken up, or not: asks for a reading, and awaits it."""
        before = len(self.told)
        os.kill(os.getpid(), signal.SIGHUP)
        with trio.fail_after(20):
            while len(self.told) == before:
                await self._more.wait()


@asynccontextmanager
async def running(file: Path, *arguments: str) -> AsyncGenerator[Task, None]:
    """A config task for a file, beside the block."""
    again = partial(read_settings, [f"--config-file={file}" if file.name else "--config-file=", *arguments], {})
    settings = again()
    task = Task(file, Latest(settings.config))
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(keep_config, interval=INTERVAL), task.config, settings, again, task.publish)
        yield task
        nursery.cancel_scope.cancel()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A good file."""
    path = tmp_path / "config.yaml"
    path.write_text("flags: {migStrategy: single}")
    return path


def in_place(file: Path, text: str) -> None:
    """As an editor may do."""
    file.write_text(text)


def renamed(file: Path, text: str) -> None:
    """As a careful editor does."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


def swapped(file: Path, text: str) -> None:
    """As the kubelet does with a ConfigMap: a link in the path leads to another directory."""
    name = f"..{len(list(file.parent.iterdir()))}"
    (file.parent / name).mkdir()
    (file.parent / name / file.name).write_text(text)
    (file.parent / "..new").symlink_to(name)
    (file.parent / "..new").rename(file.parent / "..data")
    if not file.is_symlink():
        file.unlink()
        file.symlink_to(f"..data/{file.name}")


@pytest.mark.parametrize("change", [in_place, renamed, swapped])
async def test_a_changed_file_is_obeyed(file: Path, change: Callable[[Path, str], None]) -> None:
    """However it is changed, and every time; what it changes is said."""
    async with running(file) as task:
        for strategy in ("mixed", "none"):
            before = len(task.told)
            change(file, f"flags: {{migStrategy: {strategy}}}")
            applied = await task.tells(ConfigApplied, after=before)

            assert applied == ConfigApplied(str(file), "mig-strategy")
            assert task.config.value.mig_strategy == strategy


@pytest.mark.parametrize("bad", ["flags: {migStrateggy: mixed}", "{", "sharing: {mps: {}}", None])
async def test_a_bad_file_changes_nothing(file: Path, bad: str | None) -> None:
    """What was in force stays so; the error is told, once, and the next good file is obeyed."""
    async with running(file) as task:
        before = task.config.value
        if bad is None:
            file.unlink()
        else:
            file.write_text(bad)
        refused = await task.tells(ConfigRefused)

        assert task.config.value == before
        assert isinstance(refused, ConfigRefused)
        assert str(file) in refused.reason
        assert refused.remedy
        told = len(task.told)
        await trio.sleep(3 * INTERVAL)
        assert len(task.told) == told
        file.write_text("flags: {migStrategy: mixed}")
        await task.tells(ConfigApplied)
        assert task.config.value.mig_strategy == "mixed"


async def test_a_file_that_became_good_again_is_said_to_be(file: Path) -> None:
    """Even if it says what it said before: an operator waits for it."""
    good = file.read_text()
    async with running(file) as task:
        file.write_text("{")
        await task.tells(ConfigRefused)
        file.write_text(good)

        assert await task.tells(ConfigApplied) == ConfigApplied(str(file), "nothing")


async def test_a_file_that_is_touched_is_no_news(file: Path) -> None:
    """The same content makes no version and no line."""
    async with running(file) as task:
        renamed(file, file.read_text())
        await trio.sleep(4 * INTERVAL)

        assert task.told == []
        assert task.config.version == 0


async def test_sighup_reads_again_and_says_so(file: Path) -> None:
    """At once, and also where nothing has changed."""
    async with running(file) as task:
        await task.looks_again()
        assert task.told == [ConfigApplied(str(file), "nothing")]

        file.write_text("{")
        await task.looks_again()
        assert isinstance(task.told[1], ConfigRefused)


async def test_sighup_without_a_file_ends_nothing() -> None:
    """Flags and variables are all there is, and they cannot change."""
    async with running(Path()) as task:
        await task.looks_again()

        assert task.told == [ConfigApplied("", "nothing")]


async def test_what_cannot_change_is_kept_and_said_once(file: Path) -> None:
    """The rest of the file is obeyed."""
    async with running(file) as task:
        file.write_text("flags: {migStrategy: mixed, plugin: {containerDriverRoot: /elsewhere}}")
        await task.tells(ConfigApplied)
        await task.looks_again()

        assert task.config.value.driver_root_ctr_path == "/driver-root"
        assert task.config.value.mig_strategy == "mixed"
        assert [each for each in task.told if isinstance(each, ConfigWaits)] == [
            ConfigWaits("driver-root-ctr-path", "/elsewhere")
        ]


async def test_flags_win_over_the_file_also_later(file: Path) -> None:
    """Precedence is the same whenever a file is read."""
    async with running(file, "--mig-strategy=none") as task:
        file.write_text("flags: {migStrategy: mixed, plugin: {passDeviceSpecs: true}}")
        applied = await task.tells(ConfigApplied)

        assert applied == ConfigApplied(str(file), "pass-device-specs")
        assert task.config.value.mig_strategy == "none"


async def test_keys_that_the_reference_ignores_are_named_once(file: Path) -> None:
    """At start, and again when they are others."""
    file.write_text('resources: {gpus: [{pattern: "*", name: a}]}')
    async with running(file) as task:
        assert task.told == [ConfigKeysObeyed(str(file), "resources.gpus")]

        await task.looks_again()
        file.write_text('resources: {gpus: [{pattern: "*", name: b}], mig: [{pattern: "*", name: m}]}')
        await task.looks_again()
        assert [each for each in task.told if isinstance(each, ConfigKeysObeyed)] == [
            ConfigKeysObeyed(str(file), "resources.gpus"),
            ConfigKeysObeyed(str(file), "resources.gpus,resources.mig"),
        ]


async def test_a_file_that_is_being_written_is_not_read_by_half(file: Path) -> None:
    """An editor that truncates first leaves a moment in which the file is valid, empty, and not meant."""
    async with running(file) as task:
        seen = set()
        with trio.move_on_after(10 * INTERVAL):
            while True:
                # Each state lasts for less than the file must stand still, all the time.
                file.write_text("")
                await trio.sleep(INTERVAL / 5)
                file.write_text("flags: {migStrategy: single}")
                seen.add(task.config.value.mig_strategy)
                await trio.sleep(INTERVAL / 5)

        assert seen == {"single"}
