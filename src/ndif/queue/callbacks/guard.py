"""The guard of callbacks: a check of the addresses that users name and of the server's connections.

A user's URL makes the server send a request from inside its network. The text is checked when the job is
submitted, so that mistakes are explained. A check of every connection protects the network: the connection
goes to exactly the checked address, even if a name resolves to other addresses before or after.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import urlencode

import httpcore

from ndif.hostname import NAT64, HostName, IpAddress, embedded, host_name, unmapped
from ndif.schema.callback import EVERY_STATUS_PREFIX, POST

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

EVERYWHERE: tuple[Network, ...] = (
    ipaddress.IPv4Network("0.0.0.0/0"),
    ipaddress.IPv6Network("::/0"),
)
"""Networks of a server whose only user may run anything on its machine."""

_MAX_ADDRESS = 2000
_MAX_QUOTED = 100
"""Characters of an address that an error message quotes."""
_MAX_NAME = 253
_MAX_LOCAL_PART = 64
_LOWEST_PORT = 1024
_WEB_PORTS = {"http": 80, "https": 443}
_MAX_PORT = 65535
_TRIES = 4
"""Addresses of one name that are tried in turn."""
_RESOLVERS = 8
"""Names that are looked up at once; a lookup that hangs holds one of these threads."""

# Characters with one meaning for every reader of URLs: no user name, no backslash, no escape in a host.
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9._-]+|\[[0-9a-f.]*:[0-9a-f:.]*\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>/[!$-;=@-Z_a-z~\[\]]*)?(?:\?(?P<query>[!$-;=?@-Z_a-z~\[\]]*))?(?:#[!-~]*)?",
    re.IGNORECASE | re.ASCII,
)
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.ASCII)
_LOCAL_PART = re.compile(
    r"[a-z0-9!#$%&'*+/=?^_`{|}~-]+(\.[a-z0-9!#$%&'*+/=?^_`{|}~-]+)*", re.I | re.A
)

# The special registries of IANA; the last two are services of clouds at public addresses.
_NOT_PUBLIC_4 = tuple(
    ipaddress.IPv4Network(text)
    for text in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
        *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24"),
        *("192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15"),
        *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        *("168.63.129.16/32", "100.100.100.200/32"),
    )
)
_GLOBAL_6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_6 = tuple(
    ipaddress.IPv6Network(text)
    for text in ("2001::/23", "2001:db8::/32", "2620:4f:8000::/48", "3fff::/20")
)
_LOOPBACK = ipaddress.IPv4Address("127.0.0.1")
_ISATAP = (0x00005EFE, 0x02005EFE)
"""Upper halves of interface identifiers that hold an IPv4 address in the lower half."""


@dataclass(frozen=True, slots=True)
class CallbackRules:
    """Addresses that a server's callbacks may have, and the secrets that sign them."""

    networks: Sequence[Network]
    """Networks that are allowed in addition to public addresses."""
    secrets: Sequence[str] = field(repr=False)
    """Signing secrets: new receivers get the first; earlier receivers may know only the others."""


class CallbackAddressError(ValueError):
    """A user's callback address is refused; the message is a sentence that says what to do."""


class ForbiddenAddressError(Exception):
    """The server may not connect to the address of a host."""


class NoAddressError(Exception):
    """A host has no address now."""


class CallbackKind(str, Enum):
    """The form of a callback."""

    GET = "get"
    """A webhook by GET, with the status and the id in its query."""
    POST = "post"
    """A webhook by POST, with a signed JSON object."""
    MAIL = "mail"


