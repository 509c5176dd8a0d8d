"""What a GPU is asked about its health. Every question is optional; each GPU answers as it can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import pynvml

from _nvplug.errors import DriverCallError
from _nvplug.hardware import Checkup, RecoveryAction

__all__ = ["ABSENT", "NEEDS_RESET", "Abilities", "examine"]

ABSENT: Final = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
"""What a GPU, or a library, says of what it does not have."""

NEEDS_RESET: Final = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})
"""Errors that a GPU answers everything with until it was reset."""

# A driver that does not know a field says either.
_NO_FIELD: Final = ABSENT | {pynvml.NVML_ERROR_INVALID_ARGUMENT}

_FIELDS: Final = (pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION)

# By nvmlValueType_t.
_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal")


@dataclass(slots=True)
class Abilities:
    """What one GPU was found to have and to lack in this session, so that it is not asked in vain every time.

    Attributes:
        lacking: names of functions.
        recovery_action: whether it told one before.
        mig_mode: the newest answer, if there was one: current and pending.
    """

    lacking: set[str] = field(default_factory=set)
    recovery_action: bool = False
    mig_mode: list[int] | None = None


def examine(call: Callable[..., Any], handle: Any, uuid: str, abilities: Abilities) -> Checkup:
    """Asks a GPU how it is. Blocks.

    Args:
        call: calls a function of ``pynvml``, and raises DriverCallError.
        handle: of the GPU.
        uuid: of the same.
        abilities: updated.

    Raises:
        DriverCallError: it needs a reset before it answers anything.
    """

    def ask(function: Callable[..., Any], *args: Any) -> Any:
        if function.__name__ in abilities.lacking:
            return None
        try:
            return call(function, handle, *args)
        except DriverCallError as error:
            if error.code in NEEDS_RESET:
                raise
            if error.code in ABSENT:
                abilities.lacking.add(function.__name__)
            return None

    action, energy = _fields(ask(pynvml.nvmlDeviceGetFieldValues, _FIELDS), abilities)
    rows = ask(pynvml.nvmlDeviceGetRemappedRows)
    pages = pending = None
    # GPUs before Ampere retire pages instead.
    if "nvmlDeviceGetRemappedRows" in abilities.lacking:
        causes = range(pynvml.NVML_PAGE_RETIREMENT_CAUSE_COUNT)
        lists = [ask(pynvml.nvmlDeviceGetRetiredPages, cause) for cause in causes]
        if None not in lists:
            pages = sum(map(len, lists))
            pending = ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus)
    abilities.mig_mode = mode = ask(pynvml.nvmlDeviceGetMigMode)
    return Checkup(
        uuid,
        action=action,
        remap_failure=None if rows is None else bool(rows[3]),
        remap_pending=bool(rows[2]) if rows is not None else None if pending is None else bool(pending),
        retired_pages=pages,
        uncorrectable=ask(
            pynvml.nvmlDeviceGetTotalEccErrors, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        ),
        energy=energy,
        mig_pending=mode is not None and mode[0] != mode[1],
    )


def _fields(values: Any, abilities: Abilities) -> tuple[int | None, int | None]:
    """The recovery action, and the energy used."""
    if values is None:
        return (RecoveryAction.UNREADABLE if abilities.recovery_action else None), None
    action, energy = values
    if action.nvmlReturn == pynvml.NVML_SUCCESS:
        abilities.recovery_action = True
        told: int | None = _number(action)
    elif action.nvmlReturn in _NO_FIELD:
        told = None
    else:
        told = RecoveryAction.UNREADABLE
    return told, _number(energy) if energy.nvmlReturn == pynvml.NVML_SUCCESS else None


def _number(value: Any) -> int:
    return int(getattr(value.value, _MEMBERS[value.valueType] if value.valueType < len(_MEMBERS) else "ullVal"))
