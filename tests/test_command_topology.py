"""``nvplug devices --topology`` and ``--prefer N``: what is drawn, and what is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from topologies import gpu, joined, machine

from _nvplug.commands.devices import View, main, read_view
from _nvplug.commands.topology import drawn, explained
from _nvplug.config import Config
from _nvplug.config.model import Selection, Selector, SharedResource, TimeSlicing
from _nvplug.drivers.machines import find_machine
from _nvplug.drivers.simulated import SimulatedDriver
from _nvplug.errors import OptionError
from _nvplug.hardware import Hardware, Link, MigDevice, PciPath
from _nvplug.health import Health, Verdict
from _nvplug.resources import Offer, next_offer


def hardware(name: str) -> Hardware:
    """Of a machine of the table."""
    node = machine(name)
    return Hardware(node.gpus, node.links)


def told(node: Hardware, size: int, config: Config = Config(), health: Health = Health()) -> list[str]:  # noqa: B008
    """What --prefer says."""
    return explained(node, next_offer(Offer(), node, health, config), size).splitlines()


def test_a_cube_is_drawn() -> None:
    """The matrix is ruled between NUMA nodes; what is joined each to each stands together, and the rest between."""
    assert drawn(hardware("8xV100"), Health()).splitlines() == [
        "GPU    0    1    2    3 |    4    5    6    7",
        "  0    -  NV1  NV1  NV2 |  NV2  SYS  SYS  SYS",
        "  1  NV1    -  NV2  NV1 |  SYS  NV2  SYS  SYS",
        "  2  NV1  NV2    -  NV2 |  SYS  SYS  NV1  SYS",
        "  3  NV2  NV1  NV2    - |  SYS  SYS  SYS  NV1",
        "------------------------+--------------------",
        "  4  NV2  SYS  SYS  SYS |    -  NV1  NV1  NV2",
        "  5  SYS  NV2  SYS  SYS |  NV1    -  NV2  NV1",
        "  6  SYS  SYS  NV1  SYS |  NV1  NV2    -  NV2",
        "  7  SYS  SYS  SYS  NV1 |  NV2  NV1  NV2    -",
        "",
        "NVLink  0 1 2 3 + 4 5 6 7: 1 or 2 NVLinks each to each; from one to the other: 0-4 2, 1-5 2, 2-6 1, 3-7 1",
        "PCIe    NUMA node 0: (0 1) (2 3)",
        "        NUMA node 1: (4 5) (6 7)",
        "",
        "NVn: n NVLinks from one to the other",
        "SYS: from one socket to another",
        "( ): share one PCIe switch",
    ]


def test_nvswitches_are_drawn() -> None:
    """They are told apart from NVLinks that lead straight; whoever has fewer links is named; so is who is unhealthy."""
    node = hardware("8xH100")
    rows = [list(row) for row in node.links]
    for other in range(8):
        rows[1][other] = rows[other][1] = replace(rows[1][other], nvlinks=17)
    lines = drawn(
        replace(node, links=tuple(map(tuple, rows))), Health({node.gpus[5].uuid: Verdict("XID 79", "Reset")})
    ).splitlines()

    assert lines[1] == "  0      -  NV17*  NV18*  NV18* |  NV18*  NV18*  NV18*  NV18*"
    assert "NVLink  0 1 2 3 4 5 6 7: 18 NVLinks each into NVSwitches, GPU 1 17" in lines
    assert "PCIe    NUMA node 0: 0 1 2 3" in lines
    assert lines[-2:] == [
        "NVn*: n NVLinks into NVSwitches, by which all reach all",
        "GPU 5 is unhealthy: XID 79",
    ]


def test_pairs_and_switches_are_drawn() -> None:
    """Brackets for whatever is shared, one in the other; and where no NUMA node is known, that is said."""
    node = joined(
        "X   PIX      PXB PHB",
        "PIX X        PXB NV4/PHB",
        "PXB PXB      X   PHB",
        "PHB NV4/PHB  PHB X",
    )
    lines = drawn(Hardware(node.gpus, node.links), Health()).splitlines()

    assert lines[6:10] == [
        "NVLink  1 3: 4 NVLinks",
        "PCIe    no NUMA node: {[(0 1) 2] 3}",
        "",
        "NVn: n NVLinks from one to the other",
    ]
    assert "{ }: share a host bridge" in lines


def test_a_link_that_one_end_does_not_see_is_drawn() -> None:
    """The matrix has what each end says; the island is there all the same."""
    node = joined("X NV1/PHB", "PHB X", numa="01")
    lines = drawn(Hardware(node.gpus, node.links), Health()).splitlines()

    assert lines[1:5] == ["  0    - |  NV1", "---------+-----", "  1  PHB |    -", ""]
    assert lines[5] == "NVLink  0 1: 1 NVLink"


def test_what_cannot_be_drawn_is_said() -> None:
    """No GPU, or no links."""
    assert drawn(Hardware(), Health()) == "There is no GPU.\n"
    assert drawn(Hardware((gpu(0, 0), gpu(1, 0))), Health()) == "How the 2 GPUs are joined is not known.\n"
    assert "NVLink  none" in drawn(hardware("1xT4"), Health())


def test_a_choice_is_explained() -> None:
    """Rule by rule, how many sets are left; the speeds are those of the pairs."""
    assert told(hardware("8xV100"), 3) == [
        "nvidia.com/gpu: 3 of 8: GPUs 0 2 3",
        "  56 to choose from",
        "   4 as fast as can be: 124 GB/s, 0-2 26, 0-3 46, 2-3 52",
        "   4 that leave as much as can be to the next 3: 124 GB/s, 4-6 26, 4-7 46, 6-7 52",
        "   4 that break up the fewest NVLink islands and NUMA nodes",
        "   1 that is the first in index order",
    ]
    assert told(hardware("8xH100"), 1) == [
        "nvidia.com/gpu: 1 of 8: GPU 0",
        "  8 to choose from",
        "  8 that break up the fewest NVLink islands and NUMA nodes",
        "  1 that is the first in index order",
    ]


def test_only_what_is_healthy_and_offered_is_chosen() -> None:
    """GPUs are named by their own indices, whatever is missing before them."""
    node = hardware("8xV100")
    health = Health({node.gpus[6].uuid: Verdict("XID 79", "Reset")})
    config = Config(selection=Selection(exclude=(Selector("index", "2"),)))
    lines = told(node, 2, config, health)

    assert lines[0] == "nvidia.com/gpu: 2 of 6: GPUs 0 3"
    assert lines[2].split(" ", 3)[-1].endswith("46 GB/s, 0-3 46")
    fewer = replace(node, gpus=node.gpus[1:], links=tuple(row[1:] for row in node.links[1:]))
    assert told(fewer, 2)[0] == "nvidia.com/gpu: 2 of 7: GPUs 2 3"
    assert told(fewer, 2)[2].endswith("52 GB/s, 2-3 52")


def test_where_there_is_no_choice_it_is_said() -> None:
    """All, or more than there are, or none at all."""
    assert told(hardware("2xT4"), 2) == ["nvidia.com/gpu: 2 of 2: GPUs 0 1", "  there is no choice: 2 are free"]
    assert told(hardware("2xT4"), 3) == ["nvidia.com/gpu: 3 of 2: GPUs 0 1", "  there is no choice: 2 are free"]
    node = hardware("1xT4")
    assert told(node, 1, health=Health({node.gpus[0].uuid: Verdict("lost", "")}))[1] == "  none is free"
    assert told(Hardware(), 1) == ["Nothing is offered."]


def test_shares_are_explained_by_their_policy() -> None:
    """Replicas by GPU, MIG devices by themselves."""
    shared = TimeSlicing((SharedResource("nvidia.com/gpu", 4, None, "nvidia.com/gpu"),))
    packed = Config(time_slicing=shared, shared_devices_allocation_policy="packed")

    assert told(hardware("2xT4"), 5, packed) == [
        "nvidia.com/gpu: 5 of 8: 4 of GPU 0, GPU 1",
        "  packed: of the GPU with the most in use, and of equals of one that is near the others",
    ]
    mig = MigDevice(0, "MIG-0", 7, 0, 0, 1, 1, 4864)
    node = hardware("2xA100")
    node = replace(
        node,
        gpus=tuple(
            replace(
                each,
                mig_enabled=True,
                mig_devices=(replace(mig, uuid=f"MIG-{each.index}"), replace(mig, index=1, uuid=f"MIG-{each.index}-1")),
            )
            for each in node.gpus
        ),
    )
    assert told(node, 2, Config(mig_strategy="single"))[0] == "nvidia.com/gpu: 2 of 4: MIG 0:0, MIG 1:0"


def test_many_gpus_are_searched() -> None:
    """The sum is told, and that there may be better sets."""
    links = tuple(tuple(Link(PciPath.NUMA_NODE) for _ in range(20)) for _ in range(20))
    lines = told(Hardware(tuple(gpu(each, 0) for each in range(20)), links), 10)

    assert lines[0].endswith("10 of 20: GPUs 0 1 2 3 4 5 6 7 8 9")
    assert lines[1].startswith("  270 GB/s, 0 1 2")
    assert "not every set is tried" in lines[1]


def test_words_of_the_command() -> None:
    """They are taken out in any of Go's spellings; the others are left to the options."""
    assert read_view([]) == (View(), [])
    assert read_view(["--topology", "--mig-strategy", "mixed", "-prefer=3"]) == (
        View(topology=True, prefer=3),
        ["--mig-strategy", "mixed"],
    )
    assert read_view(["-topology", "--prefer", "12"]) == (View(topology=True, prefer=12), [])


@pytest.mark.parametrize(
    "words", [["--prefer"], ["--prefer=0"], ["--prefer", "-1"], ["--prefer=many"], ["--prefer=1e3"]]
)
def test_a_number_that_is_none_is_an_error(words: list[str]) -> None:
    """It names what was written and what to write."""
    with pytest.raises(OptionError, match=r"^--prefer is '.*': a number of devices is wanted$"):
        read_view(words)


def test_main_prints_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The drawing, the explanation or both, in place of the table."""
    driver = SimulatedDriver(find_machine("2xT4"))
    printed = []
    for view in (View(), View(topology=True), View(prefer=1), View(topology=True, prefer=1)):
        assert main(driver, Config(), view) == 0
        printed.append(capsys.readouterr().out)

    table, topology, preference, both = printed
    assert table.startswith("INDEX")
    assert topology.startswith("GPU")
    assert preference.startswith("nvidia.com/gpu: 1 of 2")
    assert both == f"{topology}\n{preference}"
