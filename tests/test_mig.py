from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from _nvplug.config.model import resource_name
from _nvplug.hardware import Gpu, MigDevice
from _nvplug.mig import Profile, parse_profile, profile_of

MIB = 2**20


def gpu(mebibytes: int) -> Gpu:
    """A GPU of which only the memory matters."""
    return Gpu(0, "GPU-0", "NVIDIA H100 80GB HBM3", "", 0, None, mebibytes * MIB)


def mig(profile: int, compute: int, slices: int, memory: int) -> MigDevice:
    """A MIG device of which only the shape matters."""
    return MigDevice(0, "MIG-0", 1, 0, profile, slices, compute, memory)


@pytest.mark.parametrize(
    ("total", "profile", "compute", "slices", "memory", "name"),
    [
        # A100-SXM4-40GB, A100-SXM4-80GB, A30, H100 80GB HBM3, H200, B200, as nvidia-smi mig -lgip lists them.
        (40536, 0, 1, 1, 4864, "1g.5gb"),
        (40536, 7, 1, 1, 4864, "1g.5gb+me"),
        (40536, 9, 1, 1, 9856, "1g.10gb"),
        (40536, 1, 2, 2, 9856, "2g.10gb"),
        (40536, 2, 3, 3, 19968, "3g.20gb"),
        (40536, 3, 4, 4, 19968, "4g.20gb"),
        (40536, 4, 7, 7, 40192, "7g.40gb"),
        (81920, 0, 1, 1, 9728, "1g.10gb"),
        (81920, 9, 1, 1, 19968, "1g.20gb"),
        (24512, 0, 1, 1, 5952, "1g.6gb"),
        (24512, 8, 2, 2, 11968, "2g.12gb+me"),
        (24512, 3, 4, 4, 24000, "4g.24gb"),
        (81559, 2, 3, 3, 40448, "3g.40gb"),
        (143771, 0, 1, 1, 16384, "1g.18gb"),
        (183359, 0, 1, 1, 21760, "1g.23gb"),
        # Parts of a GPU instance.
        (40536, 2, 1, 3, 19968, "1c.3g.20gb"),
        (81559, 4, 2, 7, 81000, "2c.7g.80gb"),
        # What newer GPUs have besides.
        (183359, 13, 1, 1, 21760, "1g.23gb-me"),
        (183359, 15, 1, 1, 21760, "1g.23gb+me.all"),
        (97887, 10, 1, 1, 24000, "1g.24gb+gfx"),
        # Where the driver does not say how much the GPU has in all.
        (0, 0, 1, 1, 9728, "1g.10gb"),
    ],
)
def test_profiles_are_called_as_the_reference_calls_them(
    total: int, profile: int, compute: int, slices: int, memory: int, name: str
) -> None:
    """Slices, memory in eighths of the GPU's, and what else the GPU instance has."""
    assert str(profile_of(gpu(total), mig(profile, compute, slices, memory))) == name


@given(st.integers(1, 2**20), st.integers(1, 2**20))
def test_the_memory_is_rounded_as_in_the_reference(total: int, memory: int) -> None:
    """The formula without floating point is the formula with it."""
    assume(memory <= total)
    eighths = math.ceil(memory * MIB / (total * MIB) * 8) / 8
    expected = math.floor(eighths * math.ceil(total * MIB / 2**30) + 0.5)

    assert profile_of(gpu(total), mig(0, 1, 1, memory)).gigabytes == expected


@pytest.mark.parametrize(
    ("profile", "resource"),
    [
        (Profile(1, 1, 10), "nvidia.com/mig-1g.10gb"),
        (Profile(1, 1, 10, "+me"), "nvidia.com/mig-1g.10gb.me"),
        (Profile(1, 1, 10, "-me"), "nvidia.com/mig-1g.10gb-me"),
        (Profile(1, 1, 24, "+me.all"), "nvidia.com/mig-1g.24gb.me.all"),
        (Profile(1, 3, 40), "nvidia.com/mig-1c.3g.40gb"),
    ],
)
def test_a_profile_names_a_resource(profile: Profile, resource: str) -> None:
    """Each profile its own, and one that kubelets accept."""
    assert profile.resource == resource
    assert resource_name(profile.resource) == profile.resource


@given(
    st.sampled_from([40536, 81920, 81559, 24512, 143771, 183359]),
    st.integers(1, 8),
    st.sampled_from([(1, ""), (1, "+me"), (2, ""), (3, ""), (7, ""), (1, "-me"), (2, "+me.all"), (1, "+gfx")]),
    st.data(),
)
def test_what_is_written_is_read_back(total: int, eighths: int, shape: tuple[int, str], data: st.DataObject) -> None:
    """A profile, written and parsed, gives a device of that profile."""
    slices, extras = shape
    memory = total * eighths // 8
    gigabytes = profile_of(gpu(total), mig(0, 1, 1, memory)).gigabytes
    written = Profile(data.draw(st.integers(1, slices)), slices, gigabytes, extras)

    profile, found = parse_profile(str(written), total * MIB)
    assert profile == written
    assert profile_of(gpu(total), mig(profile.number, profile.compute_slices, slices, found)) == written


@pytest.mark.parametrize(
    "text", ["", "1g", "1g.10", "0g.10gb", "1g.11gb", "9g.80gb", "5g.40gb", "4c.3g.40gb", "1g.10gb+x"]
)
def test_what_no_gpu_has_is_refused(text: str) -> None:
    """A profile that is no profile, or not of a GPU of this size."""
    with pytest.raises(ValueError, match=r"profile"):
        parse_profile(text, 81559 * MIB)
