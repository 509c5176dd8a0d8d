"""Everything that nvplug raises on purpose.

Each error says what was tried and what was found (its message), and what to do about it (its remedy).
"""

from __future__ import annotations

__all__ = [
    "DirectoryDeadError",
    "DocumentError",
    "DriverCallError",
    "DriverError",
    "LibraryNotFoundError",
    "ListTooLongError",
    "NewProcessNeededError",
    "NotAnsweredError",
    "NvplugError",
    "OptionError",
    "RequestTooLargeError",
    "UnknownDeviceError",
    "UnusableDeviceError",
]


class NvplugError(Exception):
    """The root of the hierarchy.

    Attributes:
        remedy: what the reader can do, as an imperative sentence without a full stop.
        exit_code: the status of the process when this error ends it.
    """

    exit_code = 1

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


class OptionError(NvplugError):
    """A flag, a variable or a file asks for something that cannot be done. Only raised at start."""

    exit_code = 2


class ListTooLongError(OptionError):
    """The encoded device list would exceed what a kubelet reads, and silently end the stream."""


class NewProcessNeededError(NvplugError):
    """Nothing that this process can do helps; a new one, started by systemd or the kubelet, can."""

    exit_code = 3


class DirectoryDeadError(NewProcessNeededError):
    """The kubelet's directory was replaced behind our mount of it, so that no file can be made there."""

    exit_code = 4


class NotAnsweredError(NvplugError):
    """No nvplug says that it lives."""


class DriverError(NvplugError):
    """The NVIDIA driver, or its library, does not do what was asked of it."""


class DriverCallError(DriverError):
    """A function of the driver's library returned an error.

    Attributes:
        function: its name.
        code: an ``nvmlReturn_t``.
    """

    def __init__(self, function: str, code: int, text: str, *, remedy: str) -> None:
        super().__init__(f"{function}: {text} ({code})", remedy=remedy)
        self.function = function
        self.code = code


class LibraryNotFoundError(DriverError):
    """libnvidia-ml.so.1 is in none of the places where drivers are installed."""


class DocumentError(NvplugError):
    """A CDI document cannot be made, written or removed, or is not what was written."""


class UnknownDeviceError(NvplugError):
    """An allocation names a device that this resource never offered."""


class UnusableDeviceError(NvplugError):
    """An allocation names a device that was offered, and that is gone or known to be unhealthy."""


class RequestTooLargeError(NvplugError):
    """An allocation asks for several replicas of shared devices, where one is allowed."""
