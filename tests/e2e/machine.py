"""What a whole kubelet needs around it: namespaces of its own, containerd with the image, and places for its files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from e2e import keeper
from e2e.image import IMAGE, write_image
from e2e.waiting import holds

__all__ = ["CONTAINERD_SOCKET", "Machine", "machine"]

CONTAINERD_SOCKET: Final = "/run/containerd/containerd.sock"

_KEEPER_LIMIT: Final = 60.0
_RUN_LIMIT: Final = 60.0

# Cgroups are not the point, and half of the controllers are missing where cgroup versions are mixed; the device cgroup
# works in any case. A lower oom_score_adj and AppArmor's profile would need, or change, what belongs to the machine.
_CONTAINERD_CONFIG: Final = f"""
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{IMAGE}"
  disable_cgroup = true
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """A small machine. Its /var/lib, /var/log and /run are below ``directory``, as is whatever a test puts there.

    Attributes:
        directory: has the same path in it.
        cgroup: all of its processes, containers among them, are here or below.
        pid: of a process that is always there.
        daemons: what was started in it, in this order.
    """

    directory: Path
    cgroup: Path
    pid: int
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def joined(self) -> tuple[str, ...]:
        """A command that runs its arguments, by exec, where they end with the machine."""
        return ("sh", "-c", 'echo $$ >"$1" && shift && exec "$@"', "sh", str(self.cgroup / "cgroup.procs"))

    @property
    def inside(self) -> tuple[str, ...]:
        """The same, in its namespaces."""
        return (*self.joined, "nsenter", "--target", str(self.pid), *keeper.NAMESPACES, "--")

    @property
    def on_its_network(self) -> tuple[str, ...]:
        """The same, in none of its namespaces but that of the network."""
        return (*self.joined, "nsenter", "--target", str(self.pid), "--net", "--")

    def log(self, name: str) -> str:
        """The end of what a daemon has written."""
        path = self.directory / f"{name}.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join([f"--- {name}", *lines[-60:]])

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Starts a daemon in it, whose output goes to a log of that name."""
        with (self.directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*self.inside, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.daemons.append(process)
        return process

    async def load(self, image: Path) -> None:
        """Gives containerd an image."""
        ctr = self.start("ctr", "ctr", "--namespace", "k8s.io", "images", "import", str(image))
        code = await trio.to_thread.run_sync(ctr.wait, _RUN_LIMIT)

        assert code == 0, f"{self.log('ctr')}\n{self.log('containerd')}"

    async def run(self, *command: str) -> bytes | None:
        """What a command writes that runs on its network; None if it fails."""
        with trio.fail_after(_RUN_LIMIT):
            result = await trio.run_process(
                [*self.on_its_network, *command], capture_stdout=True, capture_stderr=True, check=False
            )
        return result.stdout if result.returncode == 0 else None


@asynccontextmanager
async def machine(kubelet: Path) -> AsyncGenerator[Machine]:
    """A machine for as long as the block, on which containerd runs; the kubelet is its ``directory/kubelet``.

    At the end all that runs on it is killed, and nothing is left.
    """
    with _kept(kubelet) as made:
        config = made.directory / "containerd.toml"
        config.write_text(_CONTAINERD_CONFIG)
        image = made.directory / "image.tar"
        await trio.to_thread.run_sync(write_image, image)
        made.start("containerd", "containerd", "--config", str(config))
        await holds(Path(f"{made.directory}{CONTAINERD_SOCKET}").is_socket, lambda: made.log("containerd"))
        await made.load(image)
        yield made


@contextmanager
def _kept(kubelet: Path) -> Generator[Machine]:
    with subprocess.Popen(
        [sys.executable, keeper.__file__, str(kubelet)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Ctrl-C is for the tests.
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        # Nothing if it failed: then it has said why, on stderr.
        first = process.stdout.readline()
        assert first, "the machine for the kubelet cannot be made"
        said = json.loads(first)
        made = Machine(Path(said["directory"]), Path(said["cgroup"]), said["pid"])
        try:
            yield made
        finally:
            process.stdin.close()
            code = process.wait(_KEEPER_LIMIT)
            for daemon in made.daemons:
                daemon.wait(_KEEPER_LIMIT)

        assert code == 0, "the machine of the kubelet could not be removed"
