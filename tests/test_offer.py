from __future__ import annotations

import random
from dataclasses import replace
from typing import Final

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from _nvplug.config.model import Config, NamingRule, Selection, Selector, SharedResource, TimeSlicing
from _nvplug.container.facts import Terms
from _nvplug.errors import RequestTooLargeError, UnusableDeviceError
from _nvplug.happenings import ConfigUnmet, DeviceExcluded, DeviceNotOffered, Happening
from _nvplug.hardware import Gpu, Hardware, MigDevice
from _nvplug.health import Health, Verdict
from _nvplug.latest import Latest
from _nvplug.resources import Offer, chosen, keep_offer, next_offer

MIB: Final = 2**20

# Profile number, slices and MiB of MIG devices on an A100 with 40 GB.
SHAPES: Final = {
    "1g.5gb": (0, 1, 1, 4864),
    "1g.5gb+me": (7, 1, 1, 4864),
    "2g.10gb": (1, 2, 2, 9856),
    "3g.20gb": (2, 3, 3, 19968),
    "1c.3g.20gb": (2, 1, 3, 19968),
}


def gpu(index: int, *profiles: str, mig: bool = False, name: str = "NVIDIA A100-SXM4-40GB") -> Gpu:
    """A GPU, cut into these MIG devices."""
    devices = []
    for position, profile in enumerate(profiles):
        number, compute, slices, memory = SHAPES[profile]
        devices.append(MigDevice(position, f"MIG-{index}-{position}", position + 7, 0, number, slices, compute, memory))
    return Gpu(
        index,
        f"GPU-{index}",
        name,
        f"0000:{index:02x}:00.0",
        index,
        None,
        40536 * MIB,
        mig_enabled=mig or bool(profiles),
        mig_devices=tuple(devices),
    )


def offered(offer: Offer) -> dict[str, list[str]]:
    """The ids under each name."""
    return {resource.name: [device.id for device in resource.devices] for resource in offer.resources}


def left(offer: Offer) -> dict[str, str]:
    """What is not offered, by index, with the reason."""
    kinds = (DeviceExcluded, DeviceNotOffered)
    return {remark.index: remark.reason for remark in offer.remarks if isinstance(remark, kinds)}


def unmet(offer: Offer) -> list[str]:
    """What of the configuration the hardware cannot meet."""
    return [f"{remark.key}: {remark.reason}" for remark in offer.remarks if isinstance(remark, ConfigUnmet)]


def of(*gpus: Gpu, health: Health | None = None, **config: object) -> Offer:
    """The first offer of a node."""
    return next_offer(Offer(), Hardware(gpus), health or Health(), Config(**config))  # type: ignore[arg-type]  # fields


# --- naming


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        # As in NVIDIA's tests.
        ("1g.24gb", "1g.24gb", True),
        ("1g.24gb", "1g.24gb-me", False),
        ("1g.24gb", "1g.24gb+me.all", False),
        ("1g.24gb", "x1g.24gb", False),
        ("1g.*", "1g.24gb", True),
        ("1g.*", "1g.24gb+me.all", True),
        ("*gb", "1g.24gb", True),
        ("*gb", "1g.24gb-me", False),
        ("*", "", True),
        ("*", "anything", True),
        # Nothing but the star is special.
        ("1g.24gb+me", "1g.24gb+me", True),
        ("1g.5gb", "1gx5gb", False),
        ("[A-Z]*", "Tesla T4", False),
        ("Tesla ?4", "Tesla T4", False),
        # More than one star, and overlaps.
        ("*H100*80GB*", "NVIDIA H100 80GB HBM3", True),
        ("*80GB*H100*", "NVIDIA H100 80GB HBM3", False),
        ("ab*ba", "aba", False),
        ("a**b", "ab", True),
        ("nvidia*", "NVIDIA H100", False),
        ("a*\n*b", "a\nb", True),
    ],
)
def test_patterns(pattern: str, text: str, fits: bool) -> None:
    """A star stands for any text, everything else for itself, and the whole must fit."""
    assert NamingRule(pattern, "nvidia.com/x").matches(text) is fits


@given(st.lists(st.text("ab*", max_size=6), min_size=1, max_size=4), st.text("ab", max_size=8))
def test_a_pattern_is_as_a_regular_expression_has_it(pieces: list[str], text: str) -> None:
    """On small cases the answer is that of re; on large ones re would not answer."""
    import re  # noqa: PLC0415 - here only

    pattern = "*".join(pieces)
    expression = ".*".join(map(re.escape, pattern.split("*")))

    assert NamingRule(pattern, "").matches(text) is bool(re.fullmatch(expression, text))


