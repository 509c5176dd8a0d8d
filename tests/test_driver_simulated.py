# ruff: noqa: ARG001 - pytest-trio takes the clock from the parameters of a test
from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from _nvplug.drivers.description import decode, simulate
from _nvplug.drivers.machines import find_machine
from _nvplug.drivers.simulated import SimulatedDriver, SimulatedFile, parse_simulated
from _nvplug.errors import OptionError
from _nvplug.happenings import DriverFound, DriverTrouble
from _nvplug.hardware import Fault, Hardware, Link, PciPath, Restored, Xid
from _nvplug.latest import Latest
from _nvplug.mig import profile_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from _nvplug.drivers.description import Simulation
    from _nvplug.happenings import Happening
    from _nvplug.hardware import GpuEvent


def decoded(description: Any) -> Simulation:
    """What a good description stands for."""
    return decode(json.dumps(description).encode(), "gpus.json")


def attempt(content: bytes) -> Simulation | OptionError:
    """What any bytes stand for, or why they stand for nothing."""
    try:
        return decode(content, "gpus.json")
    except OptionError as error:
        return error


def rejection(content: bytes) -> str:
    """Why a bad description is bad."""
    with pytest.raises(OptionError) as caught:
        decode(content, "gpus.json")
    return str(caught.value)


def rewrite(file: Path, text: str) -> None:
    """The same file gets other bytes, as ``>`` in a shell does it."""
    file.write_text(text)


def relink(file: Path, text: str) -> None:
    """A symbolic link leads to another file, as the kubelet updates a ConfigMap."""
    target = file.with_suffix(f".{time.monotonic_ns()}")
    target.write_text(text)
    link = file.with_suffix(".link")
    link.symlink_to(target)
    link.replace(file)


def replace(file: Path, text: str) -> None:
    """Another file takes the place of this one, as editors and ``mv`` do it."""
    other = file.with_suffix(".new")
    other.write_text(text)
    other.replace(file)


def rewrite_unnoticed(file: Path, text: str) -> None:
    """The same file gets other bytes within the tick of its last change."""
    stamp = file.stat().st_mtime_ns
    file.write_text(text)
    os.utime(file, ns=(stamp, stamp))


def hide(file: Path, instead: str) -> Path:
    """Moves the file away, puts something that is no file there, and returns where it went."""
    hidden = file.rename(file.with_suffix(".hidden"))
    if instead == "directory":
        file.mkdir()
    elif instead == "endless link":
        file.symlink_to(file)
    return hidden


def bring_back(hidden: Path, file: Path) -> None:
    """Undoes `hide`."""
    if file.is_dir():
        file.rmdir()
    hidden.replace(file)


def descriptors() -> int:
    """How many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


TICKS = 0.25
"""Seconds within which any change is seen: two looks at the file, and a little."""


class Running:
    """A driver that runs, and all that it has said."""

    def __init__(self) -> None:
        self.hardware = Latest(Hardware())
        self.reports: list[GpuEvent] = []
        self.published: list[Happening] = []

    @property
    def troubles(self) -> list[DriverTrouble]:
        """What was published about the file."""
        return [happening for happening in self.published if isinstance(happening, DriverTrouble)]


@pytest.fixture
def start(nursery: trio.Nursery) -> Callable[[str], Running]:
    """Starts drivers, which end with the test."""

    def start(strategy: str) -> Running:
        running = Running()
        driver = SimulatedDriver(parse_simulated(strategy))
        nursery.start_soon(driver.run, running.hardware, running.reports.append, running.published.append)
        return running

    return start


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that describes two GPUs."""
    path = tmp_path / "gpus.json"
    path.write_text('{"machine": "2xT4"}')
    return path


