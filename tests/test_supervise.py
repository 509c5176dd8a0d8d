from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

from _nvplug.errors import DirectoryDeadError, NewProcessNeededError
from _nvplug.supervise import again


class Life:
    """Lives for some seconds each time, and then dies of something; the last time it ends well.

    Attributes:
        born: when each life began, in seconds since the first.
    """

    def __init__(self, *lives: tuple[float, BaseException]) -> None:
        self._lives = list(lives)
        self.born: list[float] = []

    async def run(self) -> None:
        """One life."""
        self.born.append(trio.current_time())
        if len(self.born) <= len(self._lives):
            seconds, error = self._lives[len(self.born) - 1]
            await trio.sleep(seconds)
            raise error

    @property
    def pauses(self) -> list[float]:
        """Seconds from each death to the next birth."""
        deaths = [born + seconds for born, (seconds, _) in zip(self.born, self._lives, strict=False)]
        return [born - died for died, born in zip(deaths, self.born[1:], strict=False)]


def announced(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The pauses that the log announces, as they are written there."""
    return [record.getMessage().rpartition(" in ")[2] for record in caplog.records]


async def test_what_ends_well_is_not_run_again(autojump_clock: trio.testing.MockClock) -> None:
    """A run that returns is the last."""
    life = Life()

    await again("a life", life.run)

    assert len(life.born) == 1
    assert autojump_clock.current_time() == life.born[0]


async def test_pauses_double_up_to_a_limit(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """What fails at once is run ever less often, though at least every 30 s, and the log says when."""
    assert autojump_clock.current_time() >= 0
    life = Life(*[(0.0, ValueError())] * 9)

    await again("a life", life.run)

    assert life.pauses == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30, 30])
    assert announced(caplog) == [f"{pause:.1f} s" for pause in (0.5, 1, 2, 4, 8, 16, 30, 30, 30)]


async def test_a_sound_run_forgives(autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture) -> None:
    """After a run of a minute the pauses begin anew; after a shorter one they go on."""
    assert autojump_clock.current_time() >= 0
    seconds = (0.0, 0.0, 0.0, 59.0, 61.0, 0.0)
    life = Life(*[(each, ValueError()) for each in seconds])

    await again("a life", life.run)

    assert life.pauses == pytest.approx([0.5, 1, 2, 4, 0.5, 1])
    assert announced(caplog) == ["0.5 s", "1.0 s", "2.0 s", "4.0 s", "0.5 s", "1.0 s"]


async def test_a_fault_is_told_with_its_traceback(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """What nobody foresaw is a fault of ours: the log has its name, its place in the code and all its causes."""
    assert autojump_clock.current_time() >= 0

    async def fail_deep() -> None:
        raise LookupError("nobody foresaw this")

    async def run(lives: list[int]) -> None:
        if lives:
            lives.pop()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail_deep)

    lives = [1]
    await again("nvidia.com/gpu", lambda: run(lives))

    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.name.startswith("nvplug")
    assert record.getMessage().startswith("nvidia.com/gpu failed")
    assert "LookupError: nobody foresaw this" in caplog.text
    assert "in fail_deep" in caplog.text


async def test_each_life_is_cleaned_up_before_the_next(autojump_clock: trio.testing.MockClock) -> None:
    """Nothing of a life that failed is left when the next begins, nor while it waits."""
    assert autojump_clock.current_time() >= 0
    alive = 0
    seen: list[int] = []

    async def live() -> None:
        nonlocal alive
        alive += 1
        try:
            await trio.sleep_forever()
        finally:
            alive -= 1

    async def run() -> None:
        seen.append(alive)
        if len(seen) < 4:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(live)
                await trio.sleep(1)
                raise ValueError

    await again("a life", run)

    assert seen == [0, 0, 0, 0]


@pytest.mark.parametrize("error", [NewProcessNeededError, DirectoryDeadError])
@pytest.mark.parametrize("company", [[], [ValueError("besides")]])
async def test_what_needs_a_new_process_passes(
    error: type[NewProcessNeededError],
    company: list[Exception],
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Where no run in this process can help, there is none, whatever else went wrong at the same time."""
    began = autojump_clock.current_time()
    needed = error("the mount is dead", remedy="wait")
    life = Life((0.0, ExceptionGroup("both", [needed, *company])))

    with pytest.raises(ExceptionGroup) as caught:
        await again("a life", life.run)

    assert caught.group_contains(error)
    assert not caught.group_contains(ValueError)
    assert len(life.born) == 1
    assert autojump_clock.current_time() == began


async def test_cancellation_passes(autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture) -> None:
    """A life that is cancelled did not fail: nothing is logged, and there is no other."""
    began = autojump_clock.current_time()

    with trio.move_on_after(10) as scope:
        await again("a life", trio.sleep_forever)

    assert scope.cancelled_caught
    assert autojump_clock.current_time() == began + 10
    assert not caplog.records


async def test_a_pause_can_be_cancelled(autojump_clock: trio.testing.MockClock) -> None:
    """Between two lives it ends at once when it is cancelled."""
    began = autojump_clock.current_time()
    life = Life(*[(0.0, ValueError())] * 100)

    with trio.move_on_after(10) as scope:
        await again("a life", life.run)

    assert scope.cancelled_caught
    assert autojump_clock.current_time() == began + 10
    assert len(life.born) == 5


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_what_is_no_fault_passes(error: type[BaseException]) -> None:
    """A wish to end is obeyed."""
    life = Life((0.0, error()))

    with pytest.raises(error):
        await again("a life", life.run)

    assert len(life.born) == 1