def test_a_pattern_of_many_stars_ends() -> None:
    """What backtracks for ever as a regular expression takes no time."""
    assert not NamingRule("*a" * 200 + "*b", "").matches("a" * 5000)


def test_the_first_rule_that_matches_counts() -> None:
    """Each model its own resource, in the order of the file."""
    rules = (NamingRule("*H100*", "nvidia.com/h100"), NamingRule("*", "example.com/other"), NamingRule("*T4", "n/t4"))
    offer = of(gpu(0, name="NVIDIA H100 80GB HBM3"), gpu(1, name="Tesla T4"), gpu_names=rules)

    assert offered(offer) == {"example.com/other": ["GPU-1"], "nvidia.com/h100": ["GPU-0"]}
    assert not offer.remarks


def test_a_gpu_without_a_name_is_left_and_the_others_are_offered() -> None:
    """NVIDIA's plugin would end."""
    offer = of(gpu(0), gpu(1, name="Tesla T4"), gpu_names=(NamingRule("Tesla*", "nvidia.com/t4"),))

    assert offered(offer) == {"nvidia.com/t4": ["GPU-1"]}
    assert left(offer) == {"0": "its name 'NVIDIA A100-SXM4-40GB' matches no pattern of resources.gpus"}


# --- MIG


def test_strategy_none_offers_whole_gpus() -> None:
    """MIG or not."""
    offer = of(gpu(0, "1g.5gb"), gpu(1), gpu(2, mig=True))

    assert offered(offer) == {"nvidia.com/gpu": ["GPU-0", "GPU-1", "GPU-2"]}
    assert not offer.remarks


def test_strategy_single_offers_mig_devices_as_gpus() -> None:
    """Where all are alike, under the name of GPUs."""
    offer = of(gpu(0, "2g.10gb", "2g.10gb"), gpu(1, "2g.10gb"), mig_strategy="single")

    assert offered(offer) == {"nvidia.com/gpu": ["MIG-0-0", "MIG-0-1", "MIG-1-0"]}
    assert not offer.remarks


def test_strategy_single_without_mig_offers_whole_gpus() -> None:
    """Of whatever models: those differ without MIG as well."""
    offer = of(gpu(0), gpu(1, name="Tesla T4"), mig_strategy="single")

    assert offered(offer) == {"nvidia.com/gpu": ["GPU-0", "GPU-1"]}


@pytest.mark.parametrize(
    ("gpus", "ids", "not_offered"),
    [
        # Each of these ends NVIDIA's plugin.
        ([gpu(0, mig=True), gpu(1, "1g.5gb")], ["MIG-1-0"], ["0"]),
        ([gpu(0, mig=True)], None, ["0"]),
        ([gpu(0), gpu(1, "1g.5gb"), gpu(2, "1g.5gb")], ["MIG-1-0", "MIG-2-0"], ["0"]),
        ([gpu(0), gpu(1), gpu(2, "1g.5gb", "1g.5gb", "1g.5gb")], ["GPU-0", "GPU-1"], ["2:0", "2:1", "2:2"]),
        ([gpu(0, "3g.20gb"), gpu(1, "1g.5gb"), gpu(2, "1g.5gb")], ["MIG-1-0", "MIG-2-0"], ["0:0"]),
        ([gpu(0, "1g.5gb", "2g.10gb"), gpu(1, "2g.10gb")], ["MIG-0-1", "MIG-1-0"], ["0:0"]),
        ([gpu(0, "1g.5gb", "1g.5gb+me")], ["MIG-0-0"], ["0:1"]),
    ],
)
def test_strategy_single_offers_what_most_gpus_have(
    gpus: list[Gpu], ids: list[str] | None, not_offered: list[str]
) -> None:
    """Devices of one shape; the others, and GPUs without any, are left with a reason."""
    offer = of(*gpus, mig_strategy="single")

    assert offered(offer) == ({"nvidia.com/gpu": ids} if ids else {})
    assert sorted(left(offer)) == not_offered
    assert all("MIG" in reason for reason in left(offer).values())


