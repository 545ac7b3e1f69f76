"""HTTP client of a server, on this machine or elsewhere, with exit codes for scripts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import click

from ndif import __version__
from ndif.distribution import COMMAND_LINE
from ndif.errors import NdifError, problems
from ndif.launch.run_folder import RunFolders
from ndif.launch.waiting import waiting_for

if TYPE_CHECKING:
    from ndif.config.settings import Settings

_TIMEOUT_S = 30
_NOT_FOUND_HTTP = 404

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class CommandError(NdifError, click.ClickException):
    """A command failed; exit code 1. Exit code 2 is click's: invalid command-line usage."""


class NoServerError(CommandError):
    """No server runs, or the server does not answer."""

    exit_code = 3


class NoServerHereError(NoServerError):
    """No server runs on this machine, and the options name no other."""


class NotFoundError(CommandError):
    """The server has no model, replica or request with the given name."""

    exit_code = 4


class RefusedCommandError(CommandError):
    """The server refused: the token is missing or wrong, or the request is invalid."""

    exit_code = 5


class ServerClient:
    """HTTP client of one running server."""

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        is_local: bool,
        admin_url: str | None = None,
        key: str | None = None,
    ) -> None:
        """Act as the operator with `token`, or as a user with the API key `key`.

        `admin_url` is the address of the operator's routes, if it differs from `url`.
        """
        self.url = url
        self._admin_url = admin_url or url
        self.is_local = is_local
        """True if the server runs on this machine, in the current session."""
        self._token = token
        self._key = key

    @property
    def is_user(self) -> bool:
        """Return True if this client acts as a user and not as the operator."""
        return self._key is not None

    def as_user(self, key: str) -> ServerClient:
        """Return a client of the same server that acts as the user of an API key."""
        return ServerClient(self.url, None, is_local=self.is_local, key=key)

    def delete(self, path: str) -> Any:
        """Return the answer of a route to DELETE, like `get`."""
        return self._request("DELETE", path, None, _TIMEOUT_S)

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that identify and authenticate this client."""
        headers = {"User-Agent": f"{COMMAND_LINE}/{__version__}"}
        if self._key is not None:
            return {**headers, "ndif-api-key": self._key}
        return {**headers, "Authorization": f"Bearer {self._token}"} if self._token else headers

    @property
    def job_key(self) -> str:
        """Return the API key for jobs: the user's, or the operator's key for probes; or ""."""
        from ndif.stores.accounts import probe_key_of

        if self._key is not None:
            return self._key
        return probe_key_of(self._token) if self._token else ""

    def get(self, path: str) -> Any:
        """Return the answer of a route; raise a CommandError if the server refuses or does not answer."""
        return self._request("GET", path, None, _TIMEOUT_S)

    def post(
        self,
        path: str,
        body: Mapping[str, Any],
        timeout_s: float | None = _TIMEOUT_S,
        awaited: str | None = None,
    ) -> Any:
        """Return the answer of a route to `body`, like `get`; a timeout of None waits without limit.

        If the answer takes long, print that the command waits for `awaited`; if `awaited` is "", print
        nothing.
        """
        return self._request("POST", path, body, timeout_s, awaited)

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float | None,
        awaited: str | None = None,
    ) -> Any:
        with waiting_for(f"the answer of {self.url}{path}" if awaited is None else awaited):
            return self._exchange(method, path, body, timeout_s)

    def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> Any:
        import httpx

        try:
            answer = httpx.request(
                method,
                f"{self._admin_url if path.startswith('/admin/') else self.url}{path}",
                json=body,
                headers=self.headers,
                timeout=httpx.Timeout(timeout_s, connect=_TIMEOUT_S),
                # A proxy could not reach this machine's own server.
                trust_env=not self.is_local,
                # Loading certificates takes longer than a request, so skip that without TLS.
                verify=self.url.startswith("https:"),
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise NoServerError(f"The server at {self.url} does not answer: {reason}.") from error
        try:
            content = answer.json()
        except ValueError:
            content = None
        if answer.is_success and content is not None:
            return content
        detail = content.get("detail") if isinstance(content, dict) else None
        if not isinstance(detail, str):
            raise NoServerError(
                f"The server at {self.url} is not an ndif server (HTTP {answer.status_code})."
            )
        if answer.is_server_error:
            raise CommandError(detail)
        raise (NotFoundError if answer.status_code == _NOT_FOUND_HTTP else RefusedCommandError)(
            detail
        )


def read(kind: type[T], content: Any) -> T:
    """Return an answer's JSON as a `kind`; raise a CommandError if the JSON has another form."""
    from pydantic import ValidationError

    from ndif.schema.answer import from_plain

    try:
        return from_plain(kind, content)
    except ValidationError as error:
        raise CommandError(
            f"The server's answer cannot be read. The server may have another version than this command "
            f"({__version__}): {problems(error)[0].sentence}"
        ) from error


def connect(url: str | None, token: str | None) -> ServerClient:
    """Return the server that the options name, or else the server of the current session."""
    from ndif.net import local_url

    if token is not None and token.startswith("@"):
        file = Path(token[1:])
        try:
            token = file.expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"The token cannot be read from {file}: {error}.") from error
    if url is not None:
        url = (url if "://" in url else f"http://{url}").rstrip("/")
    running = run_folders().running()
    if running is not None and running[1].node_type != "worker":
        run_folder, record = running
        local = local_url(record.host, record.port)
        admin = local_url(record.admin_host, record.admin_port) if record.admin_port else None
        if url in (None, local, record.url, admin):
            token = token or run_folder.token()
            return ServerClient(local, token, is_local=True, admin_url=admin)
    if url is None:
        raise no_server()
    return ServerClient(url, token, is_local=False)


def options() -> Settings:
    """Return the settings of this process."""
    from ndif.config.reference import read

    return read()


def run_folders() -> RunFolders:
    """Return the run folders of this machine."""
    return RunFolders(options().session_root)


def no_server() -> NoServerHereError:
    """Return the error for a command that needs a server while none runs on this machine."""
    return NoServerHereError(
        f"No server is running here (session root {run_folders().root}). Start one with `ndif start`, or "
        "name another with --url and --token."
    )


url_option = click.option(
    "--url",
    metavar="URL",
    help="Address of the server, with the port of NDIF_ADMIN_PORT if that is set; default: this machine's "
    "server.",
)
token_option = click.option(
    "--token",
    metavar="TOKEN",
    help="Operator's token of the server, or @FILE to read it from a file.",
)
json_option = click.option("--json", "--json-output", "as_json", is_flag=True, help="Print JSON.")


def with_options_of(
    reach: Callable[[str | None, str | None], S],
) -> Callable[[Callable[Concatenate[S, bool, P], T]], Callable[P, T]]:
    """Return a decorator that adds --url, --token and --json to a command.

    The command receives the result of `reach` for the URL and token, and True if it should print JSON.
    """

    def decorate(function: Callable[Concatenate[S, bool, P], T]) -> Callable[P, T]:
        @url_option
        @token_option
        @json_option
        @functools.wraps(function)
        def command(*args: P.args, **kwargs: P.kwargs) -> T:
            url, token, as_json = (kwargs.pop(name) for name in ("url", "token", "as_json"))
            return function(reach(url, token), as_json, *args, **kwargs)  # type: ignore[arg-type]

        return command

    return decorate


with_server = with_options_of(connect)
"""Decorator that passes a command the server that its options name."""
