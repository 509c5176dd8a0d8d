from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nvml.standin import Control, refuse_soname

from _nvplug.drivers.library import SONAME, candidates, load
from _nvplug.errors import LibraryNotFoundError

REFERENCE = [
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
]


def test_reference_order() -> None:
    """The driver's root is searched in the reference's order, then / is, then the places it does not know."""
    found = candidates("/driver-root")

    assert [f"/driver-root{place}/{SONAME}" for place in REFERENCE] == list(found[:6])
    assert [f"{place}/{SONAME}" for place in REFERENCE] == list(found[6:12])
    assert f"/driver-root/opt/nvidia/lib64/{SONAME}" in found[12:]
    assert f"/opt/nvidia/lib64/{SONAME}" in found[12:]


def test_library_path_comes_between() -> None:
    """LD_LIBRARY_PATH is preferred to what is installed in /, not to --driver-root-ctr-path."""
    found = candidates("/driver-root", "/a:relative::/b")

    assert [f"/a/{SONAME}", f"/b/{SONAME}", f"/usr/lib64/{SONAME}"] == list(found[6:9])


def test_no_path_is_tried_twice() -> None:
    """A root of / and a LD_LIBRARY_PATH that names usual places add nothing to the list."""
    found = candidates("/", "/usr/lib64")

    assert len(set(found)) == len(found)
    assert set(candidates("/")) == set(found)


def test_real_path_is_opened(tmp_path: Path) -> None:
    """The versioned file is opened, so that an upgrade is another library, not the old one by its old name."""
    control = Control(tmp_path, driver="1.0")
    soname = control.install()
    old = load(str(control.root))
    control.driver("2.0")
    control.install()
    new = load(str(control.root))

    assert old.path.endswith(".so.1.0")
    assert new.path.endswith(".so.2.0")
    assert new.path == os.path.realpath(soname)
    assert ctypes.addressof(ctypes.c_char.in_dll(old.handle, "nvmlInit_v2")) != ctypes.addressof(
        ctypes.c_char.in_dll(new.handle, "nvmlInit_v2")
    )


def test_one_that_cannot_be_loaded_is_passed_over(tmp_path: Path) -> None:
    """A file of the right name that is no library, or a link that leads nowhere, hides no good one."""
    control = Control(tmp_path)
    good = control.install()
    bad = tmp_path / "other" / "usr" / "lib64" / SONAME
    bad.parent.mkdir(parents=True)
    bad.write_text("not a library")
    dangling = tmp_path / "other" / "lib64" / SONAME
    dangling.parent.mkdir(parents=True)
    dangling.symlink_to("nowhere")

    assert load(str(tmp_path / "other"), str(good.parent)).path == os.path.realpath(good)


def test_not_found_names_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has no library is told every directory that was searched, what the loader said, and what to do."""
    refuse_soname(monkeypatch)
    bad = tmp_path / "usr" / "lib64" / SONAME
    bad.parent.mkdir(parents=True)
    bad.write_text("not a library")
    with pytest.raises(LibraryNotFoundError) as caught:
        load(str(tmp_path), str(tmp_path / "elsewhere"))
    text = str(caught.value)

    searched = {str(Path(path).parent) for path in candidates(str(tmp_path), str(tmp_path / "elsewhere"))}
    assert {place for place in searched if place not in text} == set()
    assert f"{bad}: " in text
    assert f"{SONAME}: cannot open shared object file" in text
    assert "--driver-root-ctr-path" in caught.value.remedy


def test_not_found_says_that_the_root_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A root that does not exist is named once, not once for every directory that it might have."""
    refuse_soname(monkeypatch)
    with pytest.raises(LibraryNotFoundError) as caught:
        load(str(tmp_path / "absent"))

    assert str(caught.value).count(str(tmp_path / "absent")) == 1


LOADED_EARLIER = """
import shutil, sys
from _nvplug.drivers.library import load
from _nvplug.errors import LibraryNotFoundError

print(load("/nowhere", sys.argv[1]).path)
print(load("/nowhere").path)
shutil.rmtree(sys.argv[1])
try:
    load("/nowhere")
except LibraryNotFoundError as error:
    print(error)
"""


def test_found_by_the_dynamic_loader(tmp_path: Path) -> None:
    """By its bare soname the library is found last; but not one that was removed, and is only still in memory."""
    soname = Control(tmp_path).install()
    real = os.path.realpath(soname)
    done = subprocess.run(
        [sys.executable, "-c", LOADED_EARLIER, str(soname.parent)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    first, second, third = done.stdout.splitlines()

    assert [first, second] == [real, real]
    assert f"{real} was loaded, and has been removed since" in third


def test_frozen_explanation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyInstaller's text for a library that cannot be loaded is replaced by what the loader really said."""

    def frozen(name: str) -> ctypes.CDLL:
        raise OSError("Most likely this dynlib/dll was not found") from OSError(f"{name}: wrong ELF class")

    monkeypatch.setattr(ctypes, "CDLL", frozen)
    with pytest.raises(LibraryNotFoundError, match="wrong ELF class") as caught:
        load(str(tmp_path))

    assert "Most likely" not in str(caught.value)
