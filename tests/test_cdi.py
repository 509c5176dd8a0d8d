"""The document of a node's GPUs, as data: nothing here touches a file."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import pytest

from _nvplug.config import Config
from _nvplug.container.cdi import CharacterDevice, Hooks, Host, gpu_document, node_document
from _nvplug.container.cdi_document import DeviceNode, Document, Edits, Hook, Mount, decode, encode
from _nvplug.container.driver_files import DriverFile, DriverFiles
from _nvplug.hardware import Gpu, MigDevice
from _nvplug.resources import Device

DEBIAN: Final = "/usr/lib/x86_64-linux-gnu"
MOUNTED: Final = ("ro", "nosuid", "nodev", "rbind", "rprivate")
VOID: Final = "NVIDIA_VISIBLE_DEVICES=void"
ZERO: Final = Gpu(0, "GPU-a", "H100", "0000:18:00.0", 1, None, 0)
CUT: Final = Gpu(1, "GPU-b", "H100", "0000:2a:00.0", 0, None, 0, mig_enabled=True)
PART: Final = MigDevice(0, "MIG-c", 7, 0, 0, 1, 1, 1024, 66, 67)
GPUS: Final = (Device("GPU-a", ZERO), Device("MIG-c", CUT, mig=PART))


def file(path: str, *names: str, below: str = "") -> DriverFile:
    """One of the driver's."""
    return DriverFile(path, below + path, names)


FILES: Final = DriverFiles(
    version="550.54",
    libraries=(
        file(f"{DEBIAN}/libcuda.so.550.54", "libcuda.so.1"),
        file(f"{DEBIAN}/libnvidia-gpucomp.so.550.54"),
        file(f"{DEBIAN}/vdpau/libvdpau_nvidia.so.550.54", "libvdpau_nvidia.so.1"),
    ),
    programs=(file("/usr/bin/nvidia-smi"),),
    firmware=(file("/lib/firmware/nvidia/550.54/gsp_ga10x.bin"),),
    sockets=(file("/run/nvidia-persistenced/socket"),),
    graphics=(file("/usr/share/glvnd/egl_vendor.d/10_nvidia.json"),),
)


def nodes(*paths: str) -> MappingProxyType[str, CharacterDevice]:
    """Each with a minor number of its own."""
    return MappingProxyType({path: CharacterDevice(195, number, 0o666, 0) for number, path in enumerate(paths)})


NODES: Final = nodes(
    "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-caps/nvidia-cap66", "/dev/nvidia-caps/nvidia-cap67"
)


def made(*devices: Device, host: Host = Host(nodes=NODES), config: Config = Config(), **more: Any) -> Document:  # noqa: B008 - frozen
    """The document of some devices, which runtimes take."""
    document = gpu_document(devices or GPUS, host, config, **more)

    assert document is not None
    assert decode(encode(document)) == document
    return document


def paths(document: Document, name: str) -> list[str]:
    """Which device nodes a device has."""
    (found,) = [each for each in document.devices if each.name == name]
    return [node.path for node in found.container_edits.device_nodes]


def test_devices_have_their_uuid_and_their_index_for_names() -> None:
    """Each brings its own nodes, a MIG device those of its instances; all brings every one, once."""
    second = Device("MIG-d", CUT, mig=replace(PART, index=1, uuid="MIG-d", compute_instance=1))
    document = made(*GPUS, second)

    assert [each.name for each in document.devices] == ["GPU-a", "0", "MIG-c", "1:0", "MIG-d", "1:1", "all"]
    assert paths(document, "GPU-a") == paths(document, "0") == ["/dev/nvidia1"]
    caps = ["/dev/nvidia-caps/nvidia-cap66", "/dev/nvidia-caps/nvidia-cap67"]
    assert paths(document, "MIG-c") == paths(document, "1:0") == ["/dev/nvidia0", *caps]
    assert paths(document, "all") == ["/dev/nvidia1", "/dev/nvidia0", *caps]


