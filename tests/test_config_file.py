from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from _nvplug.config import INERT, OPTIONS, Config, Settings, read_settings
from _nvplug.config.file import decode_file
from _nvplug.config.model import NamingRule, Selection, Selector, SharedResource, TimeSlicing, XidRule, resource_name
from _nvplug.errors import OptionError

UUID: Final = "01234567-89ab-cdef-0123-456789abcdef"


def settings(tmp_path: Path, text: str, *arguments: str, environment: dict[str, str] | None = None) -> Settings:
    """What a file with this text asks for, besides flags and variables."""
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return read_settings([f"--config-file={file}", *arguments], environment or {})


def sections(text: str | bytes) -> dict[str, Any]:
    """What only a file can say."""
    content = text.encode() if isinstance(text, str) else text
    return dict(decode_file(content, "config.yaml").sections)


def refusal(text: str | bytes) -> tuple[str, str]:
    """The error and the remedy for a text."""
    with pytest.raises(OptionError) as caught:
        sections(text)
    return str(caught.value), caught.value.remedy


FROM_THE_FIELD: Final = {
    "empty": "",
    "only a comment": "# nothing yet\n",
    "null": "null\n",
    "an empty object": "{}",
    "the version alone": "version: v1",
    "an empty version": 'version: ""',
    "sharing as the documentation has it": """
version: v1
sharing:
  timeSlicing:
    renameByDefault: false
    failRequestsGreaterThanOne: false
    resources:
      - name: nvidia.com/gpu
        replicas: 10
""",
    "everything of the shared schema": """
version: v1
flags:
  migStrategy: "none"
  failOnInitError: true
  mpsRoot: /run/nvidia/mps
  nvidiaDriverRoot: "/"
  nvidiaDevRoot: "/"
  gdrcopyEnabled: false
  gdsEnabled: false
  mofedEnabled: false
  useNodeFeatureAPI: null
  deviceDiscoveryStrategy: auto
  plugin:
    passDeviceSpecs: false
    deviceListStrategy:
    - envvar
    deviceIDStrategy: uuid
    cdiAnnotationPrefix: cdi.k8s.io/
    nvidiaCTKPath: /usr/bin/nvidia-ctk
    containerDriverRoot: /driver-root
    sharedDevicesAllocationPolicy: distributed
  gfd:
    oneshot: false
    noTimestamp: false
    sleepInterval: 60s
    outputFile: /etc/kubernetes/node-feature-discovery/features.d/gfd
    machineTypeFile: /sys/class/dmi/id/product_name
resources:
  gpus: null
  mig: []
sharing: {}
imex: {channelIDs: [], required: false}
""",
    "JSON": '{"version": "v1", "flags": {"plugin": {"passDeviceSpecs": true, "deviceListStrategy": "envvar"}}}',
}


@pytest.mark.parametrize("name", FROM_THE_FIELD)
def test_files_from_the_field_are_obeyed(tmp_path: Path, name: str) -> None:
    """As they are written for NVIDIA's plugin, also with nothing in them."""
    config = settings(tmp_path, FROM_THE_FIELD[name]).config

    assert config.mig_strategy == "none"
    assert config.pass_device_specs is (name == "JSON")
    assert config.gpu_names == config.mig_names == ()


