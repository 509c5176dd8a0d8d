from __future__ import annotations

import os
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _nvplug.config import INERT, KUBELET_SOCKET, OPTIONS, Config, Option, read_config
from _nvplug.config.model import Selection, TimeSlicing
from _nvplug.errors import OptionError

directories = st.sampled_from(["/", "/a", "/run/nvidia/driver", "/with space/", "/a=b,c", "/--dev-root", "/\udcff"])

STRATEGIES = ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri", "direct")

configs = st.builds(
    Config,
    kubelet_socket=st.builds(Path, directories, st.just("kubelet.sock")),
    config_file=st.just(""),
    device_discovery_strategy=st.sampled_from(["auto", "nvml", "simulated:2xT4", "simulated:/tmp/a=b.json"]),
    driver_root_ctr_path=directories,
    device_list_strategy=st.lists(st.sampled_from(STRATEGIES), min_size=1, unique=True).map(tuple),
    device_id_strategy=st.sampled_from(["uuid", "index"]),
    pass_device_specs=st.booleans(),
    driver_root=directories,
    dev_root=directories,
    mig_strategy=st.sampled_from(["none", "single", "mixed"]),
    shared_devices_allocation_policy=st.sampled_from(["distributed", "packed", "distinct"]),
    forget_health=st.booleans(),
    health_silence=st.integers(10, 3600),
    gdrcopy_enabled=st.booleans(),
    gds_enabled=st.booleans(),
    mofed_enabled=st.booleans(),
    imex_channel_ids=st.sampled_from([(), ("0",)]),
    imex_required=st.booleans(),
    cdi_annotation_prefix=st.sampled_from(["cdi.k8s.io/", "nvidia.cdi.k8s.io/"]),
    nvidia_cdi_hook_path=directories,
    cdi_disable_hooks=st.sampled_from([(), ("all",), ("chmod", "update-ldcache")]),
    direct_host_path=st.just("") | directories,
    direct_container_path=st.sampled_from(["/usr/local/nvidia", "/opt/driver"]),
)

# What has a flag; the others are known by a variable alone.
FLAGGED = [option for option in OPTIONS if option.flags]

flags = [flag for option in (*OPTIONS, *INERT) for flag in option.flags]
variables = [variable for option in (*OPTIONS, *INERT) for variable in option.variables]

# What the operating system can hand over, which need not be UTF-8.
texts = st.one_of(st.text(), st.binary().map(os.fsdecode))


def written(config: Config, option: Option[object]) -> str:
    """The value of an option, as an operator would write it."""
    match getattr(config, option.field):
        case bool() as value:
            return "true" if value else "false"
        case int() as seconds:
            return f"{seconds}s"
        case tuple() as values:
            return ",".join(values)
        case value:
            return str(value)


@st.composite
def spellings(draw: st.DrawFn, config: Config) -> list[str]:
    """Flags that ask for ``config``, in any order and in any of Go's spellings."""
    words: list[str] = []
    for option in draw(st.permutations(FLAGGED)):
        flag = draw(st.sampled_from(["-", "--"])) + draw(st.sampled_from(option.flags))
        text = written(config, option)
        if option.kind.is_switch and text == "true" and draw(st.booleans()):
            words += [flag]
        elif option.kind.is_switch or draw(st.booleans()):
            words += [f"{flag}={text}"]
        else:
            words += [flag, text]
    return words


def test_health_checks_are_chosen_by_variable() -> None:
    """What NVIDIA's plugin knows by a variable alone, nvplug takes from there, and leaves its words to the policy."""
    config = read_config([], {"DP_DISABLE_HEALTHCHECKS": "all", "DP_ENABLE_HEALTHCHECKS": "79,48"})

    assert (config.dp_disable_healthchecks, config.dp_enable_healthchecks) == ("all", "79,48")


def test_the_tables_agree() -> None:
    """Every field of Config has its option, and no flag or variable means two things."""
    sections = ["gpu_names", "mig_names", "time_slicing", "selection", "health_xids"]
    assert [option.field for option in OPTIONS] + sections == [field.name for field in fields(Config)]
    assert max(Counter(flags).values()) == 1
    assert max(Counter(variables).values()) == 1


