from __future__ import annotations

import pytest

from _nvplug.drivers.platforms import check_platform
from _nvplug.errors import OptionError


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/dev/dxg", "this is WSL2"),
        ("/etc/nv_tegra_release", "this is a Tegra system"),
        ("/driver-root/etc/nv_tegra_release", "this is a Tegra system"),
    ],
)
def test_other_platforms_are_refused_with_a_sentence(path: str, what: str) -> None:
    """What nvplug would offer there, no container could use; the sentence names the evidence and a way out."""
    with pytest.raises(OptionError, match=what) as caught:
        check_platform(("/driver-root", "/"), exists=lambda each: each == path)

    assert path in str(caught.value)
    assert "NVIDIA's plugin" in caught.value.remedy


def test_everything_else_is_served() -> None:
    """No evidence, no objection."""
    check_platform(("/driver-root", "/"), exists=lambda _path: False)
