"""Container images made of nothing but static programs, so that no registry is needed."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["IMAGE", "NVPLUG", "write_image", "write_nvplug_image"]

IMAGE: Final = "localhost/nvplug-e2e:1"
"""Holds /pause, which is what it runs by itself, and /report."""

NVPLUG: Final = "nvplug:dev"
"""What `make image` would make, and the manifests name."""

_DOCKERFILE: Final = Path(__file__).parents[2] / "Dockerfile"
_SOURCE: Final = Path(__file__).parent
_PROGRAMS: Final = ("pause", "report")
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_COMPILE_LIMIT: Final = 60.0


def write_image(path: Path) -> None:
    """Writes IMAGE as the archive of an OCI layout, for ``ctr images import``, and its programs beside it.

    Raises:
        subprocess.CalledProcessError: the compiler did not like a program; what it said is on stderr.
    """
    programs = {name: _compile(name, path.parent) for name in _PROGRAMS}
    _write(path, IMAGE, programs, {"Entrypoint": ["/pause"]})


def write_nvplug_image(path: Path, executable: Path) -> None:
    """Writes NVPLUG, with what the Dockerfile says of it and the executable, in the same way."""
    (last_stage,) = re.findall(r"^FROM scratch\n(.*)", _DOCKERFILE.read_text(), re.MULTILINE | re.DOTALL)
    (entrypoint,) = re.findall(r"^ENTRYPOINT (.*)$", last_stage, re.MULTILINE)
    (environment,) = re.findall(r"^ENV (.*)$", last_stage, re.MULTILINE)
    config = {"Entrypoint": json.loads(entrypoint), "Env": environment.split()}
    _write(path, f"docker.io/library/{NVPLUG}", {"usr/bin/nvplug": executable.read_bytes()}, config)


def _write(path: Path, image: str, programs: Mapping[str, bytes], run: Mapping[str, Any]) -> None:
    layer = _archive({name: (content, 0o755) for name, content in programs.items()})
    files: dict[str, tuple[bytes, int]] = {}

    def keep(content: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        files[f"blobs/sha256/{digest}"] = (content, 0o644)
        return {
            "mediaType": f"application/vnd.oci.image.{kind}",
            "digest": f"sha256:{digest}",
            "size": len(content),
        }

    config = {
        "architecture": _ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": run,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": keep(_json(config), "config.v1+json"),
        "layers": [keep(layer, "layer.v1.tar")],
    }
    named = {**keep(_json(manifest), "manifest.v1+json"), "annotations": {"io.containerd.image.name": image}}
    files["index.json"] = (_json({"schemaVersion": 2, "manifests": [named]}), 0o644)
    files["oci-layout"] = (_json({"imageLayoutVersion": "1.0.0"}), 0o644)
    path.write_bytes(_archive(files))


def _compile(name: str, directory: Path) -> bytes:
    program = directory / name
    subprocess.run(
        ["cc", "-static", "-Os", "-Wall", "-Wextra", "-Werror", "-o", program, _SOURCE / f"{name}.c"],
        check=True,
        stdin=subprocess.DEVNULL,
        timeout=_COMPILE_LIMIT,
    )
    return program.read_bytes()


def _archive(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, (content, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return written.getvalue()


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
