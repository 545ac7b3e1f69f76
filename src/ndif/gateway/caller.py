"""The caller of a request, and the broker's ids of a caller's live channels."""

from __future__ import annotations

import hashlib

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from ndif.gateway.peer import PEER, Peer, unmapped
from ndif.hostname import is_loopback
from ndif.stores.accounts import Caller

_FORWARDED = ("forwarded", "via", "x-real-ip")


def caller_of(connection: HTTPConnection) -> Caller:
    """Return the caller of a request or a WebSocket.

    A forwarded request has no uid, because the connection is the proxy's. Forged headers gain nothing.
    """
    client, server = connection.client, connection.scope.get("server")
    address = unmapped(client.host if client else "")
    uid = None
    if is_loopback(address) and not _is_forwarded(connection.headers):
        # `HttpConnection` sets a peer for each HTTP connection, but not for a WebSocket.
        peer = connection.scope.get(PEER) or Peer(client, server)
        uid = peer.uid
    return Caller(connection.headers.get("ndif-api-key", ""), address, uid)


def subscription_of(session_id: str, owner: str) -> str:
    """Return the broker's id of a live channel: a hash of the client's session id and the opener's name.

    Only a caller of the same name can compute this id, so no other caller can send jobs to the channel.
    """
    return hashlib.sha256(f"{session_id}\n{owner}".encode(errors="replace")).hexdigest()


def _is_forwarded(headers: Headers) -> bool:
    return any(name in _FORWARDED or name.startswith("x-forwarded-") for name in headers)
