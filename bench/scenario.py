"""A scenario, and the site of its measurement."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.figures import Figure
from bench.sampling import MARK
from bench.servers.processes import CACHE, older_runtimes
from prepare_model import prepare  # in examples/

CLIENTS = ("0.8", "0.7")
"""The clients' versions of nnsight with which every server is measured."""
_PEER = re.compile(
    r"(?P<name>[^=]+)=(?P<url>https?://[^#]+?)(#(?P<key>.*?))?(@(?P<nnsight>0(\.\d+)+))?"
)


@dataclass(frozen=True)
class Server:
    """A running server that nnsight clients can use, of this project or another."""

    name: str
    url: str
    key: str = ""
    clients: tuple[str, ...] = CLIENTS
    """The nnsight version of its clients: a generation, or one release."""

    @staticmethod
    def parse(text: str) -> Server:
        """Return the server that `NAME=URL[#KEY][@NNSIGHT]` names.

        Raises:
            ValueError: If the text does not have this form.
        """
        match = _PEER.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not NAME=URL[#KEY][@NNSIGHT].")
        clients = (match["nnsight"],) if match["nnsight"] else CLIENTS
        return Server(match["name"], match["url"].rstrip("/"), match["key"] or "", clients)

    @property
    def way(self) -> dict[str, str]:
        """Return the server as a way of `bench.clients.traces`."""
        return {"url": self.url, "key": self.key}


@dataclass(frozen=True)
class Site:
    """The model, the variables and the peers of a measurement."""

    folder: Path
    """The demo model's checkpoint."""
    environment: dict[str, str]
    """The variables of a server."""
    peers: tuple[Server, ...] = ()
    """Servers that scenarios of traces measure in turn with this project's server."""
    seconds: float | None = None
    """Seconds of a scenario with a load; None for the scenario's default."""
    full: bool = False
    """True to include measurements that take longer."""

    @staticmethod
    def here(
        peers: Iterable[Server] = (), seconds: float | None = None, *, full: bool = False
    ) -> Site:
        """Return this machine, with the demo model prepared and older nnsights installed."""
        os.environ[MARK] = "1"
        peers = tuple(peers)
        environment = {**os.environ, **older_runtimes(_clients(peers))}
        return Site(prepare(CACHE / "smollm2-135m"), environment, peers, seconds, full)

    @property
    def clients(self) -> tuple[str, ...]:
        """Return the clients' versions of nnsight: for every server, then for peers only."""
        return _clients(self.peers)

    def peers_of(self, nnsight: str) -> list[Server]:
        """Return the peers that serve clients of this nnsight."""
        return [peer for peer in self.peers if nnsight in peer.clients]


def _clients(peers: Iterable[Server]) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys((*CLIENTS, *(nnsight for peer in peers for nnsight in peer.clients)))
    )


class Scenario(Protocol):
    """A module of `bench.scenarios`."""

    __doc__: str | None

    @staticmethod
    def measure(site: Site) -> Iterable[Figure]:
        """Yield each figure once it is measured."""