# What a description stands for.

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with any of these fields, their values seldom nonsense."""
    return st.fixed_dictionaries({}, optional={name: value | json_values for name, value in fields.items()})


small = st.integers(-1, 9)
descriptions = some(
    machine=st.sampled_from(["8xH100", "4xA100", "1xT4", "17xH100", "8xH1000"]),
    count=small,
    node=st.text(max_size=3),
    gpus=st.lists(
        some(
            uuid=st.sampled_from([f"GPU-00000000-0000-0000-0000-00000000000{n}" for n in range(3)]),
            name=st.text(max_size=3),
            pci=st.sampled_from(["", "0000:1b:00.0", "0001:00:1f.7", "1b:00.0"]),
            minor=st.none() | small,
            numa=st.none() | small,
            memory=small,
        ),
        max_size=4,
    ),
    links=st.lists(
        some(
            among=st.lists(small, max_size=4),
            nvlinks=small,
            switched=st.booleans(),
            path=st.sampled_from(["PIX", "SYS", "FAR"]),
        ),
        max_size=3,
    ),
    faults=st.dictionaries(
        small.map(str) | st.just("GPU-00000000-0000-0000-0000-000000000000"),
        some(xid=small, reason=st.text(max_size=3), remedy=st.text(max_size=3)),
        max_size=3,
    ),
)


@settings(deadline=None)
@given(descriptions | json_values)
def test_any_json_is_understood_or_rejected_with_a_path(description: Any) -> None:
    """Whatever JSON a file holds stands for sound hardware, the same each time, or the error says where not."""
    content = json.dumps(description).encode()
    simulation = attempt(content)
    if isinstance(simulation, OptionError):
        assert str(simulation).startswith("gpus.json: at $")
        assert simulation.remedy
        return
    gpus, links = simulation.hardware.gpus, simulation.hardware.links

    assert simulation == decode(content, "gpus.json")
    assert [gpu.index for gpu in gpus] == list(range(len(gpus)))
    assert len({gpu.uuid for gpu in gpus}) == len(gpus)
    for known in ([gpu.pci for gpu in gpus if gpu.pci], [gpu.minor for gpu in gpus if gpu.minor is not None]):
        assert len(set(known)) == len(known)
    for one in range(len(gpus)):
        assert all(one == other or links[one][other] == links[other][one] for other in range(len(gpus)))
    assert set(simulation.faults) <= {gpu.uuid for gpu in gpus}


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_rejected_with_a_path(content: bytes) -> None:
    """Bytes that are no JSON at all are rejected like JSON that is wrong."""
    simulation = attempt(content)

    assert not isinstance(simulation, OptionError) or str(simulation).startswith("gpus.json: at $")


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b"", "$: "),
        (b"[]", "$: "),
        (b'{"gpu": []}', "$: Object contains unknown field `gpu`"),
        (b'{"machine": "8xH1000"}', "$.machine: no machine is called '8xH1000'; the nearest is 8xH100"),
        (b'{"count": 100001}', "$.count: "),
        (b'{"gpus": [{}, {"numa": -1}]}', "$.gpus[1].numa: "),
        (b'{"gpus": [{"memory": "80 GB"}]}', "$.gpus[0].memory: "),
        (b'{"gpus": [{"uuid": "GPU-1"}]}', "$.gpus[0].uuid: "),
        (b'{"gpus": [{}, {"minor": 0}]}', "$.gpus: GPUs 0 and 1 have the same `minor`, 0"),
        (b'{"gpus": [{}, {}], "count": 1}', "$.gpus: "),
        (b'{"links": [{"among": [0, 8]}]}', "$.links[0].among: "),
        (b'{"links": [{"among": [0, 1], "path": "FAR"}]}', "$.links[0].path: "),
        (b'{"links": [{"among": [0, 1]}], "count": 65}', "$.links: "),
        (b'{"faults": {"8": {"xid": 79}}}', "$.faults['8']: "),
        (b'{"faults": {"3": {"xid": "79"}}}', "$.faults['3'].xid: "),
        (b'{"faults": {"3": {}}}', "$.faults['3']: Expected either `xid` or `reason`"),
        (b'{"faults": {"3": {"xid": 79, "reason": "bus"}}}', "$.faults['3']: "),
        (b'{"faults": {"3": {"xid": 79, "remedy": "reset"}}}', "$.faults['3']: "),
        (b'{"faults": {"3": ' + b"[" * 100_000, "$: "),
    ],
)
def test_what_is_wrong_is_named_by_its_path(content: bytes, where: str) -> None:
    """The error begins with the file and the path of what is wrong in it."""
    assert rejection(content).startswith(f"gpus.json: at {where}")


def test_a_fault_named_twice_is_rejected() -> None:
    """The index and the UUID of one GPU may not both be at fault."""
    uuid = decoded({}).hardware.gpus[3].uuid

    assert "GPU 3 is named twice" in rejection(json.dumps({"faults": {"3": {"xid": 79}, uuid: {"xid": 48}}}).encode())


def test_an_empty_description_is_eight_h100() -> None:
    """Everything may be left out."""
    assert decoded({}) == decoded({"machine": "8xH100"}) == simulate(find_machine("8xH100"))


def test_no_gpus_can_be_described() -> None:
    """A node without a GPU is a node, too."""
    assert decoded({"gpus": []}).hardware.gpus == decoded({"count": 0}).hardware.gpus == ()


def test_a_machine_has_its_control_nodes() -> None:
    """All control device nodes are there, in the reference's order."""
    assert decoded({}).hardware.control_nodes == (
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
        "/dev/nvidia-modeset",
    )


