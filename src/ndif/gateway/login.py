"""`POST /login`, `POST /logout` and `GET /session`: an operator's login in a browser."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from ndif.config.reference import name_of
from ndif.config.units import format_duration
from ndif.errors import problems
from ndif.gateway.caller import caller_of
from ndif.gateway.http_error import RETRY_SOON, HttpError
from ndif.gateway.incoming import read_body
from ndif.gateway.openapi import JSON, Answer, ApiRoute, Content, Description, json_response
from ndif.gateway.operator import CSRF_HEADER, Operators, is_own_page
from ndif.gateway.sessions import Session
from ndif.schema.answer import answer
from ndif.stores.events import Kind, RecordEvents, event
from ndif.stores.rate_limiter import Rates, RatesUnavailableError

logger = logging.getLogger(__name__)

FROM_ADDRESS, IN_ALL = 10, 100
"""Password attempts per window: from one address, and from all addresses together."""
WINDOW_MIN = 10
_MAX_BODY_BYTES = 8192
_BCRYPT, _BCRYPT_BYTES = "$2", 72
_FORM = "application/x-www-form-urlencoded"
_TAG = "the operator's login"
_WRONG = "That is not the operator's password, nor the server's token."
_NO_HASH = (
    "That is not the server's token, and this server has no password. `ndif start` writes the token to the "
    "file `token` in its session's folder; `ndif admin password` prints the variable that sets a password."
)


class Login(BaseModel):
    """The proof of an operator."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
        json_schema_extra={"examples": [{"password": "three words nobody knows"}]},
    )

    password: Annotated[str, Field(min_length=1, max_length=1024, repr=False)]
    """The password of NDIF_ADMIN_PASSWORD_HASH, or the server's token."""


@answer(
    example={
        "operator": True,
        "until": 1_785_000_000.0,
        "csrf": "Jx0cGk7m2n3o4p5q6r7s8t9u0v1w2x3y4z5A6B7C8D9",
        "has_password": True,
    }
)
class OwnSession:
    """The login of the requesting browser."""

    operator: bool
    """True if the cookie of the request opens the operator's routes."""
    until: float | None
    """Unix time at which the login expires."""
    csrf: str | None
    """Token to send as `X-CSRF-Token` with each request that changes something."""
    has_password: bool
    """True if the server has a password; its token is always accepted."""


_LOGIN = Description(
    _TAG,
    "Log an operator in",
    answers={
        200: Answer(
            OwnSession,
            "The login; its cookie is in the header `Set-Cookie`.",
            headers={"Set-Cookie": "The session, for this server's own pages alone."},
        )
    },
    body={
        JSON: Content(Login),
        _FORM: Content(Login, {"password": "three words nobody knows"}),
    },
    refusals={
        400: "The body is not valid.",
        401: "The password is wrong.",
        403: "The request comes from the page of another site.",
        413: "The body is too large.",
        429: "Too many passwords were tried; Retry-After says when the next one is checked.",
        503: "Password attempts cannot be counted now.",
    },
)
_LOGOUT = Description(
    _TAG,
    "End the login of this browser",
    "Needs `X-CSRF-Token`, like every change by a login.",
    answers={200: Answer(OwnSession, "No login.")},
    refusals={403: "The request comes from another page, or without the session's token."},
)
_SESSION = Description(_TAG, "The login of this browser", answered="The login, if there is one.")


