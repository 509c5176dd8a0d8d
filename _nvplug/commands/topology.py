"""``nvplug devices --topology`` and ``--prefer N``: how the GPUs are joined, and what a container would be given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations

from _nvplug.hardware import Gpu, Hardware, Link, PciPath
from _nvplug.health import Health
from _nvplug.placement import Plan, preferred
from _nvplug.placement.bandwidth import layout_of
from _nvplug.placement.choice import Question, question
from _nvplug.placement.search import search
from _nvplug.placement.table import MOST, Table
from _nvplug.resources import Device, Offer, Resource

__all__ = ["drawn", "explained"]

# As nvidia-smi writes them, and in words.
_PATHS = {
    PciPath.SAME_BOARD: ("BRD", "on one board"),
    PciPath.ONE_SWITCH: ("PIX", "through one PCIe switch"),
    PciPath.SWITCHES: ("PXB", "through several PCIe switches"),
    PciPath.HOST_BRIDGE: ("PHB", "through the PCIe host bridge"),
    PciPath.NUMA_NODE: ("NODE", "through the NUMA node"),
    PciPath.SYSTEM: ("SYS", "from one socket to another"),
    PciPath.UNKNOWN: ("?", "not known"),
}

# What stands around GPUs that are as near as this.
_BRACKETS = {
    PciPath.HOST_BRIDGE: ("{", "}", "share a host bridge"),
    PciPath.SWITCHES: ("[", "]", "share PCIe switches"),
    PciPath.ONE_SWITCH: ("(", ")", "share one PCIe switch"),
    PciPath.SAME_BOARD: ("<", ">", "share a board"),
}


def drawn(hardware: Hardware, health: Health) -> str:
    """The matrix, what NVLink joins, the tree of PCIe, and what the signs mean."""
    gpus, links = hardware.gpus, hardware.links
    if not gpus:
        return "There is no GPU.\n"
    if len(links) != len(gpus):
        return f"How the {len(gpus)} GPUs are joined is not known.\n"
    lines = [*_matrix(gpus, links), ""]
    lines += _titled("NVLink", _islands(hardware))
    lines += _titled("PCIe", _tree(gpus, links))
    lines += ["", *_legend(links)]
    unhealthy = [(gpu, verdict) for gpu in gpus if (verdict := health.of(gpu.uuid))]
    lines += [f"GPU {gpu.index} is unhealthy: {verdict.reason}" for gpu, verdict in unhealthy]
    return "\n".join(lines).rstrip() + "\n"


def _titled(title: str, entries: Iterable[str]) -> list[str]:
    return [f"{'' if row else title:6}  {entry}" for row, entry in enumerate(entries)]


def _cell(link: Link) -> str:
    if not link.nvlinks:
        return _PATHS[link.path][0]
    return f"NV{link.nvlinks}{'*' if link.switched else ''}"


def _matrix(gpus: Sequence[Gpu], links: Sequence[Sequence[Link]]) -> list[str]:
    cells = [["-" if one == other else _cell(link) for other, link in enumerate(row)] for one, row in enumerate(links)]
    width = max(len(cell) for row in cells for cell in row)
    border = [place for place in range(1, len(gpus)) if gpus[place].numa != gpus[place - 1].numa]

    def line(head: str, row: Iterable[str]) -> str:
        return head + "".join(f"{' |' if place in border else ''}  {cell:>{width}}" for place, cell in enumerate(row))

    lines = [line("GPU", (str(gpu.index) for gpu in gpus))]
    for place, row in enumerate(cells):
        if place in border:
            lines.append("".join("+" if sign == "|" else "-" for sign in lines[0]))
        lines.append(line(f"{gpus[place].index:>3}", row))
    return lines


def _islands(hardware: Hardware) -> list[str]:
    layout = layout_of(hardware.gpus, hardware.links)
    return [_island(hardware, layout.positions(island)) for island in layout.islands] or ["none"]


def _island(hardware: Hardware, places: Sequence[int]) -> str:
    gpus, links = hardware.gpus, hardware.links
    # The better of both directions: one end may be unreadable.
    ways = {
        (one, other): max(links[one][other], links[other][one], key=lambda way: way.nvlinks)
        for one, other in combinations(places, 2)
    }
    pairs = {pair: way for pair, way in ways.items() if way.nvlinks}
    groups = _complete(places, pairs)
    names = " + ".join(_names(gpus[place] for place in group) for group in groups)
    if all(way.switched for way in pairs.values()):
        most = {place: max(way.nvlinks for pair, way in pairs.items() if place in pair) for place in places}
        usual = max(most.values())
        fewer = [f"GPU {gpus[place].index} {count}" for place, count in most.items() if count != usual]
        return f"{names}: {', '.join([f'{usual} NVLinks each into NVSwitches', *fewer])}"
    between = [(pair, way) for pair, way in pairs.items() if not any({*pair} <= {*group} for group in groups)]
    counts = sorted({way.nvlinks for pair, way in pairs.items() if (pair, way) not in between})
    number = f"{' or '.join(map(str, counts))} NVLink{'' if counts == [1] else 's'}"
    text = f"{names}: {number}{' each to each' if len(places) > 2 else ''}"
    crossing = [f"{gpus[one].index}-{gpus[other].index} {way.nvlinks}" for (one, other), way in between]
    return f"{text}; from one to the other: {', '.join(crossing)}" if crossing else text


def _complete(places: Iterable[int], pairs: Collection[tuple[int, int]]) -> list[list[int]]:
    """Groups of GPUs of which each is joined to each, in index order."""
    groups: list[list[int]] = []
    for place in places:
        group = next((each for each in groups if all((other, place) in pairs for other in each)), None)
        if group is None:
            groups.append([place])
        else:
            group.append(place)
    return groups


def _tree(gpus: Sequence[Gpu], links: Sequence[Sequence[Link]]) -> list[str]:
    nodes: dict[int | None, list[int]] = {}
    for place, gpu in enumerate(gpus):
        nodes.setdefault(gpu.numa, []).append(place)

    def near(places: Sequence[int], levels: Sequence[PciPath]) -> str:
        if not levels:
            return _names(gpus[place] for place in places)
        level, *nearer = levels
        groups: list[list[int]] = []
        for place in places:
            group = next((each for each in groups if any(links[place][other].path <= level for other in each)), [])
            if not group:
                groups.append(group)
            group.append(place)
        left, right, _ = _BRACKETS[level]
        texts = []
        for group in groups:
            text = near(group, nearer)
            here = any(links[one][other].path == level for one, other in combinations(group, 2))
            texts.append(f"{left}{text}{right}" if here else text)
        return " ".join(texts)

    levels = list(_BRACKETS)
    known = sorted((numa, places) for numa, places in nodes.items() if numa is not None)
    lines = [f"NUMA node {numa}: {near(places, levels)}" for numa, places in known]
    return [*lines, f"no NUMA node: {near(nodes[None], levels)}"] if None in nodes else lines


def _legend(links: Sequence[Sequence[Link]]) -> list[str]:
    ways = [link for one, row in enumerate(links) for other, link in enumerate(row) if one != other]
    lines = []
    if any(way.nvlinks and not way.switched for way in ways):
        lines.append("NVn: n NVLinks from one to the other")
    if any(way.nvlinks and way.switched for way in ways):
        lines.append("NVn*: n NVLinks into NVSwitches, by which all reach all")
    lines += [f"{sign}: {words}" for path, (sign, words) in _PATHS.items()
              if any(way.path == path and not way.nvlinks for way in ways)]  # fmt: skip
    lines += [f"{left} {right}: {words}" for path, (left, right, words) in _BRACKETS.items()
              if any(way.path == path for way in ways)]  # fmt: skip
    return lines


def _names(gpus: Iterable[Gpu]) -> str:
    return " ".join(str(gpu.index) for gpu in gpus)


def explained(hardware: Hardware, offer: Offer, size: int) -> str:
    """What a container that asks for so many would be given of each resource, and why.

    What the kubelet has given away is not known here: all that is healthy counts as free.
    """
    layout = layout_of(hardware.gpus, hardware.links)
    plan = Plan(layout, Table(layout) if 0 < len(layout.uuids) <= MOST else None)
    return (
        "\n".join(_explained(resource, plan, size, hardware.gpus) for resource in offer.resources)
        or "Nothing is offered.\n"
    )


def _explained(resource: Resource, plan: Plan, size: int, gpus: Sequence[Gpu]) -> str:
    free = [device.id for device in resource.devices if device.healthy]
    ids = {*preferred(resource, free, (), size, plan)}
    chosen = [device for device in resource.devices if device.id in ids]
    asked = question(resource, free, (), size, plan.layout)
    if any(device.replica is not None or device.mig for device in resource.devices):
        names, reasons = _shares(chosen), [f"  {_POLICIES[resource.policy]}"]
    else:
        names = f"GPU{'s' if len(chosen) > 1 else ''} {_names(device.gpu for device in chosen)}"
        known = asked.size < asked.free.bit_count() == len(free)
        reasons = _reasons(plan, asked, gpus) if known else ["  in index order: how they are joined is not known"]
    if len(free) <= size:
        reasons = [f"  there is no choice: {len(free)} are free" if free else "  none is free"]
    return "\n".join([f"{resource.name}: {size} of {len(free)}: {names if chosen else 'none'}", *reasons]) + "\n"


def _shares(devices: Iterable[Device]) -> str:
    counts = Counter((f"MIG {device.index}" if device.mig else f"GPU {device.index}") for device in devices)
    return ", ".join(name if count == 1 else f"{count} of {name}" for name, count in counts.items())


_POLICIES = {
    "distributed": "distributed: of the GPU with the fewest in use, and of equals of one that is near the others",
    "packed": "packed: of the GPU with the most in use, and of equals of one that is near the others",
    "distinct": "distinct: of as many GPUs as there are, those with the fewest in use first",
}


_MOST_PAIRS = 6
"""That a person reads. Larger sets are shown by their sum."""


def _reasons(plan: Plan, asked: Question, gpus: Sequence[Gpu]) -> list[str]:
    layout, size, table = plan.layout, asked.size, plan.table

    def speed(members: int) -> str:
        places = layout.positions(members)
        weights = layout.weights(size)
        pairs = [
            f"{gpus[one].index}-{gpus[other].index} {weights[one][other] / (size - 1):.0f}"
            for one, other in combinations(places, 2)
        ]
        who = ", ".join(pairs) if len(pairs) <= _MOST_PAIRS else _names(gpus[place] for place in places)
        return f"{layout.score(members) / (size - 1):.0f} GB/s, {who}"

    if table is None and size > 1:
        return [f"  {speed(search(layout, *asked))}; of more than {MOST} GPUs not every set is tried"]
    if table is None:
        return ["  the one that breaks up the fewest NVLink islands and NUMA nodes"]
    members, ranking = table.best(*asked), table.ranking(*asked)
    rows = [(ranking.possible, "to choose from")]
    if size > 1:
        rows.append((ranking.fastest, f"as fast as can be: {speed(members)}"))
    if 1 < size <= asked.free.bit_count() // 2:
        rest = table.best(*asked._replace(free=asked.free & ~members))
        rows.append((ranking.considerate, f"that leave as much as can be to the next {size}: {speed(rest)}"))
    rows.append((ranking.unbroken, "that break up the fewest NVLink islands and NUMA nodes"))
    rows.append((1, "that is the first in index order"))
    width = len(str(ranking.possible))
    return [f"  {count:>{width}} {text}" for count, text in rows]