def test_time_slicing_is_read() -> None:
    """With everything that an entry can say."""
    text = f"""
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
    - {{name: nvidia.com/gpu, replicas: 4, devices: [0, "1", GPU-{UUID.upper()}, 0x2]}}
    - {{name: gpu, replicas: 2, devices: 3}}
    - {{name: mig-1g.5gb, replicas: 2, devices: [0:1, "2:3", MIG-{UUID}, MIG-GPU-{UUID}/10/0], rename: shared}}
    - {{name: mig-2g.10gb, replicas: 3, devices: all}}
    - {{name: example.com/x, replicas: 60000}}
"""
    gpu = "nvidia.com/gpu"

    assert sections(text)["time_slicing"] == TimeSlicing(
        (
            SharedResource(gpu, 4, ("0", "1", f"GPU-{UUID}", "2"), f"{gpu}.shared"),
            SharedResource(gpu, 2, 3, f"{gpu}.shared"),
            SharedResource(
                "nvidia.com/mig-1g.5gb", 2, ("0:1", "2:3", f"MIG-{UUID}", f"MIG-GPU-{UUID}/10/0"), "nvidia.com/shared"
            ),
            SharedResource("nvidia.com/mig-2g.10gb", 3, None, "nvidia.com/mig-2g.10gb.shared"),
            SharedResource("example.com/x", 60_000, None, "example.com/x.shared"),
        ),
        fail_requests_greater_than_one=True,
    )


def test_names_and_patterns_are_read() -> None:
    """With NVIDIA's domain in front of what has none."""
    text = 'resources: {gpus: [{pattern: "*A100*", name: a100}, {pattern: "*", name: x.org/G_p.u}], mig: []}'

    assert sections(text) == {
        "gpu_names": (NamingRule("*A100*", "nvidia.com/a100"), NamingRule("*", "x.org/G_p.u")),
        "mig_names": (),
    }


@pytest.mark.parametrize(
    "text",
    [
        "health: {xids: {79: ignore, 63: reset, 9999: ask-driver, 48: null}}",
        '{"health": {"xids": {"63": "reset", "79": "ignore", "9999": "ask-driver"}}}',
    ],
)
def test_what_xids_mean_is_read(text: str) -> None:
    """By number, in YAML and JSON, in order of the numbers; XIDs that nobody knows yet included."""
    assert sections(text)["health_xids"] == (
        XidRule(63, "reset"),
        XidRule(79, "ignore"),
        XidRule(9999, "ask-driver"),
    )


def test_a_selection_is_read() -> None:
    """In each of the four ways; PCI addresses as any tool prints them."""
    text = f"""
selection:
  include: [{{product: "NVIDIA *"}}]
  exclude: [{{index: 3}}, {{uuid: GPU-{UUID}}}, {{pci: 1B:00.0}}, {{pci: "00000000:10:00.0"}}, {{pci: 10:00.0}}]
"""

    assert sections(text)["selection"] == Selection(
        (Selector("product", "NVIDIA *"),),
        (
            Selector("index", "3"),
            Selector("uuid", f"GPU-{UUID}"),
            Selector("pci", "0000:1b:00.0"),
            Selector("pci", "0000:10:00.0"),
            Selector("pci", "0000:10:00.0"),
        ),
    )


def test_the_file_comes_after_flags_and_variables(tmp_path: Path) -> None:
    """Default, file, variable, flag: the later wins; and it is known where each value stands."""
    text = "flags:\n  migStrategy: single\n  plugin:\n    deviceIDStrategy: index\n    passDeviceSpecs: true\n"
    found = settings(
        tmp_path,
        text,
        "--pass-device-specs=false",
        environment={"DEVICE_ID_STRATEGY": "uuid", "PASS_DEVICE_SPECS": "true"},
    )

    assert found.config == Config(
        config_file=str(tmp_path / "config.yaml"), mig_strategy="single", device_id_strategy="uuid"
    )
    assert [
        found.origins[name] for name in ("pass_device_specs", "device_id_strategy", "mig_strategy", "dev_root")
    ] == [
        "--pass-device-specs",
        "DEVICE_ID_STRATEGY",
        f"flags.migStrategy ({tmp_path}/config.yaml:2)",
        "default",
    ]


def test_a_wrong_type_is_wrong_whoever_wins(tmp_path: Path) -> None:
    """A value that a flag overrides must have the right type all the same."""
    with pytest.raises(OptionError, match="expected a text"):
        settings(tmp_path, "flags: {migStrategy: 3}", "--mig-strategy=none")


