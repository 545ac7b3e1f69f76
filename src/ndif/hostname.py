"""Host names and IP addresses in one form, so that two spellings of a host compare equal."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

IpAddress = IPv4Address | IPv6Address

NAT64 = IPv6Network("64:ff9b::/96")
"""Addresses that a gateway translates to the IPv4 address in their last 32 bits (RFC 6052)."""
_COMPATIBLE = IPv6Network("::/96")
"""Deprecated addresses with an IPv4 address in their last 32 bits, beside `::` and `::1` (RFC 4291)."""
_LABEL = re.compile(r"[a-z0-9_-]+", re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
_ZONE = re.compile(r"[\w.~-]+", re.ASCII)
_SITE_BITS = 64
"""Bits of an IPv6 address that its holder cannot choose."""
_OCTETS = 4
_MAX_NAME = 253


@dataclass(frozen=True, slots=True)
class HostName:
    """A host's name or IP address; different spellings of a host are equal."""

    text: str
    """The name in lower-case ASCII without a trailing dot, or the address as `ipaddress` writes it."""
    address: IpAddress | None = None
    """The IP address; None for a name."""
    zone: str = field(default="", compare=False)
    """Zone of an IPv6 address as it was written. It names an interface of the writer's machine, so it does
    not distinguish hosts."""
    is_ambiguous: bool = field(default=False, compare=False)
    """True if the last label is a number, but the host is not written as four decimal numbers. Such a host
    is an IPv4 address to some programs and a name to others."""

    @classmethod
    def parse(cls, text: str) -> HostName:
        """Return the host of a name or an address, with or without brackets; raise a ValueError if invalid.

        A name may be international and may end with one dot. An IPv4 address may have each notation of
        `inet_aton`: decimal, octal, hexadecimal or short. An IPv4-mapped IPv6 address is the IPv4 address.
        """
        if text.startswith("[") or ":" in text:
            return cls._parse_ipv6(text)
        name = _ascii(text).lower().removesuffix(".")
        labels = name.split(".")
        if not all(map(_LABEL.fullmatch, labels)):
            raise ValueError(f"{text!r} is not a host name")
        if not _NUMBER.fullmatch(labels[-1]):
            return cls(name)
        address = _ipv4(labels)
        normal = name if address is None else str(address)
        return cls(normal, address, is_ambiguous=address is None or normal != name)

    @classmethod
    def _parse_ipv6(cls, text: str) -> HostName:
        bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        written, mark, zone = bare.partition("%")
        if mark and not _ZONE.fullmatch(zone):
            raise ValueError(f"{text!r} has an invalid zone")
        address = unmapped(IPv6Address(written))
        return cls(str(address), address, zone)

    @property
    def is_loopback(self) -> bool:
        """True for `localhost` and loopback addresses, which always lead to the machine that uses them.

        False for names below `localhost`: some resolvers ask the DNS for them, and a page at one of them is
        a site of its own. False for the wildcard address, which is no host, and for IPv6 addresses that
        merely contain a loopback address (6to4, NAT64), because their packets go to a router.
        """
        return self.text == "localhost" if self.address is None else self.address.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """True for `0.0.0.0` and `::`, which stand for every address of a machine, also inside IPv6."""
        if self.address is None:
            return False
        inner = embedded(self.address)
        return self.address.is_unspecified or (inner is not None and inner.is_unspecified)

    @property
    def in_url(self) -> str:
        """The host as a URL contains it."""
        if not isinstance(self.address, IPv6Address):
            return self.text
        return f"[{self.text}%{self.zone}]" if self.zone else f"[{self.text}]"


def host_name(text: str) -> HostName | None:
    """Return the host of a name or an address; None if `text` is neither."""
    try:
        return HostName.parse(text)
    except ValueError:
        return None


@functools.lru_cache(maxsize=256)
def is_loopback(text: str) -> bool:
    """Return True for `localhost` and loopback addresses in any spelling (see `HostName.is_loopback`)."""
    host = host_name(text)
    return host is not None and host.is_loopback


def is_wildcard(text: str) -> bool:
    """Return True if `text` is a wildcard address, which stands for every address of its machine."""
    host = host_name(text)
    return host is not None and host.is_wildcard


def numeric(text: str) -> str:
    """Return the IP address of `localhost`, or an address in its normal form; any other host unchanged."""
    host = host_name(text)
    if host is None:
        return text
    if host.address is None:
        return "127.0.0.1" if host.is_loopback else text
    return host.text


def client_network(address: str) -> str:
    """Return the network that counts as one client: an IPv4 or loopback address, else the IPv6 /64.

    A text that is no IP address is returned unchanged.
    """
    try:
        parsed = unmapped(ip_address(address.partition("%")[0]))
    except ValueError:
        return address
    if isinstance(parsed, IPv4Address) or parsed.is_loopback:
        return str(parsed)
    return str(IPv6Network((parsed, _SITE_BITS), strict=False))


def unmapped(address: IpAddress) -> IpAddress:
    """Return the IPv4 address of an IPv4-mapped IPv6 address; any other address unchanged."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def embedded(address: IpAddress) -> IPv4Address | None:
    """Return the IPv4 address in a mapped, compatible, 6to4 or NAT64 IPv6 address; else None."""
    if isinstance(address, IPv4Address):
        return None
    if address.sixtofour is not None:
        return address.sixtofour
    is_compatible = address in _COMPATIBLE and int(address) > 1
    if is_compatible or address in NAT64 or address.ipv4_mapped is not None:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def _ascii(name: str) -> str:
    """Return a name in the form of the DNS (`xn--…`); raise a ValueError if it has none."""
    if name.isascii():
        return name
    if len(name) > _MAX_NAME:
        raise ValueError("the name is too long")
    import idna  # few names need its tables

    return idna.encode(name, uts46=True).decode()


def _ipv4(labels: list[str]) -> IPv4Address | None:
    """Return the address that `inet_aton` reads in the parts of a name; None if it reads none."""
    if len(labels) > _OCTETS or not all(map(_NUMBER.fullmatch, labels)):
        return None
    try:
        *octets, rest = map(_number, labels)
    except ValueError:  # the digits 8 and 9 are not octal
        return None
    if any(octet > 0xFF for octet in octets) or rest >= 1 << 8 * (_OCTETS - len(octets)):
        return None
    return IPv4Address(sum(octet << 24 - 8 * place for place, octet in enumerate(octets)) + rest)


def _number(text: str) -> int:
    if text.startswith("0x"):
        return int(text[2:] or "0", 16)
    return int(text, 8 if text.startswith("0") else 10)