def test_nothing_said_is_the_default() -> None:
    """Without flags and variables everything is as in NVIDIA's plugin."""
    assert read_config([], {}) == Config(
        kubelet_socket=Path("/var/lib/kubelet/device-plugins/kubelet.sock"),
        config_file="",
        device_discovery_strategy="auto",
        driver_root_ctr_path="/driver-root",
        device_list_strategy=("envvar",),
        device_id_strategy="uuid",
        pass_device_specs=False,
        driver_root="/",
        dev_root="/",
        mig_strategy="none",
        shared_devices_allocation_policy="distributed",
        dp_disable_healthchecks="",
        dp_enable_healthchecks="",
        forget_health=False,
        health_silence=30,
        gdrcopy_enabled=False,
        gds_enabled=False,
        mofed_enabled=False,
        imex_channel_ids=(),
        imex_required=False,
        cdi_annotation_prefix="cdi.k8s.io/",
        nvidia_cdi_hook_path="/usr/bin/nvidia-ctk",
        cdi_disable_hooks=(),
        direct_host_path="",
        direct_container_path="/usr/local/nvidia",
        gpu_names=(),
        mig_names=(),
        time_slicing=TimeSlicing(),
        selection=Selection(),
        health_xids=(),
    )
    assert read_config([], {}) == Config()


@pytest.mark.parametrize(("text", "seconds"), [("10s", 10), ("90s", 90), ("2m", 120), ("2m30s", 150), ("1h", 3600)])
def test_a_duration_is_written_as_in_go(text: str, seconds: int) -> None:
    """In hours, minutes and seconds, of which any may be missing."""
    assert read_config([f"--health-silence={text}"], {}).health_silence == seconds


