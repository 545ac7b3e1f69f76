"""Secrets of the server: none is in the memory of processes that run untrusted code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from ndif.gateway.hf_mirror import HfMirror, MirroredModel
from tests.clients.harness import STARTED_ANEW, Client, LocalServer
from tests.conftest import NAME, client_environment
from tests.serving import serving

pytestmark = pytest.mark.process

TOKEN = "hf_" + "tOkEnOfTheOperator" * 2
PASSWORD = "pAsSwOrDoFtHeOpErAtOr"
OURS = "kEyOfThEoBjEcTsToRe"
"""A secret that only the control plane needs."""
ACCOUNTS = "pAsSwOrDoFtHeAcCoUnTs"
"""The password of the key database, which only the control plane needs."""
_CHUNK = 1 << 24


class Gate:
    """Middleware that admits requests with the token."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.opened = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif Request(scope).headers.get("authorization") == f"Bearer {TOKEN}":
            self.opened += 1
            await self._app(scope, receive, send)
        else:
            refusal = Response(status_code=401, headers={"X-Error-Code": "GatedRepo"})
            await refusal(scope, receive, send)


@pytest.fixture
def gated_hub(tiny_gpt2: Path) -> Iterator[tuple[str, Gate]]:
    """A hub that serves its model only with a token."""
    hub = HfMirror(share_weights=True)
    hub.serve(MirroredModel(NAME, tiny_gpt2, None, "text-generation"))
    gate = Gate(Starlette(routes=[Mount("/hub", routes=hub.routes())]))
    with serving(gate) as url:
        yield f"{url}/hub", gate


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [below for child in map(int, children) for below in (child, *descendants(child))]


def held(pid: int, *secrets: str) -> set[str]:
    """Return the secrets found in the writable memory of a process."""
    sought = {secret.encode(): secret for secret in secrets}
    longest, leaked = max(map(len, sought)), set()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            addresses, access, *_ = line.split()
            start, end = (int(address, 16) for address in addresses.split("-"))
            if not access.startswith("rw"):
                continue
            with contextlib.suppress(OSError, OverflowError, ValueError):
                for at in range(start, end, _CHUNK):
                    memory.seek(at)
                    content = memory.read(min(_CHUNK + longest, end - at))
                    leaked |= {secret for text, secret in sought.items() if text in content}
    return leaked


@pytest.mark.parametrize("options", [("--sandbox",), ()], ids=["sandboxed", "trusted"])
def test_memory_of_sandboxed_model_processes_holds_no_secret(
    options: tuple[str, ...],
    gated_hub: tuple[str, Gate],
    server_environment: dict[str, str],
    tiny_gpt2: Path,
    tmp_path: Path,
) -> None:
    url, gate = gated_hub
    environment = {
        **server_environment,
        **STARTED_ANEW,
        "HF_ENDPOINT": url,
        "HF_HOME": str(tmp_path / "server"),
        "HF_TOKEN": TOKEN,
        "AWS_SECRET_ACCESS_KEY": PASSWORD,
        "NDIF_OBJECT_STORE_SECRET_KEY": OURS,
        "POSTGRES_PASSWORD": ACCOUNTS,
    }
    server = LocalServer(NAME, *options, environment=environment)
    try:
        server.ready()
        assert gate.opened
        client = Client(
            "scenarios_08", NAME, tiny_gpt2, client_environment(server, tmp_path / "client", None)
        )
        client.run("scenario_reads_of_layers_and_logits")
        client.close()
        # Positive control: the server itself has the secrets.
        assert held(server.process.pid, PASSWORD, OURS, ACCOUNTS) == {PASSWORD, OURS, ACCOUNTS}
        near = descendants(server.process.pid)
        assert len(near) >= 2  # a zygote and its runners
        readable = near if os.getuid() == 0 else near[:1]
        leaked = set[str]().union(*(held(pid, TOKEN, PASSWORD, OURS, ACCOUNTS) for pid in readable))
        # A trusted user has the operator's account, but not the control plane's secrets.
        assert bool(leaked) is not bool(options), (leaked, near)
        assert leaked.isdisjoint({OURS, ACCOUNTS})
    finally:
        server.stop()