def test_gpus_differ_from_the_machines_in_what_is_written() -> None:
    """A written field replaces the machine's, null ones included, and all others stay."""
    usual = decoded({"machine": "2xT4"}).hardware.gpus
    gpus = decoded(
        {"machine": "2xT4", "gpus": [{"numa": None, "minor": None, "pci": ""}, {"name": "GPU"}]}
    ).hardware.gpus

    assert (gpus[0].numa, gpus[0].minor, gpus[0].pci, gpus[0].uuid) == (None, None, "", usual[0].uuid)
    assert (gpus[1].name, gpus[1].numa, gpus[1].pci) == ("GPU", usual[1].numa, usual[1].pci)


def test_mig_devices_are_described_by_their_profiles() -> None:
    """Each in a GPU instance of its own, with what identifies it its own; an empty list is MIG without devices."""
    gpus = decoded(
        {
            "machine": "4xA100",
            "count": 4,
            "gpus": [{"mig": ["1g.10gb", "1g.10gb+me", "1c.3g.40gb"]}, {"mig": []}, {"mig": ["1g.10gb"]}],
        }
    ).hardware.gpus
    devices = [mig for gpu in gpus for mig in gpu.mig_devices]

    assert [gpu.mig_enabled for gpu in gpus] == [True, True, True, False]
    assert [str(profile_of(gpu, mig)) for gpu in gpus for mig in gpu.mig_devices] == [
        "1g.10gb",
        "1g.10gb+me",
        "1c.3g.40gb",
        "1g.10gb",
    ]
    assert [mig.index for mig in devices] == [0, 1, 2, 0]
    assert len({mig.uuid for mig in devices}) == 4
    assert len({minor for mig in devices for minor in (mig.gpu_instance_minor, mig.compute_instance_minor)}) == 8
    assert len({(mig.gpu_instance, mig.compute_instance) for mig in gpus[0].mig_devices}) == 3


@pytest.mark.parametrize(
    ("profiles", "where"),
    [(["1g"], "$.gpus[0].mig[0]"), (["1g.10gb", "1g.11gb"], "$.gpus[0].mig[1]"), (["4g.40gb"] * 3, "$.gpus[0].mig[2]")],
)
def test_mig_devices_that_cannot_be_are_rejected(profiles: list[str], where: str) -> None:
    """A profile that this GPU does not have, or more slices than any GPU has."""
    assert f"at {where}: " in rejection(json.dumps({"gpus": [{"mig": profiles}]}).encode())


def test_count_may_exceed_what_is_written() -> None:
    """GPUs beyond those written are the machine's, on as many boards as it takes."""
    gpus = decoded({"machine": "4xA100", "count": 9, "gpus": [{"memory": 1}]}).hardware.gpus

    assert [gpu.memory == 1 for gpu in gpus] == [True] + [False] * 8
    assert gpus[8].pci == "0002:01:00.0"


def test_sixty_thousand_gpus() -> None:
    """As many GPUs as a list for the kubelet can hold are made at once, without links."""
    hardware = decoded({"count": 60_000}).hardware

    assert len({gpu.uuid for gpu in hardware.gpus}) == 60_000
    assert hardware.links == ()


def test_links_are_changed_group_by_group() -> None:
    """An entry changes what it says between all of its group and nothing else, and the last one wins."""
    links = decoded(
        {
            "machine": "4xL40S",
            "links": [{"among": [0, 1, 3], "nvlinks": 4}, {"among": [3, 0], "path": "PXB", "switched": True}],
        }
    ).hardware.links

    assert links[0][1] == links[1][3] == Link(PciPath.ONE_SWITCH, 4)
    assert links[0][3] == links[3][0] == Link(PciPath.SWITCHES, 4, switched=True)
    assert links[0][2] == links[2][3] == Link(PciPath.ONE_SWITCH)


# What the strategy stands for.


def test_a_strategy_is_a_machine_or_a_file(file: Path) -> None:
    """A name of the table is a machine, a path is a file."""
    assert parse_simulated("simulated:8xH100") == find_machine("8xH100")
    assert parse_simulated(f"simulated:{file}") == SimulatedFile(str(file))