def test_strategy_mixed_offers_every_shape_under_its_own_name() -> None:
    """Parts of GPU instances included, which end NVIDIA's plugin."""
    offer = of(gpu(0), gpu(1, "1g.5gb", "1g.5gb+me", "1c.3g.20gb", "1g.5gb"), gpu(2, mig=True), mig_strategy="mixed")

    assert offered(offer) == {
        "nvidia.com/gpu": ["GPU-0"],
        "nvidia.com/mig-1c.3g.20gb": ["MIG-1-2"],
        "nvidia.com/mig-1g.5gb": ["MIG-1-0", "MIG-1-3"],
        "nvidia.com/mig-1g.5gb.me": ["MIG-1-1"],
    }
    assert left(offer) == {"2": "MIG is enabled, and there is no MIG device in it"}


def test_mig_devices_are_named_by_their_profile() -> None:
    """Rules of resources.mig replace the names of either strategy; what matches none is left."""
    rules = (NamingRule("1g.*", "nvidia.com/small"), NamingRule("3g.20gb", "nvidia.com/large"))
    offer = of(gpu(0, "1g.5gb", "1g.5gb+me", "2g.10gb"), gpu(1), mig_strategy="mixed", mig_names=rules)

    assert offered(offer) == {"nvidia.com/gpu": ["GPU-1"], "nvidia.com/small": ["MIG-0-0", "MIG-0-1"]}
    assert left(offer) == {"0:2": "its profile 2g.10gb matches no pattern of resources.mig"}


def test_a_sick_gpu_makes_its_mig_devices_and_replicas_sick() -> None:
    """And no other."""
    sharing = TimeSlicing((SharedResource("nvidia.com/mig-1g.5gb", 2, None, "nvidia.com/mig-1g.5gb"),))
    health = Health({"GPU-0": Verdict("XID 79", "reset it")})
    offer = of(gpu(0, "1g.5gb"), gpu(1, "1g.5gb"), health=health, mig_strategy="mixed", time_slicing=sharing)

    (resource,) = offer.resources
    assert [(device.id, device.trouble) for device in resource.devices] == [
        ("MIG-0-0::0", "XID 79"),
        ("MIG-0-0::1", "XID 79"),
        ("MIG-1-0::0", ""),
        ("MIG-1-0::1", ""),
    ]


# --- sharing


def shared(
    *entries: tuple[str, int, tuple[str, ...] | int | None] | tuple[str, int, tuple[str, ...] | int | None, str],
    strict: bool = False,
) -> TimeSlicing:
    """Time slicing, each entry a name, replicas, devices, and another name."""
    return TimeSlicing(
        tuple(
            SharedResource(entry[0], entry[1], entry[2], entry[3] if len(entry) > 3 else entry[0]) for entry in entries
        ),
        strict,
    )


def test_every_device_is_offered_as_often_as_it_is_shared() -> None:
    """Ids are the UUID and a number from 0 on, a device's side by side."""
    offer = of(gpu(0), gpu(1), time_slicing=shared(("nvidia.com/gpu", 2, None)))

    assert offered(offer) == {"nvidia.com/gpu": ["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1"]}


def test_shared_devices_may_have_another_name() -> None:
    """Those that are not shared keep theirs."""
    offer = of(gpu(0), gpu(1), time_slicing=shared(("nvidia.com/gpu", 2, ("1",), "nvidia.com/gpu.shared")))

    assert offered(offer) == {"nvidia.com/gpu": ["GPU-0"], "nvidia.com/gpu.shared": ["GPU-1::0", "GPU-1::1"]}


@pytest.mark.parametrize(
    ("devices", "taken"),
    [
        (("0",), [0]),
        (("2", "GPU-0"), [0, 2]),
        (2, [0, 1]),
        (None, [0, 1, 2]),
    ],
)
def test_devices_are_shared_by_number_index_or_uuid(devices: tuple[str, ...] | int | None, taken: list[int]) -> None:
    """And the others are whole, under the same name, all in index order."""
    offer = of(gpu(2), gpu(0), gpu(1), time_slicing=shared(("nvidia.com/gpu", 2, devices)))

    ids = [[f"GPU-{index}::0", f"GPU-{index}::1"] if index in taken else [f"GPU-{index}"] for index in range(3)]
    assert offered(offer) == {"nvidia.com/gpu": [one for each in ids for one in each]}
    assert not offer.remarks


