from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _nvplug.drivers.machines import MAX_COUNT, MAX_LINKED, PRODUCTS, Machine, find_machine
from _nvplug.errors import OptionError
from _nvplug.hardware import Link, PciPath

machines = st.builds(Machine, st.integers(1, MAX_COUNT), st.sampled_from(sorted(PRODUCTS)))


@settings(deadline=None)
@given(machines)
def test_a_name_stands_for_its_machine(machine: Machine) -> None:
    """Every machine of the table is found by its name."""
    assert find_machine(f"{machine.count}x{machine.model}") == machine


@settings(deadline=None)
@given(machines, st.integers(0, MAX_LINKED))
def test_links_are_a_symmetric_square(machine: Machine, count: int) -> None:
    """Links form a square matrix, and say the same in both directions."""
    links = machine.links(count)

    assert [len(row) for row in links] == [count] * count
    assert all(links[one][other] == links[other][one] for one, other in combinations(range(count), 2))


@settings(deadline=None)
@given(machines, st.integers(0, MAX_LINKED))
def test_numa_and_links_agree(machine: Machine, count: int) -> None:
    """GPUs on different sockets reach each other over the system, those on one socket do not."""
    gpus = [machine.gpu(index) for index in range(count)]
    links = machine.links(count)

    for one, other in combinations(range(count), 2):
        assert (links[one][other].path == PciPath.SYSTEM) == (gpus[one].numa != gpus[other].numa)


@settings(deadline=None)
@given(machines, st.integers(0, 300), st.text(max_size=5))
def test_what_identifies_a_gpu_is_its_own(machine: Machine, count: int, node: str) -> None:
    """PCI addresses ascend with the index, and no two GPUs share a UUID, a PCI address or a minor number."""
    gpus = [machine.gpu(index, node) for index in range(count)]

    assert [gpu.pci for gpu in gpus] == sorted({gpu.pci for gpu in gpus})
    assert [gpu.minor for gpu in gpus] == list(range(count))
    assert len({gpu.uuid for gpu in gpus}) == count


@settings(deadline=None)
@given(machines, machines, st.integers(0, 300))
def test_uuids_last(one: Machine, other: Machine, index: int) -> None:
    """A UUID depends on model and index alone, not on how many GPUs the machine has."""
    assert (one.gpu(index).uuid == other.gpu(index).uuid) == (one.model == other.model)


def test_uuids_are_the_same_everywhere() -> None:
    """A UUID is the same in every process and release: demos, tests and documentation may quote it."""
    assert find_machine("8xH100").gpu(3).uuid == "GPU-688438bf-8f80-bfcb-2d97-bd10c2d82be3"


def test_nodes_differ_when_named() -> None:
    """The same machine has other UUIDs on a node with another name."""
    machine = Machine(8, "H100")

    assert len({machine.gpu(0, node).uuid for node in ("", "a", "b")}) == 3


def test_uuids_look_like_nvidias() -> None:
    """A UUID has the form that NVML gives."""
    parts = Machine(1, "T4").gpu(0).uuid.split("-")

    assert [len(part) for part in parts] == [3, 8, 4, 4, 4, 12]
    assert parts[0] == "GPU"
    assert set("".join(parts[1:])) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    ("name", "link_in_socket", "link_across"),
    [
        ("8xA100", Link(PciPath.SWITCHES, 12, switched=True), Link(PciPath.SYSTEM, 12, switched=True)),
        ("4xA100", Link(PciPath.NUMA_NODE, 4), Link(PciPath.SYSTEM, 4)),
        ("8xH100", Link(PciPath.NUMA_NODE, 18, switched=True), Link(PciPath.SYSTEM, 18, switched=True)),
        ("4xH100", Link(PciPath.NUMA_NODE, 6), Link(PciPath.SYSTEM, 6)),
        ("8xH200", Link(PciPath.NUMA_NODE, 18, switched=True), Link(PciPath.SYSTEM, 18, switched=True)),
        ("8xB200", Link(PciPath.NUMA_NODE, 18, switched=True), Link(PciPath.SYSTEM, 18, switched=True)),
        ("8xL40S", Link(PciPath.ONE_SWITCH), Link(PciPath.SYSTEM)),
        ("8xT4", Link(PciPath.ONE_SWITCH), Link(PciPath.SYSTEM)),
    ],
)
def test_well_known_layouts(name: str, link_in_socket: Link, link_across: Link) -> None:
    """The first GPU reaches the second, on its socket, and the last, on the other, as on the real machine."""
    machine = find_machine(name)
    links = machine.links(machine.count)
    numa = [machine.gpu(index).numa for index in range(machine.count)]

    assert numa == sorted([0, 1] * (machine.count // 2))
    assert links[0][1] == link_in_socket
    assert links[0][-1] == link_across


@pytest.mark.parametrize(("name", "nvlinks"), [("16xA100", 12), ("16xH100", 0), ("16xL40S", 0)])
def test_two_boards(name: str, nvlinks: int) -> None:
    """Sixteen GPUs are two boards, which only the A100's NVSwitches join."""
    machine = find_machine(name)
    links = machine.links(machine.count)

    assert links[7][8].nvlinks == nvlinks
    assert machine.gpu(8).pci.startswith("0001:")


def test_very_many_gpus_have_no_links() -> None:
    """The matrix, which grows with the square of the number, is left empty for more GPUs than a node has."""
    assert Machine(8, "H100").links(MAX_LINKED + 1) == ()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("8xh100", "8xH100"),
        ("8xH10", "8xH100"),
        ("17xH100", "16xH100"),
        ("0xT4", "1xT4"),
        ("08xH100", "8xH100"),
        ("H200", "8xH200"),
        ("L40", "8xL40S"),
        (" 2xB200", "8xB200"),
        ("9" * 5000 + "xA100", "16xA100"),
    ],
)
def test_a_near_miss_is_told_what_is_nearest(name: str, nearest: str) -> None:
    """A wrong name is answered with itself, the nearest machine and all that is allowed."""
    with pytest.raises(OptionError) as caught:
        find_machine(name)

    assert repr(name) in str(caught.value)
    assert str(caught.value).endswith(f"the nearest is {nearest}")
    assert all(model in caught.value.remedy for model in PRODUCTS)


@settings(deadline=None)
@given(st.text())
def test_any_other_text_is_an_option_error(name: str) -> None:
    """No text makes anything but a machine of the table or an OptionError."""
    try:
        machine = find_machine(name)
    except OptionError:
        return

    assert name == f"{machine.count}x{machine.model}"
