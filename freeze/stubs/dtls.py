"""Stands for trio._dtls in the frozen program, which speaks over unix sockets only and so never uses it.

The true one makes a dozen classes for packets: 10 ms at each start.
"""

from __future__ import annotations

__all__ = ["DTLSChannel", "DTLSChannelStatistics", "DTLSEndpoint"]


class DTLSChannel:
    """Nothing is an instance of it."""


class DTLSChannelStatistics:
    """Nothing is an instance of it."""


class DTLSEndpoint:
    """Nothing is an instance of it."""
