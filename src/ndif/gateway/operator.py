"""Authentication of operators, by the server's token or by the session of a login.

This is the only check in front of `/admin/*`.
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
_READ_METHODS = ("GET", "HEAD")

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
class AuthenticatedOperator:
    """The operator who sent a request."""

    by: str
    """Name in the event log: `login`, `command line` or `token`."""
    session: Session | None = None


class Operators:
    """Authenticates operators by token or session.

    Browsers attach the session's cookie to the requests of any page. So a request that changes something by
    a session must come from the server's own page and repeat the session's CSRF token.
    """

    def __init__(self, token: str, sessions: Sessions) -> None:
        if not token:
            raise ValueError("an empty token would let everyone in")
        self._token = token.encode()
        self.sessions = sessions

    def is_token(self, text: str) -> bool:
        """Return True if `text` is the operator's token."""
        return secrets.compare_digest(text.encode(errors="replace"), self._token)

    def is_logged_in(self, connection: HTTPConnection) -> bool:
        """Return True if a request has the cookie of a session, which suffices only for reading."""
        return self.sessions.of(connection) is not None

    def of(self, http: Request) -> AuthenticatedOperator:
        """Return the operator of a request; raise an HttpError (401, or 403 for a forged request)."""
        authorization = http.headers.get("authorization")
        if authorization is not None:
            return self._of_token(http, authorization)
        session = self.sessions.of(http)
        if session is None:
            raise _unauthorized()
        if http.method not in _READ_METHODS:
            self._refuse_forged(http, session)
        return AuthenticatedOperator("login", session)

    def _of_token(self, http: Request, authorization: str) -> AuthenticatedOperator:
        scheme, _, token = authorization.partition(" ")
        # Starlette decodes headers as Latin-1, which covers every character of a token.
        if scheme.lower() != "bearer" or not self.is_token(token.strip()):
            raise _unauthorized()
        is_command = http.headers.get("user-agent", "").startswith(COMMAND_LINE)
        return AuthenticatedOperator("command line" if is_command else "token")

    def _refuse_forged(self, http: Request, session: Session) -> None:
        if not is_own_page(http):
            raise HttpError(403, _OTHER_PAGE)
        if not self.sessions.is_token_of(session, http.headers.get(CSRF_HEADER, "")):
            raise HttpError(403, _OTHER_SESSION)


def is_own_page(http: Request) -> bool:
    """Return True if the browser's headers say that a page of this server sent the request.

    `Sec-Fetch-Site` decides. Without it any `Origin` passes, because `SameOrigin` refuses foreign ones.
    """
    site = http.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    return bool(urlsplit(http.headers.get("origin", "")).hostname)


def _unauthorized() -> HttpError:
    return HttpError(401, UNAUTHORIZED, {"WWW-Authenticate": "Bearer"})
