"""``nvplug health``: asks the nvplug that runs whether it lives, and says in one line what it is at.

The static executable has the same in launcher.c: a probe asks every few seconds, and to start Python each time would
cost more than all that nvplug does meanwhile. What is asked, and what the answer means: see observe/probe.py.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from _nvplug.config import read_config
from _nvplug.errors import NotAnsweredError, OptionError

__all__ = ["main"]

_PATIENCE: Final = 5
"""Seconds. nvplug itself gives its loops 4 s to turn."""

_LONGEST: Final = 4096


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Prints the answer, and returns the exit status: 0 for yes.

    Raises:
        OptionError: what is asked makes no sense.
        NotAnsweredError: nobody answers, or somebody who is not nvplug.
    """
    if arguments not in ([], ["--ready"]):
        raise OptionError("nvplug health takes nothing but --ready", remedy="leave the other words out")
    # Whatever else is wrong with the environment is no matter here.
    variable = {name: value for name, value in environment.items() if name == "HEALTH_SOCKET"}
    answer = _ask(read_config([], variable).health_socket)
    sys.stdout.write(f"{answer[3:]}\n")
    return int(answer[1 if arguments else 0] != "0")


def _ask(name: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        # Not settimeout, with which connect does not wait at all where others wait already.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            asking.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _PATIENCE, 0))
        try:
            asking.connect(f"\0{name[1:]}")
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            answer = asking.recv(_LONGEST)
        except BlockingIOError:
            raise NotAnsweredError(
                f"no answer from {name} within {_PATIENCE} s", remedy="nvplug hangs: restart it"
            ) from None
        except OSError:
            raise NotAnsweredError(
                f"nobody answers at {name}",
                remedy="ask where nvplug runs, in its network namespace and with its HEALTH_SOCKET",
            ) from None
    # On a host anybody may take the name while nvplug does not run.
    _, user, _ = struct.unpack("iII", credentials)
    if user not in {0, os.geteuid()} or len(answer) < 3:
        raise NotAnsweredError(f"what answers at {name} is not nvplug", remedy="see who it is: ss -xlp")
    return answer.decode(errors="replace")
