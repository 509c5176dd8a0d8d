"""CDI documents of a host that was made for the test: what is looked for, and what is written."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from driver_tree import DEBIAN, VERSION, lay, link, write

from _nvplug.config import Config
from _nvplug.container.cdi import HOOKS, CharacterDevice, Hooks
from _nvplug.container.cdi_document import Device as Entry
from _nvplug.container.cdi_document import Document, Edits, decode, encode
from _nvplug.container.cdi_files import Claim, describe, read_document, remove_documents, renew, write_document
from _nvplug.container.cdi_host import look
from _nvplug.container.extras import Extra
from _nvplug.container.facts import NodeFacts, Terms
from _nvplug.errors import DocumentError
from _nvplug.hardware import Gpu, Hardware, LeftOut, MigDevice
from _nvplug.resources import Device

GPU_FILE: Final = "k8s.device-plugin.nvidia.com-gpu.json"
TOOLKIT: Final = "/usr/bin/nvidia-ctk"


def gpu(number: int, **more: Any) -> Gpu:
    """A GPU of which all numbers are the same."""
    return Gpu(number, f"GPU-{number}", "H100", f"0000:0{number}:00.0", number, None, 0, **more)


TWO: Final = Hardware((gpu(0), gpu(1)), driver_version=VERSION)
BOTH: Final = frozenset({"GPU-0", "GPU-1"})
PART: Final = MigDevice(0, "MIG-x", 7, 0, 0, 1, 1, 1024, 66, 67)


def node(root: Path, name: str, minor: int = 0) -> None:
    """Makes a character device, or skips where that is not allowed."""
    path = root / "dev" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(195, minor))
    except PermissionError:
        pytest.skip("device nodes can only be made by root")
    path.chmod(0o666)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with a driver and two GPUs."""
    lay(tmp_path)
    for number, name in enumerate(("nvidia0", "nvidia1", "nvidiactl")):
        node(tmp_path, name, number)
    return tmp_path


def terms(**fields: Any) -> Terms:
    """What is asked for."""
    return Terms(Config(**fields))


def names(document: Document) -> list[str]:
    """Of the devices."""
    return [entry.name for entry in document.devices]


def test_nodes_are_those_that_exist_and_are_devices(root: Path) -> None:
    """With their numbers; of a GPU also those below /dev/dri that sysfs tells of."""
    write(root / "dev/nvidia-uvm", "no device")
    node(root, "dri/card0", 5)
    for name in ("card0", "card0-DP-1", "renderD128"):
        (root / "sys/bus/pci/devices/0000:00:00.0/drm" / name).mkdir(parents=True)
    host = look([Device("GPU-0", gpu(0))], VERSION, Config(), ["/dev/nvidia1", "/dev/none"], root=str(root))

    assert {path: (each.major, each.minor) for path, each in host.nodes.items()} == {
        "/dev/nvidia0": (195, 0),
        "/dev/nvidia1": (195, 1),
        "/dev/nvidiactl": (195, 2),
        "/dev/dri/card0": (195, 5),
    }
    assert host.nodes["/dev/nvidia0"] == CharacterDevice(195, 0, 0o666, os.getgid())
    assert host.displays == {"0000:00:00.0": ("/dev/dri/card0",)}


def test_a_mounted_root_comes_before_that_of_the_process(root: Path) -> None:
    """For the driver's files and for device nodes; what it does not have is looked for in the process's own /dev."""
    node(root / "driver-root", "nvidia0", 7)
    lay(root / "driver-root", "/usr/lib64", version="535.1.2")
    host = look([Device("GPU-0", gpu(0)), Device("GPU-1", gpu(1))], "", Config(), root=str(root))

    assert host.files.version == "535.1.2"
    assert host.nodes["/dev/nvidia0"].minor == 7
    assert host.nodes["/dev/nvidia1"].minor == 1


