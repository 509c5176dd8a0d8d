"""What systemd is told: that nvplug is ready, what it is doing, in words, and that it lives.

The protocol is that of sd_notify(3): datagrams to the socket in $NOTIFY_SOCKET.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from _nvplug import happenings
from _nvplug.happenings import Happening
from _nvplug.latest import Latest

__all__ = ["Service", "State", "after", "keep_told", "service_from", "status"]

_REGISTERED: Final = "registered"

# Seconds for systemd to read a datagram. It reads late while it is busy, but what it misses it gets with the next.
_READ_WITHIN: Final = 5.0


@dataclass(frozen=True, slots=True)
class Service:
    """What systemd asks of a service.

    Attributes:
        address: of its socket; an abstract one begins with a zero byte.
        watchdog: seconds within which it wants to hear that we live; 0 if it does not want to.
    """

    address: str
    watchdog: float


def service_from(environ: MutableMapping[str, str]) -> Service | None:
    """Reads what systemd asks, and takes it out of the environment: it is not for what we start.

    Args:
        environ: of the process.

    Returns:
        None where systemd is not who started us.
    """
    address = environ.pop("NOTIFY_SOCKET", "")
    usec = environ.pop("WATCHDOG_USEC", "")
    pid = environ.pop("WATCHDOG_PID", "")
    if not address.startswith(("/", "@")):
        return None
    # A watchdog may be meant for the process that started us.
    for_us = usec.isdecimal() and pid in {"", str(os.getpid())}
    return Service(f"\0{address[1:]}" if address.startswith("@") else address, int(usec) / 1e6 if for_us else 0.0)


@dataclass(frozen=True, slots=True)
class State:
    """What an operator wants to know at a glance.

    Attributes:
        driver: what is wrong with it; empty if nothing is, None as long as nothing is known.
        resources: of each, in words, what it is at.
        devices: of each, how many there are and how many of them are healthy, in words.
        reloads: how often the configuration has been read again.
    """

    driver: str | None = None
    resources: dict[str, str] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    reloads: int = 0

    @property
    def ready(self) -> bool:
        """Whether the kubelet has been told or is being waited for, or what there is to tell is being waited for."""
        return bool(self.resources) or bool(self.driver)

    @property
    def serving(self) -> bool:
        """Whether there is something to offer, and the kubelet watches all of it."""
        return bool(self.resources) and set(self.resources.values()) == {_REGISTERED}


def after(state: State, happening: Happening) -> State:
    """The state after something happened; the same if it does not matter here."""
    match happening:
        case happenings.DriverFound():
            return replace(state, driver="" if happening.gpus else "the driver has no GPUs")
        case happenings.DriverTrouble():
            # The whole reason is in the log, and may name forty places.
            return replace(state, driver=f"waiting for the driver: {happening.reason.partition(':')[0]}")
        case happenings.DevicesListed():
            words = f"{happening.healthy} of {happening.devices} healthy"
            return replace(state, devices={**state.devices, happening.resource: words})
        case happenings.Registered():
            return _at(state, happening.resource, _REGISTERED)
        case happenings.KubeletAwaited():
            return _at(state, happening.resource, "waiting for the kubelet")
        case happenings.RegistrationRefused():
            return _at(state, happening.resource, f"refused by the kubelet: {happening.reason}")
        case happenings.RegistrationUnanswered() | happenings.StreamMissing():
            return _at(state, happening.resource, "the kubelet does not answer")
        case happenings.StreamLost() | happenings.KubeletRestarted() | happenings.SocketVanished():
            return _at(state, happening.resource, "registering anew")
        case happenings.Deregistered():
            return replace(
                state, resources={name: words for name, words in state.resources.items() if name != happening.resource}
            )
        case happenings.ConfigApplied() | happenings.ConfigRefused():
            return replace(state, reloads=state.reloads + 1)
        case _:
            return state


def status(state: State) -> str:
    """The state in one line, as ``systemctl status`` shows it."""
    words = [state.driver] if state.driver else []
    for resource, doing in sorted(state.resources.items()):
        devices = state.devices.get(resource)
        words.append(f"{resource}: {doing}{f', {devices}' if devices else ''}")
    # What a kubelet refuses with may be of several lines, and each line is a message to systemd.
    return " ".join("; ".join(words).split()) or "starting"


async def keep_told(service: Service, state: Latest[State], lives: Callable[[], Awaitable[None]]) -> None:
    """Tells systemd of every state, and that we live, until cancelled; then that we end.

    Args:
        service: what it asks.
        state: what to tell.
        lives: returns soon if the program's loops turn; else the watchdog is not fed, and systemd ends and starts us.
    """
    with trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_DGRAM) as socket:

        async def send(*lines: str) -> None:
            with trio.move_on_after(_READ_WITHIN):
                try:
                    await socket.sendto("\n".join(lines).encode(), service.address)
                except OSError:
                    # systemd is restarting. What counts is told again: the watchdog at its next beat.
                    return

        async def feed() -> None:
            while True:
                await trio.sleep(service.watchdog / 3)
                with trio.move_on_after(service.watchdog / 3) as scope:
                    await lives()
                if not scope.cancelled_caught:
                    await send("WATCHDOG=1")

        async def tell() -> None:
            told: State | None = None
            while True:
                version, now = state.version, state.value
                lines = [f"STATUS={status(now)}"]
                if now.ready:
                    lines.append("READY=1")
                    if told is not None and now.reloads != told.reloads:
                        await send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
                await send(*lines)
                told = now
                await state.newer_than(version)

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tell)
                if service.watchdog:
                    nursery.start_soon(feed)
        finally:
            with trio.CancelScope(shield=True):
                await send("STOPPING=1", "STATUS=ending")


def _at(state: State, resource: str, doing: str) -> State:
    return replace(state, resources={**state.resources, resource: doing})
