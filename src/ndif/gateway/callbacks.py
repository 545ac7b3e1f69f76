"""Checks of the webhook and mail addresses that jobs name, and the secret that signs webhooks."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.routing import BaseRoute

from ndif.config.settings import Settings
from ndif.gateway.answers import CallbackSecret
from ndif.gateway.caller import caller_of
from ndif.gateway.http_error import RETRY_SOON, HttpError
from ndif.gateway.openapi import ApiRoute, Description
from ndif.queue.callbacks.guard import (
    CallbackAddressError,
    CallbackKind,
    CallbackRules,
    read_address,
)
from ndif.queue.callbacks.webhook import signing_secret
from ndif.stores.accounts import Accounts
from ndif.stores.callbacks import CallbackQueue

_NO_MAIL = (
    "This server sends no mail: name an http or https URL as the callback, or leave it out and poll for "
    "the job (`backend()` again, or GET /response/ID)."
)
_SECRET = Description(
    "jobs",
    "The secret of one's webhooks",
    "A receiver verifies the header `webhook-signature` of a webhook with this secret.",
    "The secret; it changes only with the server's own secret.",
    refusals={
        401: "The API key is missing or unknown.",
        429: "Too many wrong keys came from this address.",
        503: "The server cannot reach its database of API keys.",
    },
    needs="key",
)


@dataclass(frozen=True)
class CallbackRoute:
    """Checks a job's webhook or mail address, and serves the secret that signs a key's webhooks."""

    settings: Settings
    rules: CallbackRules
    accounts: Accounts
    queue: CallbackQueue

    def routes(self) -> list[BaseRoute]:
        """Return the route."""
        return [ApiRoute("/callbacks/secret", self.secret, _SECRET)]

    async def admit(self, address: str, user: str) -> None:
        """Raise an `HttpError` if the address is invalid, or too many webhooks and mails wait."""
        try:
            receiver = read_address(address, self.rules.networks)
        except CallbackAddressError as error:
            raise HttpError(400, str(error)) from error
        if receiver.kind is CallbackKind.MAIL and not self.settings.sends_mail:
            raise HttpError(400, _NO_MAIL)
        limit = self.settings.max_callbacks
        if await self.queue.waiting_of(user) >= limit:
            raise HttpError(
                429,
                f"{limit} webhooks or mails of your jobs wait for receivers that do not accept them; this "
                "is the maximum. Fix these receivers, or send this job without a callback and poll for it.",
                RETRY_SOON,
            )

    async def secret(self, http: Request) -> CallbackSecret:
        """Answer with the secret that signs the webhooks of the caller's API key."""
        account = await self.accounts.account(caller_of(http))
        return CallbackSecret(secret=signing_secret(self.rules.secrets[0], account.key))
