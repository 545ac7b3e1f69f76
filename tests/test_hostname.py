"""Spellings of hosts, and the hosts that are this machine."""

from __future__ import annotations

import contextlib
import ipaddress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ndif.hostname import (
    HostName,
    client_network,
    embedded,
    is_loopback,
    is_wildcard,
    unmapped,
)

NORMAL = {
    "localhost": ["LOCALHOST", "localhost.", "LocalHost.", "\uff4cocalhost", "localhost。"],
    "evil.localhost": ["evil.localhost", "EVIL.localhost.", "evil。localhost"],
    "localhost.evil.example": ["localhost.evil.example", "Localhost.Evil.Example."],
    "lab_gpu-7": ["lab_gpu-7", "LAB_GPU-7."],
    "xn--bcher-kva.example": ["bücher.example", "BÜCHER.Example.", "XN--Bcher-KVA.example"],
    "xn--strae-oqa.de": ["straße.de"],
    "127.0.0.1": [
        *("127.0.0.1", "127.0.0.1.", "127.1", "127.0.1", "2130706433", "0x7f000001", "0X7F.1"),
        *(
            "0177.0.0.1",
            "017700000001",
            "127.0.0.0x1",
            "127.0.0.01",
            "\uff1127。\uff10.0.1",
            "①②⑦.1",
        ),
        *("::ffff:127.0.0.1", "[::FFFF:7f00:1]", "0:0:0:0:0:ffff:127.0.0.1"),
    ],
    "1.2.0.3": ["1.2.3"],
    "8.8.8.8": ["8.8.8.8", "134744072", "010.8.8.8", "::ffff:8.8.8.8"],
    "255.255.255.255": ["4294967295", "0xffffffff", "255.0xffffff"],
    "0.0.0.0": ["0", "0.0", "0x", "0x0.0", "00000", "0.0.0.0.", "[::ffff:0.0.0.0]"],
    "::1": ["::1", "[::1]", "0:0:0:0:0:0:0:1", "::1%lo", "[::1%25lo]"],
    "::": ["::", "[::]", "0::0"],
    "fe80::1": ["fe80::1", "FE80::1%eth0", "[fe80::1%25eth0]", "fe80::1%2"],
    # Packets for these go to a router, not to the IPv4 address itself.
    "::7f00:1": ["::127.0.0.1"],
    "2002:7f00:1::": ["2002:7f00:1::", "[2002:7F00:0001:0::]"],
    "64:ff9b::7f00:1": ["64:ff9b::127.0.0.1"],
    # Numbers that are no IPv4 address.
    **{
        text: [text, f"{text}."]
        for text in ("1.2.3.4.5", "256.0.0.1", "4294967296", "08.1", "a.1", "123456789012", "1_0.1")
    },
}
INVALID = [
    *("", ".", "..", "localhost..", "a..b", ".a", "a b", "a/b", "a@b", "a:1", "*", "*.a", "a%25b"),
    *("[", "[]", "[::1", "::1]", "[[::1]]", "[localhost]", "[127.0.0.1]", "[::1]x", "1::2::3"),
    *("::1%", "::1%a b", "::1%/", "127.0.0.1%lo", "localhost:80", "127.0.0.1:80", "a\n", "a\0"),
    *("-ü.example", "ü" * 70, "ü" * 100_000, "。", "xn--\xe9", "::ffff:127.1", "fe80::1%25%25"),
]


@pytest.mark.parametrize(
    ("normal", "text"), [(normal, text) for normal, texts in NORMAL.items() for text in texts]
)
def test_spellings_of_host_are_equal(normal: str, text: str) -> None:
    host = HostName.parse(text)
    assert host.text == normal
    assert host == HostName.parse(normal)
    assert hash(host) == hash(HostName.parse(normal))


@pytest.mark.parametrize("text", INVALID)
def test_text_that_names_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        HostName.parse(text)


def test_hosts_with_different_normal_forms_differ() -> None:
    assert len({HostName.parse(text) for text in NORMAL}) == len(NORMAL)


@given(st.text(max_size=30) | st.from_regex(r"[\[\]:.a-fx0-9%]{0,30}", fullmatch=True))
@example("9" * 5000)
@example("0x" + "f" * 100_000)
def test_normal_form_of_any_host_is_stable(text: str) -> None:
    with contextlib.suppress(ValueError):
        host = HostName.parse(text)
        assert HostName.parse(host.text) == host
        assert HostName.parse(host.in_url) == host
        assert host.text.isascii()


