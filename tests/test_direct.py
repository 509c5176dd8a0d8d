"""What the strategy direct mounts into a container."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from driver_tree import DEBIAN, VERSION, lay

from _nvplug.config import Config, read_config
from _nvplug.container import Mount
from _nvplug.container.direct import driver_mounts, find_driver_mounts
from _nvplug.container.driver_files import DriverFile, DriverFiles
from _nvplug.happenings import ConfigUnmet, DriverFilesFound

FILES: Final = DriverFiles(
    "/",
    VERSION,
    libraries=(
        DriverFile("/usr/lib64/libcuda.so.1.1", "/usr/lib64/libcuda.so.1.1", ("libcuda.so", "libcuda.so.1")),
        DriverFile("/usr/lib64/libnvidia-gpucomp.so.1.1", "/usr/lib64/libnvidia-gpucomp.so.1.1"),
        DriverFile("/usr/lib64/vdpau/libvdpau_nvidia.so.1.1", "/x/libvdpau_nvidia.so.1.1", ("libvdpau_nvidia.so.1",)),
    ),
    programs=(DriverFile("/usr/local/bin/nvidia-smi", "/opt/nvidia-smi"),),
    firmware=(DriverFile("/lib/firmware/nvidia/1.1/gsp_ga10x.bin", "/lib/firmware/nvidia/1.1/gsp_ga10x.bin"),),
    graphics=(DriverFile("/etc/vulkan/icd.d/nvidia_icd.json", "/usr/share/vulkan/icd.d/nvidia_icd.json"),),
)


def config(*arguments: str) -> Config:
    """What the flags ask for."""
    return read_config(["--device-list-strategy=direct", *arguments], {})


def by_place(mounts: tuple[Mount, ...]) -> dict[str, str]:
    """From paths in a container to paths on the host; each may be there once, and only to be read."""
    found = {mount.container_path: mount.host_path for mount in mounts}

    assert len(found) == len(mounts)
    assert all(mount.read_only for mount in mounts)
    return found


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_libraries_lie_where_loaders_look_anyway(machine: str) -> None:
    """By every name that is asked for, in the directories of both families of distributions; programs are on PATH."""
    expected = {
        f"{place}/{name}": f"/host/usr/lib64/{file}"
        for place in (f"/usr/lib/{machine}-linux-gnu", "/usr/lib64")
        for name, file in (
            ("libcuda.so", "libcuda.so.1.1"),
            ("libcuda.so.1", "libcuda.so.1.1"),
            ("libnvidia-gpucomp.so.1.1", "libnvidia-gpucomp.so.1.1"),
        )
    }
    expected["/usr/lib64/libcuda.so.1.1"] = "/host/usr/lib64/libcuda.so.1.1"
    expected["/usr/lib64/vdpau/libvdpau_nvidia.so.1.1"] = "/host/x/libvdpau_nvidia.so.1.1"
    expected["/usr/lib64/vdpau/libvdpau_nvidia.so.1"] = "/host/x/libvdpau_nvidia.so.1.1"
    expected["/usr/bin/nvidia-smi"] = "/host/opt/nvidia-smi"
    expected["/etc/vulkan/icd.d/nvidia_icd.json"] = "/host/usr/share/vulkan/icd.d/nvidia_icd.json"

    assert by_place(driver_mounts(FILES, config("--driver-root=/host"), machine)) == expected


def test_a_driver_in_the_hosts_root_is_found(tmp_path: Path) -> None:
    """As on most hosts, where its files lie among all others: they are mounted one by one."""
    lay(tmp_path)
    mounts, remark = find_driver_mounts(config(), "", str(tmp_path))

    found = by_place(mounts)
    assert found["/usr/lib64/libcuda.so.1"] == f"{DEBIAN}/libcuda.so.{VERSION}"
    assert found["/usr/bin/nvidia-smi"] == "/usr/bin/nvidia-smi"
    assert not any(place.startswith("/usr/local/nvidia") for place in found)
    assert remark == DriverFilesFound("/", VERSION, 5, 2)


@pytest.mark.parametrize("root", ["/home/kubernetes/bin/nvidia", "/opt/nvidia"])
def test_a_directory_of_the_drivers_own_is_mounted_whole(tmp_path: Path, root: str) -> None:
    """As Google's plugin does, to where it does; and programs that no script prepares find the libraries, too."""
    lay(tmp_path / "driver-root" / root[1:], "/lib64", programs="/bin")
    mounts, remark = find_driver_mounts(config(), "", str(tmp_path))

    found = by_place(mounts)
    assert found["/usr/local/nvidia"] == root
    assert found[f"{DEBIAN}/libcuda.so.1"] == f"{root}/lib64/libcuda.so.{VERSION}"
    assert remark == DriverFilesFound(root, VERSION, 5, 2)