@pytest.mark.parametrize("option", [option for option in (*OPTIONS, *INERT) if option.key], ids=lambda each: each.key)
def test_every_key_of_the_table_is_read(tmp_path: Path, option: Any) -> None:
    """The default, written into the file, changes nothing."""
    value: Any = option.default == "true" if option.kind.is_switch else option.default
    if option.kind.is_list:
        value = option.default.split(",") if option.default else []
    for part in reversed(option.key.split(".")):
        value = {part: value}

    found = settings(tmp_path, json.dumps(value))

    assert found.config == Config(config_file=str(tmp_path / "config.yaml"))


@pytest.mark.parametrize("interval", ["0", "0s", "5", "5s", "infinite"])
def test_keys_of_other_programs_are_theirs_to_judge(tmp_path: Path, interval: str) -> None:
    """GPU feature discovery reads the same file."""
    flags = f"{{gfd: {{sleepInterval: {interval}, oneshot: true}}, useNodeFeatureAPI: true}}"
    text = f"{{flags: {flags}, imex: {{channelIDs: null}}}}"

    assert settings(tmp_path, text).config == Config(config_file=str(tmp_path / "config.yaml"))


def test_imex_is_read(tmp_path: Path) -> None:
    """As a list of numbers, which it is in NVIDIA's files."""
    config = settings(tmp_path, "imex: {channelIDs: [0], required: true}").config

    assert (config.imex_channel_ids, config.imex_required) == (("0",), True)


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        (
            "flags: {deviceDiscoveryStrategy: tegra}",
            "flags.deviceDiscoveryStrategy",
            "nvplug does not support that yet",
        ),
        ("imex:\n  channelIDs: [2]", "imex.channelIDs", "allowed is 0"),
        ("imex: {channelIDs: [0, 1]}", "imex.channelIDs", "allowed is 0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, text: str, key: str, problem: str) -> None:
    """Also where the file asks for it; the key and its line are named."""
    with pytest.raises(OptionError, match=problem) as caught:
        settings(tmp_path, text)

    line = text.count("\n") + 1
    assert str(caught.value).startswith(f"{key} ({tmp_path}/config.yaml:{line}) is ")


def test_mps_is_refused_with_a_sentence() -> None:
    """Where NVIDIA's plugin would let it win silently over time slicing."""
    message, _ = refusal("sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}, timeSlicing: null}")

    assert message.startswith("sharing.mps (config.yaml:1) is {'resources'")
    assert "nvplug does not support MPS yet" in message


NO_YAML: Final = "correct it: it must be YAML or JSON, in UTF-8"


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        (
            "flags:\n  migStrateggy: mixed",
            "config.yaml:2: there is no key 'migStrateggy' in flags",
            "did you mean migStrategy?",
        ),
        ("flag: {}", "config.yaml:1: there is no key 'flag' in the file", "did you mean flags?"),
        (
            "sharing:\n  timeSlicing:\n    resources:\n    - name: gpu\n      replicas: 2\n      device: [0]",
            "config.yaml:6: there is no key 'device' in sharing.timeSlicing.resources[0]",
            "did you mean devices?",
        ),
        ("imex: {xyzzy: 1}", "config.yaml:1: there is no key 'xyzzy' in imex", "allowed are channelIDs, required"),
        ("version: v2", "version (config.yaml:1) is 'v2': allowed is v1", "correct or remove version"),
        ("version: 1", "version (config.yaml:1) is 1: expected a text", "correct or remove version"),
        ("flags: [1]", "flags (config.yaml:1) is [1]: expected keys and values", "correct or remove flags"),
        ("- 1", "config.yaml is [1]: expected keys and values", "correct config.yaml"),
        (
            'flags: {plugin: {passDeviceSpecs: "true"}}',
            "flags.plugin.passDeviceSpecs (config.yaml:1) is 'true': expected true or false",
            "correct or remove flags.plugin.passDeviceSpecs",
        ),
        (
            "resources: {gpus: [{name: a}]}",
            "resources.gpus[0] (config.yaml:1) is {'name': 'a'}: it needs a 'pattern'",
            "correct or remove resources.gpus[0]",
        ),
        ("a: 1\na: 2", "config.yaml:2: the key 'a' is given twice", NO_YAML),
        ("a: 1\n- b", "config.yaml:2: expected <block end>, but found '-'", NO_YAML),
        ("version: v1\n---\nversion: v1", "config.yaml:2: but found another document", NO_YAML),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, message: str, remedy: str) -> None:
    """File and line, key, value, what is allowed, and the nearest key."""
    assert refusal(text) == (message, remedy)


