"""A real S3 server for tests: OpenStack Swift with its S3 interface."""

from __future__ import annotations

import contextlib
import http.client
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.services.packages import need
from tests.services.process import HOST, Process, accepts, free_port

ACCESS_KEY, SECRET_KEY = "test:tester", "testing"
REGION = "us-east-1"

_STORES = ("account", "container", "object")
_PACKAGES = ("swift-proxy", *(f"swift-{store}" for store in _STORES))
_PYTHON = "/usr/bin/python3"
"""The interpreter of Debian's packages."""

_RINGS = """
import sys
from swift.common.ring import RingBuilder
folder, *ports = sys.argv[1:]
for name, port in zip(("account", "container", "object"), ports):
    builder = RingBuilder(4, 1, 1)
    builder.add_dev(dict(region=1, zone=1, ip="127.0.0.1", port=int(port), device="disk", weight=1,
                         replication_ip="127.0.0.1", replication_port=int(port)))
    builder.rebalance()
    builder.get_ring().save(f"{folder}/{name}.ring.gz")
"""

_COMMON = """\
[DEFAULT]
bind_ip = {host}
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
disable_fallocate = true
log_level = WARNING
log_address = {folder}/no-syslog
"""

_STORE = """
[pipeline:main]
pipeline = {name}-server

[app:{name}-server]
use = egg:swift#{name}
"""

# tempauth needs a memcache for tokens. S3 requests have no tokens, so nothing listens on port 1.
_PROXY = """
[pipeline:main]
pipeline = catch_errors healthcheck cache listing_formats s3api tempauth bulk slo dlo proxy-server

[filter:catch_errors]
use = egg:swift#catch_errors
[filter:healthcheck]
use = egg:swift#healthcheck
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:1
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:s3api]
use = egg:swift#s3api
location = {region}
[filter:tempauth]
use = egg:swift#tempauth
user_{user_key} = {secret} .admin
[filter:bulk]
use = egg:swift#bulk
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
"""

_HASH = """\
[swift-hash]
swift_hash_path_suffix = tests
swift_hash_path_prefix = tests

[storage-policy:0]
name = only
default = yes
"""


class SwiftServer:
    """Swift's proxy, which speaks S3, and the three stores behind it, without data.

    It serves as a context manager. Within it, `stop` and `start` make it unavailable and available
    again at the same address, with its data.
    """

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        programs = [need(f"swift-{name}-server", *_PACKAGES) for name in ("proxy", *_STORES)]
        ports = [self.port, *(free_port() for _ in _STORES)]
        (folder / "devices" / "disk").mkdir(parents=True)
        (folder / "swift.conf").write_text(_HASH)
        subprocess.run(
            [_PYTHON, "-c", _RINGS, str(folder), *map(str, ports[1:])],
            check=True,
            capture_output=True,
        )
        self._processes = [
            _process(folder, name, program, port)
            for name, program, port in zip(("proxy", *_STORES), programs, ports, strict=True)
        ]
        self._proxy, *self._stores = self._processes

    def start(self) -> None:
        """Start the proxy again."""
        self._proxy.start()

    def stop(self) -> None:
        """Stop the proxy; it refuses connections until `start`."""
        self._proxy.stop()

    def pause(self) -> None:
        """Pause the proxy: it accepts connections and answers none of them until `resume`."""
        self._proxy.pause()

    def resume(self) -> None:
        """Continue the proxy."""
        self._proxy.resume()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Stop the proxy within the context."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def log(self) -> str:
        """Return the end of all parts' logs."""
        return "\n".join(process.log() for process in self._processes)

    def __enter__(self) -> SwiftServer:
        try:
            for process in self._processes:
                process.launch()
            for process in self._processes:
                process.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()  # its data is removed with it


def _process(folder: Path, name: str, program: str, port: int) -> Process:
    conf = folder / f"{name}-server.conf"
    user = subprocess.run(["id", "-un"], check=True, capture_output=True, text=True).stdout.strip()
    common = _COMMON.format(host=HOST, port=port, user=user, folder=folder)
    if name == "proxy":
        own = _PROXY.format(region=REGION, user_key=ACCESS_KEY.replace(":", "_"), secret=SECRET_KEY)
    else:
        own = _STORE.format(name=name)
    conf.write_text(common + own)
    ready = (lambda: _serves(port)) if name == "proxy" else (lambda: accepts(port))
    return Process([program, str(conf), "-v"], folder / f"{name}.log", ready, cwd=folder)


def _serves(port: int) -> bool:
    """Return True if the proxy answers; a listening socket alone is not enough."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/healthcheck")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