def test_a_bare_file_name_is_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the working directory needs no slash; a machine's name is the machine all the same."""
    monkeypatch.chdir(file.parent)
    file.rename("gpus")
    (file.parent / "8xH100").write_text('{"count": 1}')

    assert parse_simulated("simulated:gpus") == SimulatedFile("gpus")
    assert parse_simulated("simulated:8xH100") == find_machine("8xH100")


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("simulated:8xh100", "no machine is called '8xh100'; the nearest is 8xH100"),
        ("simulated:" + "x" * 5000, "no machine is called"),
        ("simulated:nonsense", "no machine is called 'nonsense'"),
        ("simulated:", "no machine is called ''"),
        ("simulated", "no machine is called ''"),
        ("simulated:/no/such/file", "cannot read /no/such/file: No such file or directory"),
        ("simulated:none.json", "cannot read none.json: No such file or directory"),
        ("simulated:/dev/null", "/dev/null is not a regular file"),
        ("simulated:/", "/ is not a regular file"),
    ],
)
def test_a_strategy_that_stands_for_nothing_is_an_option_error(strategy: str, message: str) -> None:
    """The error at start says what was looked for, and the remedy what is allowed."""
    with pytest.raises(OptionError) as caught:
        parse_simulated(strategy)

    assert message in str(caught.value)
    assert "JSON file that describes the GPUs" in caught.value.remedy


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    """A FIFO that nobody writes to is an error at start, not a program that hangs."""
    os.mkfifo(tmp_path / "fifo")

    with pytest.raises(OptionError, match="not a regular file"):
        parse_simulated(f"simulated:{tmp_path}/fifo")


def test_a_bad_file_is_an_option_error_at_start(file: Path) -> None:
    """A file that was never good cannot be obeyed."""
    file.write_text('{"count": -1}')

    with pytest.raises(OptionError, match=r"\$\.count"):
        parse_simulated(f"simulated:{file}")


# What the driver says. All time is virtual: the clock jumps whenever every task waits.


async def test_a_machine_is_there_at_once(
    autojump_clock: trio.testing.MockClock, start: Callable[[str], Running]
) -> None:
    """The snapshot is there before any time has passed, and nothing ever changes."""
    running = start("simulated:8xH100")
    await running.hardware.newer_than(0)

    assert autojump_clock.current_time() == 0
    assert running.hardware.value == simulate(find_machine("8xH100")).hardware
    await trio.sleep(3600)
    assert running.hardware.version == 1
    assert running.published == [DriverFound("simulated", "", 8)]
    assert running.reports == []


async def test_a_file_is_there_at_once_with_its_faults(
    autojump_clock: trio.testing.MockClock, start: Callable[[str], Running], file: Path
) -> None:
    """Faults that the file lists at start are reported with the first snapshot, in index order."""
    rewrite(file, '{"faults": {"5": {"reason": "fell off the bus", "remedy": "Reset it"}, "3": {"xid": 79}}}')
    running = start(f"simulated:{file}")
    gpus = (await running.hardware.newer_than(0)).gpus

    assert autojump_clock.current_time() == 0
    assert running.reports == [Xid(gpus[3].uuid, 79), Fault(gpus[5].uuid, "fell off the bus", "Reset it")]


@pytest.mark.parametrize("write", [rewrite, replace, relink])
async def test_a_changed_file_is_read_again(
    autojump_clock: trio.testing.MockClock,
    write: Callable[[Path, str], None],
    start: Callable[[str], Running],
    file: Path,
) -> None:
    """However the file is changed, time after time, its GPUs are the node's within two looks."""
    running = start(f"simulated:{file}")
    await trio.sleep(TICKS)
    for count in range(1, 9):
        # Each as long as no other: virtual time flies faster than the time stamps of the file system.
        write(file, f'{{"machine": "2xT4", "count": {count}}}' + " " * count)
        await trio.sleep(TICKS)

        assert running.hardware.value == decoded({"machine": "2xT4", "count": count}).hardware
    assert [found.gpus for found in running.published if isinstance(found, DriverFound)] == [2, *range(1, 9)]


async def test_a_change_within_one_tick_of_the_file_system_is_seen(
    autojump_clock: trio.testing.MockClock, start: Callable[[str], Running], file: Path
) -> None:
    """Another write of the same length, with the same time stamp as the one just read, is not missed."""
    running = start(f"simulated:{file}")
    await trio.sleep(TICKS)
    rewrite(file, '{"machine": "3xT4"}')
    await running.hardware.newer_than(1)
    rewrite_unnoticed(file, '{"machine": "4xT4"}')
    await trio.sleep(TICKS)

    assert len(running.hardware.value.gpus) == 4


