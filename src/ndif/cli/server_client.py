"""How commands talk to a server: over HTTP, here or elsewhere, with exit codes that scripts can use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import click

if TYPE_CHECKING:
    import httpx

    from ndif.config import Settings

_TIMEOUT_S = 30
_NOT_FOUND_HTTP = 404

P = ParamSpec("P")
T = TypeVar("T")


class CommandError(click.ClickException):
    """A command that failed: a sentence, and exit code 1 (2 is click's, for what is no command line)."""


class NoServerError(CommandError):
    """Nothing runs, or nothing that runs answers."""

    exit_code = 3


class NotThereError(CommandError):
    """The server has nothing of that name."""

    exit_code = 4


class RefusedError(CommandError):
    """The server will not: no token, or a request that cannot be."""

    exit_code = 5


class Server:
    """A running server's routes."""

    def __init__(self, url: str, token: str | None, *, is_local: bool) -> None:
        self.url = url.rstrip("/")
        self.is_local = is_local
        """Whether it is this machine's own, of the current session."""
        self._token = token

    def get(self, path: str) -> Any:
        """What a route answers.

        Raises:
            CommandError: with what the server says, if it does not.
        """
        return self._ask("GET", path, None, _TIMEOUT_S)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float | None = _TIMEOUT_S) -> Any:
        """What a route answers to `body`; None waits without end.

        Raises:
            CommandError: with what the server says, if it does not.
        """
        return self._ask("POST", path, body, timeout_s)

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> Any:
        import httpx

        try:
            answer = httpx.request(
                method,
                f"{self.url}{path}",
                json=body,
                headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
                timeout=httpx.Timeout(timeout_s, connect=_TIMEOUT_S),
                # A proxy leads away from this machine.
                trust_env=not self.is_local,
                # To read what certificates there are takes longer than the answer.
                verify=self.url.startswith("https:"),
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise NoServerError(f"The server at {self.url} does not answer: {why}.") from error
        return _content(self.url, answer)


def _content(url: str, answer: httpx.Response) -> Any:
    try:
        content = answer.json()
    except ValueError:
        content = None
    if answer.is_success and content is not None:
        return content
    detail = content.get("detail") if isinstance(content, dict) else None
    if not isinstance(detail, str):
        raise NoServerError(f"What answers at {url} is no ndif server (HTTP {answer.status_code}).")
    if answer.is_server_error:
        raise CommandError(detail)
    raise (NotThereError if answer.status_code == _NOT_FOUND_HTTP else RefusedError)(detail)


def connect(url: str | None, token: str | None) -> Server:
    """The server that the options name; without any, that of the current session.

    Raises:
        CommandError: if there is none.
    """
    from ndif.gateway.serving import local_url
    from ndif.session.folder import Sessions

    if token is not None and token.startswith("@"):
        token = _read(Path(token[1:]))
    sessions = Sessions(options().session_root)
    running = sessions.running()
    if running is None or running[1].node_type == "worker":
        if url is not None:
            return Server(_complete(url), token, is_local=False)
        raise nothing_runs(sessions.root)
    session, record = running
    here = local_url(record.host, record.port)
    if url is not None and _complete(url) not in (here, record.url):
        return Server(_complete(url), token, is_local=False)
    return Server(here, token or session.token(), is_local=True)


def options() -> Settings:
    """The settings of this process."""
    from ndif.variables import VariableError, read

    try:
        return read()
    except VariableError as error:
        raise CommandError(str(error)) from error


def nothing_runs(root: Path) -> NoServerError:
    """What to raise where a server is needed and there is none."""
    return NoServerError(
        f"No server is running here (there is none in {root}). Start one with `ndif start`, or name one "
        "elsewhere with --url and --token."
    )


def _read(file: Path) -> str:
    try:
        return file.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"The token cannot be read from {file}: {error}.") from error


def _complete(url: str) -> str:
    return (url if "://" in url else f"http://{url}").rstrip("/")


def to_a_server(
    function: Callable[Concatenate[Server, bool, P], T],
) -> Callable[P, T]:
    """Options that say which server, and whether a program reads the answer."""

    @click.option(
        "--url", metavar="URL", help="A server elsewhere; default: the one that runs here."
    )
    @click.option(
        "--token",
        metavar="TOKEN",
        help="Its token, or @FILE to read it from there; default: that of the server here.",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @functools.wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> T:
        url: Any = kwargs.pop("url")
        token: Any = kwargs.pop("token")
        as_json: Any = kwargs.pop("as_json")
        return function(connect(url, token), as_json, *args, **kwargs)

    return command
