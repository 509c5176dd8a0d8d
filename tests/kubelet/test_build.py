from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kubelet.build import VERSIONS, GoError, build

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("version", VERSIONS)
def test_a_machine_without_go_is_told_what_is_missing(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the go command nothing is built, and the error says which Go is needed."""
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(GoError, match="not on PATH") as raised:
        build(version)
    assert "Go 1.26.0 or newer" in raised.value.remedy


@pytest.mark.parametrize("version", VERSIONS)
def test_a_go_that_is_too_old_is_named(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older Go is not used: the error says which one was found, where, and which one is needed."""
    go = tmp_path / "go"
    go.write_text("#!/bin/sh\necho go1.25.9\n")
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(GoError, match=rf"{go} is Go 1\.25\.9, and .* asks for 1\.26\.0") as raised:
        build(version)
    assert "Go 1.26.0 or newer" in raised.value.remedy
