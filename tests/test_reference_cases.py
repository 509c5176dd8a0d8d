"""What NVIDIA's plugin does with a node and a file, case by case, and what nvplug does with the same.

Each row names where it is from: the sections are those of the collection of facts about that plugin (1.2 configuration,
1.3 MIG, 1.4 ids, 1.11 health, 4 its own tests). Rows that differ on purpose say so. From the text of the file to the
ids that the kubelet sees; how preferences are made is in test_placement, what a container is given in test_container.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from _nvplug.config import read_settings
from _nvplug.errors import NvplugError, OptionError, RequestTooLargeError, UnknownDeviceError
from _nvplug.hardware import Gpu, Hardware, MigDevice
from _nvplug.health import Health, health_policy
from _nvplug.resources import Offer, chosen, next_offer

UUID: Final = "00000000-0000-4000-8000-00000000000%d"

# An A100 with 40 GB: number of the profile, slices of compute and of the GPU, MiB.
SHAPES: Final = {
    "1g.5gb": (0, 1, 1, 4864),
    "1g.5gb+me": (7, 1, 1, 4864),
    "1g.10gb": (9, 1, 1, 9856),
    "2g.10gb": (1, 2, 2, 9856),
    "3g.20gb": (2, 3, 3, 19968),
    "7g.40gb": (4, 7, 7, 40192),
    "1c.3g.20gb": (2, 1, 3, 19968),
}


def gpu(index: int, shape: str) -> Gpu:
    """A GPU, by its product name, or ``mig`` and the profiles that it is cut into."""
    name, *profiles = shape.split() if shape.startswith("mig") else [shape]
    devices = []
    for number, profile in enumerate(profiles):
        kind, compute, slices, memory = SHAPES[profile]
        devices.append(MigDevice(number, f"MIG-{index}{number}", number + 1, 0, kind, slices, compute, memory))
    product = "NVIDIA A100-SXM4-40GB" if name in {"mig", "gpu"} else name
    cut = name == "mig"
    return Gpu(index, f"GPU-{UUID % index}", product, "", index, None, 40536 << 20, cut, tuple(devices))


def offer_of(path: Path, text: str, shapes: str) -> Offer:
    """What a node offers, whose GPUs are written like ``gpu, mig 1g.5gb 2g.10gb``, with this file."""
    (path / "config.yaml").write_text(text)
    config = read_settings([f"--config-file={path}/config.yaml"], {}).config
    gpus = tuple(gpu(index, shape.strip()) for index, shape in enumerate(shapes.split(",")))
    return next_offer(Offer(), Hardware(gpus), Health(), config)


def short(device_id: str) -> str:
    """``G3::1`` for a replica of GPU 3, ``M30`` for MIG device 3:0."""
    uuid, separator, replica = device_id.partition("::")
    name = f"G{int(uuid[-1])}" if uuid.startswith("GPU-") else uuid.replace("MIG-", "M")
    return name + separator + replica


SLICING: Final = "{sharing: {timeSlicing: {%s, resources: [{name: nvidia.com/gpu, replicas: 2}]}}}"
MIXED: Final = "{flags: {migStrategy: mixed}%s}"
SINGLE: Final = "{flags: {migStrategy: single}%s}"

CASES: Final = [
    ("1.3 none: MIG is ignored", "", "gpu, mig 1g.5gb, mig", {"gpu": "G0 G1 G2"}),
    ("1.3 single: uniform", SINGLE % "", "mig 1g.5gb 1g.5gb, mig 1g.5gb", {"gpu": "M00 M01 M10"}),
    ("1.3 single: no MIG at all", SINGLE % "", "gpu, gpu", {"gpu": "G0 G1"}),
    ("1.3 single: MIG and not (differs: ends there)", SINGLE % "", "mig 1g.5gb, gpu, gpu", {"gpu": "G1 G2"}),
    ("1.3 single: MIG without devices (differs: ends there)", SINGLE % "", "mig, mig 1g.5gb", {"gpu": "M10"}),
    (
        "1.3 single: two types (differs: ends there)",
        SINGLE % "",
        "mig 2g.10gb, mig 1g.5gb, mig 1g.5gb",
        {"gpu": "M10 M20"},
    ),
    ("1.3 single: same size, other extras (differs: ends there)", SINGLE % "", "mig 1g.5gb 1g.5gb+me", {"gpu": "M00"}),
    (
        "1.3 mixed: a resource for each profile",
        MIXED % "",
        "gpu, mig 1g.5gb 2g.10gb, mig 1g.5gb 3g.20gb, mig 7g.40gb",
        {"gpu": "G0", "mig-1g.5gb": "M10 M20", "mig-2g.10gb": "M11", "mig-3g.20gb": "M21", "mig-7g.40gb": "M30"},
    ),
    (
        "1.3 mixed: plus becomes a dot",
        MIXED % "",
        "mig 1g.5gb+me 1g.5gb",
        {"mig-1g.5gb": "M01", "mig-1g.5gb.me": "M00"},
    ),
    (
        "1.3 mixed: one slice, twice the memory",
        MIXED % "",
        "mig 1g.10gb 2g.10gb",
        {"mig-1g.10gb": "M00", "mig-2g.10gb": "M01"},
    ),
    ("1.3 mixed: MIG without devices only warns", MIXED % "", "gpu, mig", {"gpu": "G0"}),
    ("1.3 mixed: part of an instance (differs: ends there)", MIXED % "", "mig 1c.3g.20gb", {"mig-1c.3g.20gb": "M00"}),
    ("1.3 skipped products", "", "DGX Display, NVIDIA DGX Display, gpu, NVIDIA DGX A100", {"gpu": "G2 G3"}),
    (
        "1.3 skipped products, asked for (differs)",
        "selection: {include: [{product: '*'}]}",
        "DGX Display",
        {"gpu": "G0"},
    ),
    ("1.2 renameByDefault: false", SLICING % "renameByDefault: false", "gpu, gpu", {"gpu": "G0::0 G0::1 G1::0 G1::1"}),
    ("1.2 renameByDefault: true", SLICING % "renameByDefault: true", "gpu", {"gpu.shared": "G0::0 G0::1"}),
    (
        "1.2 a name that is not shared keeps its devices",
        MIXED % ", sharing: {timeSlicing: {renameByDefault: true, resources: [{name: mig-1g.5gb, replicas: 3}]}}",
        "gpu, mig 1g.5gb 2g.10gb",
        {"gpu": "G0", "mig-1g.5gb.shared": "M10::0 M10::1 M10::2", "mig-2g.10gb": "M11"},
    ),
    (
        "1.2 MIG devices of strategy single, shared",
        SINGLE % ", sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}",
        "mig 1g.5gb 1g.5gb",
        {"gpu": "M00::0 M00::1 M01::0 M01::1"},
    ),
    (
        "1.2 a shared resource that the node does not have",
        "{sharing: {timeSlicing: {resources: [{name: mig-1g.5gb, replicas: 2}]}}}",
        "gpu",
        {"gpu": "G0"},
    ),
    (
        "1.2 devices (differs: ignored there)",
        "{sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [1]}]}}}",
        "gpu, gpu",
        {"gpu": "G0 G1::0 G1::1"},
    ),
    (
        "1.2 rename (differs: ignored there)",
        "{sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: 1, rename: part}]}}}",
        "gpu, gpu",
        {"gpu": "G1", "part": "G0::0 G0::1"},
    ),
    (
        "1.2 resources.gpus (differs: ignored there)",
        "{resources: {gpus: [{pattern: 'Tesla *', name: old}, {pattern: '*', name: new}]}}",
        "Tesla T4, gpu, Tesla V100",
        {"old": "G0 G2", "new": "G1"},
    ),
    (
        "1.2 no pattern fits (differs: ends there)",
        "{resources: {gpus: [{pattern: 'Tesla *', name: old}]}}",
        "gpu, Tesla T4",
        {"old": "G1"},
    ),
    *(
        (
            f"4 patterns: {pattern} {profile}",
            MIXED % f", resources: {{mig: [{{pattern: '{pattern}', name: x}}]}}",
            shape,
            expected,
        )
        for pattern, profile, fits in [
            ("1g.5gb", "1g.5gb", True),
            ("1g.5gb", "1g.5gb+me", False),
            ("g.5gb", "1g.5gb", False),
            ("1g.*", "1g.5gb+me", True),
            ("*gb", "1g.5gb", True),
            ("*gb", "1g.5gb+me", False),
            ("1g?5gb", "1g.5gb", False),
        ]
        for shape, expected in [(f"mig {profile}", {"x": "M00"} if fits else {})]
    ),
    (
        "selection (only here)",
        "selection: {exclude: [{index: 0}, {product: 'Tesla*'}]}",
        "gpu, Tesla T4, gpu",
        {"gpu": "G2"},
    ),
]


@pytest.mark.parametrize(("source", "text", "shapes", "expected"), CASES, ids=[case[0] for case in CASES])
def test_a_node_and_a_file(tmp_path: Path, source: str, text: str, shapes: str, expected: dict[str, str]) -> None:
    """The resources, by what follows nvidia.com/, and the ids under each, in index order."""
    assert source
    offer = offer_of(tmp_path, text, shapes)

    found = {
        each.name.removeprefix("nvidia.com/"): [short(device.id) for device in each.devices] for each in offer.resources
    }
    assert found == {name: ids.split() for name, ids in expected.items()}


FLAG: Final = "flags: {plugin: {%s: %s}}"
REPLICAS: Final = "sharing: {timeSlicing: {resources: [%s]}}"

REFUSALS: Final = [
    ("1.2 unknown version", "version: v2", "allowed is v1"),
    ("1.2 no pattern", "resources: {mig: [{name: a}]}", "it needs a 'pattern'"),
    ("1.2 no name", "resources: {mig: [{pattern: '*'}]}", "it needs a 'name'"),
    ("1.2 no resources", "sharing: {timeSlicing: {renameByDefault: true}}", "it needs resources"),
    ("1.2 no resource name", REPLICAS % "{replicas: 2}", "it needs a 'name'"),
    ("1.2 no replicas", REPLICAS % "{name: gpu}", "it needs a 'replicas'"),
    ("1.2 one replica", REPLICAS % "{name: gpu, replicas: 1}", "allowed are 2 to"),
    ("4 an invalid name", REPLICAS % "{name: $invalid$, replicas: 2}", "up to 63 letters"),
    ("1.2 a long name", REPLICAS % f"{{name: {'x' * 64}, replicas: 2}}", "up to 63 letters"),
    ("1.2 devices: a word", REPLICAS % "{name: gpu, replicas: 2, devices: x}", "allowed are all"),
    ("1.2 devices: none", REPLICAS % "{name: gpu, replicas: 2, devices: 0}", "1 or more"),
    ("1.2 devices: another type", REPLICAS % "{name: gpu, replicas: 2, devices: {a: 1}}", "expected"),
    *(
        (f"4 references: {device}", REPLICAS % f"{{name: gpu, replicas: 2, devices: [{device}]}}", "")
        for device in ("GPU-UUID", f"MIG-GPU-{UUID % 1}", "-1", "'-1'", "2.0", "[0]")
    ),
    ("1.2 strategy of lists", FLAG % ("deviceListStrategy", "foo"), "allowed are"),
    ("1.2 strategy of ids", FLAG % ("deviceIDStrategy", "foo"), "allowed are uuid, index"),
    ("1.2 policy of allocation", FLAG % ("sharedDevicesAllocationPolicy", "foo"), "allowed are distributed, packed"),
    ("1.2 discovery", "flags: {deviceDiscoveryStrategy: foo}", "allowed are auto"),
    ("1.2 MIG strategy", "flags: {migStrategy: foo}", "allowed are none, single, mixed"),
    ("4 IMEX channel", "imex: {channelIDs: [2]}", ""),
    ("1.2 a misspelt key (differs: ignored there)", "flags: {migStrateggy: mixed}", "no key 'migStrateggy'"),
    (
        "1.2 MPS and time slicing (differs: MPS wins there)",
        "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}",
        "MPS",
    ),
]


@pytest.mark.parametrize(("source", "text", "what"), REFUSALS, ids=[case[0] for case in REFUSALS])
def test_a_file_that_is_refused(tmp_path: Path, source: str, text: str, what: str) -> None:
    """What ends NVIDIA's plugin at its start ends nvplug at its start, and no later; differences say so."""
    assert source
    with pytest.raises(OptionError) as caught:
        offer_of(tmp_path, text, "gpu")

    assert what in str(caught.value)


