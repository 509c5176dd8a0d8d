from __future__ import annotations

import re
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _nvplug.container.cdi_names import (
    ALL,
    GDS,
    GPU,
    IMEX_CHANNEL,
    annotation_key,
    device_name,
    document_file,
    kind,
    qualified,
)

UUID: Final = "12345678-1234-1234-1234-123456789abc"

ids: Final = st.one_of(
    st.sampled_from([f"GPU-{UUID}", f"MIG-{UUID}", f"MIG-GPU-{UUID}/13/7", "0", "15", "3:0", "3:12"]),
    st.uuids().map(str),
)


def test_names_are_those_of_nvidias_plugin() -> None:
    """Documents that it wrote describe what our answers name, and the other way around."""
    assert qualified(GPU, f"GPU-{UUID}") == f"k8s.device-plugin.nvidia.com/gpu=GPU-{UUID}"
    assert qualified(IMEX_CHANNEL, "0") == "k8s.device-plugin.nvidia.com/imex-channel=0"
    assert qualified(GDS, ALL) == "k8s.device-plugin.nvidia.com/gds=all"
    assert kind(GPU) == "k8s.device-plugin.nvidia.com/gpu"
    assert document_file(GPU) == "k8s.device-plugin.nvidia.com-gpu.json"


@given(ids)
def test_a_device_name_is_one_by_the_cdi_specification(device_id: str) -> None:
    """Letters, digits and four signs, the first and the last a letter or digit; what is one already stays."""
    name = device_name(device_id)

    assert re.fullmatch("[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?", name)
    assert name == device_id or "/" in device_id


@given(ids)
def test_an_annotation_key_is_one_by_kubernetes_rules(uuid: str) -> None:
    """63 characters behind the slash at most, of those allowed; and another for every device."""
    key = annotation_key("cdi.k8s.io/", uuid)
    prefix, _, name = key.partition("/")

    assert prefix == "cdi.k8s.io"
    assert len(name) <= 63
    assert re.fullmatch("[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?", name)
    assert annotation_key("cdi.k8s.io/", uuid) == key != annotation_key("cdi.k8s.io/", "GPU-another")


@pytest.mark.parametrize("prefix", ["cdi.k8s.io/", "nvidia.cdi.k8s.io/"])
def test_an_annotation_key_begins_with_the_prefix(prefix: str) -> None:
    """By which a runtime recognises it; the rest is that of NVIDIA's plugin, with the device in place of chance."""
    assert annotation_key(prefix, f"GPU-{UUID}") == f"{prefix}nvidia-device-plugin_GPU-{UUID}"
