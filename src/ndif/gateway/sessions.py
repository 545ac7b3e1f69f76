"""Browser sessions of operators: a signed cookie that expires, and a CSRF token.

itsdangerous signs the cookies. The key is derived from a secret that the server's gateways share, so each
gateway accepts the sessions of the others, and no gateway stores sessions. The key also depends on the hash
of the password, so a new password ends all sessions.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from itsdangerous import BadData, Signer, URLSafeTimedSerializer
from starlette.requests import HTTPConnection
from starlette.responses import Response

from ndif.stores.broker.signing import derive

_ID_BYTES = 16
_NAME_DIGITS = 8
_MAX_COOKIE = 1024
"""Characters; a longer cookie is ignored."""


@dataclass(frozen=True, slots=True)
class Session:
    """One login of an operator."""

    id: str
    way: str
    """Proof of the login: `password` or `token`."""
    until: float
    """Unix time at which the session expires."""
    csrf: str
    """Token derived from the session; a request that changes anything must repeat it."""


class Sessions:
    """Issues, reads and removes the session cookies of one server."""

    def __init__(
        self,
        shared: Sequence[str],
        password_hash: str,
        life_s: float,
        *,
        is_behind_tls: bool = False,
    ) -> None:
        """Sign with the first secret of `shared`, and verify with any of them.

        `is_behind_tls`: a proxy serves the public URL over TLS, and may not forward the scheme.
        """
        if not shared or not all(shared):
            raise ValueError("an empty secret would let everyone sign")
        use = f"operator session {hashlib.sha256(password_hash.encode()).hexdigest()}"
        # itsdangerous signs with the last key.
        keys = [derive(secret, use) for secret in reversed(shared)]
        digest = {"digest_method": hashlib.sha256, "key_derivation": "hmac"}
        self._cookies = URLSafeTimedSerializer(keys, salt="cookie", signer_kwargs=digest)
        self._tokens = Signer(keys, salt="csrf", **digest)  # type: ignore[arg-type]
        self._life_s = life_s
        # Browsers share cookies between the ports of a host: each server needs its own cookie name.
        suffix = derive(shared[0], "operator cookie").hex()[:_NAME_DIGITS]
        self._name = f"ndif-operator-{suffix}"
        self._is_behind_tls = is_behind_tls

    def begin(self, way: str) -> tuple[Session, str]:
        """Return a new session and the value of its cookie."""
        session_id = secrets.token_urlsafe(_ID_BYTES)
        value = self._cookies.dumps([session_id, way])
        until = int(time.time()) + self._life_s  # the signature has whole seconds
        session = Session(session_id, way, until, self._token_of(session_id))
        return session, str(value)

    def of(self, connection: HTTPConnection) -> Session | None:
        """Return the session of a request's cookie; None without a valid cookie."""
        values = (connection.cookies.get(name, "") for name in self._names(connection))
        sessions = (self._read(value) for value in values if 0 < len(value) <= _MAX_COOKIE)
        return next((session for session in sessions if session is not None), None)

    def is_token_of(self, session: Session, text: str) -> bool:
        """Return True if `text` is the session's CSRF token."""
        return self._tokens.verify_signature(
            session.id.encode(), text.encode("ascii", errors="replace")
        )

    def set_on(self, response: Response, connection: HTTPConnection, value: str) -> None:
        """Set the session's cookie, which lives as long as the session."""
        name = self._secure_name if self._may_be_secure(connection) else self._name
        self._set(response, name, value, int(self._life_s))

    def remove_from(self, response: Response, connection: HTTPConnection) -> None:
        """Remove the cookie from the browser."""
        for name in self._names(connection):
            self._set(response, name, "", 0)

    def _set(self, response: Response, name: str, value: str, life_s: int) -> None:
        response.set_cookie(
            name,
            value,
            max_age=life_s,
            path="/",
            secure=name == self._secure_name,
            httponly=True,
            samesite="strict",
        )

    @property
    def _secure_name(self) -> str:
        # Browsers accept a `__Host-` cookie only over TLS, and never from another host of the domain.
        return f"__Host-{self._name}"

    def _names(self, connection: HTTPConnection) -> tuple[str, ...]:
        """Return the names of the cookies that a request may have, in the order in which they count."""
        if _is_https(connection):
            return (self._secure_name,)
        # Behind a proxy that forwards no scheme, a request over TLS looks like plain HTTP.
        return (self._secure_name, self._name) if self._is_behind_tls else (self._name,)

    def _may_be_secure(self, connection: HTTPConnection) -> bool:
        """Return True if the browser uses TLS, or is not known to use plain HTTP behind a proxy with TLS.

        Browsers send the page's origin, and so its scheme, with each POST.
        """
        origin = connection.headers.get("origin", "")
        return _is_https(connection) or (self._is_behind_tls and not origin.startswith("http:"))

    def _read(self, value: str) -> Session | None:
        try:
            content: Any
            content, signed = self._cookies.loads(
                value, max_age=int(self._life_s), return_timestamp=True
            )
        except BadData:
            return None
        session_id, way = content
        until = signed.timestamp() + self._life_s
        return Session(session_id, way, until, self._token_of(session_id))

    def _token_of(self, session_id: str) -> str:
        return self._tokens.get_signature(session_id).decode()


def _is_https(connection: HTTPConnection) -> bool:
    """Return True if the browser uses TLS, directly or as reported by a trusted proxy."""
    return connection.scope.get("scheme") in ("https", "wss")