@given(st.ip_addresses())
def test_every_address_is_read(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    host = HostName.parse(str(address))
    assert host.address == unmapped(address)
    assert not host.is_ambiguous


@given(st.ip_addresses(v=4))
def test_every_notation_of_ipv4_address_is_the_address(address: ipaddress.IPv4Address) -> None:
    a, b, c, d = address.packed
    number = int(address)
    for text in (
        *(f"{number}", f"{number:#x}", f"0{number:o}", f"{a:#x}.{b:#x}.{c:#x}.{d:#x}"),
        *(f"{a}.{number & 0xFFFFFF}", f"{a}.{b}.{number & 0xFFFF}", f"::ffff:{address}"),
    ):
        assert HostName.parse(text) == HostName.parse(str(address)), text


def test_notation_that_programs_read_differently_is_ambiguous() -> None:
    for text in ("127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1", "256.0.0.1", "a.1", "1.2.3"):
        assert HostName.parse(text).is_ambiguous, text
    for text in ("127.0.0.1", "127.0.0.1.", "::1", "::ffff:127.0.0.1", "localhost", "1.a", "a1"):
        assert not HostName.parse(text).is_ambiguous, text


# The hosts of this machine

THIS_MACHINE = [
    *("localhost", "LOCALHOST", "localhost.", "127.0.0.1", "127.255.255.254", "::1", "[::1]"),
    *(
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "::ffff:127.0.0.1",
        "::1%lo",
        "127.0.0.1.",
    ),
]
NOT_THIS_MACHINE = [
    # A page below `localhost` is another site, and its name may be asked of the DNS.
    *("evil.localhost", "sub.localhost.", "localhost.evil.example", "localhost.localdomain"),
    # The wildcard address is no host, although the kernel connects it to loopback.
    *("0.0.0.0", "0", "::", "[::]", "::ffff:0.0.0.0"),
    # Packets for an IPv6 address that contains a loopback address go to a router.
    *("::127.0.0.1", "2002:7f00:1::", "2002:7f00:1::1", "64:ff9b::127.0.0.1"),
    *("128.0.0.1", "126.255.255.255", "1.127.0.0.1", "127.0.0.1.evil.example", "::2", "fe80::1"),
    *("", "localhost..", "[", "[localhost]", "localhost:80", "user@localhost", "a b"),
]


@pytest.mark.parametrize("text", THIS_MACHINE)
def test_spelling_of_loopback_is_this_machine(text: str) -> None:
    assert is_loopback(text)


@pytest.mark.parametrize("text", NOT_THIS_MACHINE)
def test_other_host_is_not_this_machine(text: str) -> None:
    assert not is_loopback(text)


@pytest.mark.parametrize(
    "text", ["0.0.0.0", "0", "0x0", "0.0", "::", "[::]", "::ffff:0:0", "64:ff9b::", "2002::1"]
)
def test_wildcard_address_is_recognised_in_every_spelling(text: str) -> None:
    assert is_wildcard(text)


def test_other_host_is_no_wildcard_address() -> None:
    for text in (
        "127.0.0.1",
        "0.0.0.1",
        "::1",
        "localhost",
        "",
        "*",
        "0.0.0.0.example",
        "2002:1::",
    ):
        assert not is_wildcard(text), text


# Addresses in addresses


@given(st.ip_addresses(v=4))
def test_ipv4_address_in_ipv6_address_is_found(address: ipaddress.IPv4Address) -> None:
    bits = int(address)
    for upper in (0xFFFF << 32, 0x64FF9B << 96):
        assert embedded(ipaddress.IPv6Address(upper | bits)) == address
    assert embedded(ipaddress.IPv6Address(0x2002 << 112 | bits << 80 | 7)) == address
    if bits > 1:
        assert embedded(ipaddress.IPv6Address(bits)) == address
    assert embedded(address) is None


def test_ordinary_ipv6_address_contains_no_ipv4_address() -> None:
    for text in (
        "::",
        "::1",
        "fe80::1",
        "2600::1",
        "64:ff9b:1::1",
        "2003:7f00:1::",
        "::ffff:0:1:1",
    ):
        assert embedded(ipaddress.IPv6Address(text)) is None, text


def test_host_in_url_has_brackets_and_zone() -> None:
    for text, expected in (
        ("LOCALHOST.", "localhost"),
        ("0x7f.1", "127.0.0.1"),
        ("::1", "[::1]"),
        ("[fe80::1%25eth0]", "[fe80::1%25eth0]"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
    ):
        assert HostName.parse(text).in_url == expected


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1%eth0", "2001:db8:1:2::/64"),
        ("::1", "::1"),
        ("", ""),
    ],
)
def test_ipv6_network_counts_as_one_client(address: str, network: str) -> None:
    assert client_network(address) == network
