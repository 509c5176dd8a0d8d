"""What a real driver answers, as JSON: for a machine that has GPUs, and for tests to play it afterwards.

    python tests/bench/real_gpu.py --minutes 10 > answers.json

in a bare checkout, with what requirements.lock names and nothing else. Where nothing can be installed, carry it along:
``pip install --target DIRECTORY --requirement requirements.lock`` elsewhere, and PYTHONPATH=DIRECTORY there.

First each GPU is asked everything that nvplug may ask, and what it answered and how long that took is noted. Nothing is
changed on any GPU. Then nvplug runs beside the small kubelet of its demo, and what an idle minute costs is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pynvml

# As a script it has nothing of the checkout at hand but what is beside it.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from _nvplug.drivers.readings import Reading, link_table
from _nvplug.drivers.session import Session
from _nvplug.errors import DriverCallError
from bench.processes import cpu_seconds, memory

__all__: list[str] = []

ROOT: Final = Path(__file__).parents[2]

_LINKS: Final = range(pynvml.NVML_NVLINK_MAX_LINKS)
_CAUSES: Final = range(pynvml.NVML_PAGE_RETIREMENT_CAUSE_COUNT)

# Everything that nvplug asks of one GPU, and some questions more that it may come to.
_QUESTIONS: Final[Sequence[tuple[str, tuple[Any, ...]]]] = (
    ("nvmlDeviceGetUUID", ()),
    ("nvmlDeviceGetName", ()),
    ("nvmlDeviceGetPciInfo", ()),
    ("nvmlDeviceGetMinorNumber", ()),
    ("nvmlDeviceGetMemoryInfo", ()),
    ("nvmlDeviceGetMigMode", ()),
    ("nvmlDeviceGetMaxMigDeviceCount", ()),
    ("nvmlDeviceGetSupportedEventTypes", ()),
    ("nvmlDeviceGetRemappedRows", ()),
    *(("nvmlDeviceGetRetiredPages", (cause,)) for cause in _CAUSES),
    ("nvmlDeviceGetRetiredPagesPendingStatus", ()),
    *(
        ("nvmlDeviceGetTotalEccErrors", (kind, counter))
        for kind in (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
        for counter in (pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC)
    ),
    *(("nvmlDeviceGetNvLinkState", (link,)) for link in _LINKS),
    *(("nvmlDeviceGetNvLinkRemotePciInfo", (link,)) for link in _LINKS),
    ("nvmlDeviceGetNumaNodeId", ()),
    ("nvmlDeviceGetPersistenceMode", ()),
    ("nvmlDeviceGetComputeMode", ()),
    ("nvmlDeviceGetCudaComputeCapability", ()),
    ("nvmlDeviceGetAddressingMode", ()),
)
_FIELDS: Final = {
    name: getattr(pynvml, name)
    for name in ("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", "NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION")
}


def main() -> None:
    """Asks, measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0, help="of idleness to measure; 0: none")
    parser.add_argument("--root", default="/", help="where the driver's root is")
    parser.add_argument("--warm-up", type=float, default=15, metavar="SECONDS", help="before that is measured")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": f"{platform.machine()}, Linux {platform.release()}"}
    found |= asked(options.root)
    if options.minutes:
        found["idle"] = idle(options.root, 60 * options.minutes, options.warm_up)
    json.dump(found, sys.stdout, indent=1, default=plain)
    sys.stdout.write("\n")


def asked(root: str) -> dict[str, Any]:
    """Everything that the driver answers."""
    began = time.monotonic()
    session = Session.open(root, os.environ.get("LD_LIBRARY_PATH", ""), sysfs="/sys")
    attached = time.monotonic()
    session.create_event_set(1)
    gpus, readings = [], []
    for index in range(session.count()):
        at = time.monotonic()
        answer, checkup = session.look(index, None)
        first = time.monotonic() - at
        gpu: dict[str, Any] = {"index": index, "answer": answer, "checkup": checkup, "first look": first}
        if isinstance(answer, Reading):
            readings.append(answer)
            at = time.monotonic()
            session.look(index, answer)
            gpu["later look"] = time.monotonic() - at
            gpu["questions"] = questions(answer.handle)
        gpus.append(gpu)
    paths = {
        key: path
        for place, one in enumerate(readings)
        for key, path in session.paths(one, readings[place + 1 :]).items()
    }
    heard = timed(lambda: session.wait(1.0, once=True))
    found = {
        "driver": session.version,
        "nvml": timed(pynvml.nvmlSystemGetNVMLVersion),
        "cuda": timed(pynvml.nvmlSystemGetCudaDriverVersion),
        "nvmlInit": attached - began,
        "gpus": gpus,
        "links": [
            [f"{link.path.name} {link.nvlinks} {link.switched}" for link in row] for row in link_table(readings, paths)
        ],
        "event within a second": heard,
    }
    session.close()
    return found