def test_outside_a_container_the_driver_is_where_the_host_has_it(root: Path) -> None:
    """In the root that the operator names."""
    lay(root / "opt/driver", "/usr/lib64", version="535.1.2")
    (root / "opt/driver/dev").mkdir()
    node(root / "opt/driver", "nvidia0", 9)
    host = look(
        [Device("GPU-0", gpu(0))], "", Config(driver_root="/opt/driver", dev_root="/opt/driver"), root=str(root)
    )

    assert host.files.version == "535.1.2"
    assert host.nodes["/dev/nvidia0"].minor == 9


@pytest.mark.parametrize(
    ("libraries", "triplet"),
    [("/usr/lib/aarch64-linux-gnu", "aarch64-linux-gnu"), ("/usr/lib64", f"{os.uname().machine}-linux-gnu")],
)
def test_the_machine_is_that_of_the_libraries(tmp_path: Path, libraries: str, triplet: str) -> None:
    """As their place says; where it does not, this one."""
    lay(tmp_path, libraries)

    assert look([], "", Config(), root=str(tmp_path)).triplet == triplet


def test_the_toolkit_is_the_one_that_exists(root: Path) -> None:
    """The one that is asked for; by default the older program, or the newer one."""

    def find(**fields: Any) -> Hooks | None:
        return look([], "", Config(**fields), root=str(root)).hooks

    assert find() is None
    write(root / "usr/bin/nvidia-cdi-hook", "#!/bin/sh")
    assert find() == Hooks("/usr/bin/nvidia-cdi-hook")
    write(root / "usr/bin/nvidia-ctk", "#!/bin/sh")
    assert find() == Hooks(TOOLKIT)
    assert find(nvidia_cdi_hook_path="/opt/hook") is None
    assert find(nvidia_cdi_hook_path="") is None
    assert find(cdi_disable_hooks=("all",)) is None
    assert find(cdi_disable_hooks=("enable-cuda-compat",)) == Hooks(TOOLKIT, frozenset(HOOKS) - {"enable-cuda-compat"})


def test_an_older_toolkit_is_not_asked_for_hooks_that_it_does_not_know(root: Path) -> None:
    """It would fail, and no container would start: what the program knows stands in it. A script tells nothing."""
    program = root / "usr/bin/nvidia-ctk"
    program.write_bytes(b"\x7fELF... create-symlinks update-ldcache ... enable-cuda-compat\0")
    older = look([], "", Config(), root=str(root)).hooks
    program.write_bytes(b"\x7fELF... " + " ".join(HOOKS).encode())
    os.utime(program, ns=(1, 1))

    assert older == Hooks(TOOLKIT, frozenset({"create-symlinks", "update-ldcache", "enable-cuda-compat"}))
    assert look([], "", Config(), root=str(root)).hooks == Hooks(TOOLKIT)


def test_a_toolkit_that_cannot_be_seen_is_believed_in_if_somebody_named_it(root: Path) -> None:
    """The GPU Operator names its own, which a container with nothing but the driver's root does not see."""
    lay(root / "driver-root")
    write(root / "usr/bin/nvidia-ctk")
    plain = Config(driver_root="/run/nvidia/driver")
    asked = replace(plain, nvidia_cdi_hook_path="/usr/local/nvidia/toolkit/nvidia-cdi-hook")

    assert look([], "", plain, root=str(root)).hooks is None
    assert look([], "", asked, root=str(root)).hooks == Hooks("/usr/local/nvidia/toolkit/nvidia-cdi-hook")


def test_a_host_is_described(root: Path) -> None:
    """From its files to its document, with the paths that the host has for them."""
    lay(root / "driver-root")
    document = describe(TWO, BOTH, terms(driver_root="/run/nvidia/driver"), root=str(root)).document

    assert names(document) == ["GPU-0", "0", "GPU-1", "1", "all"]
    assert document.container_edits.mounts[0].host_path == f"/run/nvidia/driver{DEBIAN}/libcuda.so.{VERSION}"
    assert document.container_edits.mounts[0].container_path == f"{DEBIAN}/libcuda.so.{VERSION}"


