"""The user (uid) of the process at the other end of a local connection.

`sock_diag(7)` looks up one socket in about 10 µs, independent of the number of sockets. If it fails, the
kernel's list of all sockets is read, which takes milliseconds. A socket that its process has closed has no
user, though the kernel reports root.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
from pathlib import Path
from struct import Struct, error

Address = tuple[str, int]
"""An IP address and a port."""

_SOCK_DIAG = 4
_BY_FAMILY = 20
_IS_REQUEST = 1
_ANY = 0xFFFFFFFF
_OPEN_STATES = (1, 4, 5)
"""TCP states of a socket that a process holds: ESTABLISHED; FIN_WAIT1 and FIN_WAIT2 after `shutdown(2)`."""
_HEADER = Struct("=IHHII")
_REQUEST = Struct("=BBBBI")
_PORTS = Struct("!HH")
_ADDRESS_BYTES = 16
_NO_COOKIE = Struct("=III").pack(0, _ANY, _ANY)
_ANSWER = Struct(f"=BBBB{_PORTS.size + 2 * _ADDRESS_BYTES + len(_NO_COOKIE)}sIIIII")
_TIMEOUT_S = 1.0
_WORD = Struct("=I")
_OVERFLOW = Path("/proc/sys/kernel/overflowuid")


def uid_of(client: Address, server: Address) -> int | None:
    """Return the uid of the process with the socket `client`, connected to `server`; None if unknown."""
    ends = (unmapped(client[0]), client[1]), (unmapped(server[0]), server[1])
    try:
        uid = _query_kernel(*ends)
    except (OSError, error):
        uid = _search_proc(*ends)
    # The kernel reports this uid for every user that is not mapped into this user namespace.
    return None if uid == _overflow_uid() else uid


class Peer:
    """The other end of one connection; asks the kernel once, at the first use."""

    def __init__(self, client: Address | None, server: tuple[str, int | None] | None) -> None:
        self._client = client
        self._server = server

    @functools.cached_property
    def uid(self) -> int | None:
        """The uid of the process at the other end; None if it is on another machine or unknown."""
        host, port = self._server or ("", None)
        if self._client is None or not port:  # a Unix socket has neither
            return None
        return uid_of(self._client, (host, port))


PEER = "ndif.peer"
"""Key of a connection's `Peer` in the scope of each of its requests."""


def unmapped(address: str) -> str:
    """Return the IPv4 address of an IPv4-mapped IPv6 address; any other address unchanged."""
    try:
        mapped = ipaddress.IPv6Address(address).ipv4_mapped
    except ValueError:
        return address
    return address if mapped is None else str(mapped)


def _query_kernel(client: Address, server: Address) -> int | None:
    """Look up the socket's uid with `sock_diag(7)`; raise an OSError if the kernel gives no answer."""
    family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
    ends = [
        socket.inet_pton(family, host).ljust(_ADDRESS_BYTES, b"\0") for host, _ in (client, server)
    ]
    ports = _PORTS.pack(client[1], server[1])
    body = (
        _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _ANY) + ports + b"".join(ends) + _NO_COOKIE
    )
    head = _HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _IS_REQUEST, 0, 0)
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG
    ) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        kernel.send(head + body)
        answer = kernel.recv(1 << 13)
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        raise OSError("the kernel gives no answer")
    _, state, _, _, socket_id, *_, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    # If there is no such connection, the kernel answers with a listener on the client's port.
    is_match = state in _OPEN_STATES and inode and socket_id.startswith(ports)
    return int(uid) if is_match else None


def _search_proc(client: Address, server: Address) -> int | None:
    """Look up the socket's uid in `/proc/net/tcp` and `tcp6`, which may be long."""
    for name, prefix in (("tcp", ""), ("tcp6", "::ffff:" if ":" not in client[0] else "")):
        if name == "tcp" and ":" in client[0]:
            continue
        ends = [f"{_proc_address(prefix + host)}:{port:04X}" for host, port in (client, server)]
        try:
            lines = Path("/proc/net", name).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if ends[0] in line and (fields := line.split())[1:3] == ends:
                is_held = int(fields[3], 16) in _OPEN_STATES and fields[9] != "0"
                return int(fields[7]) if is_held else None
    return None


def _proc_address(host: str) -> str:
    """Return an address as `/proc/net/tcp` writes it: 32-bit words in the processor's byte order."""
    packed = ipaddress.ip_address(host).packed
    return "".join(f"{word:08X}" for (word,) in _WORD.iter_unpack(packed))


@functools.cache
def _overflow_uid() -> int:
    try:
        return int(_OVERFLOW.read_text())
    except (OSError, ValueError):
        return 65534
