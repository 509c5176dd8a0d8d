"""Generates _nvplug/kubelet/api out of proto/: ``python -m tests.generate_api DIRECTORY``, or ``make api``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["ROOT", "generate"]

ROOT: Final = Path(__file__).parents[1]
"""The checkout."""

OPTIONS: Final = ("client_generation=async", "server_generation=async")


def generate(directory: Path) -> None:
    """Writes the package into ``directory``, which is made, and whose other files stay as they are.

    Args:
        directory: of the package ``api``.

    Raises:
        subprocess.CalledProcessError: the compiler refuses the contract; it says why on stderr.
    """
    # Beside the interpreter that runs this, whatever environment the shell has activated. The plugin looks for ruff,
    # with which it formats what it writes, on the PATH.
    scripts = sysconfig.get_path("scripts")
    plugin = shutil.which("protoc-gen-python_betterproto2", path=scripts)
    assert plugin is not None, f"betterproto2-compiler is not installed in {scripts}"
    directory.mkdir(parents=True, exist_ok=True)
    # ruff takes its settings from where it is started: not from our pyproject.toml, so that a change of our style
    # never changes generated code.
    with tempfile.TemporaryDirectory() as elsewhere:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "grpc_tools.protoc",
                f"--proto_path={ROOT / 'proto'}",
                f"--plugin=protoc-gen-python_betterproto2={plugin}",
                f"--python_betterproto2_out={directory.absolute()}",
                f"--python_betterproto2_opt={','.join(OPTIONS)}",
                "deviceplugin.proto",
            ],
            cwd=elsewhere,
            env={**os.environ, "PATH": os.pathsep.join((scripts, os.environ["PATH"]))},
            check=True,
        )


if __name__ == "__main__":
    _, target = sys.argv
    generate(Path(target))