def test_nothing_is_mounted_that_does_not_exist(root: Path) -> None:
    """Whatever links lead nowhere."""
    link(root / f"{DEBIAN[1:]}/libnvidia-cfg.so.1", "gone")
    link(root / "usr/bin/nvidia-persistenced", "/gone")
    (root / "lib/firmware/nvidia" / VERSION / "gsp_ga10x.bin").unlink()
    mounts = describe(TWO, BOTH, terms(), root=str(root)).document.container_edits.mounts

    assert mounts
    for mount in mounts:
        assert (root / mount.host_path[1:]).exists(), mount


def test_what_containers_get_besides_has_documents_of_its_own(root: Path) -> None:
    """By class; what has no nodes has none."""
    for name in ("gdrdrv", "nvidia-caps-imex-channels/channel0"):
        node(root, name)
    facts = NodeFacts(("0",), (Extra("gdrcopy", ("/dev/gdrdrv",)), Extra("gds", ("/dev/nvidia-fs0",), ("/run/udev",))))
    others = describe(TWO, BOTH, Terms(Config(), facts), root=str(root)).others

    assert {name: names(document) for name, document in others.items()} == {"gdrcopy": ["all"], "imex-channel": ["0"]}


def test_a_node_without_device_nodes_cannot_be_described(tmp_path: Path) -> None:
    """An error says what to do; GPUs on paper can."""
    with pytest.raises(DocumentError, match="no GPU has a device node") as failed:
        describe(TWO, BOTH, terms(), root=str(tmp_path))
    assert "nvidia-smi" in failed.value.remedy
    simulated = terms(device_discovery_strategy="simulated:2xH100")
    assert names(describe(TWO, BOTH, simulated, root=str(tmp_path)).document) == ["GPU-0", "0", "GPU-1", "1", "all"]


def test_what_was_once_offered_is_described_for_as_long_as_it_exists(root: Path) -> None:
    """Containers that have it may start again. What was never offered has no name."""
    only = describe(TWO, {"GPU-0"}, terms(), root=str(root))
    before = describe(TWO, BOTH, terms(), root=str(root)).document
    later = describe(TWO, {"GPU-0"}, terms(), before, root=str(root))
    gone = describe(replace(TWO, gpus=(gpu(0),)), {"GPU-0"}, terms(), before, root=str(root))
    unread = replace(TWO, gpus=(gpu(0),), left_out=(LeftOut(1, "it does not answer"),))

    assert names(only.document) == ["GPU-0", "0", "all"]
    assert names(later.document) == ["GPU-0", "0", "GPU-1", "1", "all"]
    assert later.named == BOTH
    assert names(gone.document) == ["GPU-0", "0", "all"]
    assert set(names(describe(unread, {"GPU-0"}, terms(), before, root=str(root)).document)) == {*names(before)}


def test_a_device_whose_node_is_missing_is_not_named(root: Path) -> None:
    """The others are."""
    node(root, "nvidia-caps/nvidia-cap66")
    cut = Hardware((gpu(0), gpu(1, mig_enabled=True, mig_devices=(PART,))))
    description = describe(cut, {"GPU-0", "MIG-x"}, terms(), root=str(root))

    assert description.named == {"GPU-0"}
    assert names(description.document) == ["GPU-0", "0", "all"]


@pytest.fixture
def document(root: Path) -> Document:
    """Some document."""
    return describe(TWO, BOTH, terms(), root=str(root)).document


def test_a_document_is_written_once(tmp_path: Path, document: Document) -> None:
    """Its directory is made, everybody may read it, nothing else is left there, and the same is not written again."""
    file = tmp_path / "cdi" / GPU_FILE

    assert write_document(file, document)
    before = file.stat()
    assert not write_document(file, document)
    assert file.stat() == before
    assert stat.S_IMODE(before.st_mode) == 0o644
    assert [*file.parent.iterdir()] == [file]
    assert read_document(file) == document
    assert decode(file.read_bytes()) == document


