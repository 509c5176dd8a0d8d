"""The document of a node's GPUs: from devices, configuration and what was found on the host, without I/O."""

from __future__ import annotations

import posixpath
from collections.abc import Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from _nvplug.config import Config
from _nvplug.container import cdi_names
from _nvplug.container.cdi_document import Device as Entry
from _nvplug.container.cdi_document import DeviceNode, Document, Edits, Hook, Mount, compose
from _nvplug.container.driver_files import DriverFiles
from _nvplug.container.edits import on_host
from _nvplug.container.library_paths import LINKS, library_paths, stem_of
from _nvplug.container.nodes import node_paths
from _nvplug.resources import Device

__all__ = ["CONTROL_NODES", "HOOKS", "CharacterDevice", "Hooks", "Host", "gpu_document", "node_document"]

HOOKS: Final = (
    "create-symlinks",
    "enable-cuda-compat",
    "update-ldcache",
    "disable-device-node-modification",
    "update-application-profile",
)
"""What NVIDIA's toolkit can do in a container that is being made, in the order in which it is asked to."""

CONTROL_NODES: Final = ("/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl")
"""What every GPU needs besides its own."""

_MOUNTED: Final = ("ro", "nosuid", "nodev", "rbind", "rprivate")


class CharacterDevice(NamedTuple):
    """A device node of the host: its numbers, permissions and group."""

    major: int
    minor: int
    mode: int
    group: int


class Hooks(NamedTuple):
    """NVIDIA's toolkit on the host.

    Attributes:
        program: its path there: nvidia-ctk or nvidia-cdi-hook.
        known: those of HOOKS that it has, and that may be used.
    """

    program: str
    known: frozenset[str] = frozenset(HOOKS)


class Host(NamedTuple):
    """What of a host goes into its documents, as it was found at one moment.

    Attributes:
        files: of the driver.
        nodes: the character devices there are, by path.
        displays: the paths below /dev/dri of each GPU, by its PCI address.
        hooks: None where there is no toolkit.
        triplet: of its machine, as in Debian's directories: ``x86_64-linux-gnu``.
    """

    files: DriverFiles = DriverFiles()
    nodes: Mapping[str, CharacterDevice] = MappingProxyType({})
    displays: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    hooks: Hooks | None = None
    triplet: str = "x86_64-linux-gnu"


def gpu_document(
    devices: Sequence[Device],
    host: Host,
    config: Config,
    *,
    before: Document | None = None,
    offered: Container[str] | None = None,
    complete: bool = True,
) -> Document | None:
    """The document of a node's GPUs and MIG devices; None where nothing can be said of any.

    Each device has its UUID and its index for names, and there is ``all``. What cannot be seen at present stays as it
    was: answers of Allocate live on in the kubelet's checkpoint, so a name once given must be good for as long as
    there is the device.

    Args:
        devices: whole GPUs and MIG devices, each once; of those with the same index the first one has it.
        host: what was found.
        config: says where the host has these things.
        before: the document that this one takes the place of.
        offered: UUIDs of those that ``all`` stands for; None for all.
        complete: whether ``devices`` are all there are. Otherwise whatever else was named before is still.
    """
    earlier = {entry.name: entry for entry in before.devices} if before else {}
    entries: dict[str, Entry] = {}
    every: dict[str, Edits] = {}
    for device in devices:
        name = cdi_names.device_name(device.uuid)
        edits = _device_edits(device, host, config)
        if edits is None and name in earlier:
            edits = earlier[name].container_edits
        if edits is None and config.device_discovery_strategy.startswith("simulated:"):
            # A GPU on paper has no nodes, and a device that adds nothing is not allowed.
            edits = Edits(env=(_VOID,))
        if edits is not None:
            for each in (name, cdi_names.device_name(device.index)):
                entries.setdefault(each, Entry(each, edits))
            every[device.uuid] = edits
    chosen = [edits for uuid, edits in every.items() if offered is None or uuid in offered] or [*every.values()]
    if chosen:
        entries[cdi_names.ALL] = Entry(cdi_names.ALL, _together(chosen))
    if not complete:
        entries = {**earlier, **entries}
    if not entries:
        return None
    common = _common_edits(host, config)
    if before and not host.files.libraries:
        # The driver is being replaced. A container that starts meanwhile fails either way, and one that starts right
        # after must not be without libraries.
        common = before.container_edits
    return compose(cdi_names.kind(cdi_names.GPU), entries.values(), common)


def node_document(
    device_class: str, devices: Mapping[str, Sequence[str]], host: Host, config: Config, mounts: Sequence[str] = ()
) -> Document | None:
    """The document of something that consists of device nodes alone; None if there are none.

    Args:
        device_class: see cdi_names.
        devices: the paths of the nodes of each, by its name.
        host: what was found.
        config: says where the host has it.
        mounts: paths of what else containers need, below the driver's root.
    """
    entries = []
    for name, paths in devices.items():
        nodes = tuple(_node(path, host.nodes[path], config) for path in paths if path in host.nodes)
        if nodes:
            entries.append(Entry(name, Edits(device_nodes=nodes)))
    if not entries:
        return None
    common = Edits(
        env=(_VOID,), mounts=tuple(Mount(on_host(config.driver_root, path), path, _MOUNTED) for path in mounts)
    )
    return compose(cdi_names.kind(device_class), entries, common)


