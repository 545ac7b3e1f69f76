"""Every write to a Redis, as its MONITOR shows it, and detection of unsigned writes."""

from __future__ import annotations

import ast
import contextlib
import re
import socket
import threading
from collections.abc import Iterator

from ndif.stores.broker.signing import unverified

_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"')
_READS = frozenset(
    (
        *("auth", "blpop", "client", "command", "config", "eval", "evalsha", "exec", "exists"),
        *("flushall", "get", "hello", "hexists", "hget", "hmget", "info", "lindex", "llen"),
        *(
            "lrange",
            "monitor",
            "multi",
            "ping",
            "pttl",
            "pubsub",
            "scan",
            "script",
            "select",
            "subscribe",
        ),
        *("time", "ttl", "type", "unsubscribe", "xinfo", "xlen", "xpending", "xrange", "xread"),
        *("xreadgroup", "xrevrange"),
    )
)
"""Commands that store and publish nothing. A script's arguments appear in the commands that it runs."""
_REMOVES = frozenset(["del", "expire", "hdel", "lrem", "xack", "xautoclaim", "xdel", "xgroup"])
_SIGNED = frozenset(("publish", "rpush", "set", "xadd"))
_COUNTS = frozenset(("decrby", "hincrby", "incrby"))
_UNSIGNED = re.compile(
    r"set dispatcher:leader|set ended:.*|hset request:.*|hset queue:jobs", re.ASCII
)
"""The leader's lock, the mark of an end, the fields of a request (its payload is signed), and the numbers
of requests."""


class Monitor:
    """A thread that records the commands that a Redis receives."""

    def __init__(self, port: int) -> None:
        self.commands: list[list[bytes]] = []
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(b"MONITOR\r\n")
        self._file = self._socket.makefile("r", errors="replace")
        assert self._file.readline().startswith("+OK")
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._file:
                words = [ast.literal_eval(f'b"{word}"') for word in _WORD.findall(line)]
                self.commands.append(words)

    def close(self) -> None:
        """Stop listening."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def problems(self) -> list[str]:
        """Return unsigned writes and unknown commands."""
        unsigned = []
        for name, *arguments in self.commands:
            command = name.decode().lower()
            if command in _READS | _REMOVES | _COUNTS:
                continue
            target = arguments[0].decode(errors="replace")
            if _UNSIGNED.fullmatch(f"{command} {target}"):
                continue
            if command not in _SIGNED:
                unsigned.append(f"{command} {target}: unknown")
                continue
            value = arguments[1] if command == "set" else arguments[-1]
            if not _begins_signed(value):
                unsigned.append(f"{command} {target}: {value[:80]!r}")
        return unsigned


def _begins_signed(value: bytes) -> bool:
    """Return True if a value has the form of a signed message, which a job's payload may follow."""
    if unverified(value) is not value:
        return True
    length = int.from_bytes(value[32:36], "big")
    return len(value) > 36 and 0 < length <= len(value) - 36 and value[44:45] == b"{"


@contextlib.contextmanager
def monitoring(port: int) -> Iterator[Monitor]:
    """Record the commands of a Redis within the context."""
    monitor = Monitor(port)
    try:
        yield monitor
    finally:
        monitor.close()