@dataclass(frozen=True, slots=True)
class Address:
    """A callback's address, read and checked."""

    kind: CallbackKind
    mail: str = ""
    """The e-mail address, if it is one."""
    scheme: str = ""
    host: str = ""
    """Name or IP address in lower case, without brackets and final dot."""
    port: int = 0
    target: str = ""
    """Path and query."""

    @property
    def host_header(self) -> str:
        """Return the value of the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _WEB_PORTS[self.scheme] else f"{host}:{self.port}"

    def target_with(self, **values: str) -> str:
        """Return path and query, with further values at the end of the query."""
        joint = "?" if "?" not in self.target else "" if self.target.endswith(("?", "&")) else "&"
        return f"{self.target}{joint}{urlencode(values)}"


# Addresses that users may name


def read_address(text: str, allowed: Sequence[Network] = ()) -> Address:
    """Return the callback address that a client names, or raise a `CallbackAddressError`.

    `allowed` are the networks that the operator allows in addition to public addresses. A name may still
    resolve to an address to which the server does not connect.
    """
    if len(text) > _MAX_ADDRESS:
        raise CallbackAddressError(f"The callback is longer than {_MAX_ADDRESS} characters.")
    if not text.isascii():
        raise CallbackAddressError(
            f"The callback {_quoted(text)} has characters beyond ASCII: write a host as xn--…, and the "
            "rest in percent escapes."
        )
    url = text[len(EVERY_STATUS_PREFIX) :] if text.lower().startswith(EVERY_STATUS_PREFIX) else text
    wants_post = url.lower().startswith(POST)
    url = url[len(POST) :] if wants_post else url
    if url.lower().startswith(("http://", "https://")):
        return _read_url(url, CallbackKind.POST if wants_post else CallbackKind.GET, allowed)
    if "@" in text and "://" not in text and url is text:
        return _read_mail(text)
    raise CallbackAddressError(
        f"The callback must be an http or https URL or an e-mail address, not {_quoted(text)}."
    )


def shown(text: str) -> str:
    """Return an address as operators see it: without path, query and most of a mailbox's name."""
    if "://" not in text:
        name, at, domain = text.rpartition("@")
        return f"{name[:1]}…{at}{domain}"
    scheme, _, rest = text.partition("://")
    return f"{scheme}://{re.split('[/?#]', rest, maxsplit=1)[0]}/…"


def _read_url(url: str, kind: CallbackKind, allowed: Sequence[Network]) -> Address:
    match = _URL.fullmatch(url)
    if match is None:
        authority = re.split(r"[/?#\\]", url.partition("://")[2], maxsplit=1)[0]
        raise CallbackAddressError(
            f"The callback {_quoted(url)} names a user or password: leave them out, and put a secret into "
            "the query."
            if "@" in authority
            else f"The callback {_quoted(url)} is not a URL like https://example.org/done."
        )
    scheme, host = match["scheme"].lower(), _read_host(match["host"], url)
    port = int(match["port"]) if match["port"] else _WEB_PORTS[scheme]
    # Any port of an operator's own networks is allowed; a name's address is checked at the connection.
    if not 0 < port <= _MAX_PORT or not (allowed or _is_web_port(port)):
        raise CallbackAddressError(
            f"The callback's port {port} is not a web server's port: use 80, 443 or one from "
            f"{_LOWEST_PORT} on."
        )
    address = _LOOPBACK if _is_below_localhost(host) else host.address
    if address is not None and not may_connect(address, allowed, port):
        raise CallbackAddressError(
            f"The callback {_quoted(url)} names an address or port that this server does not call: the "
            "address must be public."
        )
    path, query = match["path"] or "/", match["query"]
    target = path if query is None else f"{path}?{query}"
    return Address(
        kind,
        scheme=scheme,
        host=host.text,
        port=port,
        target=target,
    )


def _read_host(text: str, url: str) -> HostName:
    """Return a URL's host; raise a `CallbackAddressError` if it is invalid or ambiguous."""
    host = host_name(text)
    # 2130706433, 0x7f.1 and 0177.0.0.1 are 127.0.0.1 to the system's resolver.
    if host is not None and host.is_ambiguous:
        raise CallbackAddressError(
            f"The callback {_quoted(url)} has an unusual form of an IP address: write it as four decimal "
            "numbers."
        )
    if host is None or (host.address is None and not _is_valid_name(host.text)):
        raise CallbackAddressError(f"The callback {_quoted(url)} names no valid host.")
    return host


def _is_valid_name(name: str) -> bool:
    return len(name) <= _MAX_NAME and all(map(_LABEL.fullmatch, name.split(".")))