def test_a_whole_system_is_not_mounted(tmp_path: Path) -> None:
    """The root of NVIDIA's driver container holds more than a driver."""
    lay(tmp_path / "run/nvidia/driver", "/lib64")
    mounts, _ = find_driver_mounts(config(), "", str(tmp_path))

    found = by_place(mounts)
    assert found[f"{DEBIAN}/libcuda.so.1"] == f"/run/nvidia/driver/lib64/libcuda.so.{VERSION}"
    assert "/run/nvidia/driver" not in found.values()


@pytest.mark.parametrize(
    ("roots", "seen"),
    [
        ((), "driver-root/srv/driver"),
        (("--driver-root=/srv",), "driver-root/driver"),
        (("--driver-root=/elsewhere",), "srv/driver"),
        (("--driver-root-ctr-path=/nowhere",), "srv/driver"),
    ],
)
def test_both_directories_can_be_named(tmp_path: Path, roots: tuple[str, ...], seen: str) -> None:
    """That of the host as the host calls it, however nvplug sees it."""
    (tmp_path / "driver-root").mkdir()
    lay(tmp_path / seen, "/lib64", programs="/bin")
    asked = config("--direct-host-path=/srv/driver", "--direct-container-path=/opt/gpu", *roots)
    mounts, remark = find_driver_mounts(asked, "", str(tmp_path))

    found = by_place(mounts)
    assert found["/opt/gpu"] == "/srv/driver"
    assert found[f"{DEBIAN}/libcuda.so.1"] == f"/srv/driver/lib64/libcuda.so.{VERSION}"
    assert remark == DriverFilesFound("/srv/driver", VERSION, 5, 2)


@pytest.mark.parametrize("mounted", [True, False])
def test_a_driver_in_a_root_of_its_own_is_where_the_host_has_it(tmp_path: Path, mounted: bool) -> None:
    """Whether nvplug runs on the host or sees that root through a mount."""
    lay(tmp_path / ("driver-root" if mounted else "run/nvidia/driver"))
    mounts, remark = find_driver_mounts(config("--driver-root=/run/nvidia/driver"), "", str(tmp_path))

    assert by_place(mounts)["/usr/lib64/libcuda.so.1"] == f"/run/nvidia/driver{DEBIAN}/libcuda.so.{VERSION}"
    assert remark == DriverFilesFound("/run/nvidia/driver", VERSION, 5, 2)


@pytest.mark.parametrize("named", [(), ("--direct-host-path=/srv/driver",)])
def test_a_driver_that_is_not_there_is_missed(tmp_path: Path, named: tuple[str, ...]) -> None:
    """Aloud; a directory that was named is given all the same."""
    mounts, remark = find_driver_mounts(config(*named), "", str(tmp_path))

    assert by_place(mounts) == ({"/usr/local/nvidia": "/srv/driver"} if named else {})
    assert isinstance(remark, ConfigUnmet)
    assert ("/srv/driver" if named else "/") in remark.reason
