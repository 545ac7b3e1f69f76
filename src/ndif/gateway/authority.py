"""Hosts with ports: of the Host header, of a page's origin, and of the server's own URL."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from ndif.hostname import HostName

_AUTHORITY = re.compile(
    r"(?P<host>\[[0-9a-f:.]+(%[\w.-]+)?\]|[\w.-]+)(:(?P<port>\d{1,5}))?", re.ASCII | re.IGNORECASE
)
_PORTS = range(1, 1 << 16)
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Authority:
    """A host, and its port if it has one."""

    host: HostName
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Authority:
        """Return the host and port of a Host header; raise a ValueError if it is malformed."""
        match = _AUTHORITY.fullmatch(text)
        port = int(match["port"]) if match and match["port"] else None
        if match is None or (port is not None and port not in _PORTS):
            raise ValueError(f"{text!r} is not a host and a port")
        return cls(HostName.parse(match["host"]), port)

    def __str__(self) -> str:
        return self.host.in_url + ("" if self.port is None else f":{self.port}")


@dataclass(frozen=True, slots=True)
class Origin:
    """The site of a web page: equal origins are one site."""

    scheme: str
    authority: Authority
    """Host and port; the port is None only if the scheme has no default port."""

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Return the origin of a URL; raise a ValueError if it has none."""
        parts = urlsplit(url)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
        return cls(parts.scheme, Authority(HostName.parse(parts.hostname or ""), port))

    def is_at(self, authority: Authority) -> bool:
        """Return True if the origin's pages come from `authority`, whatever the scheme."""
        port = authority.port or _DEFAULT_PORTS.get(self.scheme)
        return self.authority == Authority(authority.host, port)


def base_url(connection: HTTPConnection, public_url: str) -> str:
    """Return the URL of the server for the sender of a request; addresses of results begin with it.

    Without a public URL it has the requested host, which `SameOrigin` has checked. If the request names no
    host, it has the address that the connection reached.
    """
    if public_url:
        return public_url
    scheme = connection.scope["scheme"]
    if header := connection.headers.get("host"):
        return f"{scheme}://{Authority.parse(header)}"
    address, port = connection.scope["server"]
    is_default = port == _DEFAULT_PORTS.get(scheme)
    return f"{scheme}://{Authority(HostName.parse(address), None if is_default else port)}"
