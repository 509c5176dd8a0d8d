"""Stands for ssl in the frozen program, which speaks over unix sockets only and so never uses it.

trio, grpclib and asyncio import it all the same, and with it come OpenSSL's libraries: 6 MB. Here are the names that
they touch without being asked for TLS.
"""

from __future__ import annotations

__all__ = [
    "CertificateError",
    "DefaultVerifyPaths",
    "MemoryBIO",
    "SSLContext",
    "SSLEOFError",
    "SSLError",
    "SSLObject",
    "SSLSocket",
    "SSLSyscallError",
    "SSLWantReadError",
    "SSLZeroReturnError",
]


class SSLError(OSError):
    """Never raised."""


class SSLEOFError(SSLError):
    """Never raised."""


class SSLSyscallError(SSLError):
    """Never raised."""


class SSLWantReadError(SSLError):
    """Never raised."""


class SSLZeroReturnError(SSLError):
    """Never raised."""


CertificateError = SSLError


class SSLContext:
    """Nothing is an instance of it."""


class SSLObject:
    """Nothing is an instance of it."""


class SSLSocket:
    """Nothing is an instance of it."""


class MemoryBIO:
    """Nothing is an instance of it."""


class DefaultVerifyPaths:
    """Nothing is an instance of it."""
