"""A scenario, and the site at which it is measured."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.figures import Figure
from bench.sampling import MARK
from bench.servers.processes import CACHE, older_runtime
from prepare_model import prepare  # an example


@dataclass(frozen=True)
class Server:
    """A server that runs somewhere, ours or another's that the clients can use."""

    name: str
    url: str
    key: str = ""

    @staticmethod
    def parse(text: str) -> Server:
        """Return the server that `NAME=URL[#KEY]` names.

        Raises:
            ValueError: If it names none.
        """
        name, is_named, address = text.partition("=")
        url, _, key = address.partition("#")
        if not is_named or not url.startswith(("http://", "https://")):
            raise ValueError(f"{text!r} is not NAME=URL or NAME=URL#KEY.")
        return Server(name, url.rstrip("/"), key)


@dataclass(frozen=True)
class Site:
    """The model, the variables and the peers of a measurement."""

    folder: Path
    """The demo model's checkpoint."""
    environment: dict[str, str]
    """The variables of a server."""
    peers: tuple[Server, ...] = ()
    """Servers that scenarios of traces measure in turn with ours."""
    seconds: float | None = None
    """The time that a scenario with a load may take, if it is said."""
    full: bool = False
    """True if also what takes longer is measured."""

    @staticmethod
    def here(
        peers: Iterable[Server] = (), seconds: float | None = None, *, full: bool = False
    ) -> Site:
        """Return this machine, with the demo model prepared and nnsight 0.7 installed."""
        os.environ[MARK] = "1"
        environment = {**os.environ, **older_runtime()}
        return Site(prepare(CACHE / "smollm2-135m"), environment, tuple(peers), seconds, full)


class Scenario(Protocol):
    """A module of `bench.scenarios`."""

    __doc__: str | None

    @staticmethod
    def measure(site: Site) -> Iterable[Figure]:
        """Return figures, one after the other as they are measured."""
