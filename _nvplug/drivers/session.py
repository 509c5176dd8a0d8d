"""What is done inside libnvidia-ml.so.1. It blocks, perhaps for ever: to be called in worker threads."""

from __future__ import annotations

import ctypes
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pynvml

from _nvplug.drivers.library import Library, load
from _nvplug.drivers.readings import Answer, Reading, Registration, Remote, pair, sysfs_address
from _nvplug.errors import DriverCallError, DriverError
from _nvplug.happenings import XidUnplaced
from _nvplug.hardware import Gpu, LeftOut, PciPath, Xid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Session"]

# The thread looks up from a wait for events this often, to see whether it is still wanted.
_SLICE_MS: Final = 1000

# A library that says "timeout" long before the time must not make us spin, nor late for its next event.
_EARLY: Final = 0.05

_WANTED: Final = (
    pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError | pynvml.nvmlEventTypeSingleBitEccError
)

_WHOLE_GPU: Final = 0xFFFFFFFF

_ABSENT: Final = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})

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
    """

    def __init__(self, library: Library, *, sysfs: str) -> None:
        self.version = ""
        self.event_set = 0
        self._library = library
        self._sysfs = Path(sysfs)
        self._ended = False
        self._events: Any = None
        self._uuids: dict[int, str] = {}

    @classmethod
    def open(cls, root: str, library_path: str, *, sysfs: str) -> Session:
        """Finds the library, loads and initialises it. With many cold GPUs it takes a minute.

        Raises:
            LibraryNotFoundError: there is no driver, as far as can be seen.
            DriverCallError: there is one, and it does not work.
        """
        library = load(root, library_path)
        with pynvml.libLoadLock:
            pynvml.nvmlLib = library.handle
            # Otherwise it goes on calling the functions of the library before.
            pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - there is no public way
        session = cls(library, sysfs=sysfs)
        try:
            session._call(pynvml.nvmlInit)
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

    def read(self, index: int, known: Reading | None) -> Answer:
        """Reads one GPU and registers it for events, or finds that nothing has changed.

        Only its handle and its UUID are needed. Whatever else cannot be read is left unknown.

        Args:
            index: NVML's.
            known: what this session read before; returned as it is, or with a newer registration, if it is
                still the same GPU.
        """
        try:
            handle = self._call(pynvml.nvmlDeviceGetHandleByIndex, index)
            uuid = self._call(pynvml.nvmlDeviceGetUUID, handle)
        except DriverCallError as error:
            return LeftOut(index, str(error))
        if not uuid:
            return LeftOut(index, "nvmlDeviceGetUUID: the UUID is empty")
        address = _address(handle)
        self._uuids[address] = uuid
        if known is not None and (known.gpu.uuid, known.address) == (uuid, address):
            registration = known.registration
            if registration.event_set == self.event_set and not registration.trouble:
                return known
            return dataclasses.replace(known, registration=self._register(handle))
        info = self._optional(None, pynvml.nvmlDeviceGetPciInfo, handle)
        pci = "" if info is None else sysfs_address(_text(info.busId))
        memory = self._optional(None, pynvml.nvmlDeviceGetMemoryInfo, handle)
        gpu = Gpu(
            index=index,
            uuid=uuid,
            name=self._optional("", pynvml.nvmlDeviceGetName, handle),
            pci=pci,
            minor=self._optional(None, pynvml.nvmlDeviceGetMinorNumber, handle),
            numa=self._numa(pci),
            memory=0 if memory is None else int(memory.total),
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

    def wait(self, *, once: bool) -> Xid | XidUnplaced | None:
        """Waits for an XID.

        Returns:
            What was reported; None when the session ends, or, with ``once``, when a second went well without.

        Raises:
            DriverCallError: no event can be heard through this set.
        """
        while not self._ended:
            began = time.monotonic()
            try:
                data = self._call(pynvml.nvmlEventSetWait_v2, self._events, _SLICE_MS)
            except DriverCallError as error:
                if error.code != pynvml.NVML_ERROR_TIMEOUT:
                    raise
                if time.monotonic() - began < _SLICE_MS / 2000:
                    time.sleep(_EARLY)
            else:
                if data.eventType & pynvml.nvmlEventTypeXidCriticalError:
                    return self._attribute(data)
            if once:
                break
        return None

    def _attribute(self, data: Any) -> Xid | XidUnplaced:
        uuid = self._uuids.get(_address(data.device))
        if uuid is None:
            try:
                uuid = self._call(pynvml.nvmlDeviceGetUUID, data.device)
            except DriverCallError as error:
                return XidUnplaced(int(data.eventData), str(error))
            if uuid not in self._uuids.values():
                return XidUnplaced(int(data.eventData), f"no GPU is known by the UUID {uuid}")
        gi, ci = (None if n == _WHOLE_GPU else int(n) for n in (data.gpuInstanceId, data.computeInstanceId))
        return Xid(uuid, int(data.eventData), gi, ci)

    def _register(self, handle: Any) -> Registration:
        number = self.event_set
        if not number:
            return Registration()
        try:
            mask = _WANTED & self._call(pynvml.nvmlDeviceGetSupportedEventTypes, handle)
            if not mask & pynvml.nvmlEventTypeXidCriticalError:
                return Registration(number)
            self._call(pynvml.nvmlDeviceRegisterEvents, handle, mask, self._events)
        except DriverCallError as error:
            # A GPU too old to have events is healthy, as far as anyone can know.
            return Registration(number, trouble="" if error.code in _ABSENT else str(error))
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
            # The text may take another call, so it is made here, in the thread.
            raise DriverCallError(name, error.value, str(error), remedy=_REMEDIES.get(error.value, _REMEDY)) from None
        except UnicodeDecodeError:
            raise DriverCallError(
                name, pynvml.NVML_ERROR_UNKNOWN, "what it returned is not UTF-8", remedy=_REMEDY
            ) from None


def _init_v2() -> None:
    pynvml._nvmlCheckReturn(pynvml._nvmlGetFunctionPointer("nvmlInit_v2")())  # noqa: SLF001 - as above


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _text(raw: bytes | str) -> str:
    return raw.decode("ascii", "replace") if isinstance(raw, bytes) else raw