def test_a_node_is_as_the_host_has_it() -> None:
    """With its numbers and permissions, its group where it has one, and where the host has it if elsewhere."""
    host = Host(nodes=MappingProxyType({"/dev/nvidia1": CharacterDevice(195, 1, 0o660, 44)}))
    plain, below = (
        made(GPUS[0], host=host, config=Config(dev_root=root)).devices[0].container_edits.device_nodes
        for root in ("/", "/run/nvidia/driver")
    )

    assert plain == (
        DeviceNode("/dev/nvidia1", type="c", major=195, minor=1, file_mode=0o660, gid=44, permissions="rw"),
    )
    assert [node.host_path for node in below] == ["/run/nvidia/driver/dev/nvidia1"]


def test_the_nodes_that_all_gpus_share_are_common() -> None:
    """Those that exist."""
    assert [node.path for node in made().container_edits.device_nodes] == ["/dev/nvidiactl"]


def test_no_variable_of_an_image_brings_other_gpus() -> None:
    """NVIDIA's runtime, where it is the default one, is told that all is seen to."""
    assert made().container_edits.env == (VOID,)


def test_displays_come_with_their_gpu() -> None:
    """Their nodes; and the links to them, where there is a hook that makes links. MIG devices have none."""
    card, render = "/dev/dri/card1", "/dev/dri/renderD128"
    host = Host(
        nodes=MappingProxyType({**NODES, **nodes(card, render)}),
        displays=MappingProxyType({ZERO.pci: (card, render), CUT.pci: (card,)}),
    )
    with_hooks = made(host=host._replace(hooks=Hooks("/usr/bin/nvidia-cdi-hook")))

    assert paths(made(host=host), "0") == ["/dev/nvidia1", card, render]
    assert card not in paths(made(host=host), "1:0")
    assert made(host=host).devices[0].container_edits.hooks == ()
    assert with_hooks.devices[0].container_edits.hooks == (
        Hook(
            "createContainer",
            "/usr/bin/nvidia-cdi-hook",
            (
                *("nvidia-cdi-hook", "create-symlinks"),
                *("--link", "../card1::/dev/dri/by-path/pci-0000:18:00.0-card"),
                *("--link", "../renderD128::/dev/dri/by-path/pci-0000:18:00.0-render"),
            ),
            ("NVIDIA_CTK_DEBUG=false",),
        ),
    )


def test_with_the_hooks_of_nvidias_toolkit_libraries_are_mounted_once() -> None:
    """Under their versioned names; the hooks make the links and tell the container's loader."""
    edits = made(host=Host(FILES, NODES, hooks=Hooks("/usr/bin/nvidia-ctk"))).container_edits

    assert edits.env == (f"NVIDIA_CTK_LIBCUDA_DIR={DEBIAN}", VOID)
    assert [mount.container_path for mount in edits.mounts] == [
        f"{DEBIAN}/libcuda.so.550.54",
        f"{DEBIAN}/libnvidia-gpucomp.so.550.54",
        f"{DEBIAN}/vdpau/libvdpau_nvidia.so.550.54",
        "/usr/bin/nvidia-smi",
        "/lib/firmware/nvidia/550.54/gsp_ga10x.bin",
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "/run/nvidia-persistenced/socket",
    ]
    assert edits.mounts[0] == Mount(f"{DEBIAN}/libcuda.so.550.54", f"{DEBIAN}/libcuda.so.550.54", MOUNTED)
    assert edits.mounts[-1].options == (*MOUNTED, "noexec")
    assert {(hook.hook_name, hook.path, hook.args[:2]) for hook in edits.hooks} == {
        ("createContainer", "/usr/bin/nvidia-ctk", ("nvidia-ctk", "hook"))
    }
    assert [hook.args[2:] for hook in edits.hooks] == [
        ("create-symlinks", "--link", f"libcuda.so.1::{DEBIAN}/libcuda.so"),
        ("enable-cuda-compat", "--host-driver-version=550.54"),
        ("update-ldcache", "--folder", DEBIAN, "--folder", f"{DEBIAN}/vdpau"),
        ("disable-device-node-modification",),
        ("update-application-profile",),
    ]


def test_hooks_that_are_not_known_or_not_wanted_are_not_used() -> None:
    """Without the one for the loader's cache, libraries are mounted under every name."""
    few = made(host=Host(FILES, NODES, hooks=Hooks("/h", frozenset({"create-symlinks", "update-ldcache"}))))
    other = made(host=Host(FILES, NODES, hooks=Hooks("/h", frozenset({"create-symlinks", "enable-cuda-compat"}))))

    assert [hook.args[1] for hook in few.container_edits.hooks] == ["create-symlinks", "update-ldcache"]
    assert other.container_edits.hooks == ()
    assert f"{DEBIAN}/libcuda.so.1" in {mount.container_path for mount in other.container_edits.mounts}