def _is_below_localhost(host: HostName) -> bool:
    """Return True for `localhost` and the names below it, which some resolvers resolve to loopback."""
    return f".{host.text}".endswith(".localhost")


def _read_mail(text: str) -> Address:
    name, _, domain = text.rpartition("@")
    host = host_name(domain)
    if (
        len(name) > _MAX_LOCAL_PART
        or not _LOCAL_PART.fullmatch(name)
        or host is None
        or host.address is not None
        or host.is_ambiguous
        or "." not in host.text
        or not _is_valid_name(domain.lower())
    ):
        raise CallbackAddressError(
            f"The callback {_quoted(text)} is not one e-mail address like ada@example.org."
        )
    return Address(CallbackKind.MAIL, mail=text)


def _quoted(text: str) -> str:
    return repr(text[:_MAX_QUOTED])


# Addresses that the server connects to


def may_connect(
    address: IpAddress, allowed: Sequence[Network] = (), port: int = _WEB_PORTS["https"]
) -> bool:
    """Return True for a public address and a web server's port, or for an address in `allowed`."""
    address = _unwrapped(address)
    is_allowed = any(address in network for network in allowed)
    return is_allowed or (is_public(address) and _is_web_port(port))


def is_public(address: IpAddress) -> bool:
    """Return True for a unicast address of the Internet, also where IPv6 wraps an IPv4 address."""
    address = _unwrapped(address)
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    if address not in _GLOBAL_6 or any(address in network for network in _NOT_PUBLIC_6):
        return False
    inner = embedded(address)
    if inner is not None and not is_public(inner):
        return False
    bits = int(address)
    within_interface = bits & 0xFFFFFFFF
    is_isatap = bits >> 32 & 0xFFFFFFFF in _ISATAP
    return not is_isatap or is_public(ipaddress.IPv4Address(within_interface))


def _is_web_port(port: int) -> bool:
    """Return True for a port at which strangers may expect web requests."""
    return port in _WEB_PORTS.values() or port >= _LOWEST_PORT


def _unwrapped(address: IpAddress) -> IpAddress:
    """Return the IPv4 address that an IPv6 address maps or translates; any other address unchanged."""
    inner = embedded(address)
    return inner if inner is not None and address in NAT64 else unmapped(address)


Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a host, or raises an OSError."""


class Resolver:
    """The system's resolver, in threads of its own, so that lookups that hang delay only callbacks."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="callback-names")

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses of `host` in the system's order."""
        loop = asyncio.get_running_loop()
        addresses = await loop.run_in_executor(self._threads, _look_up, host, port)
        return [*dict.fromkeys(addresses)]

    def close(self) -> None:
        """End the threads once their lookups have."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int) -> list[str]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in infos]


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Opens the connections of callbacks, and only to addresses that are allowed.

    It resolves a host itself, once, and connects to an address that it has checked. If any address of a
    name is not allowed, none is used. TLS still verifies the name of the URL.
    """

    def __init__(self, allowed: Sequence[Network], resolve: Resolve) -> None:
        self._allowed = allowed
        self._resolve = resolve
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """See `AsyncNetworkBackend`. Raise a `ForbiddenAddressError` before a connection is made."""
        problem: Exception = NoAddressError(host)
        for address in (await self._addresses(host, port))[:_TRIES]:
            try:
                stream = await self._inner.connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                problem = error
                continue
            peer = stream.get_extra_info("server_addr")
            if _unwrapped(ipaddress.ip_address(peer[0])) != _unwrapped(address):
                await stream.aclose()
                raise ForbiddenAddressError(host)
            return stream
        raise problem

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """See `AsyncNetworkBackend`. Raise a `ForbiddenAddressError`: no URL names a local socket."""
        raise ForbiddenAddressError(path)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _addresses(self, host: str, port: int) -> list[IpAddress]:
        try:
            addresses = [ipaddress.ip_address(text) for text in await self._resolve(host, port)]
        except (OSError, UnicodeError) as error:
            raise NoAddressError(host) from error
        if not all(may_connect(address, self._allowed, port) for address in addresses):
            raise ForbiddenAddressError(host)
        return addresses
