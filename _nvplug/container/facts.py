"""What is known of a node besides its hardware when an answer is made: gathered before, so that making it is pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from _nvplug.config import Config
from _nvplug.container.edits import Mount
from _nvplug.container.extras import KINDS, Extra, find_extras, find_imex_channels, imex_path
from _nvplug.happenings import ConfigRedundant, ConfigUnmet, Happening
from _nvplug.hardware import Hardware

__all__ = ["NodeFacts", "Terms", "gather", "needs_a_look"]


class NodeFacts(NamedTuple):
    """As of the last look.

    Attributes:
        imex_channels: ids of those that are configured and exist.
        extras: what of GDRCopy, GPUDirect Storage and MOFED is switched on and there.
        driver_mounts: the driver's libraries and programs, for containers that nobody else gives them.
        remarks: what of the configuration this node does not have, and what was found.
    """

    imex_channels: tuple[str, ...] = ()
    extras: tuple[Extra, ...] = ()
    driver_mounts: tuple[Mount, ...] = ()
    remarks: tuple[Happening, ...] = ()


class Terms(NamedTuple):
    """By what answers are made.

    Attributes:
        config: what is asked for.
        facts: as they were gathered for it.
        hardware: what the driver had at that time; None if not enough is known yet to offer anything.
    """

    config: Config
    facts: NodeFacts = NodeFacts()
    hardware: Hardware | None = None

    @property
    def met(self) -> bool:
        """Whether there is everything without which nothing should be offered."""
        return not self.config.imex_required or self.facts.imex_channels == self.config.imex_channel_ids

    def cover(self, hardware: Hardware, config: Config) -> bool:
        """Whether the node was looked at for what these need."""
        return not needs_a_look(config) or (config is self.config and hardware is self.hardware)


def needs_a_look(config: Config) -> bool:
    """Whether any fact depends on more than the configuration."""
    return bool(
        config.imex_channel_ids
        or config.gdrcopy_enabled
        or config.gds_enabled
        or config.mofed_enabled
        or "direct" in config.device_list_strategy
    )


def gather(config: Config, driver_version: str = "", root: str = "/") -> NodeFacts:
    """Looks at the node. Blocks, for some milliseconds.

    Args:
        config: says what for, and where.
        driver_version: as NVML says it.
        root: the root of this process.
    """
    if not needs_a_look(config):
        return NodeFacts(remarks=tuple(_redundant(config)))
    imex_channels, extras = find_imex_channels(config, root), find_extras(config, root)
    remarks = [*_redundant(config), *_missing(config, imex_channels, extras)]
    mounts: tuple[Mount, ...] = ()
    if "direct" in config.device_list_strategy:
        # Only where it is asked for is it worth the time to load what searches.
        from _nvplug.container.direct import find_driver_mounts  # noqa: PLC0415

        mounts, remark = find_driver_mounts(config, driver_version, root)
        remarks.append(remark)
    return NodeFacts(imex_channels, extras, mounts, tuple(remarks))


def _redundant(config: Config) -> Iterator[Happening]:
    if {"cdi-annotations", "cdi-cri"} <= {*config.device_list_strategy}:
        yield ConfigRedundant(
            "device-list-strategy",
            "cdi-annotations and cdi-cri name the same devices to the container runtime twice: cdi-cri alone does with"
            " a kubelet from 1.29 on, cdi-annotations alone with an older one",
        )


def _missing(config: Config, channels: tuple[str, ...], extras: tuple[Extra, ...]) -> Iterator[Happening]:
    for channel in config.imex_channel_ids:
        if channel not in channels:
            consequence = "nothing is offered without it" if config.imex_required else "containers do without it"
            yield ConfigUnmet("imex.channelIDs", f"there is no {imex_path(channel)}; {consequence}")
    there = {extra.device_class for extra in extras}
    for field, device_class, patterns, _ in KINDS:
        if getattr(config, field) and device_class not in there:
            yield ConfigUnmet(field.replace("_", "-"), f"there is no {' and no '.join(patterns)}")