async def test_a_fault_is_reported_as_it_comes_changes_and_goes(
    autojump_clock: trio.testing.MockClock, start: Callable[[str], Running], file: Path
) -> None:
    """A fault is reported once when it appears, and its end with the evidence, though another follows at once."""
    running = start(f"simulated:{file}")
    uuid = (await running.hardware.newer_than(0)).gpus[1].uuid
    for faults in (
        {"1": {"xid": 79}},
        {uuid: {"xid": 79}},
        {"1": {"reason": "fell off the bus", "remedy": "Reset it"}},
        {},
        {},
    ):
        replace(file, json.dumps({"machine": "2xT4", "faults": faults}))
        await trio.sleep(TICKS)

    assert running.reports == [
        Xid(uuid, 79),
        Restored(uuid, "the description no longer lists its XID 79"),
        Fault(uuid, "fell off the bus", "Reset it"),
        Restored(uuid, "the description no longer lists its fault (fell off the bus)"),
    ]
    assert running.hardware.version == 1
    assert len(running.published) == 1


async def test_a_gpu_that_is_gone_is_not_restored(
    autojump_clock: trio.testing.MockClock, start: Callable[[str], Running], file: Path
) -> None:
    """A GPU that was at fault and vanished with it counts as restored when it is back, not before."""
    rewrite(file, '{"machine": "2xT4", "faults": {"1": {"xid": 79}}}')
    running = start(f"simulated:{file}")
    uuid = (await running.hardware.newer_than(0)).gpus[1].uuid
    replace(file, '{"machine": "1xT4"}')
    await trio.sleep(TICKS)

    assert len(running.hardware.value.gpus) == 1
    assert running.reports == [Xid(uuid, 79)]
    replace(file, '{"machine": "2xT4"}')
    await trio.sleep(TICKS)
    assert running.reports[1:] == [Restored(uuid, "the description no longer lists its XID 79")]


async def test_a_bad_edit_changes_nothing_and_is_told_once(
    autojump_clock: trio.testing.MockClock, start: Callable[[str], Running], file: Path
) -> None:
    """A file that is wrong leaves GPUs and faults as they were; that is told once, as is its end."""
    rewrite(file, '{"machine": "2xT4", "faults": {"1": {"xid": 79}}}')
    running = start(f"simulated:{file}")
    before = await running.hardware.newer_than(0)
    replace(file, '{"machine": "2xT4", "faults": {"1": {"xid": 0}}}')
    await trio.sleep(60)

    assert [trouble.reason for trouble in running.troubles] == [f"{file}: at $.faults['1'].xid: Expected `int` >= 1"]
    assert running.troubles[0].remedy
    replace(file, '{"machine": "2xT4", "faults": {"1": {"xid": 79}}}')
    await trio.sleep(60)
    assert running.hardware.value is before
    assert len(running.reports) == 1
    assert running.published[2:] == [DriverFound("simulated", "", 2)]


@pytest.mark.parametrize("instead", ["nothing", "directory", "endless link"])
async def test_a_file_that_is_gone_changes_nothing(
    autojump_clock: trio.testing.MockClock, instead: str, start: Callable[[str], Running], file: Path
) -> None:
    """While the file is missing the GPUs stay, no descriptor leaks, and it may come back unchanged."""
    running = start(f"simulated:{file}")
    before = await running.hardware.newer_than(0)
    opened = descriptors()
    hidden = hide(file, instead)
    await trio.sleep(60)

    assert running.hardware.value is before
    assert len(running.troubles) == 1
    assert str(file) in running.troubles[0].reason
    assert descriptors() == opened
    bring_back(hidden, file)
    await trio.sleep(TICKS)
    assert running.published[2:] == [DriverFound("simulated", "", 2)]


async def test_a_file_written_slowly_ends_up_read(
    autojump_clock: trio.testing.MockClock, start: Callable[[str], Running], file: Path
) -> None:
    """Half of a file is a bad edit like another: when the rest is there, it is what counts."""
    running = start(f"simulated:{file}")
    await trio.sleep(TICKS)
    rewrite(file, '{"machine": "8x')
    await trio.sleep(TICKS)
    rewrite(file, '{"machine": "8xT4"}')
    await trio.sleep(TICKS)

    assert len(running.hardware.value.gpus) == 8
    assert len(running.troubles) == 1
    assert isinstance(running.published[-1], DriverFound)
