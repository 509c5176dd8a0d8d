"""``nvplug cdi``: the document by which container runtimes find the GPUs of this node."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import trio

from _nvplug.commands.devices import ask
from _nvplug.container.cdi_document import encode
from _nvplug.container.cdi_files import describe
from _nvplug.container.facts import Terms
from _nvplug.errors import NvplugError
from _nvplug.resources import Offer, next_offer

if TYPE_CHECKING:
    from _nvplug.config import Config
    from _nvplug.drivers import Driver

__all__ = ["main"]


def main(driver: Driver, config: Config, *, root: str = "") -> int:
    """Prints it as `nvplug run` would write it, or what stands in the way, and returns the exit status.

    Args:
        driver: knows the GPUs.
        config: as for `nvplug run`; documents need not be among what it asks for.
        root: see cdi_host.look.
    """
    try:
        hardware, health = trio.run(ask, driver)
        offered = next_offer(Offer(), hardware, health, config).uuids
        document = describe(hardware, offered, Terms(config), root=root).document
    except NvplugError as error:
        sys.stderr.write(f"nvplug cdi: {error}; {error.remedy}\n")
        return error.exit_code
    sys.stdout.write(encode(document).decode())
    return 0