def test_a_document_is_replaced_as_a_whole(tmp_path: Path, document: Document) -> None:
    """Whoever has the old one open goes on reading it."""
    file = tmp_path / GPU_FILE
    write_document(file, document)
    with file.open("rb") as reader:
        assert write_document(file, replace_kind(document))
        old = reader.read()

    assert old == encode(document)
    assert read_document(file) == replace_kind(document)


def replace_kind(document: Document) -> Document:
    """Another one."""
    return Document(document.cdi_version, "example.com/gpu", document.devices, document.container_edits)


def test_what_runtimes_would_refuse_is_not_written(tmp_path: Path, document: Document) -> None:
    """What was there is still there."""
    file = tmp_path / GPU_FILE
    write_document(file, document)
    empty = Document("0.3.0", document.kind, (Entry("x", Edits()),))

    with pytest.raises(DocumentError, match="device x adds nothing"):
        write_document(file, empty)
    assert read_document(file) == document


def test_a_directory_that_cannot_be_written_to_is_named_with_a_remedy(tmp_path: Path, document: Document) -> None:
    """A file in the place of the directory, a parent that does not exist, and a disk that is full."""
    write(tmp_path / "file")

    for file, reason in ((tmp_path / "file" / "x.json", "Not a directory"), (tmp_path / "a/b/x.json", "No such file")):
        with pytest.raises(DocumentError, match=f"{file}: {reason}") as failed:
            write_document(file, document)
        assert "mount the host's" in failed.value.remedy


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither half a document nor a file of another name."""

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "cdi" / GPU_FILE
    write_document(file, document)
    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(DocumentError, match="No space left on device"):
        write_document(file, replace_kind(document))
    assert [*file.parent.iterdir()] == [file]
    assert read_document(file) == document


def test_what_is_no_document_of_ours_is_replaced(tmp_path: Path, root: Path) -> None:
    """Half a one, and one with fields that nvplug does not write."""
    directory = tmp_path / "cdi"
    directory.mkdir()
    for content in ("{", '{"cdiVersion": "0.6.0", "annotations": {}}'):
        (directory / GPU_FILE).write_text(content)
        description, changed, _ = renew(directory, TWO, BOTH, terms(), root=str(root))

        assert changed == (directory / GPU_FILE,)
        assert read_document(directory / GPU_FILE) == description.document


def test_documents_are_renewed_when_something_changed_and_only_then(tmp_path: Path, root: Path) -> None:
    """Driver, devices, or somebody's hand. One that was removed is made again, with all that it had."""
    file = tmp_path / "cdi" / GPU_FILE

    def again(hardware: Hardware = TWO, last: Document | None = None) -> bool:
        return renew(file.parent, hardware, BOTH, terms(), last, root=str(root))[1] == (file,)

    assert again()
    assert not again()
    lay(root, version="560.1")
    assert again(replace(TWO, driver_version="560.1"))
    assert again(replace(TWO, gpus=(gpu(0),)))
    assert not again(replace(TWO, gpus=(gpu(0),)))
    last = read_document(file)
    file.unlink()
    (root / "dev/nvidia0").unlink()
    assert last is not None
    assert again(replace(TWO, gpus=(gpu(0),)), last)
    assert read_document(file) is not None


def test_documents_are_removed(tmp_path: Path, document: Document) -> None:
    """Ours, of every class, and no others; and none if somebody has written to the GPUs' meanwhile."""
    gds = tmp_path / "k8s.device-plugin.nvidia.com-gds.json"
    other = tmp_path / "nvidia.yaml"
    for file in (tmp_path / GPU_FILE, gds, other):
        file.write_bytes(encode(document))

    status = (tmp_path / GPU_FILE).stat()
    claim = Claim(status.st_ino, status.st_mtime_ns)

    assert remove_documents(tmp_path, claim._replace(modified=0)) == ()
    assert remove_documents(tmp_path, claim) == (tmp_path / GPU_FILE, gds)
    assert remove_documents(tmp_path, claim) == ()
    assert other.exists()
    gds.mkdir()
    with pytest.raises(DocumentError, match="Is a directory"):
        remove_documents(tmp_path, claim)