def questions(handle: Any) -> dict[str, Any]:
    """Each question with its arguments, and the answer to it."""
    answers = {
        f"{name}{arguments}": timed(getattr(pynvml, name), handle, *arguments)
        for name, arguments in _QUESTIONS
        if hasattr(pynvml, name)
    }
    for name, field in _FIELDS.items():
        answers[f"nvmlDeviceGetFieldValues({name})"] = timed(pynvml.nvmlDeviceGetFieldValues, handle, [field])
    return answers


def timed(ask: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """An answer or an error, and the milliseconds that it took."""
    at = time.monotonic()
    try:
        answer: dict[str, Any] = {"answer": ask(*arguments)}
    except pynvml.NVMLError as error:
        answer = {"error": error.value, "text": str(error)}
    except DriverCallError as error:
        answer = {"error": error.code, "text": str(error)}
    return answer | {"ms": round(1e3 * (time.monotonic() - at), 3)}


def plain(value: Any) -> Any:
    """What JSON has no word for."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: each for name, each in fields.items() if name != "handle"}
    if isinstance(value, ctypes.Union):
        # Which of its members counts is told beside it.
        return {"raw": bytes(value).hex()}
    if isinstance(value, ctypes.Structure):
        return {field[0]: getattr(value, field[0]) for field in value._fields_}
    if isinstance(value, ctypes.Array):
        return list(value)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return repr(value)


def idle(root: str, seconds: float, warm_up: float) -> dict[str, Any]:
    """What nvplug costs while nothing happens, beside the kubelet of the demo."""
    with tempfile.TemporaryDirectory(prefix="nvp") as scratch:
        standin = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); from _nvplug.kubelet.standin import run_standin as run"
        )
        kubelet = subprocess.Popen(
            [sys.executable, "-c", f"{standin}; sys.exit(run({scratch!r}))"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert kubelet.stdout is not None
        json.loads(kubelet.stdout.readline())
        environment = {**os.environ, "KUBELET_SOCKET": f"{scratch}/kubelet.sock", "DRIVER_ROOT_CTR_PATH": root}
        log = Path(scratch, "log")
        with log.open("wb") as file:
            nvplug = subprocess.Popen(
                [sys.executable, str(ROOT / "nvplug.py"), "run"], env=environment, stdin=subprocess.DEVNULL, stderr=file
            )
        try:
            devices = 0
            while not devices:
                saw: Mapping[str, Any] = json.loads(kubelet.stdout.readline())
                devices = len(saw.get("devices", ()))
            time.sleep(warm_up)
            at, before, lines = time.monotonic(), cpu_seconds(nvplug.pid), len(log.read_bytes().splitlines())
            time.sleep(seconds)
            used, took = cpu_seconds(nvplug.pid) - before, time.monotonic() - at
            said = log.read_text(errors="replace").splitlines()
            return {
                "devices": devices,
                "seconds": took,
                "ms of CPU a second": 1e3 * used / took,
                "resident": memory([nvplug.pid]).resident,
                "threads": len(os.listdir(f"/proc/{nvplug.pid}/task")),  # noqa: PTH208 - /proc, where only the count matters
                "descriptors": len(os.listdir(f"/proc/{nvplug.pid}/fd")),  # noqa: PTH208 - the same
                "log": said[:lines],
                "log meanwhile": said[lines:],
            }
        finally:
            for process in (nvplug, kubelet):
                process.terminate()
                process.wait()


if __name__ == "__main__":
    main()
