"""How many connections a gateway keeps open, and how often one may make the event loop work."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from ndif.hostname import client_network

logger = logging.getLogger(__name__)

_KEPT_BACK = 4
"""One in this many of the process's file descriptors is kept back for jobs, files and services."""
_DESCRIPTORS = 65_536
"""Descriptors that a process asks for; a limit of millions slows programs that close them all."""
_WARN_EVERY_S = 60.0
_SUSPECT_S = 10.0
"""Seconds for which a client's network is suspect after one of its connections was refused."""
_MAX_SUSPECTS = 10_000
_FREE_BYTES = 4096
"""Size at which a piece costs nothing."""


def raise_descriptor_limit() -> None:
    """Raise the process's soft limit of open files to its hard limit, or to 65,536 if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def default_limit() -> int:
    """Return the number of connections that leaves a quarter of the process's descriptors free."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _DESCRIPTORS)
    return most - most // _KEPT_BACK


@dataclass(slots=True)
class _Client:
    """The open connections of one client's network; `idle` has the longest idle one first."""

    open: int = 0
    idle: dict[asyncio.BaseTransport, None] = field(default_factory=dict)


class ConnectionLimit:
    """The open connections of a gateway.

    At most `limit` connections are open, half of them from one client's network; the limit of one client
    does not apply to a trusted proxy, which forwards the requests of many. A connection without a request
    in progress is idle. If a limit is reached, the longest idle connection is closed for the new one. If
    none is idle, the new connection is refused. So idle connections cannot lock other clients out.
    """

    def __init__(
        self,
        limit: int,
        is_proxy: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._limit = limit
        self._is_proxy = is_proxy
        self._open: dict[asyncio.BaseTransport, str] = {}
        self._idle: dict[asyncio.BaseTransport, None] = {}
        self._clients: defaultdict[str, _Client] = defaultdict(_Client)
        self._next_warning = 0.0
        self._suspect_until: dict[str, float] = {}

    def suspect(self, address: str) -> None:
        """Remember for ten seconds that a client sent more than it may; it may connect again at once."""
        now = self._clock()
        if len(self._suspect_until) >= _MAX_SUSPECTS:
            current = ((name, end) for name, end in self._suspect_until.items() if end > now)
            self._suspect_until = dict(current)
        self._suspect_until[client_network(address)] = now + _SUSPECT_S

    def is_suspect(self, address: str) -> bool:
        """Return True if `suspect` was called for the address's network in the last ten seconds."""
        return self._suspect_until.get(client_network(address), 0.0) > self._clock()

    def admit(self, transport: asyncio.Transport, address: str) -> bool:
        """Count a new connection, which is idle; return False if it must be refused."""
        name = client_network(address)
        client = self._clients[name]
        is_full = len(self._open) >= self._limit
        has_most = client.open >= max(1, self._limit // 2) and not self._is_proxy(address)
        if is_full or has_most:
            # A client that has reached its own limit must not displace the connections of others.
            longest_idle = next(iter(client.idle if has_most else self._idle), None)
            self._warn(address, is_closed=longest_idle is not None)
            if longest_idle is None:
                self._forget_if_unused(name)
                return False
            self.close(longest_idle)
            longest_idle.abort()  # type: ignore[attr-defined]  # transports of sockets have it
        client = self._clients[name]
        client.open += 1
        self._open[transport] = name
        self.set_idle(transport)
        return True

    def set_idle(self, transport: asyncio.BaseTransport) -> None:
        """Record that a connection has no request in progress."""
        name = self._open.get(transport)
        if name is not None:
            self._idle[transport] = self._clients[name].idle[transport] = None

    def set_busy(self, transport: asyncio.BaseTransport) -> None:
        """Record that a request has begun on a connection, or that it is a WebSocket now."""
        name = self._open.get(transport)
        if name is not None:
            self._idle.pop(transport, None)
            self._clients[name].idle.pop(transport, None)

    def close(self, transport: asyncio.BaseTransport) -> None:
        """Stop counting a connection; a second call does nothing."""
        self.set_busy(transport)
        name = self._open.pop(transport, None)
        if name is not None:
            self._clients[name].open -= 1
            self._forget_if_unused(name)

    def _forget_if_unused(self, name: str) -> None:
        if not self._clients[name].open:
            del self._clients[name]

    def _warn(self, address: str, *, is_closed: bool) -> None:
        now = self._clock()
        if now >= self._next_warning:
            self._next_warning = now + _WARN_EVERY_S
            consequence = "idle connections are closed" if is_closed else "new ones are refused"
            logger.warning(
                "%d connections are open, %d of them from the network of %s: %s (NDIF_MAX_CONNECTIONS)",
                len(self._open),
                self._clients[client_network(address)].open,
                address,
                consequence,
            )


class Allowance:
    """A token bucket for the small pieces in which a client sends; large pieces are free.

    A piece costs one token, less one for each 4 KiB of it. So a sender of large pieces gains tokens, and a
    sender of many tiny pieces runs out of them.
    """

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._tokens = burst
        self._at = clock()

    def spend(self, pieces: int, size: int) -> float:
        """Take `pieces` with `size` bytes in all; return the seconds until there is a token again, or 0."""
        now = self._clock()
        gained = (now - self._at) * self._per_s + size / _FREE_BYTES
        self._at = now
        self._tokens = min(self._burst, self._tokens + gained) - pieces
        return max(0.0, -self._tokens / self._per_s)