SHARED: Final = "sharing: {timeSlicing: {resources: [{name: %s, replicas: %s, devices: %s}]}}"


@pytest.mark.parametrize(
    ("text", "part", "what"),
    [
        ("sharing: {timeSlicing: {}}", "sharing.timeSlicing ", "it needs resources"),
        ("sharing: {timeSlicing: {resources: []}}", "sharing.timeSlicing ", "it needs resources"),
        (SHARED % ("gpu", 1, "all"), "resources[0].replicas", "allowed are 2 to 60000"),
        (SHARED % ("gpu", -2, "all"), "resources[0].replicas", "allowed are 2 to 60000"),
        (SHARED % ("gpu", 60001, "all"), "resources[0].replicas", "allowed are 2 to 60000"),
        (SHARED % ("gpu", "2.0", "all"), "resources[0].replicas", "expected a whole number"),
        (SHARED % ("gpu", '"2"', "all"), "resources[0].replicas", "expected a whole number"),
        (SHARED % ("gpu", "true", "all"), "resources[0].replicas", "expected a whole number"),
        (SHARED % ("$invalid$", 2, "all"), "resources[0].name", "up to 63 letters"),
        (SHARED % ("gpu", 2, "some"), "resources[0].devices", "allowed are all"),
        (SHARED % ("gpu", 2, 0), "resources[0].devices", "1 or more"),
        (SHARED % ("gpu", 2, "[]"), "resources[0].devices", "the list is empty"),
        (SHARED % ("gpu", 2, "[-1]"), "resources[0].devices", "neither an index"),
        (SHARED % ("gpu", 2, '["-1"]'), "resources[0].devices", "neither an index"),
        (SHARED % ("gpu", 2, "[2.0]"), "resources[0].devices[0]", "expected a whole number or a text"),
        (SHARED % ("gpu", 2, "[GPU-UUID]"), "resources[0].devices", "neither an index"),
        (SHARED % ("gpu", 2, f"[MIG-GPU-{UUID}]"), "resources[0].devices", "neither an index"),
        (SHARED % ("gpu", 2, '["0:0:0"]'), "resources[0].devices", "neither an index"),
        (
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}, {name: nvidia.com/gpu, replicas: 3}]}}",
            "resources[1].name",
            "an entry before this one",
        ),
        (
            f"sharing: {{timeSlicing: {{renameByDefault: true, resources: [{{name: {'g' * 60}, replicas: 2}}]}}}}",
            "resources[0].name",
            "up to 63 letters",
        ),
        ('resources: {gpus: [{pattern: "", name: a}]}', "resources.gpus[0].pattern", "must not be empty"),
        ('resources: {mig: [{pattern: "*", name: kubernetes.io/x}]}', "resources.mig[0].name", "Kubernetes' own"),
        ("selection: {include: []}", "selection.include", "would exclude every GPU"),
        ("selection: {exclude: [{}]}", "selection.exclude[0]", "exactly one of"),
        ("selection: {exclude: [{index: 1, pci: 1b:00.0}]}", "selection.exclude[0]", "exactly one of"),
        ("selection: {exclude: [{index: -1}]}", "selection.exclude[0].index", "0 or more"),
        ('selection: {exclude: [{index: "1"}]}', "selection.exclude[0].index", "expected a whole number"),
        (f"selection: {{exclude: [{{uuid: MIG-{UUID}}}]}}", "selection.exclude[0].uuid", "MIG devices go with"),
        ("selection: {exclude: [{pci: 1b}]}", "selection.exclude[0].pci", "0000:1b:00.0"),
        ("health: {xids: {79: fatal}}", "health.xids.79", "allowed are ignore, reset, reboot, ask-driver"),
        ("health: {xids: {48: reste}}", "health.xids.48", "did you mean reset?"),
        ("health: {xids: {48: [reset]}}", "health.xids.48", "allowed are ignore, reset"),
        ("health: {xids: {48: 1}}", "health.xids.48", "allowed are ignore, reset"),
        ("health: {xids: {XID79: reset}}", "health.xids.XID79", "the number of an XID"),
        ('health: {xids: {"-1": reset}}', "health.xids.-1", "the number of an XID"),
        ('health: {xids: {"79": reset, "079": ignore}}', "health.xids.079", "given twice"),
        ("health: {xids: [79]}", "health.xids", "expected keys and values"),
        ("health: {silence: 30}", "health.silence", "expected a text"),
    ],
)
def test_what_cannot_be_done_is_refused(text: str, part: str, what: str) -> None:
    """The key is named to the last part, and the value and what is allowed with it."""
    message, remedy = refusal(text)

    assert part in message
    assert "(config.yaml:1) is " in message
    assert what in message
    assert remedy.startswith("correct or remove ")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("gpu", "nvidia.com/gpu"),
        ("nvidia.com/gpu", "nvidia.com/gpu"),
        ("example.org/A_b-c.d", "example.org/A_b-c.d"),
        ("x" * 63, f"nvidia.com/{'x' * 63}"),
        ("a" * 244 + "/b", "a" * 244 + "/b"),
        ("", None),
        ("x" * 64, None),
        ("a" * 245 + "/b", None),
        ("/gpu", None),
        ("nvidia.com/", None),
        ("a/b/c", None),
        ("-gpu", None),
        ("gpu.", None),
        ("gpu\n", None),
        ("Nvidia.com/gpu", None),
        ("nvidia..com/gpu", None),
        ("kubernetes.io/gpu", None),
        ("x.kubernetes.io/gpu", None),
        ("requests.nvidia.com/gpu", None),
        ("gpü", None),
    ],
)
def test_names_are_judged_as_the_kubelet_judges_them(text: str, name: str | None) -> None:
    """What it would refuse at registration is refused when the file is read."""
    if name is not None:
        assert resource_name(text) == name
    else:
        with pytest.raises(ValueError, match=r"\w"):
            resource_name(text)


