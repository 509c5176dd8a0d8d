from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from driver_tree import DEBIAN, VERSION, lay, link, write
from hypothesis import example, given
from hypothesis import strategies as st

from _nvplug.container.driver_files import DriverFile, DriverFiles, find_driver_files, resolve
from _nvplug.container.elf import Elf, read_elf


def paths(files: tuple[DriverFile, ...]) -> list[str]:
    """Where programs expect them."""
    return [file.path for file in files]


@pytest.mark.parametrize(
    "libraries",
    ["/usr/lib64", DEBIAN, "/usr/lib/aarch64-linux-gnu", "/lib64", "/lib/aarch64-linux-gnu", "/usr/lib"],
)
def test_libraries_are_found_where_distributions_have_them(tmp_path: Path, libraries: str) -> None:
    """Each file once, with the names by which it is asked for."""
    lay(tmp_path, libraries)
    found = find_driver_files(str(tmp_path))

    assert found.root == "/"
    assert found.version == VERSION
    assert found.libraries == tuple(
        DriverFile(f"{libraries}/{stem}.so.{VERSION}", f"{libraries}/{stem}.so.{VERSION}", names)
        for stem, names in (
            ("libcuda", ("libcuda.so", "libcuda.so.1")),
            ("libcudadebugger", ("libcudadebugger.so.1",)),
            ("libnvidia-gpucomp", ()),
            ("libnvidia-ml", ("libnvidia-ml.so.1",)),
            ("libnvidia-ptxjitcompiler", ("libnvidia-ptxjitcompiler.so.1",)),
        )
    )
    assert paths(found.programs) == ["/usr/bin/nvidia-debugdump", "/usr/bin/nvidia-smi"]
    assert paths(found.firmware) == [f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"]


@pytest.mark.parametrize(
    "root", ["/run/nvidia/driver", "/home/kubernetes/bin/nvidia", "/usr/local/nvidia", "/usr/local/glibc"]
)
def test_a_driver_with_a_root_of_its_own_is_found_below_the_hosts(tmp_path: Path, root: str) -> None:
    """Sources are below what was searched, paths below the driver's own root."""
    lay(tmp_path / root[1:], "/lib64", programs="/bin")
    found = find_driver_files(str(tmp_path))

    assert found.root == root
    assert found.libraries[0][:2] == (f"/lib64/libcuda.so.{VERSION}", f"{root}/lib64/libcuda.so.{VERSION}")
    assert found.programs[1] == DriverFile("/bin/nvidia-smi", f"{root}/bin/nvidia-smi")


def test_absolute_links_are_followed_within_the_root(tmp_path: Path) -> None:
    """A link of a mounted root that leads to /etc means that root's own /etc."""
    lay(tmp_path, f"{DEBIAN}/nvidia/current")
    (tmp_path / "usr/bin/nvidia-smi").rename(tmp_path / f"{DEBIAN[1:]}/nvidia/current/nvidia-smi")
    for name, way in (
        (f"{DEBIAN}/libcuda.so.1", "/etc/alternatives/glx--libcuda.so.1"),
        ("/etc/alternatives/glx--libcuda.so.1", f"{DEBIAN}/nvidia/current/libcuda.so.1"),
        ("/usr/bin/nvidia-smi", "/etc/alternatives/nvidia--nvidia-smi"),
        ("/etc/alternatives/nvidia--nvidia-smi", f"{DEBIAN}/nvidia/current/nvidia-smi"),
    ):
        link(tmp_path / name[1:], way)
    found = find_driver_files(str(tmp_path))

    assert found.libraries[0] == DriverFile(
        f"{DEBIAN}/nvidia/current/libcuda.so.{VERSION}",
        f"{DEBIAN}/nvidia/current/libcuda.so.{VERSION}",
        ("libcuda.so", "libcuda.so.1"),
    )
    assert found.programs[1] == DriverFile("/usr/bin/nvidia-smi", f"{DEBIAN}/nvidia/current/nvidia-smi")


def test_a_library_that_is_reached_by_several_ways_is_one(tmp_path: Path) -> None:
    """Where /lib64 is a link to /usr/lib64, nothing is doubled."""
    lay(tmp_path, "/usr/lib64")
    link(tmp_path / "lib64", "usr/lib64")

    assert len(find_driver_files(str(tmp_path)).libraries) == 5


def test_what_leads_nowhere_is_left_out(tmp_path: Path) -> None:
    """Dangling links, links in circles, links out of the root, and directories with the names of libraries."""
    lay(tmp_path)
    place = tmp_path / DEBIAN[1:]
    before = find_driver_files(str(tmp_path))
    link(place / f"libnvidia-cfg.so.{VERSION}", "gone.so")
    link(place / f"libnvidia-fbc.so.{VERSION}", f"libnvidia-fbc.so.{VERSION}")
    link(place / f"libnvidia-tls.so.{VERSION}", f"../../../../../../../..{tmp_path}/../outside.so.{VERSION}")
    (place / f"libnvidia-rtcore.so.{VERSION}").mkdir()
    link(tmp_path / "usr/bin/nvidia-persistenced", "/opt/nowhere")

    assert find_driver_files(str(tmp_path)) == before


@pytest.mark.process
def test_names_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    """Neither an answer nor a document can have them. The others are found."""
    lay(tmp_path)
    usual = find_driver_files(str(tmp_path))
    place = tmp_path / DEBIAN.lstrip("/")
    for name in ("libnvidia-\udcff", "\udcff"):
        shutil.copy(place / "libcuda.so.1", place / f"{name}.so.{VERSION}")
    link(place / "libnvidia-\udcff.so.1", "libcuda.so.1")
    link(place / "libnvidia-odd.so.1", f"\udcff.so.{VERSION}")

    assert find_driver_files(str(tmp_path)) == usual


def test_a_library_whose_link_is_missing_is_known_by_what_it_says_of_itself(tmp_path: Path) -> None:
    """As ldconfig would name it; a link of an older driver that leads nowhere is no hindrance."""
    place = tmp_path / "usr/lib64"
    place.mkdir(parents=True)
    compile_library(place / f"libcuda.so.{VERSION}", "libcuda.so.1")
    link(place / "libcuda.so.1", "libcuda.so.535.1.2")

    assert find_driver_files(str(tmp_path)).libraries[0].names == ("libcuda.so.1",)


@pytest.mark.process
def test_of_an_elf_file_the_machine_and_the_name_are_read(tmp_path: Path) -> None:
    """Whatever is damaged or something else is none."""
    with_name, without, text = tmp_path / "a.so", tmp_path / "b.so", tmp_path / "c.so"
    compile_library(with_name, "libcuda.so.1")
    compile_library(without, "")
    text.write_text("GROUP ( libc.so.6 )")
    whole = with_name.read_bytes()

    name = read_elf(str(with_name))
    assert name is not None
    assert name.soname == "libcuda.so.1"
    assert read_elf(str(without)) == Elf(name.machine, "")
    assert read_elf(str(text)) is None
    assert read_elf(str(tmp_path / "none")) is None
    for length in range(0, len(whole), 97):
        text.write_bytes(whole[:length])
        read_elf(str(text))


# Half of them with the head of a shared library, or none would come further than that.
@given(st.binary(max_size=400) | st.binary(max_size=400).map(lambda rest: bytes(10) + b"\x03\x00" + bytes(14) + rest))
@example(bytes(10) + b"\x03\x00" + bytes(14) + b"\xff" * 32)
def test_reading_any_bytes_as_elf_ends(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """No content is an error."""
    file = tmp_path_factory.getbasetemp() / "any.so"
    file.write_bytes(b"\x7fELF\x02\x01" + content)

    read_elf(str(file))


def compile_library(file: Path, soname: str) -> None:
    """Makes a real one."""
    name = [f"-Wl,-soname,{soname}"] if soname else []
    subprocess.run(
        ["cc", "-shared", "-nostdlib", "-x", "c", "-", "-o", file, *name], input=b"int x;", check=True, timeout=60
    )


@pytest.mark.process
def test_libraries_of_another_machine_are_left_out(tmp_path: Path) -> None:
    """A driver brings 32-bit libraries, too, which some distributions have in /usr/lib."""
    lay(tmp_path, "/usr/lib64")
    head = b"\x7fELF\x01\x01" + bytes(10) + b"\x03\x00" + b"\x03\x00"
    other = tmp_path / f"usr/lib/libnvidia-glcore.so.{VERSION}"
    write(other)
    other.write_bytes(head)
    compile_library(tmp_path / f"usr/lib64/libcuda.so.{VERSION}", "libcuda.so.1")

    assert len(find_driver_files(str(tmp_path)).libraries) == 5


def test_of_two_drivers_that_of_the_running_version_counts(tmp_path: Path) -> None:
    """In one place or in two roots; where neither has it, the one that the links lead to."""
    lay(tmp_path, version="535.1.2")
    lay(tmp_path, version="535.1.3")
    lay(tmp_path / "run/nvidia/driver", "/usr/lib64")

    assert find_driver_files(str(tmp_path), VERSION).root == "/run/nvidia/driver"
    assert find_driver_files(str(tmp_path), "535.1.3").version == "535.1.3"
    assert find_driver_files(str(tmp_path), "535.1.2").version == "535.1.2"
    assert find_driver_files(str(tmp_path), "999.1").version == "535.1.3"
    assert len(find_driver_files(str(tmp_path), "535.1.3").libraries) == 5


def test_files_without_a_version_in_their_names_are_found(tmp_path: Path) -> None:
    """Then the names that every driver has count."""
    for name in ("libcuda.so.1", "libnvidia-ml.so.1", "libnvpair.so.1"):
        write(tmp_path / "usr/lib64" / name)
    found = find_driver_files(str(tmp_path), VERSION)

    assert found.version == ""
    assert paths(found.libraries) == ["/usr/lib64/libcuda.so.1", "/usr/lib64/libnvidia-ml.so.1"]


def test_sockets_of_daemons_are_those_that_are_there(tmp_path: Path) -> None:
    """In the driver's own root, else in the host's; the directory of MPS as a whole."""
    root = tmp_path / "run/nvidia/driver"
    lay(root)
    (tmp_path / "tmp/nvidia-mps").mkdir(parents=True)

    assert find_driver_files(str(tmp_path)).sockets == (DriverFile("/tmp/nvidia-mps", "/tmp/nvidia-mps"),)

    write(root / "run/nvidia-persistenced/socket")

    assert find_driver_files(str(tmp_path)).sockets == (
        DriverFile("/run/nvidia-persistenced/socket", "/run/nvidia/driver/run/nvidia-persistenced/socket"),
        DriverFile("/tmp/nvidia-mps", "/tmp/nvidia-mps"),
    )


def test_graphics_find_their_libraries(tmp_path: Path) -> None:
    """JSON files where they are, those of Vulkan of COS where programs look for them, and the modules of X."""
    lay(tmp_path)
    for name in (
        "/etc/vulkan/icd.d/nvidia_icd.json",
        "/vulkan/icd.d/nvidia_icd.json",
        "/vulkan/implicit_layer.d/nvidia_layers.json",
        "/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
        "/usr/share/egl/egl_external_platform.d/50_mesa.json",
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        f"{DEBIAN}/nvidia/xorg/libglxserver_nvidia.so.{VERSION}",
        f"{DEBIAN}/nvidia/xorg/libglxserver_nvidia.so.1.2",
        f"{DEBIAN}/vdpau/libvdpau_nvidia.so.{VERSION}",
        f"{DEBIAN}/libnvidia-egl-gbm.so.1.1.0",
    ):
        write(tmp_path / name[1:])
    found = find_driver_files(str(tmp_path))

    assert paths(found.graphics) == [
        "/etc/vulkan/icd.d/nvidia_icd.json",
        "/etc/vulkan/implicit_layer.d/nvidia_layers.json",
        "/usr/lib/x86_64-linux-gnu/nvidia/xorg/libglxserver_nvidia.so.550.54.15",
        "/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    ]
    assert {f"{DEBIAN}/vdpau/libvdpau_nvidia.so.{VERSION}", f"{DEBIAN}/libnvidia-egl-gbm.so.1.1.0"} <= {
        *paths(found.libraries)
    }


def test_without_libraries_there_is_no_driver(tmp_path: Path) -> None:
    """An empty directory, one that is not there, and one with a program alone."""
    write(tmp_path / "usr/bin/nvidia-smi")
    link(tmp_path / "usr/lib64/libcuda.so.1", "libcuda.so.550.54.15")

    assert find_driver_files(str(tmp_path)) == DriverFiles()
    assert find_driver_files(str(tmp_path / "none")) == DriverFiles()


COMPONENTS = st.sampled_from(["a", "b", "c", "..", ".", ""])


@given(st.dictionaries(st.sampled_from("abc"), st.lists(COMPONENTS, max_size=4)), st.lists(COMPONENTS, max_size=5))
def test_no_path_leads_out_of_the_root(
    tmp_path_factory: pytest.TempPathFactory, links: dict[str, list[str]], path: list[str]
) -> None:
    """Whatever links there are, the outcome is in the root, is there, and is no link."""
    root = tmp_path_factory.mktemp("root")
    for name in "abc":
        if name in links:
            (root / name).symlink_to("/".join(links[name]) or "/")
        else:
            (root / name).mkdir()
    found = resolve(str(root), "/".join(path))

    if found is not None:
        file = root / found[1:]
        assert file.resolve() == file
        assert file.is_relative_to(root.resolve())
        assert file.exists()
