"""Stands for importlib.metadata in the frozen program, where betterproto2 asks for its own version at import.

The true one reads it from a file with the help of email, csv and zipfile: 20 ms at each start.
"""

from __future__ import annotations

from _versions import VERSIONS  # type: ignore[import-not-found]  # made by build.spec

__all__ = ["PackageNotFoundError", "version"]


class PackageNotFoundError(ModuleNotFoundError):
    """No version of a package was asked for when the program was built."""


def version(name: str) -> str:
    """The version of a package, as it was when the program was built.

    Raises:
        PackageNotFoundError: it is not among those noted then.
    """
    try:
        return str(VERSIONS[name])
    except KeyError:
        raise PackageNotFoundError(name) from None
