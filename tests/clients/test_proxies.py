"""`ndif start` on loopback behind Caddy and nginx, and clients that know only its https address."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.harness import Client, StartedServer
from tests.conftest import NAME
from tests.services import tls_proxies
from tests.services.process import Process, free_port
from tests.waiting import PATIENCE_S, time_passes, until

pytestmark = [pytest.mark.engine, pytest.mark.slow]


class Site:
    """A server with a public address, its certificate, and clients of two generations."""

    def __init__(
        self, folder: Path, environment: dict[str, str], tiny: Path, runtimes: Path
    ) -> None:
        self.folder = folder
        self.port = free_port()
        authority = str(tls_proxies.make_authority(folder))
        url = f"https://{tls_proxies.NAME}:{self.port}"
        settings = {
            "NDIF_SESSION_ROOT": str(folder / "session"),
            "NDIF_PUBLIC_URL": url,
            # Clients fetch even small results by URL.
            "NDIF_MAX_INLINE_RESULT_BYTES": "0",
            "NDIF_MAX_INCOMING_BYTES": "8MiB",
        }
        self._server = StartedServer(NAME, environment={**environment, **settings})
        self._arguments = (
            tiny,
            {
                "NDIF_HOST": url,
                "HF_ENDPOINT": environment["HF_ENDPOINT"],
                "NDIF_API_KEY": "",
                "SSL_CERT_FILE": authority,
                "REQUESTS_CA_BUNDLE": authority,
            },
        )
        self._overlays = {"0.8": {}, "0.7": {"PYTHONPATH": str(runtimes / "0.7")}}
        self._clients: dict[str, Client] = {}

    @property
    def server(self) -> str:
        """The host and port of the server behind the proxy."""
        return self._server.ready().url.removeprefix("http://")

    def client(self, generation: str) -> Client:
        """Return the client of a generation."""
        if generation not in self._clients:
            tiny, environment = self._arguments
            home = {"HF_HOME": str(self.folder / f"client-{generation}")}
            environment = {**environment, **home, **self._overlays[generation]}
            self._clients[generation] = Client("scenarios_proxies", NAME, tiny, environment)
        return self._clients[generation]

    def proxy(self, kind: str) -> Process:
        """Return a proxy at the public address."""
        if kind == "Caddy":
            return tls_proxies.caddy(self.folder, self.port, free_port(), self.server)
        keeps_host = kind == "nginx"
        return tls_proxies.nginx(self.folder, self.port, self.server, keeps_host=keeps_host)

    def close(self) -> None:
        """Stop all clients and the server."""
        for client in self._clients.values():
            client.close()
        self._server.stop()


@pytest.fixture(scope="module")
def site(
    server_environment: dict[str, str],
    tiny_gpt2: Path,
    runtimes: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    started = Site(folder, server_environment, tiny_gpt2, runtimes)
    yield started
    started.close()


def in_flight(site: Site) -> int:
    """Return the bytes that wait in sockets between client, proxy and server."""
    ports = {site.port, int(site.server.rpartition(":")[2])}
    total = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, own, other, _, queues, *_ = line.split()
        if ports & {int(end.partition(":")[2], 16) for end in (own, other)}:
            total += sum(int(size, 16) for size in queues.split(":"))
    return total


def test_server_counts_two_clients_behind_nginx_separately(site: Site) -> None:
    proxy = site.proxy("nginx")
    proxy.start()
    with contextlib.ExitStack() as stack:
        stack.callback(proxy.stop)

        def begin(address: str, size: int) -> ssl.SSLSocket:
            """Send an incomplete request."""
            plain = socket.create_connection(
                ("127.0.0.1", site.port), timeout=PATIENCE_S, source_address=(address, 0)
            )
            trusting = ssl.create_default_context(cafile=str(site.folder / "ca.pem"))
            connection = stack.enter_context(
                trusting.wrap_socket(plain, server_hostname=tls_proxies.NAME)
            )
            connection.sendall(
                f"POST /request HTTP/1.1\r\nHost: {tls_proxies.NAME}:{site.port}\r\n"
                f"nnsight-version: 0.8.1\r\nContent-Length: {size + 100}\r\n"
                "Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
                'Content-Disposition: form-data; name="blob"\r\n\r\n'.encode()
            )
            connection.sendall(bytes(size))
            return connection

        first, second = begin("127.0.0.2", 4_000_000), begin("127.0.0.3", 4_000_000)
        # A third that came before the first is counted would have the first refused.
        until(lambda: in_flight(site) == 0)
        time_passes(0.5)
        third = begin("127.0.0.2", 400_000)
        assert b" 429 " in third.recv(1000)
        for other in (first, second):
            other.settimeout(0.3)
            with pytest.raises(TimeoutError):  # no rejection arrives
                other.recv(1)


@pytest.mark.parametrize("kind", ["Caddy", "nginx", "nginx with its own Host"])
def test_clients_of_both_wires_work_through_proxy(site: Site, kind: str) -> None:
    proxy = site.proxy(kind)
    proxy.start()
    try:
        for generation in ("0.8", "0.7"):
            site.client(generation).run("scenario_everything_goes_through_https")
    finally:
        proxy.stop()