@pytest.mark.parametrize(
    ("text", "obeyed"),
    [
        (
            "{resources: {gpus: []}, sharing: {timeSlicing: {resources: [{name: g, replicas: 2, devices: all}]}}}",
            (),
        ),
        ('resources: {gpus: [{pattern: "*", name: a}]}', ("resources.gpus",)),
        (
            SHARED % ("a", 2, "1}, {name: b, replicas: 9, rename: c"),
            ("sharing.timeSlicing.resources[0].devices", "sharing.timeSlicing.resources[1].rename"),
        ),
    ],
)
def test_keys_that_the_reference_ignores_are_known(text: str, obeyed: tuple[str, ...]) -> None:
    """So that whoever has them in a file can be told that here they count."""
    assert decode_file(text.encode(), "config.yaml").obeyed == obeyed


def test_the_case_of_keys_does_not_matter(tmp_path: Path) -> None:
    """Go's decoder is as lenient; the same key in two spellings is given twice."""
    config = settings(tmp_path, "Flags: {migstrategy: mixed, PLUGIN: {deviceIdStrategy: index}}").config

    assert (config.mig_strategy, config.device_id_strategy) == ("mixed", "index")
    assert "'migStrategy' is given twice" in refusal("flags: {migStrategy: none, MIGStrategy: none}")[0]


