"""Sessions of operators in browsers: a signed cookie that expires, and the token that its forms repeat.

The signature is itsdangerous'. Its key follows from a secret that the server's gateways share, so that each
of them knows the sessions of the others and none of them stores one. The hash of the password is in the
key: a new password ends the sessions of the old.
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
"""Characters of a cookie that are looked at."""


@dataclass(frozen=True, slots=True)
class Session:
    """One login of an operator."""

    id: str
    way: str
    """Proof of the login: `password` or `token`."""
    until: float
    """Unix time of its end."""
    csrf: str
    """Token that follows from the session, and without which it changes nothing."""


class Sessions:
    """Make, find and end the sessions of one server."""

    def __init__(self, shared: Sequence[str], password_hash: str, life_s: float) -> None:
        """Sign with the first of the secrets that the server's gateways share, and verify with any."""
        if not shared or not all(shared):
            raise ValueError("an empty secret would let everyone sign")
        use = f"operator session {hashlib.sha256(password_hash.encode()).hexdigest()}"
        # The newest comes last there.
        keys = [derive(secret, use) for secret in reversed(shared)]
        digest = {"digest_method": hashlib.sha256, "key_derivation": "hmac"}
        self._cookies = URLSafeTimedSerializer(keys, salt="cookie", signer_kwargs=digest)
        self._tokens = Signer(keys, salt="csrf", **digest)  # type: ignore[arg-type]
        self._life_s = life_s
        # Servers of one machine share the cookies of its name, whatever their ports.
        own = derive(shared[0], "operator cookie").hex()[:_NAME_DIGITS]
        self._name = f"ndif-operator-{own}"

    def begin(self, way: str) -> tuple[Session, str]:
        """Return a new session and the value of its cookie."""
        session_id = secrets.token_urlsafe(_ID_BYTES)
        value = self._cookies.dumps([session_id, way])
        until = int(time.time()) + self._life_s  # the signature has whole seconds
        session = Session(session_id, way, until, self._token_of(session_id))
        return session, str(value)

    def of(self, connection: HTTPConnection) -> Session | None:
        """Return the session whose cookie a request carries; None without one that holds."""
        value = connection.cookies.get(self._cookie_name(connection), "")
        return self._read(value) if 0 < len(value) <= _MAX_COOKIE else None

    def is_token_of(self, session: Session, given: str) -> bool:
        """Return True if a request repeats the session's own token."""
        return self._tokens.verify_signature(
            session.id.encode(), given.encode("ascii", errors="replace")
        )

    def set_on(self, response: Response, connection: HTTPConnection, value: str) -> None:
        """Set a cookie for the life of its session."""
        self._set(response, connection, value, int(self._life_s))

    def remove_from(self, response: Response, connection: HTTPConnection) -> None:
        """Remove the cookie from the browser."""
        self._set(response, connection, "", 0)

    def _set(self, response: Response, connection: HTTPConnection, value: str, life_s: int) -> None:
        response.set_cookie(
            self._cookie_name(connection),
            value,
            max_age=life_s,
            path="/",
            secure=_is_https(connection),
            httponly=True,
            samesite="strict",
        )

    def _cookie_name(self, connection: HTTPConnection) -> str:
        # Browsers take a name with this prefix over TLS alone, from this very host.
        return f"__Host-{self._name}" if _is_https(connection) else self._name

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
    """Return True if the browser uses TLS, as far as its proxy is believed."""
    return connection.scope.get("scheme") in ("https", "wss")
