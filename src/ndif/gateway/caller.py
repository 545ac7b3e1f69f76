"""The caller of a request, and the live channels that belong to one."""

from __future__ import annotations

import hashlib

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from ndif.gateway.peer import PEER, Peer, unmapped
from ndif.net import is_loopback
from ndif.stores.accounts import Caller

_FORWARDED = ("forwarded", "via", "x-real-ip")


def caller_of(connection: HTTPConnection) -> Caller:
    """Return the caller of a request or a WebSocket.

    A request that a proxy passes on is not that of the proxy's user, whoever may have forged its headers.
    """
    client, server = connection.client, connection.scope.get("server")
    address = unmapped(client.host if client else "")
    uid = None
    if is_loopback(address) and not _is_forwarded(connection.headers):
        # A WebSocket is asked for when it opens.
        peer = connection.scope.get(PEER) or Peer(client, server)
        uid = peer.uid
    return Caller(connection.headers.get("ndif-api-key", ""), address, uid)


def subscription_of(session_id: str, owner: str) -> str:
    """Return the broker's id of a live channel, given its client's id of it and the name of who opened it.

    Nobody else has a channel of that id: who posts to it must have the name that opened it.
    """
    return hashlib.sha256(f"{session_id}\n{owner}".encode(errors="replace")).hexdigest()


def _is_forwarded(headers: Headers) -> bool:
    return any(name in _FORWARDED or name.startswith("x-forwarded-") for name in headers)