def test_yaml_is_read_as_go_reads_it() -> None:
    """No numbers in base 60, no dates, merges of anchors, and JSON with tabs."""
    based = "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [1:00, 10:30]}]}}"
    merged = "sharing: {timeSlicing: {resources: [&a {name: gpu, replicas: 2, devices: 1}, {<<: *a, devices: 2}]}}"
    tabs = '{\n\t"resources": {\n\t\t"gpus": [{"pattern": "*", "name": "2024-01-01"}]}}'

    assert sections(based)["time_slicing"].resources[0].devices == ("1:0", "10:30")
    with pytest.raises(OptionError, match="an entry before this one"):
        sections(merged.replace(", devices: 1", ""))
    assert [each.devices for each in sections(merged)["time_slicing"].resources] == [1, 2]
    assert sections(tabs)["gpu_names"] == (NamingRule("*", "nvidia.com/2024-01-01"),)
    assert sections(tabs.replace("\t", " ")) == sections(tabs)


# Each line stands for ten times as much as the one before.
NESTED: Final = b"c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d]"


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\xff",
        b"\x00",
        b"a: \x07",
        b"{",
        b'{"a": 1,\t',
        b'{\t"a": 1, "a": 2}',
        b"[" * 10_000,
        b"a: &a [*a]",
        b"? [1]\n: 2",
        b"? ''\n: 2",
        b"a: !!python/object:os.system {}",
        b"a: !!int x",
        b"<<: 1",
        b"version: " + b"9" * 5000,
        b"a: &a [1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\n" + NESTED,
    ],
)
def test_damaged_files_are_refused_in_a_line(content: bytes) -> None:
    """Whatever the damage: no traceback, no endless work, and a message that can be printed."""
    message, remedy = refusal(content)

    assert message.isprintable()
    assert len(message) < 300
    assert remedy


KEYS: Final = ["version", "flags", "plugin", "resources", "gpus", "mig", "pattern", "name", "sharing", "timeSlicing"]
MORE_KEYS: Final = [
    "replicas",
    "devices",
    "rename",
    "selection",
    "include",
    "exclude",
    "index",
    "pci",
    "mps",
    "imex",
    "health",
    "xids",
    "x",
]

values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2) | st.text("ab:/*-", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS + MORE_KEYS), inner, max_size=4),
    max_leaves=12,
)


@given(values, st.booleans())
def test_any_document_is_obeyed_or_refused(value: Any, as_json: bool) -> None:
    """As YAML and as JSON; an error names a place."""
    text = json.dumps(value) if as_json else yaml.safe_dump(value)
    try:
        sections(text)
    except OptionError as error:
        refused = error
    else:
        return

    assert str(refused).isprintable()
    assert "config.yaml" in str(refused)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_obeyed_or_refused(content: bytes) -> None:
    """There is no third way."""
    try:
        sections(content)
    except OptionError as error:
        refused = error
    else:
        return

    assert str(refused).isprintable()


@pytest.mark.parametrize("path", ["/nonexistent/config.yaml", "/", "nul\0", "\x1f", "/dev/null/x"])
def test_a_file_that_cannot_be_read_is_an_error(path: str) -> None:
    """With the path and the reason."""
    with pytest.raises(OptionError, match="cannot read the configuration file") as caught:
        read_settings([f"--config-file={path}"], {})

    assert str(caught.value).isprintable()


def test_a_file_of_any_length_is_not_read(tmp_path: Path) -> None:
    """No ConfigMap is longer than a MiB."""
    with pytest.raises(OptionError, match="is longer than"):
        settings(tmp_path, "#" * (2**20 + 1))


def test_no_file_costs_nothing() -> None:
    """What decodes files is loaded only where there is one."""
    program = (
        "import sys; from _nvplug.config import read_settings; read_settings([], {});"
        "sys.exit(bool({'yaml', 'msgspec', 'json'} & sys.modules.keys()))"
    )

    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], check=False).returncode == 0