@pytest.mark.parametrize("reference", ["0:1", "MIG-0-1", "MIG-GPU-0/8/0"])
def test_mig_devices_are_shared_by_index_or_uuid(reference: str) -> None:
    """By the UUID of older drivers as well."""
    offer = of(
        gpu(0, "1g.5gb", "1g.5gb"),
        mig_strategy="mixed",
        time_slicing=shared(("nvidia.com/mig-1g.5gb", 2, (reference,))),
    )

    assert offered(offer) == {"nvidia.com/mig-1g.5gb": ["MIG-0-0", "MIG-0-1::0", "MIG-0-1::1"]}


def test_each_entry_shares_what_earlier_ones_left() -> None:
    """So that GPUs are shared by different counts."""
    entries = (("nvidia.com/gpu", 2, ("3",)), ("nvidia.com/gpu", 4, 1), ("nvidia.com/gpu", 3, None))
    offer = of(*map(gpu, range(4)), time_slicing=shared(*entries))

    ids = offered(offer)["nvidia.com/gpu"]
    assert [sum(one.startswith(f"GPU-{index}::") for one in ids) for index in range(4)] == [4, 3, 3, 2]


def test_what_the_node_does_not_have_is_remarked_upon() -> None:
    """The rest of the configuration is obeyed; nothing is said before there is hardware."""
    entries = (("nvidia.com/gpu", 2, ("0", "7")), ("nvidia.com/gpu", 2, 3), ("nvidia.com/mig-1g.5gb", 2, None))
    selection = Selection(exclude=(Selector("product", "*T4"),))
    offer = of(gpu(0), gpu(1), time_slicing=shared(*entries), selection=selection)

    assert offered(offer) == {"nvidia.com/gpu": ["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1"]}
    assert unmet(offer) == [
        "selection.exclude: no GPU has product: *T4",
        "sharing.timeSlicing.resources[0].devices: nvidia.com/gpu has no device 7",
        "sharing.timeSlicing.resources[1].devices: of 3 devices there are 1",
        "sharing.timeSlicing.resources[2]: no device of this node is nvidia.com/mig-1g.5gb",
    ]
    assert of(time_slicing=shared(*entries), selection=selection) == Offer()


def test_more_replicas_than_a_list_holds_are_not_made() -> None:
    """The devices are offered whole: a list that no kubelet reads would take them away."""
    offer = of(gpu(0), gpu(1), time_slicing=shared(("nvidia.com/gpu", 40_000, None)))

    assert offered(offer) == {"nvidia.com/gpu": ["GPU-0", "GPU-1"]}
    assert len(unmet(offer)) == 1


def test_a_container_may_be_held_to_one_replica() -> None:
    """Also where one of several devices is whole; the message is the one that operators know."""
    offer = of(gpu(0), gpu(1), gpu(2), time_slicing=shared(("nvidia.com/gpu", 2, ("0",)), strict=True))
    (resource,) = offer.resources

    assert [device.id for device in chosen(resource, None, ["GPU-0::1"])] == ["GPU-0::1"]
    assert [device.id for device in chosen(resource, None, ["GPU-2", "GPU-1"])] == ["GPU-1", "GPU-2"]
    with pytest.raises(RequestTooLargeError, match="maximum request size for shared resources is 1; found 2"):
        chosen(resource, None, ["GPU-0::1", "GPU-1"])
    with pytest.raises(RequestTooLargeError, match=r"nvidia\.com/gpu"):
        chosen(resource, None, ["GPU-0::1", "GPU-0::0"])


def test_a_container_may_have_several_replicas_by_default() -> None:
    """As with NVIDIA's plugin."""
    (resource,) = of(gpu(0), time_slicing=shared(("nvidia.com/gpu", 2, None))).resources

    assert len(chosen(resource, None, ["GPU-0::1", "GPU-0::0"])) == 2


# --- selection


@pytest.mark.parametrize(
    ("selector", "excluded"),
    [
        (Selector("index", "1"), ["1"]),
        (Selector("uuid", "GPU-2"), ["2"]),
        (Selector("pci", "0000:00:00.0"), ["0"]),
        (Selector("product", "*A100*"), ["0", "1"]),
    ],
)
def test_gpus_are_selected_in_four_ways(selector: Selector, excluded: list[str]) -> None:
    """What one way excludes it includes as well, and the reason names it."""
    gpus = (gpu(0), gpu(1), gpu(2, name="Tesla T4"))
    without = of(*gpus, selection=Selection(exclude=(selector,)))
    only = of(*gpus, selection=Selection(include=(selector,)))

    assert list(left(without)) == excluded
    assert [one[-1:] for one in offered(only)["nvidia.com/gpu"]] == excluded
    assert all(str(selector) in reason for reason in left(without).values())


