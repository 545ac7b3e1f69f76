"""The right to see the dashboard, and the user whose jobs are shown there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import HTTPConnection

from ndif.config.settings import Settings
from ndif.gateway.caller import caller_of
from ndif.gateway.http_error import HttpError
from ndif.net import reachable_as
from ndif.stores.accounts import Account, Accounts, NoSuchKeyError

Mode = Literal["public", "login", "off"]

_LOG_IN = (
    "The state of this server is for its users: send an API key as the header ndif-api-key, or enter it on "
    "the page at /. The server's operator has keys to give."
)


def mode_of(settings: Settings, host: str, *, places: bool) -> Mode:
    """Return who may see the dashboard of a server that listens on `host`.

    Where the operator does not say, everybody may who is on the same machine. A server without `places` is
    one user's own.
    """
    if settings.dashboard is not None:
        return settings.dashboard
    is_apart = reachable_as(host, settings.public_url) is None and not settings.allowed_hosts
    return "public" if is_apart or not places else "login"


@dataclass(frozen=True, slots=True)
class Viewer:
    """Whoever looks at the dashboard."""

    account: Account | None = None
    """None for one who has shown no key."""
    is_known: bool = False
    """True if the account is nobody else's, so that its jobs may be shown."""

    @property
    def user(self) -> str | None:
        """Return the user whose jobs the viewer sees; None for one who sees none."""
        return self.account.user if self.account is not None and self.is_known else None


@dataclass(frozen=True)
class Access:
    """Decides by an API key, or by a further check, who sees the state of the server."""

    mode: Mode
    accounts: Accounts
    checks: list[Callable[[HTTPConnection], Awaitable[bool]]] = field(default_factory=list)
    """Further ways to be let in, such as an operator's session."""

    async def viewer(self, http: HTTPConnection) -> Viewer:
        """Return the viewer who sends a request; raise if there is nothing for them to see.

        A key that is sent has to be right, even where none is needed.
        """
        caller = caller_of(http)
        try:
            account = await self.accounts.account(caller)
        except NoSuchKeyError:
            if caller.key:
                raise
            if self.mode == "public" or await self._is_let_in(http):
                return Viewer()
            raise HttpError(401, _LOG_IN) from None
        # An address may be that of many.
        return Viewer(account, bool(account.key) or caller.uid is not None)

    async def _is_let_in(self, http: HTTPConnection) -> bool:
        for check in self.checks:
            if await check(http):
                return True
        return False
