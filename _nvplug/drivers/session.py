"""What is done inside libnvidia-ml.so.1. It blocks, perhaps for ever: to be called in worker threads."""

from __future__ import annotations

import ctypes
import dataclasses
import time
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pynvml

from _nvplug.drivers.library import Library, load
from _nvplug.drivers.partitions import capability_minors, mig_devices, mig_uuids
from _nvplug.drivers.readings import Answer, Failure, Reading, Registration, Remote, nvml_address, pair, sysfs_address
from _nvplug.drivers.vitals import ABSENT, Abilities, examine
from _nvplug.errors import DriverCallError, DriverError
from _nvplug.happenings import XidUnplaced
from _nvplug.hardware import Checkup, Gpu, MigDevice, Notice, NoticeKind, PciPath, Xid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Session"]

# A library that says "timeout" long before the time must not make us spin, nor late for its next event.
_EARLY: Final = 0.05

# Not single-bit errors: they are corrected, and would wake us for nothing.
_OLDEST: Final = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError

_NOTICES: Final = {
    pynvml.nvmlEventTypeDoubleBitEccError: NoticeKind.DOUBLE_BIT_ECC_ERROR,
    pynvml.nvmlEventTypeDramRetirementEvent: NoticeKind.DRAM_RETIREMENT,
    pynvml.nvmlEventTypeDramRetirementFailure: NoticeKind.DRAM_RETIREMENT_FAILURE,
    pynvml.nvmlEventTypeNonFatalPoisonError: NoticeKind.NON_FATAL_POISON,
    pynvml.nvmlEventTypeFatalPoisonError: NoticeKind.FATAL_POISON,
    pynvml.nvmlEventTypeGpuUnavailableError: NoticeKind.UNAVAILABLE,
    pynvml.nvmlEventTypeGpuRecoveryAction: NoticeKind.RECOVERY_ACTION,
}

_WANTED: Final = reduce(or_, _NOTICES, pynvml.nvmlEventTypeXidCriticalError)

_WHOLE_GPU: Final = 0xFFFFFFFF

_REMEDIES: Final = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the driver's kernel module: modprobe nvidia",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the library and the kernel module are of different versions:"
    " reload the kernel modules, or reboot the node",
    pynvml.NVML_ERROR_NO_PERMISSION: "let this process open /dev/nvidiactl and /dev/nvidia*: run it as root,"
    " and privileged or with these devices in its container",
    pynvml.NVML_ERROR_GPU_IS_LOST: "look for NVRM lines in the kernel log; reset the GPU, or reboot the node",
    pynvml.NVML_ERROR_RESET_REQUIRED: "drain the GPU and reset it: nvidia-smi -r",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "install a newer NVIDIA driver",
}
_REMEDY: Final = "look for NVRM lines in the kernel log, and try nvidia-smi on this node"