def test_exclusion_wins_over_inclusion() -> None:
    """All but one of a model, for instance."""
    selection = Selection((Selector("product", "*A100*"),), (Selector("index", "1"),))

    assert offered(of(gpu(0), gpu(1), gpu(2), selection=selection)) == {"nvidia.com/gpu": ["GPU-0", "GPU-2"]}


def test_mig_devices_go_with_their_gpu() -> None:
    """Whoever excludes a GPU excludes its parts."""
    offer = of(
        gpu(0, "1g.5gb"),
        gpu(1, "1g.5gb"),
        mig_strategy="single",
        selection=Selection(exclude=(Selector("index", "0"),)),
    )

    assert offered(offer) == {"nvidia.com/gpu": ["MIG-1-0"]}


# --- properties of every configuration

names = st.sampled_from(["nvidia.com/gpu", "nvidia.com/a", "nvidia.com/mig-1g.5gb", "nvidia.com/gpu.shared"])
rules = st.lists(
    st.builds(NamingRule, st.sampled_from(["*", "*A100*", "1g.*", "*gb", "Tesla T4"]), names), max_size=3
).map(tuple)
references = st.sampled_from(["0", "1", "2", "0:0", "1:1", "GPU-1", "MIG-0-0", "MIG-GPU-1/7/0"])
selector = st.one_of(
    st.builds(Selector, st.just("index"), st.sampled_from("0123")),
    st.builds(Selector, st.just("uuid"), st.sampled_from(["GPU-0", "GPU-3"])),
    st.builds(Selector, st.just("product"), st.sampled_from(["*", "*A100*", "Tesla T4"])),
)
selections = st.builds(
    Selection,
    st.none() | st.lists(selector, min_size=1, max_size=2).map(tuple),
    st.lists(selector, max_size=2).map(tuple),
)
slicings = st.builds(
    TimeSlicing,
    st.lists(
        st.builds(
            SharedResource,
            names,
            st.integers(2, 4),
            st.one_of(st.none(), st.integers(1, 3), st.lists(references, min_size=1, max_size=3).map(tuple)),
            names,
        ),
        max_size=3,
    ).map(tuple),
    st.booleans(),
)
configs = st.builds(
    Config,
    mig_strategy=st.sampled_from(["none", "single", "mixed"]),
    gpu_names=rules,
    mig_names=rules,
    time_slicing=slicings,
    selection=selections,
)
nodes = st.lists(
    st.tuples(
        st.lists(st.sampled_from(sorted(SHAPES)), max_size=3),
        st.booleans(),
        st.sampled_from(["NVIDIA A100-SXM4-40GB", "Tesla T4"]),
    ),
    max_size=4,
).map(lambda parts: [gpu(index, *shapes, mig=mig, name=name) for index, (shapes, mig, name) in enumerate(parts)])


@given(nodes, configs)
def test_every_device_is_in_one_resource_or_left_with_a_reason(gpus: list[Gpu], config: Config) -> None:
    """Never in two, never both, and none is forgotten; the replicas of one are numbered from 0 on."""
    offer = next_offer(Offer(), Hardware(tuple(gpus)), Health(), config)
    replicas: dict[str, list[int | None]] = {}
    where: dict[str, set[str]] = {}
    for resource in offer.resources:
        for device in resource.devices:
            replicas.setdefault(device.uuid, []).append(device.replica)
            where.setdefault(device.uuid, set()).add(resource.name)

    assert all(len(places) == 1 for places in where.values())
    for numbers in replicas.values():
        assert numbers == [None] or numbers == list(range(len(numbers)))
    given_up = {remark.uuid for remark in offer.remarks if isinstance(remark, DeviceExcluded | DeviceNotOffered)}
    assert not given_up & where.keys()
    for each in gpus:
        parts = {mig.uuid for mig in each.mig_devices}
        if config.mig_strategy == "none" or not each.mig_enabled or not parts or each.uuid in given_up:
            parts = {each.uuid}
        assert parts <= given_up | where.keys()


@given(nodes, configs)
def test_ids_are_unique_over_all_resources(gpus: list[Gpu], config: Config) -> None:
    """The kubelet looks devices up by id alone."""
    ids = [
        one for each in offered(next_offer(Offer(), Hardware(tuple(gpus)), Health(), config)).values() for one in each
    ]

    assert len(set(ids)) == len(ids)


