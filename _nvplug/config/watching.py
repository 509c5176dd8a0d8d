"""The config task: a changed configuration is judged, and if it can be obeyed, it is."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Final

import trio

from _nvplug.config.model import Config
from _nvplug.config.options import OPTIONS
from _nvplug.config.reading import Settings
from _nvplug.errors import OptionError
from _nvplug.happenings import ConfigApplied, ConfigKeysObeyed, ConfigRefused, ConfigWaits, Publish
from _nvplug.latest import Latest

__all__ = ["keep_config"]

# Seconds between two looks at the file. A change is taken up at the second look that finds it, so that a file that is
# being written is not read by half: an empty one would be a valid configuration.
POLL_INTERVAL: Final = 0.5

# Seconds for a file system to answer; one that hangs must not hang anything else.
ANSWERED_WITHIN: Final = 5.0

_Signature = tuple[int, int, int, int] | None

# What no file has: the inode number 0.
UNREAD: Final[_Signature] = (0, 0, 0, 0)

_LASTING: Final = tuple(option for option in OPTIONS if option.lasting)


async def keep_config(
    config: Latest[Config],
    settings: Settings,
    read: Callable[[], Settings],
    publish: Publish,
    *,
    interval: float = POLL_INTERVAL,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Reads the configuration again at SIGHUP, and whenever its file changes; a bad one leaves all as it is.

    Args:
        config: what is in force.
        settings: how it came about.
        read: makes it anew from the same command line and environment; runs in a thread.
        publish: told of every outcome.
        interval: seconds between two looks at the file.
        task_status: started when signals are heard.
    """
    keeper = _Keeper(config, settings, read, publish)
    with trio.open_signal_receiver(signal.SIGHUP) as hangups:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        task_status.started()
        async with trio.open_nursery() as nursery:
            if config.value.config_file:
                nursery.start_soon(keeper.watch, config.value.config_file, interval)
            async for _ in hangups:
                await keeper.renew(asked=True)


class _Keeper:
    def __init__(
        self, config: Latest[Config], settings: Settings, read: Callable[[], Settings], publish: Publish
    ) -> None:
        self._config = config
        self._read = read
        self._publish = publish
        # Of its own: calls that never return take no threads from others, and only one.
        self._lane = trio.CapacityLimiter(1)
        self._refused = ""
        self._obeyed: tuple[str, ...] = ()
        self._wanted = {option.field: getattr(settings.config, option.field) for option in _LASTING}
        self._tell_obeyed(settings)

    async def watch(self, path: str, interval: float) -> None:
        """Reads anew when the file has changed and then stood still for one look."""
        # What was read at start may have changed since: so the first that stands still is read again.
        seen = taken = UNREAD
        while True:
            now = await self._look(path)
            if now == seen and now != taken:
                taken = now
                await self.renew(asked=False)
            seen = now
            await trio.sleep(interval)

    async def renew(self, *, asked: bool) -> None:
        """Reads the configuration, and obeys it if it can be obeyed."""
        try:
            with trio.fail_after(ANSWERED_WITHIN):
                settings = await trio.to_thread.run_sync(self._read, abandon_on_cancel=True, limiter=self._lane)
        except OptionError as error:
            self._refuse(str(error), error.remedy, asked=asked)
            return
        except trio.TooSlowError:
            self._refuse(f"it could not be read within {ANSWERED_WITHIN:.0f} s", "see to its file system", asked=asked)
            return
        mended, self._refused = bool(self._refused), ""
        before = self._config.value
        after = self._lasting(settings.config, before)
        self._config.set(after)
        changed = [each.name for each in fields(Config) if getattr(before, each.name) != getattr(after, each.name)]
        if changed or asked or mended:
            names = ",".join(name.replace("_", "-") for name in changed) or "nothing"
            self._publish(ConfigApplied(before.config_file, names))
        self._tell_obeyed(settings)

    async def _look(self, path: str) -> _Signature:
        with trio.move_on_after(ANSWERED_WITHIN):
            return await trio.to_thread.run_sync(_signature, path, abandon_on_cancel=True, limiter=self._lane)
        return None

    def _refuse(self, reason: str, remedy: str, *, asked: bool) -> None:
        if asked or reason != self._refused:
            self._refused = reason
            self._publish(ConfigRefused(self._config.value.config_file, reason, remedy))

    def _lasting(self, config: Config, before: Config) -> Config:
        """The configuration without what cannot change while the process runs."""
        for option in _LASTING:
            value = getattr(config, option.field)
            if value != self._wanted[option.field]:
                self._wanted[option.field] = value
                if value != getattr(before, option.field):
                    self._publish(ConfigWaits(option.name, str(value)))
        return replace(config, **{option.field: getattr(before, option.field) for option in _LASTING})

    def _tell_obeyed(self, settings: Settings) -> None:
        obeyed = settings.file.obeyed
        if obeyed and obeyed != self._obeyed:
            self._publish(ConfigKeysObeyed(settings.config.config_file, ",".join(obeyed)))
        self._obeyed = obeyed


def _signature(path: str) -> _Signature:
    """What changes when the file does, through links as well; None where there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - of what links lead to, and the first error is the answer
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