class Session:
    """One initialisation of the library, and what may be asked until it is given up.

    ``pynvml`` keeps its library in a global, so there is one session at a time. Threads that hang in an older one
    may come back at any time: ``end`` makes them stop at their next call, before they carry a handle of one
    library into another.

    Attributes:
        version: of the driver, "" if unknown.
        event_set: the number of the event set there is, 0 for none.
        late: events that came after the end.
    """

    def __init__(self, library: Library, *, sysfs: str, proc: str) -> None:
        self.version = ""
        self.event_set = 0
        self.late: list[Xid | Notice | XidUnplaced] = []
        self._library = library
        self._sysfs = Path(sysfs)
        self._proc = Path(proc)
        self._ended = False
        self._events: Any = None
        self._uuids: dict[int, str] = {}
        self._abilities: dict[str, Abilities] = {}
        self._file = _identity(library.path)

    @classmethod
    def open(cls, root: str, library_path: str, *, sysfs: str, proc: str = "/proc", attach: bool = True) -> Session:
        """Finds the library, loads and initialises it. With many cold GPUs it takes a minute.

        Args:
            root: the driver's root as this process sees it.
            library_path: more directories, by colons.
            sysfs: where this process sees /sys.
            proc: where it sees /proc.
            attach: whether to open every GPU. If not, each is opened when it is read by its address, and others are
                left alone.

        Raises:
            LibraryNotFoundError: there is no driver, as far as can be seen.
            DriverCallError: there is one, and it does not work.
        """
        library = load(root, library_path)
        with pynvml.libLoadLock:
            pynvml.nvmlLib = library.handle
            # Otherwise it goes on calling the functions of the library before.
            pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - there is no public way
        session = cls(library, sysfs=sysfs, proc=proc)
        try:
            if attach:
                session._call(pynvml.nvmlInit)
            else:
                session._call(pynvml.nvmlInitWithFlags, pynvml.NVML_INIT_FLAG_NO_ATTACH)
        except DriverCallError as error:
            if error.code != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                raise
            # pynvml knows only nvmlInitWithFlags, which drivers before 410 lack.
            session._call(_init_v2)
        session.version = session._optional("", pynvml.nvmlSystemGetDriverVersion)
        return session

    def end(self) -> None:
        """Makes every call from now on fail, and a wait for events return. Does not block."""
        self._ended = True

    def close(self) -> None:
        """Gives the library up, after ``end``. No other thread may be inside it.

        Raises:
            DriverCallError: it does not want to be given up; there is nothing more to do.
        """
        self._ended = False
        try:
            if self.event_set:
                self.free_event_set()
            self._call(pynvml.nvmlShutdown)
        finally:
            self._ended = True

    def count(self) -> int:
        """How many GPUs there are, usable or not.

        Raises:
            DriverCallError: the session is of no more use.
        """
        return int(self._call(pynvml.nvmlDeviceGetCount))

    @property
    def is_outdated(self) -> bool:
        """Whether the library's file is another one now, or gone: the driver is being upgraded. Does not block."""
        return _identity(self._library.path) != self._file

    def look(self, index: int, known: Reading | None, pci: str = "") -> tuple[Answer | None, Checkup | None]:
        """Reads one GPU and registers it for events, or finds that nothing has changed; and asks how it is.

        Only its handle and its UUID are needed. Whatever else cannot be read is left unknown.

        Args:
            index: NVML's.
            known: what this session read before; returned as it is, or with a newer registration, if it is
                still the same GPU.
            pci: its address, to find it by; it may have no other index then.

        Returns:
            What it is, and how. Nothing of an index that is none any more.
        """
        try:
            if pci:
                handle = self._call(pynvml.nvmlDeviceGetHandleByPciBusId, nvml_address(pci))
            else:
                handle = self._call(pynvml.nvmlDeviceGetHandleByIndex, index)
            uuid = self._call(pynvml.nvmlDeviceGetUUID, handle)
            if not uuid:
                return Failure(index, "nvmlDeviceGetUUID: the UUID is empty"), None
            checkup = examine(self._call, handle, uuid, self._abilities.setdefault(uuid, Abilities()))
        except DriverCallError as error:
            if error.code == pynvml.NVML_ERROR_INVALID_ARGUMENT and not pci and self._is_beyond(index):
                return None, None
            return Failure(index, str(error), error.remedy, error.code), None
        return self._read(index, known, handle, uuid), checkup

    def _is_beyond(self, index: int) -> bool:
        """Whether there are not so many GPUs any more: the others have moved up, and the next count tells."""
        count = self._optional(None, pynvml.nvmlDeviceGetCount)
        return count is not None and index >= count

    def _read(self, index: int, known: Reading | None, handle: Any, uuid: str) -> Reading:
        address = _address(handle)
        self._uuids[address] = uuid
        enabled, found = self._partitions(handle, uuid)
        if (
            known is not None
            and (known.gpu.uuid, known.address, known.gpu.mig_enabled) == (uuid, address, enabled)
            and {mig.uuid for mig in known.gpu.mig_devices} == {mig for mig, _ in found.values()}
        ):
            registration = known.registration
            if registration.event_set == self.event_set and not registration.trouble:
                return known
            return dataclasses.replace(known, registration=self._register(handle))
        info = self._optional(None, pynvml.nvmlDeviceGetPciInfo, handle)
        pci = "" if info is None else sysfs_address(_text(info.busId))
        memory = self._optional(None, pynvml.nvmlDeviceGetMemoryInfo, handle)
        minor = self._optional(None, pynvml.nvmlDeviceGetMinorNumber, handle)
        gpu = Gpu(
            index=index,
            uuid=uuid,
            name=self._optional("", pynvml.nvmlDeviceGetName, handle),
            pci=pci,
            minor=minor,
            numa=self._numa(pci),
            memory=0 if memory is None else int(memory.total),
            mig_enabled=enabled,
            mig_devices=self._mig_devices(handle, found, minor),
        )
        return Reading(gpu, self._remotes(handle), self._register(handle), address, handle)

    def paths(self, one: Reading, others: Iterable[Reading]) -> dict[frozenset[str], PciPath]:
        """How one GPU meets others over PCI Express, by the two UUIDs."""
        paths = {}
        for other in others:
            level = self._optional(
                PciPath.UNKNOWN, pynvml.nvmlDeviceGetTopologyCommonAncestor, one.handle, other.handle
            )
            try:
                paths[pair(one, other)] = PciPath(level)
            except ValueError:
                paths[pair(one, other)] = PciPath.UNKNOWN
        return paths

    def create_event_set(self, number: int) -> None:
        """Makes the event set that the next ``read`` of each GPU registers it with.

        Raises:
            DriverCallError: it cannot be made.
        """
        self._events = self._call(pynvml.nvmlEventSetCreate)
        self.event_set = number

    def free_event_set(self) -> None:
        """Gives the event set up. No other thread may be inside the library.

        Raises:
            DriverCallError: it cannot be given up; it counts as gone nevertheless.
        """
        events, self._events, self.event_set = self._events, None, 0
        self._call(pynvml.nvmlEventSetFree, events)

    def wait(self, slice_seconds: float, *, once: bool) -> Xid | Notice | XidUnplaced | None:
        """Waits for an event.

        Args:
            slice_seconds: after which it is looked whether the session has ended.
            once: whether to return after one slice.

        Returns:
            What was reported; None when the session ends, or, with ``once``, when a slice went well without.

        Raises:
            DriverCallError: no event can be heard through this set.
        """
        milliseconds = round(slice_seconds * 1000)
        while not self._ended:
            began = time.monotonic()
            try:
                data = pynvml.nvmlEventSetWait_v2(self._events, milliseconds)
            except pynvml.NVMLError as error:
                # Not by _call: to say in words that nothing happened is most of what it takes.
                if error.value != pynvml.NVML_ERROR_TIMEOUT:
                    raise _explained("nvmlEventSetWait_v2", error) from None
                if time.monotonic() - began < slice_seconds / 2:
                    time.sleep(_EARLY)
            else:
                if data.eventType & _WANTED:
                    event = self._attribute(data)
                    if self._ended:
                        # Nobody waits any more, and no other session will be told.
                        self.late.append(event)
                    return event
            if once:
                break
        return None

    def _attribute(self, data: Any) -> Xid | Notice | XidUnplaced:
        uuid = self._uuids.get(_address(data.device))
        if uuid is None:
            try:
                uuid = self._call(pynvml.nvmlDeviceGetUUID, data.device)
            except DriverCallError as error:
                return XidUnplaced(int(data.eventData), str(error))
            if uuid not in self._uuids.values():
                return XidUnplaced(int(data.eventData), f"no GPU is known by the UUID {uuid}")
        if not data.eventType & pynvml.nvmlEventTypeXidCriticalError:
            return Notice(uuid, next(kind for bit, kind in _NOTICES.items() if data.eventType & bit))
        gi, ci = (None if n == _WHOLE_GPU else int(n) for n in (data.gpuInstanceId, data.computeInstanceId))
        return Xid(uuid, int(data.eventData), gi, ci)

    def _partitions(self, handle: Any, uuid: str) -> tuple[bool, dict[int, tuple[str, Any]]]:
        """Whether the GPU is cut, and its MIG devices."""
        mode = self._abilities[uuid].mig_mode
        if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return False, {}
        try:
            return True, mig_uuids(self._call, handle)
        except DriverCallError:
            return True, {}

    def _mig_devices(self, handle: Any, found: dict[int, tuple[str, Any]], minor: int | None) -> tuple[MigDevice, ...]:
        if not found:
            return ()
        try:
            text = (self._proc / "driver" / "nvidia-caps" / "mig-minors").read_text()
        except (OSError, UnicodeDecodeError):
            text = ""
        minors = {} if minor is None else capability_minors(text, minor)
        return mig_devices(self._call, handle, found, minors)

    def _register(self, handle: Any) -> Registration:
        number = self.event_set
        if not number:
            return Registration()
        try:
            mask = _WANTED & self._call(pynvml.nvmlDeviceGetSupportedEventTypes, handle)
            if not mask & pynvml.nvmlEventTypeXidCriticalError:
                return Registration(number)
            try:
                self._call(pynvml.nvmlDeviceRegisterEvents, handle, mask, self._events)
            except DriverCallError:
                if mask & _OLDEST == mask:
                    raise
                # What is newer is not needed.
                self._call(pynvml.nvmlDeviceRegisterEvents, handle, mask & _OLDEST, self._events)
        except DriverCallError as error:
            # A GPU too old to have events is healthy, as far as anyone can know.
            return Registration(number, trouble="" if error.code in ABSENT else str(error))
        return Registration(number, heard=True)

    def _remotes(self, handle: Any) -> tuple[Remote, ...]:
        remotes = []
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                if self._call(pynvml.nvmlDeviceGetNvLinkState, handle, link) != pynvml.NVML_FEATURE_ENABLED:
                    continue
                far = self._call(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            except DriverCallError as error:
                if error.code == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                    break
                # Of this link alone: drivers number links that a board does not have.
                continue
            if pci := sysfs_address(_text(far.busId)):
                remotes.append(Remote(pci, self._sysfs_text(pci, "class").startswith("0x03")))
        return tuple(remotes)

    def _numa(self, pci: str) -> int | None:
        # Not nvmlDeviceGetNumaNodeId: that is the node of a GPU's own memory, on machines that have such.
        try:
            node = int(self._sysfs_text(pci, "numa_node"))
        except ValueError:
            return None
        return node if node >= 0 else None

    def _sysfs_text(self, pci: str, name: str) -> str:
        if not pci:
            return ""
        try:
            return (self._sysfs / "bus" / "pci" / "devices" / pci / name).read_text()
        except (OSError, UnicodeDecodeError):
            return ""

    def _optional(self, default: Any, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return self._call(function, *args)
        except DriverCallError:
            return default

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        name = function.__name__
        if self._ended:
            raise DriverError(f"{name} was not called: its session is over", remedy=_REMEDY)
        try:
            return function(*args)
        except pynvml.NVMLError as error:
            raise _explained(name, error) from None
        except UnicodeDecodeError:
            raise DriverCallError(
                name, pynvml.NVML_ERROR_UNKNOWN, "what it returned is not UTF-8", remedy=_REMEDY
            ) from None


def _explained(function: str, error: pynvml.NVMLError) -> DriverCallError:
    # The text may take another call, so it is made in the thread.
    return DriverCallError(function, error.value, str(error), remedy=_REMEDIES.get(error.value, _REMEDY))


def _init_v2() -> None:
    pynvml._nvmlCheckReturn(pynvml._nvmlGetFunctionPointer("nvmlInit_v2")())  # noqa: SLF001 - as above


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _text(raw: bytes | str) -> str:
    return raw.decode("ascii", "replace") if isinstance(raw, bytes) else raw