@dataclass
class LoginRoutes:
    """Begins and ends sessions.

    Each password attempt is counted before it is checked, per address and in total; the server's gateways
    share these limits. The token cannot be guessed. It is checked first and is not counted, so that a
    guesser cannot lock its owner out.
    """

    operators: Operators
    password_hash: str = field(repr=False)
    """Argon2id hash, or a bcrypt hash of NDIF 0.1; empty without a password."""
    rates: Rates
    record: RecordEvents
    _verifying: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a password is verified: a hash takes 64 MiB and a core, so one runs at a time."""

    def routes(self) -> list[BaseRoute]:
        """Return the routes."""
        return [
            ApiRoute("/login", self.login, _LOGIN, "POST"),
            ApiRoute("/logout", self.logout, _LOGOUT, "POST"),
            ApiRoute("/session", self.session, _SESSION),
        ]

    async def session(self, http: Request) -> OwnSession:
        """Answer with the login of the request's cookie."""
        return self._own_session(self.operators.sessions.of(http))

    async def login(self, http: Request) -> Response:
        """Set a session cookie in exchange for the operator's password or token."""
        if "sec-fetch-site" in http.headers and not is_own_page(http):
            # Login CSRF: a foreign page could log its visitor in to a session of the attacker.
            raise HttpError(403, "Log in on the server's own page: this came from another.")
        password = (await _read_login(http)).password
        caller = caller_of(http).name
        if self.operators.is_token(password):
            return await self._begin(http, caller, "token")
        await self._count_attempt(caller)
        if self.password_hash and await self._is_password(password):
            return await self._begin(http, caller, "password")
        await self._record("failed login", caller, "The password was wrong.")
        raise HttpError(401, _WRONG if self.password_hash else _NO_HASH)

    async def logout(self, http: Request) -> Response:
        """Remove the session cookie from the browser; refuse a logout without the session's token."""
        session = self.operators.sessions.of(http)
        response = json_response(self._own_session(None))
        if session is not None:
            if not is_own_page(http) or not self.operators.sessions.is_token_of(
                session, http.headers.get(CSRF_HEADER, "")
            ):
                raise HttpError(
                    403,
                    "Log out on the server's own page: this came from another, or from an old one.",
                )
            await self._record("logout", caller_of(http).name, "")
        self.operators.sessions.remove_from(response, http)
        return response

    async def _begin(self, http: Request, caller: str, way: str) -> Response:
        session, value = self.operators.sessions.begin(way)
        response = json_response(self._own_session(session))
        self.operators.sessions.set_on(response, http, value)
        await self._record("login", caller, f"By the {way}.")
        return response

    def _own_session(self, session: Session | None) -> OwnSession:
        return OwnSession(
            operator=session is not None,
            until=session.until if session else None,
            csrf=session.csrf if session else None,
            has_password=bool(self.password_hash),
        )

    async def _count_attempt(self, caller: str) -> None:
        """Count a password attempt; raise an HttpError if there were too many."""
        try:
            wait_s = await self.rates.take(f"login {caller}", FROM_ADDRESS, WINDOW_MIN)
            wait_s = wait_s or await self.rates.take("login", IN_ALL, WINDOW_MIN)
        except RatesUnavailableError as error:
            logger.warning("a login is refused: %s", error)
            raise HttpError(
                503,
                "Password attempts cannot be counted now, so none is checked. Try again in a moment, or "
                "log in with the server's token.",
                RETRY_SOON,
            ) from error
        if wait_s > 0:
            await self._record("failed login", caller, "Too many passwords were tried.")
            raise HttpError(
                429,
                f"Too many passwords were tried. Wait {format_duration(math.ceil(wait_s))}, or log in with "
                "the server's token.",
                {"Retry-After": str(math.ceil(wait_s))},
            )

    async def _is_password(self, text: str) -> bool:
        async with self._verifying:
            return await asyncio.to_thread(_verify, self.password_hash, text)

    async def _record(self, kind: Kind, caller: str, text: str) -> None:
        await self.record([event(kind, caller, text, "login")])


def _verify(password_hash: str, password: str) -> bool:
    # Imported at the first login, because most servers need neither library.
    import bcrypt
    from argon2 import PasswordHasher
    from argon2.exceptions import InvalidHashError, VerificationError

    if password_hash.startswith(_BCRYPT):
        # bcrypt uses no more than these bytes; version 5 of the library refuses longer passwords.
        return bcrypt.checkpw(password.encode()[:_BCRYPT_BYTES], password_hash.encode())
    try:
        return PasswordHasher().verify(password_hash, password)
    except VerificationError:
        return False
    except InvalidHashError:
        logger.error("%s is no hash of `ndif admin password`", name_of("admin_password_hash"))  # noqa: TRY400
        return False


async def _read_login(http: Request) -> Login:
    """Return the body of a login; raise an HttpError that repeats no value of it, such as a password."""
    content = await read_body(http, _MAX_BODY_BYTES, "A login is at most 8 KiB.")
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if kind == _FORM:
            fields = dict(parse_qsl(content.decode(), keep_blank_values=True, max_num_fields=8))
            return Login.model_validate(fields)
        return Login.model_validate_json(content)
    except ValidationError as error:
        first = problems(error)[0]
        place = str(first.location[0]) if first.location else "the body"
        raise HttpError(
            400, f'The login is not valid: {place[:50]}: send {{"password": "…"}}.'
        ) from error
    except ValueError as error:
        raise HttpError(400, 'The login is not valid: send {"password": "…"}.') from error
