"""A CDI document as data: what runtimes read, and when they refuse it.

Facts from the specification of the Container Device Interface, versions 0.3 to 1.1: a runtime refuses a document with
fields that it does not know, with names that are not valid or double, and with devices that change nothing; and one
that says a lower version than its content needs. Runtimes of an older version refuse a higher one, so a document says
the lowest that it can.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

__all__ = ["Device", "DeviceNode", "Document", "Edits", "Hook", "Mount", "compose", "decode", "encode"]


class _Part(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """Fields that say nothing are left out, and a field that is not known is an error."""


class DeviceNode(_Part, frozen=True):
    """A device node that a container is given.

    Attributes:
        path: in the container.
        host_path: on the host, where it is another.
        type: ``c``: with it and the numbers, runtimes need no look at the host's node.
        major, minor: of the device.
        file_mode: the permissions of the node in the container; without one, everybody may read and write it.
        gid: the group of the node in the container.
        permissions: for the container's device cgroup.
    """

    path: str
    host_path: str = ""
    type: str = ""
    major: int | None = None
    minor: int | None = None
    file_mode: int | None = None
    gid: int | None = None
    permissions: str = ""


class Mount(_Part, frozen=True):
    """A file or directory of the host that a container sees."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ()


class Hook(_Part, frozen=True):
    """A program of the host that the runtime runs while it makes a container."""

    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()


class Edits(_Part, frozen=True):
    """What is added to a container."""

    env: tuple[str, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    hooks: tuple[Hook, ...] = ()
    mounts: tuple[Mount, ...] = ()


class Device(_Part, frozen=True):
    """What a name stands for."""

    name: str
    container_edits: Edits


class Document(_Part, frozen=True):
    """Everything about the devices of one kind.

    Attributes:
        cdi_version: of the specification.
        kind: vendor and class.
        devices: each with what it adds.
        container_edits: what a container gets that has any of them.
    """

    cdi_version: str
    kind: str
    devices: tuple[Device, ...]
    container_edits: Edits = Edits()


_KIND: Final = re.compile(r"[A-Za-z]([\w.-]*[A-Za-z0-9])?/[A-Za-z]([\w-]*[A-Za-z0-9])?", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z0-9]([\w.:-]*[A-Za-z0-9])?", re.ASCII)
_ENV: Final = re.compile(r"[^=]+=.*", re.DOTALL)
_HOOKS: Final = frozenset({"createRuntime", "createContainer", "startContainer", "poststart", "poststop"})


def compose(kind: str, devices: Iterable[Device], common: Edits) -> Document:
    """A document that says the oldest version of the specification that has all of it."""
    devices = tuple(devices)
    return Document(_lowest_version(devices, common), kind, devices, common)


def encode(document: Document) -> bytes:
    """A document as JSON, for people and runtimes; the same one gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def decode(content: bytes) -> Document:
    """The opposite.

    Raises:
        ValueError: a runtime would refuse it. The message says why.
    """
    try:
        document = msgspec.json.decode(content, type=Document)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error
    for problem in _problems(document):
        raise ValueError(problem)
    return document


def _lowest_version(devices: Sequence[Device], common: Edits) -> str:
    edits = (common, *(device.container_edits for device in devices))
    if any(node.host_path for each in edits for node in each.device_nodes):
        return "0.5.0"
    return "0.5.0" if any(device.name[:1].isdigit() for device in devices) else "0.3.0"


def _problems(document: Document) -> Iterator[str]:
    if document.cdi_version != _lowest_version(document.devices, document.container_edits):
        yield f"{document.cdi_version} is not the lowest version that has all of it"
    if not _KIND.fullmatch(document.kind):
        yield f"{document.kind!r} is not a vendor, a slash and a class"
    if not document.devices:
        yield "there is no device in it"
    names = [device.name for device in document.devices]
    for name in names:
        if not _NAME.fullmatch(name) or names.count(name) > 1:
            yield f"{name!r} is no name of a device, or is that of two"
    for device in document.devices:
        if device.container_edits == Edits():
            yield f"device {device.name} adds nothing"
        yield from _problems_of(device.container_edits)
    yield from _problems_of(document.container_edits)


def _problems_of(edits: Edits) -> Iterator[str]:
    for variable in (*edits.env, *(variable for hook in edits.hooks for variable in hook.env)):
        if not _ENV.fullmatch(variable):
            yield f"{variable!r} is not a name, = and a value"
    for node in edits.device_nodes:
        if node.type not in {"", "c"} or not set(node.permissions) <= set("rwm"):
            yield f"{node.path} has an odd type or permissions"
    for hook in edits.hooks:
        if hook.hook_name not in _HOOKS:
            yield f"{hook.hook_name!r} is no hook"
    paths = [path for node in edits.device_nodes for path in (node.path, node.host_path or node.path)]
    paths += [path for mount in edits.mounts for path in (mount.host_path, mount.container_path)]
    paths += [hook.path for hook in edits.hooks]
    for path in paths:
        if not path.startswith("/"):
            yield f"{path!r} is not an absolute path"
