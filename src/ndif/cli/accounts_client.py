"""Operations on keys from the command line, by the running server, or else directly on the database."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

from ndif.cli.server_client import (
    CommandError,
    NoServerHereError,
    NotFoundError,
    RefusedCommandError,
    ServerClient,
    connect,
    options,
    read,
    with_options_of,
)

_NOT_FOUND_HTTP = 404

T = TypeVar("T")


class AccountsClient:
    """The users, keys and tiers of a running server, or of the database in this machine's configuration."""

    def __init__(self, server: ServerClient | None) -> None:
        self._server = server

    @property
    def asks_a_server(self) -> bool:
        """Return True if a server performs the operations, False if this process does."""
        return self._server is not None

    def get(self, answer: type[T], name: str, **fields: str | None) -> T:
        """Return the answer of a read-only operation; fields that are None are not sent."""
        given = {key: value for key, value in fields.items() if value is not None}
        if self._server is None:
            return _perform(answer, name, given)
        from urllib.parse import urlencode

        query = f"?{urlencode(given)}" if given else ""
        return read(answer, self._server.get(f"/admin/{name}{query}"))

    def post(self, answer: type[T], name: str, **fields: Any) -> T:
        """Return the answer of an operation; raise a CommandError if the operation fails."""
        if self._server is None:
            return _perform(answer, name, fields)
        return read(answer, self._server.post(f"/admin/{name}", fields))


def _perform(_: type[T], name: str, fields: dict[str, Any]) -> T:
    """Perform an operation on the configured database in this process."""
    import asyncio

    from ndif.control.account_operations import ACCOUNT_OPERATIONS, perform_on
    from ndif.control.operations import parse_operation
    from ndif.schema.deployment import OperationError
    from ndif.stores.accounts import AccountsUnavailableError, open_accounts

    kind = next(kind for kind in ACCOUNT_OPERATIONS if kind.name == name)
    accounts = open_accounts(options())

    async def perform() -> T:
        try:
            answer: T = await perform_on(accounts.registry, parse_operation(kind, fields))
            return answer
        finally:
            await accounts.stop()

    try:
        return asyncio.run(perform())
    except OperationError as error:
        kind_of = NotFoundError if error.status == _NOT_FOUND_HTTP else RefusedCommandError
        raise kind_of(str(error)) from error
    except AccountsUnavailableError as error:
        raise CommandError(f"The database of API keys is unavailable: {error}.") from error


def _connect(url: str | None, token: str | None) -> AccountsClient:
    server: ServerClient | None = None
    with contextlib.suppress(*(() if url is not None else (NoServerHereError,))):
        server = connect(url, token)
    return AccountsClient(server)


with_accounts = with_options_of(_connect)
"""Decorator that passes a command the `AccountsClient` for the server that its options name."""