@pytest.mark.parametrize(
    ("place", "first", "second"),
    [
        (DEBIAN, DEBIAN, "/usr/lib64"),
        ("/usr/lib64", "/usr/lib64", DEBIAN),
        ("/lib64", "/lib64", DEBIAN),
        ("/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib64"),
        (f"{DEBIAN}/nvidia/current", DEBIAN, "/usr/lib64"),
        ("/nix/store/x-nvidia/lib", DEBIAN, "/usr/lib64"),
    ],
)
def test_without_hooks_libraries_are_where_every_loader_looks(place: str, first: str, second: str) -> None:
    """Under their own names where the host has them, and under each name that is asked for in both families' places."""
    files = DriverFiles(
        version="550.54",
        libraries=(
            file(f"{place}/libcuda.so.550.54", "libcuda.so.1", below="/root"),
            file(f"{place}/libnvidia-gpucomp.so.550.54", below="/root"),
        ),
    )
    edits = made(host=Host(files, NODES), config=Config(driver_root="/host")).container_edits

    assert [(mount.container_path, mount.host_path) for mount in edits.mounts] == [
        (f"{where}/{name}", f"/host/root{place}/{source}.550.54")
        for where, name, source in (
            (first, "libcuda.so.550.54", "libcuda.so"),
            (first, "libcuda.so.1", "libcuda.so"),
            (first, "libcuda.so", "libcuda.so"),
            (second, "libcuda.so.1", "libcuda.so"),
            (second, "libcuda.so", "libcuda.so"),
            (first, "libnvidia-gpucomp.so.550.54", "libnvidia-gpucomp.so"),
            (second, "libnvidia-gpucomp.so.550.54", "libnvidia-gpucomp.so"),
        )
    ]
    assert edits.hooks == ()
    assert edits.env[0] == f"NVIDIA_CTK_LIBCUDA_DIR={first}"


def test_the_version_is_the_lowest_that_has_it_all() -> None:
    """Names that begin with a digit came with 0.5, as did nodes that are elsewhere on the host."""
    devices = {"all": ["/dev/nvidiactl"]}
    plain = node_document("gds", devices, Host(nodes=NODES), Config())
    below = node_document("gds", devices, Host(nodes=NODES), Config(dev_root="/host"))
    digit = node_document("imex-channel", {"0": ["/dev/nvidiactl"]}, Host(nodes=NODES), Config())

    assert [each and each.cdi_version for each in (plain, below, digit)] == ["0.3.0", "0.5.0", "0.5.0"]
    assert made().cdi_version == "0.5.0"


def test_what_cannot_be_seen_at_present_stays_as_it_was() -> None:
    """A node that vanished with its GPU, and the libraries while a driver is being replaced."""
    before = made(host=Host(FILES, NODES))
    now = made(host=Host(nodes=nodes("/dev/nvidiactl", "/dev/nvidia1")), before=before)

    assert [each.name for each in now.devices] == [each.name for each in before.devices]
    assert now.devices[2:4] == before.devices[2:4]
    assert now.container_edits == before.container_edits


def test_a_new_driver_takes_the_place_of_the_old_one() -> None:
    """Nothing is left of the old one's files."""
    before = made(host=Host(FILES, NODES))
    new = FILES._replace(libraries=(file("/usr/lib64/libcuda.so.560.1", "libcuda.so.1"),), version="560.1")

    assert made(host=Host(new, NODES), before=before) == made(host=Host(new, NODES))


def test_a_device_that_is_gone_has_no_name() -> None:
    """Unless it is not known which devices there are."""
    before = made()
    one = [each.name for each in made(GPUS[0], before=before).devices]
    unsure = [each.name for each in made(GPUS[0], before=before, complete=False).devices]

    assert one == ["GPU-a", "0", "all"]
    assert set(unsure) == {"GPU-a", "0", "MIG-c", "1:0", "all"}