# Where NVIDIA's runtime is the default one, an image that sets this variable to ``all`` would get every GPU. The
# runtime takes this value as the word of somebody who has seen to it already.
_VOID: Final = "NVIDIA_VISIBLE_DEVICES=void"


def _device_edits(device: Device, host: Host, config: Config) -> Edits | None:
    """What makes a device usable; None if a node of it is not there, or it has none."""
    paths = tuple(node_paths(device))
    if not paths or not all(path in host.nodes for path in paths):
        return None
    hooks: tuple[Hook, ...] = ()
    if device.mig is None:
        displays = host.displays.get(device.gpu.pci, ())
        paths += displays
        links = [f"../{posixpath.basename(path)}::{_by_path(path, device.gpu.pci)}" for path in displays]
        hooks = tuple(_hooks(host.hooks, "create-symlinks", *_each("--link", links))) if links else ()
    return Edits(device_nodes=tuple(_node(path, host.nodes[path], config) for path in paths), hooks=hooks)


def _node(path: str, device: CharacterDevice, config: Config) -> DeviceNode:
    """A node as the host has it, as open as there; but a container has no use for making others like it (``m``)."""
    where = on_host(config.dev_root, path)
    return DeviceNode(
        path,
        host_path="" if where == path else where,
        type="c",
        major=device.major,
        minor=device.minor,
        file_mode=device.mode,
        # Groups of the container's process came with version 0.7, which podman of 2024 does not take.
        gid=device.group or None,
        permissions="rw",
    )


def _by_path(path: str, pci: str) -> str:
    kind = "render" if posixpath.basename(path).startswith("render") else "card"
    return f"/dev/dri/by-path/pci-{pci}-{kind}"


def _together(edits: Sequence[Edits]) -> Edits:
    """Everything that is in any of them, once."""
    return Edits(
        env=tuple(dict.fromkeys(variable for each in edits for variable in each.env)),
        device_nodes=tuple({node.path: node for each in edits for node in each.device_nodes}.values()),
        hooks=tuple(dict.fromkeys(hook for each in edits for hook in each.hooks)),
    )


def _common_edits(host: Host, config: Config) -> Edits:
    """What each container with a GPU gets."""
    nodes = tuple(_node(path, host.nodes[path], config) for path in CONTROL_NODES if path in host.nodes)
    files, hooks = host.files, host.hooks
    if hooks is not None and "update-ldcache" in hooks.known:
        libraries = [(file.path, file.source) for file in files.libraries]
        made = tuple(_library_hooks(files, hooks))
    else:
        libraries = [*library_paths(files, host.triplet)]
        made = ()
    mounts = {path: Mount(on_host(config.driver_root, source), path, _MOUNTED) for path, source in libraries}
    for file in (*files.programs, *files.firmware, *files.graphics):
        mounts[file.path] = Mount(on_host(config.driver_root, file.source), file.path, _MOUNTED)
    for file in files.sockets:
        mounts[file.path] = Mount(on_host(config.driver_root, file.source), file.path, (*_MOUNTED, "noexec"))
    cuda = next((path for path, _ in libraries if posixpath.basename(path).startswith("libcuda.so")), "")
    env = (f"NVIDIA_CTK_LIBCUDA_DIR={posixpath.dirname(cuda)}",) if cuda else ()
    return Edits(
        env=(*env, _VOID),
        device_nodes=nodes,
        hooks=(
            *made,
            *_hooks(hooks, "disable-device-node-modification"),
            *_hooks(hooks, "update-application-profile"),
        ),
        mounts=tuple(mounts.values()),
    )


def _library_hooks(files: DriverFiles, hooks: Hooks) -> Iterator[Hook]:
    """By which the container's own dynamic loader learns of the libraries."""
    links = [
        f"{target.format(files.version)}::{posixpath.dirname(file.path)}/{name}"
        for stem, name, target in LINKS
        for file in files.libraries
        if stem_of(file) == stem
    ]
    if links:
        yield from _hooks(hooks, "create-symlinks", *_each("--link", links))
    if files.version:
        yield from _hooks(hooks, "enable-cuda-compat", f"--host-driver-version={files.version}")
    folders = sorted({posixpath.dirname(file.path) for file in files.libraries})
    if folders:
        yield from _hooks(hooks, "update-ldcache", *_each("--folder", folders))


def _hooks(hooks: Hooks | None, name: str, *arguments: str) -> Iterator[Hook]:
    """A hook, where there is such a one."""
    if hooks is not None and name in hooks.known:
        program = posixpath.basename(hooks.program)
        words = (program, "hook") if program == "nvidia-ctk" else (program,)
        yield Hook("createContainer", hooks.program, (*words, name, *arguments), ("NVIDIA_CTK_DEBUG=false",))


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]
