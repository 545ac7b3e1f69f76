"""The operator behind a request: by the server's token, or by the session of a login.

This is the one place that opens `/admin/*`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection, Request

from ndif.distribution import COMMAND_LINE
from ndif.gateway.http_error import HttpError
from ndif.gateway.sessions import Session, Sessions

CSRF_HEADER = "X-CSRF-Token"
"""Header in which a page repeats the token of its session."""
_READ = ("GET", "HEAD")

UNAUTHORIZED = (
    "This needs the server's token, as `Authorization: Bearer TOKEN`. `ndif start` writes it to the file "
    "`token` in its session's folder; from another machine, give it to the command with --token. In a "
    "browser, log in on the server's page."
)
_OTHER_PAGE = (
    "This request carries an operator's login, and does not come from the server's own page: nothing was "
    "changed. Open the server's page, and do it there."
)
_OTHER_SESSION = "This page belongs to an earlier login, and nothing was changed: load it again."


@dataclass(frozen=True, slots=True)
class Operator:
    """Whoever operates the server with a request."""

    by: str
    """Words for the log of events: `login`, `command line` or `token`."""
    session: Session | None = None


class Operators:
    """Tell operators from everybody else.

    Owns the check of the token, and asks `Sessions` for a login. A login's request that changes something
    must come from the server's own page, and repeat the token of its session: a browser adds the cookie to
    whatever page asks.
    """

    def __init__(self, token: str, sessions: Sessions) -> None:
        if not token:
            raise ValueError("an empty token would let everyone in")
        self._token = token.encode()
        self.sessions = sessions

    def is_token(self, given: str) -> bool:
        """Return True if a text is the operator's token."""
        return secrets.compare_digest(given.encode(errors="replace"), self._token)

    def is_logged_in(self, connection: HTTPConnection) -> bool:
        """Return True if a request has the cookie of a session: enough to read, and no more."""
        return self.sessions.of(connection) is not None

    def of(self, http: Request) -> Operator:
        """Return the operator of a request; raise an HttpError that says what it lacks."""
        authorization = http.headers.get("authorization")
        if authorization is not None:
            return self._of_token(http, authorization)
        session = self.sessions.of(http)
        if session is None:
            raise _unauthorized()
        if http.method not in _READ:
            self._refuse_forged(http, session)
        return Operator("login", session)

    def _of_token(self, http: Request, authorization: str) -> Operator:
        scheme, _, given = authorization.partition(" ")
        # Starlette decodes headers as Latin-1: a token has no other characters.
        if scheme.lower() != "bearer" or not self.is_token(given.strip()):
            raise _unauthorized()
        is_command = http.headers.get("user-agent", "").startswith(COMMAND_LINE)
        return Operator("command line" if is_command else "token")

    def _refuse_forged(self, http: Request, session: Session) -> None:
        if not is_own_page(http):
            raise HttpError(403, _OTHER_PAGE)
        if not self.sessions.is_token_of(session, http.headers.get(CSRF_HEADER, "")):
            raise HttpError(403, _OTHER_SESSION)


def is_own_page(http: Request) -> bool:
    """Return True if a browser says that a request comes from a page of this server.

    `SameOrigin` has refused every other `Origin`; here one of the two headers must be there.
    """
    site = http.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    return bool(urlsplit(http.headers.get("origin", "")).hostname)


def _unauthorized() -> HttpError:
    return HttpError(401, UNAUTHORIZED, {"WWW-Authenticate": "Bearer"})