def test_all_stands_for_what_is_offered() -> None:
    """A device that was named before and is not offered now can still be found by its own name."""
    assert paths(made(offered={"GPU-a"}), "all") == ["/dev/nvidia1"]
    assert paths(made(offered={"GPU-a"}), "MIG-c") != []


def test_an_index_is_that_of_the_first() -> None:
    """A GPU that is gone may have had the index that another has now."""
    gone = replace(ZERO, uuid="GPU-gone", minor=0)
    document = made(GPUS[0], Device("GPU-gone", gone))

    assert [each.name for each in document.devices] == ["GPU-a", "0", "GPU-gone", "all"]
    assert paths(document, "0") == ["/dev/nvidia1"]


def test_a_device_without_nodes_is_not_described() -> None:
    """A container that asked for it must not start without it. GPUs on paper never have any."""
    none = Host()
    simulated = Config(device_discovery_strategy="simulated:2xH100")

    assert gpu_document(GPUS, none, Config()) is None
    assert made(host=none, config=simulated).devices[0].container_edits == Edits(env=(VOID,))


def test_slashes_of_old_uuids_are_no_hindrance() -> None:
    """Drivers before 470 give MIG devices names that CDI does not allow."""
    old = Device("x", CUT, mig=replace(PART, uuid="MIG-GPU-b/7/0"))

    assert made(old).devices[0].name == "MIG-GPU-b_7_0"


def test_what_consists_of_nodes_alone_brings_those_that_exist() -> None:
    """And is no document without any."""
    host = Host(nodes=nodes("/dev/gdrdrv"))
    document = node_document("gdrcopy", {"all": ["/dev/gdrdrv", "/dev/x"]}, host, Config(driver_root="/h"), ["/etc/c"])

    assert document is not None
    assert document.kind == "k8s.device-plugin.nvidia.com/gdrcopy"
    assert paths(document, "all") == ["/dev/gdrdrv"]
    assert document.container_edits.mounts == (Mount("/h/etc/c", "/etc/c", MOUNTED),)
    assert decode(encode(document)) == document
    assert node_document("gds", {"all": ["/dev/nvidia-fs0"]}, host, Config()) is None


@pytest.mark.parametrize(
    ("was", "becomes", "problem"),
    [
        ('"0.5.0"', '"0.3.0"', "0.3.0 is not the lowest version that has all of it"),
        ('"0.5.0"', '"0.6.0"', "0.6.0 is not the lowest version"),
        ('"kind": "k8s.device-plugin.nvidia.com/gpu"', '"kind": "gpu"', "'gpu' is not a vendor, a slash and a class"),
        ('"name": "GPU-a"', '"name": "-a"', "'-a' is no name of a device, or is that of two"),
        ('"name": "GPU-a"', '"name": "0"', "'0' is no name of a device, or is that of two"),
        ('"type": "c"', '"type": "b"', "/dev/nvidia1 has an odd type or permissions"),
        ('"permissions": "rw"', '"permissions": "x"', "/dev/nvidia1 has an odd type or permissions"),
        ('"path": "/dev/nvidia1"', '"path": "dev/nvidia1"', "'dev/nvidia1' is not an absolute path"),
        ("NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_VISIBLE_DEVICES", "is not a name, = and a value"),
        ('"createContainer"', '"prestart"', "'prestart' is no hook"),
        ('"path": "/dev/nvidia1"', '"odd": 1, "path": "/dev/nvidia1"', "unknown field `odd`"),
        ('"0.5.0"', '"0.5.0', "JSON is malformed"),
    ],
)
def test_what_runtimes_refuse_is_found(was: str, becomes: str, problem: str) -> None:
    """Each with the reason."""
    text = encode(made(host=Host(FILES, NODES, hooks=Hooks("/usr/bin/nvidia-ctk")))).decode()

    assert was in text
    with pytest.raises(ValueError, match=problem):
        decode(text.replace(was, becomes, 1).encode())


def test_a_document_must_have_devices_and_they_must_add_something() -> None:
    """CNCF's package refuses both."""
    text = b'{"cdiVersion": "0.3.0", "kind": "a.com/b", "devices": [%s]}'

    with pytest.raises(ValueError, match="there is no device in it"):
        decode(text % b"")
    with pytest.raises(ValueError, match="device x adds nothing"):
        decode(text % b'{"name": "x", "containerEdits": {}}')
