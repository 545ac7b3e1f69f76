"""Access control of the dashboard; viewers and their users."""

from __future__ import annotations

from collections.abc import Callable
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
    "Only users of this server may see its state: send an API key in the header ndif-api-key, or enter it "
    "on the page at /. The server's operator issues keys."
)


def mode_of(settings: Settings, host: str, *, many_users: bool) -> Mode:
    """Return the mode of the dashboard of a server that listens on `host`.

    The setting decides. Without the setting, the dashboard is public if only this machine reaches the
    server, or if the server has one user (not `many_users`). Otherwise it requires a login.
    """
    if settings.dashboard is not None:
        return settings.dashboard
    is_apart = reachable_as(host, settings.public_url) is None and not settings.allowed_hosts
    return "public" if is_apart or not many_users else "login"


@dataclass(frozen=True, slots=True)
class Viewer:
    """A viewer of the dashboard."""

    account: Account | None = None
    """None for a viewer without an account."""
    is_known: bool = False
    """True if the account belongs to this viewer alone, so that the viewer may see its jobs."""

    @property
    def user(self) -> str | None:
        """Return the user whose jobs the viewer sees; None if the viewer sees no jobs."""
        return self.account.user if self.account is not None and self.is_known else None


@dataclass(frozen=True)
class Access:
    """Admits viewers of the server's state by API key or by further checks."""

    mode: Mode
    accounts: Accounts
    checks: list[Callable[[HTTPConnection], bool]] = field(default_factory=list)
    """Checks that admit a viewer without a key, such as a check of an operator's session."""

    async def viewer(self, http: HTTPConnection) -> Viewer:
        """Return the viewer that sends a request.

        Raises:
            NoSuchKeyError: If the request has a wrong key, even on a public dashboard.
            HttpError: 401, if the dashboard needs a key, and the request has no key and passes no check.
        """
        caller = caller_of(http)
        try:
            account = await self.accounts.account(caller)
        except NoSuchKeyError:
            if caller.key:
                raise
            if self.mode == "public" or any(check(http) for check in self.checks):
                return Viewer()
            raise HttpError(401, _LOG_IN) from None
        # A caller without key and uid is known only by its address, which several users may share.
        return Viewer(account, bool(account.key) or caller.uid is not None)
