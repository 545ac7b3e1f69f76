"""The operations on keys from the command line: by the running server, or else on the database itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from ndif.cli.server_client import (
    CommandError,
    NoServerHereError,
    NotFoundError,
    RefusedError,
    ServerClient,
    connect,
    json_option,
    options,
    token_option,
    url_option,
)

_NOT_FOUND_HTTP = 404

P = ParamSpec("P")
T = TypeVar("T")


class AccountsClient:
    """The users, keys and tiers of a server that runs, or of the database that this machine's would use."""

    def __init__(self, server: ServerClient | None) -> None:
        self._server = server

    def get(self, name: str, **fields: str | None) -> Any:
        """Return the answer of an operation that changes nothing."""
        given = {key: value for key, value in fields.items() if value is not None}
        if self._server is None:
            return _perform(name, given)
        from urllib.parse import urlencode

        query = f"?{urlencode(given)}" if given else ""
        return self._server.get(f"/admin/{name}{query}")

    def post(self, name: str, **fields: Any) -> Any:
        """Return the answer of an operation; raise a CommandError if it cannot be done."""
        if self._server is None:
            return _perform(name, fields)
        return self._server.post(f"/admin/{name}", fields)


def _perform(name: str, fields: dict[str, Any]) -> Any:
    """Perform an operation on the configured database in this process."""
    import asyncio

    from ndif.control.account_operations import ACCOUNT_OPERATIONS, perform_on
    from ndif.control.operations import parse_operation
    from ndif.schema.deployment import OperationError
    from ndif.stores.accounts import AccountsAwayError, open_accounts

    kind = next(kind for kind in ACCOUNT_OPERATIONS if kind.name == name)
    accounts = open_accounts(options())

    async def perform() -> Any:
        try:
            return await perform_on(accounts.registry, parse_operation(kind, fields))
        finally:
            await accounts.stop()

    try:
        return asyncio.run(perform())
    except OperationError as error:
        kind_of = NotFoundError if error.status == _NOT_FOUND_HTTP else RefusedError
        raise kind_of(str(error)) from error
    except AccountsAwayError as error:
        raise CommandError(f"The database of API keys does not answer: {error}.") from error


def with_accounts(
    function: Callable[Concatenate[AccountsClient, bool, P], T],
) -> Callable[P, T]:
    """Add --url, --token and --json to a command, and pass it the accounts and whether to print JSON."""

    @url_option
    @token_option
    @json_option
    @functools.wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> T:
        url, token, as_json = (kwargs.pop(name) for name in ("url", "token", "as_json"))
        server: ServerClient | None = None
        with contextlib.suppress(*(() if url is not None else (NoServerHereError,))):
            server = connect(url, token)  # type: ignore[arg-type]
        return function(AccountsClient(server), as_json, *args, **kwargs)  # type: ignore[arg-type]

    return command
