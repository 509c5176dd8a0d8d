"""CDI documents on disk."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Container, Mapping
from pathlib import Path
from typing import NamedTuple

from _nvplug.container import cdi_names
from _nvplug.container.cdi import gpu_document, node_document
from _nvplug.container.cdi_document import Document, decode, encode
from _nvplug.container.cdi_host import look
from _nvplug.container.extras import imex_path
from _nvplug.container.facts import Terms
from _nvplug.errors import DocumentError
from _nvplug.hardware import Hardware
from _nvplug.resources import Device

__all__ = ["Claim", "Description", "describe", "read_document", "remove_documents", "renew", "write_document"]


class Description(NamedTuple):
    """The documents of a node.

    Attributes:
        document: of the GPUs.
        named: UUIDs of the devices in it.
        others: of what containers get besides, by class.
    """

    document: Document
    named: frozenset[str]
    others: Mapping[str, Document]


class Claim(NamedTuple):
    """By what a nvplug knows that no other one has claimed the documents after it: the GPUs' file as it left that."""

    inode: int
    modified: int


def describe(
    hardware: Hardware, offered: Container[str], terms: Terms, before: Document | None = None, *, root: str = ""
) -> Description:
    """Makes the documents of a node from what there is now. Blocks.

    Args:
        hardware: with the devices.
        offered: UUIDs of those that are described.
        terms: say where things are on the host, and what of it containers get besides.
        before: what was said of the GPUs so far. Devices that are in it are described for as long as they exist,
            whether or not they are offered now.
        root: see cdi_host.look.

    Raises:
        DocumentError: there is nothing to describe.
    """
    named = {entry.name for entry in before.devices} if before else set()
    devices = [
        device for device in _devices(hardware) if device.uuid in offered or cdi_names.device_name(device.uuid) in named
    ]
    config, facts = terms.config, terms.facts
    further = [*map(imex_path, facts.imex_channels), *(path for extra in facts.extras for path in extra.nodes)]
    host = look(devices, hardware.driver_version, config, further, root=root)
    complete = not hardware.left_out
    document = gpu_document(devices, host, config, before=before, offered=offered, complete=complete)
    if document is None:
        raise DocumentError(
            "no GPU has a device node, so there is nothing to describe",
            remedy="run nvidia-smi on the host, which makes them; in a container, mount the host's /dev, or its root"
            " and point --driver-root-ctr-path at it",
        )
    names = {entry.name for entry in document.devices}
    uuids = frozenset(device.uuid for device in devices if cdi_names.device_name(device.uuid) in names)
    others = {
        extra.device_class: node_document(
            extra.device_class, {cdi_names.ALL: extra.nodes}, host, config, mounts=extra.mounts
        )
        for extra in facts.extras
    }
    channels = {channel: (imex_path(channel),) for channel in facts.imex_channels}
    others[cdi_names.IMEX_CHANNEL] = node_document(cdi_names.IMEX_CHANNEL, channels, host, config)
    return Description(document, uuids, {name: each for name, each in others.items() if each is not None})


def renew(
    directory: Path,
    hardware: Hardware,
    offered: Container[str],
    terms: Terms,
    last: Document | None = None,
    *,
    root: str = "",
) -> tuple[Description, tuple[Path, ...], Claim | None]:
    """Brings the documents in a directory up to date. Blocks.

    Args:
        directory: where they are.
        hardware: with the devices.
        offered: UUIDs of those that are described.
        terms: as for describe.
        last: the document of the GPUs that was written last, in case somebody removed it.
        root: see cdi_host.look.

    Returns:
        What they say now, the files that said something else before, and what to remove them by: anew if the file of
        the GPUs was written, or was found and there is no ``last``.

    Raises:
        DocumentError: there is nothing to describe, or it cannot be written.
    """
    main = directory / cdi_names.document_file(cdi_names.GPU)
    description = describe(hardware, offered, terms, read_document(main) or last, root=root)
    documents = {cdi_names.GPU: description.document, **description.others}
    changed = []
    for device_class, document in documents.items():
        file = directory / cdi_names.document_file(device_class)
        if write_document(file, document):
            changed.append(file)
    if last is not None and main not in changed:
        return description, tuple(changed), None
    with contextlib.suppress(OSError):
        # A second nvplug, during an upgrade, seldom has something else to say. The time tells that it took over.
        os.utime(main)
    return description, tuple(changed), _claim_on(main)


def _devices(hardware: Hardware) -> list[Device]:
    """Everything on a node that could be offered, in index order."""
    return [
        device
        for gpu in sorted(hardware.gpus, key=lambda gpu: gpu.index)
        for device in (Device(gpu.uuid, gpu), *(Device(mig.uuid, gpu, mig=mig) for mig in gpu.mig_devices))
    ]


def read_document(file: Path) -> Document | None:
    """What is there; None if there is nothing, or nothing that we could have written. Blocks."""
    try:
        return decode(file.read_bytes())
    except (OSError, ValueError):
        return None


def write_document(file: Path, document: Document) -> bool:
    """Puts a document in the place of what is there, all or nothing, and reads it back. Blocks.

    A runtime that looks in the same moment sees the old one or the new one, and after a crash of the node there is one
    of them.

    Returns:
        Whether it was another one.

    Raises:
        DocumentError: it cannot be written. What was there is still there.
    """
    content = encode(document)
    try:
        # Before it can harm: a document that runtimes refuse makes every name in it unknown.
        decode(content)
    except ValueError as error:
        raise DocumentError(f"{file}: {error}", remedy="this is a fault in nvplug; report it") from error
    try:
        with contextlib.suppress(FileNotFoundError):
            if file.read_bytes() == content:
                return False
        if not file.parent.is_dir():
            file.parent.mkdir()
            # Whatever our umask: not only root runs containers.
            file.parent.chmod(0o755)
        _replace(file, content)
        written = file.read_bytes()
    except OSError as error:
        raise DocumentError(
            f"{file}: {error.strerror or error}",
            remedy=f"see to it that {file.parent} can be made and written to; in a container, mount the host's there",
        ) from error
    if written != content:
        raise DocumentError(f"{file}: somebody else writes to it", remedy="stop the other plugin, or whatever does")
    return True


def remove_documents(directory: Path, claim: Claim) -> tuple[Path, ...]:
    """Removes all documents that have our names, and says which there were. Blocks.

    If somebody has written to that of the GPUs since, such as the nvplug that comes after this one in an upgrade, all
    of them are that one's, and stay.

    Raises:
        DocumentError: one cannot be removed.
    """
    if _claim_on(directory / cdi_names.document_file(cdi_names.GPU)) not in {None, claim}:
        return ()
    removed = []
    for device_class in (cdi_names.GPU, cdi_names.IMEX_CHANNEL, cdi_names.GDRCOPY, cdi_names.GDS, cdi_names.MOFED):
        file = directory / cdi_names.document_file(device_class)
        try:
            file.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DocumentError(f"{file}: {error.strerror or error}", remedy="remove it by hand") from error
        removed.append(file)
    return tuple(removed)


def _claim_on(file: Path) -> Claim | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return Claim(status.st_ino, status.st_mtime_ns)


def _replace(file: Path, content: bytes) -> None:
    # Runtimes read names that end in .json and .yaml.
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as new:
            new.write(content)
            new.flush()
            os.fchmod(new.fileno(), 0o644)
            os.fsync(new.fileno())
        Path(name).replace(file)
    finally:
        # There is none any more if all went well.
        Path(name).unlink(missing_ok=True)
    directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