ACCEPTED: Final = [
    *(
        (f"4 references: {device}", REPLICAS % f"{{name: gpu, replicas: 2, devices: [{device}]}}")
        for device in ('"0"', '"0:0"', f"GPU-{UUID % 1}", f"MIG-{UUID % 1}", f"MIG-GPU-{UUID % 1}/10/0", "3")
    ),
    ("4 a list of strategies", FLAG % ("deviceListStrategy", "[envvar]")),
    ("4 one strategy", FLAG % ("deviceListStrategy", "envvar")),
    *(
        (f"4 sleepInterval: {text}", f"flags: {{gfd: {{sleepInterval: {text}}}}}")
        for text in ("0", "0s", "5", "5s", "infinite")
    ),
    *((f"4 IMEX: {text}", f"imex: {{channelIDs: {text}}}") for text in ("[]", "null", "[0]")),
    ("1.2 an empty file", ""),
    ("1.2 an empty version", "version: ''"),
    ("1.2 failOnInitError", "flags: {failOnInitError: false}"),
]


@pytest.mark.parametrize(("source", "text"), ACCEPTED, ids=[case[0] for case in ACCEPTED])
def test_a_file_that_is_accepted(tmp_path: Path, source: str, text: str) -> None:
    """Whatever it asks for besides, the node's one GPU is offered."""
    assert source
    assert [each.name for each in offer_of(tmp_path, text, "gpu").resources] == ["nvidia.com/gpu"]


