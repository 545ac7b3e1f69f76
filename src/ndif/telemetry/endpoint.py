"""The HTTP address at which a store of metrics, logs or traces accepts batches."""

from __future__ import annotations

import base64
import gzip
import ssl
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

from ndif.telemetry.shipper import RefusedBatchError, UnavailableError

_TIMEOUT_S = 10.0
"""Timeout in seconds of the connection and of each read and write."""
_REFUSALS = (400, 413, 422)
"""Statuses of batches that the store would refuse again."""
_MAX_BODY = 300
"""Bytes of a response that the error message quotes."""


class Endpoint:
    """An address that accepts batches by POST, compressed with gzip.

    Each batch uses a new connection, because a proxy may close an idle connection.
    """

    def __init__(
        self,
        url: str,
        target: str,
        content_type: str,
        token: str = "",
        headers: Mapping[str, str] = MappingProxyType({}),
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """Send to the path and query `target` at the scheme, credentials and host of `url`.

        `headers` are sent as well.
        """
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._target = target
        self._timeout_s = timeout_s
        self._shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._headers = {
            "Content-Type": content_type,
            "Content-Encoding": "gzip",
            "Connection": "close",
            **_authorization(parts.username, parts.password, token),
            **headers,
        }

    def post(self, content: bytes) -> None:
        """Send a batch; raise `UnavailableError` or `RefusedBatchError` if the store does not accept it."""
        connection = self._connection()
        try:
            connection.request("POST", self._target, gzip.compress(content), self._headers)
            answer = connection.getresponse()
            body = answer.read(_MAX_BODY)
        except (OSError, HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise UnavailableError(f"{self._shown}: {reason}") from error
        finally:
            connection.close()
        if answer.status // 100 != 2:
            kind = RefusedBatchError if answer.status in _REFUSALS else UnavailableError
            text = body.decode(errors="replace").strip()
            raise kind(f"{self._shown} answers {answer.status} {answer.reason}: {text!r}")

    def _connection(self) -> HTTPConnection:
        if self._tls is None:
            return HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        return HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._tls)


def _authorization(user: str | None, password: str | None, token: str) -> Mapping[str, str]:
    if token:
        return {"Authorization": f"Token {token}"}
    if user is None:
        return {}
    pair = f"{unquote(user)}:{unquote(password or '')}".encode()
    return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}