@pytest.mark.parametrize(
    "text", ["30", "9s", "0s", "1h1s", "99h", "-30s", "30 s", "30S", "s", "30s2m", "1.5m", "\u0663s"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    """Too short for the driver, too long to be of use, or written otherwise; with what is allowed."""
    with pytest.raises(OptionError, match=r"--health-silence is .*: allowed are 10s to 1h"):
        read_config([f"--health-silence={text}"], {})


@pytest.mark.parametrize("option", [*OPTIONS, *INERT], ids=lambda option: option.written)
def test_a_default_is_a_value(option: Option[object]) -> None:
    """A default, written out, changes nothing."""
    words = [f"--{option.flags[0]}={option.default}"] if option.flags else []

    assert read_config(words, {option.variables[0]: option.default}) == read_config([], {})


@given(st.data(), configs)
def test_flags_round_trip(data: st.DataObject, config: Config) -> None:
    """A configuration written as flags, in any spelling and order, is read back."""
    assert read_config(data.draw(spellings(config)), {}) == config


@given(configs)
def test_variables_round_trip(config: Config) -> None:
    """A configuration written as variables is read back."""
    assert read_config([], {option.variables[0]: written(config, option) for option in OPTIONS}) == config


@given(st.data(), configs, st.dictionaries(st.sampled_from(variables), texts))
def test_a_flag_wins_over_its_variable(data: st.DataObject, config: Config, environment: dict[str, str]) -> None:
    """Where every flag is given, no variable of theirs counts, however wrong."""
    ours = {variable for option in FLAGGED for variable in option.variables}
    environment = {name: text for name, text in environment.items() if name in ours}

    assert read_config(data.draw(spellings(config)), environment) == config


@given(configs, configs, st.lists(st.booleans(), min_size=len(FLAGGED), max_size=len(FLAGGED)))
def test_the_last_repetition_counts(first: Config, last: Config, aliased: list[bool]) -> None:
    """Of a flag given twice, under the same name or an alias, the last one counts, unless it is a list."""
    words = [f"--{option.flags[0]}={written(first, option)}" for option in FLAGGED if not option.kind.is_list]
    words += [
        f"--{option.flags[-1 if alias else 0]}={written(last, option)}"
        for option, alias in zip(FLAGGED, aliased, strict=True)
    ]

    assert read_config(words, {}) == last


@given(st.lists(st.sampled_from(STRATEGIES), min_size=1), st.booleans())
def test_a_list_is_a_set(words: list[str], repeated: bool) -> None:
    """By comma or by repetition: what is said twice counts once."""
    joined = ",".join(words)
    arguments = [f"--device-list-strategy={word}" for word in (words if repeated else [joined])]

    assert read_config(arguments, {}).device_list_strategy == tuple(dict.fromkeys(words))


def test_a_list_grows_by_repetition() -> None:
    """An item of a list is not undone by the next one."""
    config = read_config(["--device-list-strategy=cdi-cri", "--device-list-strategy", "envvar"], {})

    assert config.device_list_strategy == ("cdi-cri", "envvar")


@given(configs)
def test_an_empty_variable_is_unset(config: Config) -> None:
    """Empty variables leave the default, and the next variable its chance."""
    assert read_config([], dict.fromkeys(variables, "")) == read_config([], {})
    root = config.driver_root_ctr_path
    environment = {"DRIVER_ROOT_CTR_PATH": "", "CONTAINER_DRIVER_ROOT": root}
    assert read_config([], environment).driver_root_ctr_path == root


def test_the_first_variable_wins() -> None:
    """Of two variables of one option, the one named first counts."""
    environment = {"CONTAINER_DRIVER_ROOT": "/second", "DRIVER_ROOT_CTR_PATH": "/first"}

    assert read_config([], environment).driver_root_ctr_path == "/first"


@pytest.mark.parametrize(
    ("arguments", "dev_root"),
    [
        ([], "/"),
        (["--driver-root=/run/nvidia/driver"], "/run/nvidia/driver"),
        (["--driver-root=/run/nvidia/driver", "--dev-root="], "/run/nvidia/driver"),
        (["--driver-root=/run/nvidia/driver", "--dev-root=/"], "/"),
    ],
)
def test_devices_are_in_the_driver_root(arguments: list[str], dev_root: str) -> None:
    """Device nodes are looked for in the driver's root, unless another root is given for them."""
    assert read_config(arguments, {}).dev_root == dev_root


@pytest.mark.parametrize("text", ["1", "t", "T", "true", "True", "TRUE"])
def test_true_is_spelt_as_in_go(text: str) -> None:
    """Everything that Go takes for true is true, and so is the flag alone."""
    assert read_config([f"-pass-device-specs={text}"], {}).pass_device_specs
    assert read_config([], {"PASS_DEVICE_SPECS": text}).pass_device_specs
    assert read_config(["--pass-device-specs"], {}).pass_device_specs


@pytest.mark.parametrize("text", ["0", "f", "F", "false", "False", "FALSE"])
def test_false_is_spelt_as_in_go(text: str) -> None:
    """Everything that Go takes for false is false, and wins over a variable."""
    environment = {"PASS_DEVICE_SPECS": "true"}

    assert not read_config([f"--pass-device-specs={text}"], environment).pass_device_specs


def test_two_dashes_end_the_flags() -> None:
    """As in Go, ``--`` ends the flags; nothing may follow."""
    assert read_config(["--dev-root=/x", "--"], {}).dev_root == "/x"
    with pytest.raises(OptionError, match="'--dev-root=/y' is not a flag"):
        read_config(["--dev-root=/x", "--", "--dev-root=/y"], {})


@given(
    st.lists(
        st.one_of(
            texts,
            st.sampled_from([f"--{flag}" for flag in flags]),
            st.builds("--{}={}".format, st.sampled_from(flags), texts),
        )
    ),
    st.dictionaries(st.sampled_from(variables), texts),
)
def test_any_words_are_read_or_refused(arguments: list[str], environment: dict[str, str]) -> None:
    """Whatever is written, the outcome is a Config or an OptionError that says what to do."""
    try:
        read_config(arguments, environment)
    except OptionError as error:
        refused = error
    else:
        return

    assert refused.remedy
    assert str(refused).isprintable()


@pytest.mark.parametrize(
    ("arguments", "environment", "message", "remedy"),
    [
        (
            ["--device-id-strategy", "uiud"],
            {},
            "--device-id-strategy is 'uiud': allowed are uuid, index (did you mean uuid?)",
            "correct or remove --device-id-strategy",
        ),
        (
            [],
            {"DEVICE_ID_STRATEGY": "name"},
            "DEVICE_ID_STRATEGY is 'name': allowed are uuid, index",
            "correct or remove DEVICE_ID_STRATEGY",
        ),
        (
            ["-container-driver-root=driver"],
            {},
            "--container-driver-root is 'driver': it must be an absolute path",
            "correct or remove --container-driver-root",
        ),
        (
            ["--device-list-strategy", "envvar,volume-mount"],
            {},
            (
                "--device-list-strategy is 'envvar,volume-mount': allowed are envvar, volume-mounts, cdi-annotations,"
                " cdi-cri, direct (did you mean volume-mounts?)"
            ),
            "correct or remove --device-list-strategy",
        ),
        (
            [],
            {"PASS_DEVICE_SPECS": "yes"},
            "PASS_DEVICE_SPECS is 'yes': allowed are true and false",
            "correct or remove PASS_DEVICE_SPECS",
        ),
        (["--pas-device-specs"], {}, "there is no flag '--pas-device-specs'", "did you mean --pass-device-specs?"),
        (["--quite-another"], {}, "there is no flag '--quite-another'", "see nvplug run --help"),
        (["---dev-root=/x"], {}, "there is no flag '---dev-root'", "did you mean --dev-root?"),
        (["--dev-root"], {}, "--dev-root needs a value", "write --dev-root=VALUE"),
    ],
)
def test_errors_name_the_place_and_the_way_out(
    arguments: list[str], environment: dict[str, str], message: str, remedy: str
) -> None:
    """An error names what was said, where it stands as it was spelt, what is allowed, and what was likely meant."""
    with pytest.raises(OptionError) as caught:
        read_config(arguments, environment)

    assert str(caught.value) == message
    assert caught.value.remedy == remedy
    assert caught.value.exit_code == 2


def test_a_switch_takes_no_next_word() -> None:
    """Where Go would silently mean true and drop all that follows, the word is refused, and how to write it is said."""
    with pytest.raises(OptionError, match="'false' is not a flag") as caught:
        read_config(["--pass-device-specs", "false", "--dev-root=/x"], {})

    assert "--pass-device-specs=false" in caught.value.remedy


@pytest.mark.parametrize("strategy", ["tegra", "vfio"])
def test_platforms_of_the_reference_are_known(strategy: str) -> None:
    """What NVIDIA's plugin can discover and nvplug cannot is not taken for a misspelling."""
    with pytest.raises(OptionError, match="nvplug does not support that yet"):
        read_config(["--device-discovery-strategy", strategy], {})


@pytest.mark.parametrize("path", ["", "kubelet.sock", f"/{'d' * 70}/kubelet.sock", f"/{'k' * 107}"])
def test_a_socket_has_a_usable_path(path: str) -> None:
    """A path that no socket can have, or that leaves no room for ours beside it, is refused at start."""
    with pytest.raises(OptionError, match="--kubelet-socket"):
        read_config(["--kubelet-socket", path], {})


@pytest.mark.parametrize("path", [KUBELET_SOCKET, f"/{'d' * 69}/kubelet.sock", f"/{'k' * 106}"])
def test_a_long_socket_path_may_still_do(path: str) -> None:
    """The limits are those of the kernel, and no narrower."""
    assert read_config(["--kubelet-socket", path], {}).kubelet_socket == Path(path)


@pytest.mark.parametrize(
    "word",
    [
        "--mig-strategy=none",
        "--fail-on-init-error",
        "--fail-on-init-error=false",
        "--gds-enabled=0",
        "--imex-channel-ids=",
        "--config-file=",
        "--mps-root=/run/nvidia/mps",
    ],
)
def test_what_asks_for_nothing_is_accepted(word: str) -> None:
    """A manifest of NVIDIA's plugin may spell out what it does not use."""
    assert read_config([word], {}) == read_config([], {})


def test_feature_flags_of_any_generator_are_taken() -> None:
    """Later ones have other words; those that are known count."""
    words = ["--cdi-feature-flags=disable-ipc-discoverer,new", "--cdi-feature-flags=other"]

    assert read_config(words, {}).cdi_feature_flags == ("disable-ipc-discoverer", "new", "other")


def test_a_flag_takes_back_what_its_variable_asks_for() -> None:
    """Also what a manifest sets for all nodes."""
    assert read_config(["--gds-enabled=false"], {"GDS_ENABLED": "true"}) == read_config([], {})


@pytest.mark.parametrize(
    "word",
    [
        "--mig-strategy=misxed",
        "--shared-devices-allocation-policy=spread",
        "--imex-channel-ids=1",
        "--imex-channel-ids=0,1",
        "--cdi-disable-hooks=all,none",
    ],
)
def test_what_nobody_supports_is_refused(word: str) -> None:
    """A value that NVIDIA's plugin refuses is no better here."""
    with pytest.raises(OptionError, match="allowed"):
        read_config([word], {})


@pytest.mark.parametrize("prefix", ["", "cdi.k8s.io", "/", "CDI.k8s.io/", "cdi.k8s.io/x", "cdi.k8s.io/\n"])
def test_an_annotation_that_no_runtime_reads_is_refused(prefix: str) -> None:
    """The prefix has to make a key out of what follows."""
    with pytest.raises(OptionError, match="it must be a domain with a slash behind it"):
        read_config([f"--cdi-annotation-prefix={prefix}"], {})


@pytest.mark.parametrize("path", ["/", "//", "/usr/..", "usr/local/nvidia"])
def test_nothing_is_mounted_over_everything(path: str) -> None:
    """A directory of the container is one in it."""
    with pytest.raises(OptionError, match="it must"):
        read_config([f"--direct-container-path={path}"], {})