STRICT: Final = "failRequestsGreaterThanOne: true"
LENIENT: Final = "failRequestsGreaterThanOne: false"


@pytest.mark.parametrize(
    ("text", "ids", "error"),
    [
        # 4 ValidateRequest.
        ("", [0], None),
        ("", [0, 1], None),
        ("", [0, 7], UnknownDeviceError),
        (SLICING % LENIENT, ["0::0"], None),
        (SLICING % LENIENT, ["0::0", "1::1"], None),
        (SLICING % LENIENT, ["0::9"], UnknownDeviceError),
        (SLICING % STRICT, ["0::0"], None),
        (SLICING % STRICT, ["0::0", "1::1"], RequestTooLargeError),
        (SLICING % STRICT, ["0::0", "0::1"], RequestTooLargeError),
        # 1.4: an id that is shared is no id by itself.
        (SLICING % LENIENT, ["0"], UnknownDeviceError),
    ],
)
def test_a_request(tmp_path: Path, text: str, ids: list[int | str], error: type[NvplugError] | None) -> None:
    """Known and unknown ids, one replica and two, with the limit and without."""
    (resource,) = offer_of(tmp_path, text, "gpu, gpu").resources
    asked = [f"GPU-{UUID[:-2]}{each}" for each in ids]

    if error is not None:
        with pytest.raises(error):
            chosen(resource, None, asked)
    else:
        assert [device.id for device in chosen(resource, None, asked)] == asked