@given(nodes, configs)
def test_replica_counts_add_up(gpus: list[Gpu], config: Config) -> None:
    """A device is offered once, or as often as an entry for its resource says."""
    plain = next_offer(Offer(), Hardware(tuple(gpus)), Health(), replace(config, time_slicing=TimeSlicing()))
    sliced = next_offer(Offer(), Hardware(tuple(gpus)), Health(), config)
    names = {device.uuid: resource.name for resource in plain.resources for device in resource.devices}
    counts: dict[str, int] = {}
    for resource in sliced.resources:
        for device in resource.devices:
            counts[device.uuid] = counts.get(device.uuid, 0) + 1

    assert counts.keys() == names.keys()
    for uuid, count in counts.items():
        entries = [entry.replicas for entry in config.time_slicing.resources if entry.name == names[uuid]]
        assert count in {1, *entries}


@given(nodes, configs, st.randoms())
def test_the_order_of_the_hardware_is_irrelevant(gpus: list[Gpu], config: Config, chance: random.Random) -> None:
    """Of GPUs and of MIG devices: the same offer, and the devices in index order."""
    otherwise = [
        replace(each, mig_devices=tuple(chance.sample(each.mig_devices, len(each.mig_devices))))
        for each in chance.sample(gpus, len(gpus))
    ]
    offer = next_offer(Offer(), Hardware(tuple(gpus)), Health(), config)
    other = next_offer(Offer(), Hardware(tuple(otherwise)), Health(), config)

    assert offered(other) == offered(offer)
    assert other.remarks == offer.remarks
    for resource in offer.resources:
        order = [
            (each.gpu.index, each.mig.index if each.mig else -1, -1 if each.replica is None else each.replica)
            for each in resource.devices
        ]
        assert order == sorted(order)


@given(nodes, st.lists(configs, min_size=1, max_size=4))
def test_a_resource_never_ends_whatever_is_configured(gpus: list[Gpu], history: list[Config]) -> None:
    """A resource that lost all devices has an empty list; what was offered is offered or departed with a reason."""
    offer, seen, ever = Offer(), set[str](), dict[str, set[str]]()
    for config in history:
        offer = next_offer(offer, Hardware(tuple(gpus)), Health(), config)
        seen |= offered(offer).keys()
        for resource in offer.resources:
            ids = {device.id for device in resource.devices}
            ever.setdefault(resource.name, set()).update(ids)

            assert ids | resource.departed.keys() == ever[resource.name]
            assert not ids & resource.departed.keys()
        assert offered(offer).keys() == seen
    assert next_offer(offer, Hardware(tuple(gpus)), Health(), history[-1]) == offer


def test_a_device_that_the_configuration_took_away_is_unusable() -> None:
    """And the refusal says what became of it."""
    before = of(gpu(0))
    after = next_offer(before, Hardware((gpu(0),)), Health(), Config(time_slicing=shared(("nvidia.com/gpu", 2, None))))
    (resource,) = after.resources

    with pytest.raises(UnusableDeviceError, match="GPU-0 cannot be allocated: it is no longer offered here"):
        chosen(resource, None, ["GPU-0"])


async def test_a_remark_is_published_once_for_as_long_as_it_holds() -> None:
    """Again when it holds again; and a changed configuration changes the offer."""
    hardware, health, offer = Latest(Hardware((gpu(0), gpu(1)))), Latest(Health()), Latest(Offer())
    config = Latest(Config())
    published: list[Happening] = []
    excluding = Config(selection=Selection(exclude=(Selector("index", "1"),)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_offer, hardware, health, config, Latest(Terms(config.value)), offer, published.append)
        await trio.testing.wait_all_tasks_blocked()
        assert offered(offer.value) == {"nvidia.com/gpu": ["GPU-0", "GPU-1"]}
        assert published == []

        config.set(excluding)
        await trio.testing.wait_all_tasks_blocked()
        health.set(Health({"GPU-0": Verdict("XID 79", "reset it")}))
        await trio.testing.wait_all_tasks_blocked()
        remark = DeviceExcluded("1", "GPU-1", "selection.exclude has index: 1")
        assert offered(offer.value) == {"nvidia.com/gpu": ["GPU-0"]}
        assert published == [remark]

        config.set(Config())
        await trio.testing.wait_all_tasks_blocked()
        config.set(excluding)
        await trio.testing.wait_all_tasks_blocked()
        assert published == [remark, remark]
        nursery.cancel_scope.cancel()
