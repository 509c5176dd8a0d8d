"""The CDI task: keeps documents that describe the devices, and lets no device be offered before it is in one."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from _nvplug.config import Config
from _nvplug.container.facts import Terms
from _nvplug.errors import DocumentError
from _nvplug.happenings import DevicesNotDescribed, DocumentNotWritten, DocumentRemoved, DocumentWritten, Publish
from _nvplug.hardware import Hardware
from _nvplug.latest import Latest
from _nvplug.resources import Offer
from _nvplug.supervise import again

if TYPE_CHECKING:
    from _nvplug.container.cdi_document import Document
    from _nvplug.container.cdi_files import Claim, Description

__all__ = ["DIRECTORY", "Pace", "keep_described", "needs_documents"]

DIRECTORY: Final = "/var/run/cdi"
"""Where runtimes look for documents that are made anew after each boot."""


class Pace(NamedTuple):
    """How long things take, in seconds.

    Attributes:
        look_again: between two looks at the driver's files, which say nothing when they change.
        retry: before the second attempt to write; doubles up to ``look_again``.
        patience: that new devices wait for their document. Then they are offered all the same: other strategies must
            go on, and the kubelet tries to start a container again until its names are known.
        attempt: for a look and a document to be written.
        removal: for documents to be removed at the end.
    """

    look_again: float = 30.0
    retry: float = 1.0
    patience: float = 5.0
    attempt: float = 5.0
    removal: float = 2.0


def needs_documents(config: Config) -> bool:
    """Whether containers are told their devices by CDI names."""
    return any(strategy.startswith("cdi-") for strategy in config.device_list_strategy)


async def keep_described(
    hardware: Latest[Hardware],
    offer: Latest[Offer],
    terms: Latest[Terms],
    described: Latest[Offer],
    agreed: Latest[Terms],
    publish: Publish,
    *,
    directory: str = DIRECTORY,
    root: str = "",
    pace: Pace = Pace(),  # noqa: B008 - immutable
) -> None:
    """Hands each offer on as ``described``, and keeps the node's CDI documents where the configuration wants them.

    A device that was not in a document before is handed on when it is, or after ``Pace.patience``: so an allocation of
    it names what a runtime will find. Whatever else is new, such as the health of devices, is handed on at once. The
    same holds for terms: those of a new configuration count when there are the documents that they speak of.

    Args:
        hardware: what there is. Until there is a GPU, documents of an earlier life of nvplug stay as they are.
        offer: what is to be described.
        terms: say whether documents are wanted, and what is on the host.
        described: what is handed on of offers.
        agreed: what is handed on of terms.
        publish: told of documents that are written, or cannot be.
        directory: of the documents.
        root: see cdi_host.look.
        pace: another than usual, for tests.
    """
    task = _Describing(hardware, offer, terms, described, agreed, publish, Path(directory), root, pace)
    await task.run()


class _Wanted(NamedTuple):
    """What documents are made from, besides what is found on the host."""

    hardware: Hardware
    offered: frozenset[str]
    terms: Terms


class _Describing:
    def __init__(
        self,
        hardware: Latest[Hardware],
        offer: Latest[Offer],
        terms: Latest[Terms],
        described: Latest[Offer],
        agreed: Latest[Terms],
        publish: Publish,
        directory: Path,
        root: str,
        pace: Pace,
    ) -> None:
        self._hardware = hardware
        self._offer = offer
        self._terms = terms
        self._described = described
        self._agreed = agreed
        self._publish = publish
        self._directory = directory
        self._root = root
        self._pace = pace
        self._news = trio.Event()
        self._lane = trio.CapacityLimiter(1)
        self._last: Document | None = None
        self._claim: Claim | None = None
        # UUIDs of the devices that are in the document, and of those that have waited long enough for it.
        self._named: frozenset[str] = frozenset()
        self._waived: frozenset[str] = frozenset()
        # The terms of those documents, or those that have waited long enough for them.
        self._settled: Terms | None = None
        self._said = ""
        self._without: frozenset[str] = frozenset()

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                for follow in (self._hardware.follow, self._offer.follow, self._terms.follow):
                    nursery.start_soon(follow, self._take)
                # Apart from handing on: a fault in what makes documents must not hold back the news of a broken GPU.
                nursery.start_soon(again, "what keeps CDI documents", self._keep)
        finally:
            # Also if they are not wanted any more, since a reload.
            if self._claim is not None and self._terms.value.config.cdi_remove_at_exit:
                with trio.CancelScope(shield=True), trio.move_on_after(self._pace.removal):
                    await self._remove(self._claim)

    def _take(self, _changed: object) -> None:
        self._hand_on()
        self._news.set()

    def _hand_on(self) -> bool:
        """Hands on what needs not wait, and says whether that is all."""
        terms, offer = self._terms.value, self._offer.value
        settled = not needs_documents(terms.config) or terms == self._settled
        if settled:
            self._agreed.set(terms)
        # By the terms in force: those that wait for a document hold back no news of devices that need none yet.
        named = not needs_documents(self._agreed.value.config) or offer.uuids <= self._named | self._waived
        if named:
            self._described.set(offer)
        return named and settled

    def _waive(self) -> None:
        self._waived |= self._offer.value.uuids
        self._settled = self._terms.value

    async def _keep(self) -> None:
        done: _Wanted | None = None
        delay, at, held_until = self._pace.retry, -math.inf, math.inf
        try:
            while True:
                self._news = trio.Event()
                wanted = _Wanted(self._hardware.value, self._offer.value.uuids, self._terms.value)
                if not self._hand_on() and held_until == math.inf:
                    held_until = trio.current_time() + self._pace.patience
                if wanted != done or trio.current_time() >= at:
                    written = await self._renew(wanted)
                    if written:
                        delay = self._pace.look_again
                    else:
                        delay = self._pace.retry if wanted != done else min(2 * delay, self._pace.look_again)
                    done, at = wanted, trio.current_time() + delay
                if trio.current_time() >= held_until:
                    self._waive()
                if self._hand_on():
                    held_until = math.inf
                with trio.move_on_at(min(at, held_until)):
                    await self._news.wait()
        finally:
            # Devices that come while this does not run wait for the next run; these do not.
            self._waive()
            self._hand_on()

    async def _renew(self, wanted: _Wanted) -> bool:
        """Brings the documents up to date, and says whether that went well."""
        # Hardware is known a moment before what is offered of it.
        if not needs_documents(wanted.terms.config) or not wanted.hardware.gpus or not wanted.offered:
            self._settled = wanted.terms
            return True
        job = partial(_renew, self._directory, wanted, self._last, self._root)
        try:
            with trio.fail_after(self._pace.attempt):
                description, changed, claim = await trio.to_thread.run_sync(
                    job, abandon_on_cancel=True, limiter=self._lane
                )
        except DocumentError as error:
            self._complain(str(error), error.remedy)
            return False
        except trio.TooSlowError:
            self._complain(f"{self._directory}: no answer within {self._pace.attempt:g} s", "see to its file system")
            return False
        self._said = ""
        self._last, self._named, self._settled = description.document, description.named, wanted.terms
        self._claim = claim or self._claim
        for file in changed:
            self._publish(DocumentWritten(str(file)))
        without = wanted.offered - description.named
        if without and without != self._without:
            self._publish(DevicesNotDescribed(",".join(sorted(without))))
        self._without = without
        return True

    def _complain(self, reason: str, remedy: str) -> None:
        if reason != self._said:
            self._said = reason
            self._publish(DocumentNotWritten(reason, remedy))

    async def _remove(self, claim: Claim) -> None:
        try:
            # In the lane, behind an attempt to write that is still under way.
            removed = await trio.to_thread.run_sync(
                _remove, self._directory, claim, abandon_on_cancel=True, limiter=self._lane
            )
        except DocumentError as error:
            self._publish(DocumentNotWritten(str(error), error.remedy))
        else:
            for file in removed:
                self._publish(DocumentRemoved(str(file)))


# What makes documents takes 40 ms to load, and is only loaded where there are any to be made.


def _renew(
    directory: Path, wanted: _Wanted, last: Document | None, root: str
) -> tuple[Description, tuple[Path, ...], Claim | None]:
    from _nvplug.container.cdi_files import renew  # noqa: PLC0415

    return renew(directory, *wanted, last, root=root)


def _remove(directory: Path, claim: Claim) -> tuple[Path, ...]:
    from _nvplug.container.cdi_files import remove_documents  # noqa: PLC0415

    return remove_documents(directory, claim)