@pytest.mark.parametrize(
    ("disable", "ignored"),
    [
        # 4 XIDs.
        ("", []),
        (",", []),
        ("not-an-int", []),
        ("68", [68]),
        ("-68", []),
        ("68  ", [68]),
        ("68,", [68]),
        (",68", [68]),
        ("68,67", [67, 68]),
        ("68,not-an-int,67", [67, 68]),
    ],
)
def test_xids_that_are_disabled(disable: str, ignored: list[int]) -> None:
    """What is no number is left out, and the rest counts."""
    assert sorted(health_policy(disable, "").disabled) == ignored


@pytest.mark.parametrize(
    ("disable", "enable", "code", "counts"),
    [
        # 4 XIDs, and 1.11.
        ("all", "", 79, False),
        ("xids", "", 79, False),
        ("", "all", 13, True),
        ("11", "11", 11, True),
        ("", "", 11, True),
        *(("", "", code, False) for code in (13, 31, 43, 45, 68, 109)),
        # Differs: does nothing there, against its documentation.
        ("all", "79", 79, True),
    ],
)
def test_xids_that_count(disable: str, enable: str, code: int, counts: bool) -> None:
    """Enabled overrides disabled, and the defaults of both."""
    assert (health_policy(disable, enable).row(code) is not None) is counts
