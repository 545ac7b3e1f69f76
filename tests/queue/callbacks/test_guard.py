"""The guard of webhook addresses, and a canary on loopback that must get no connection."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Sequence

import httpcore
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ndif.queue.callbacks.guard import (
    EVERYWHERE,
    Address,
    CallbackAddressError,
    CallbackKind,
    ForbiddenAddressError,
    GuardedBackend,
    NoAddressError,
    Resolver,
    is_public,
    may_connect,
    read_address,
    shown,
)
from tests.on_loop import on_loop
from tests.waiting import PATIENCE_S

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))

NOT_PUBLIC = [
    *("127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.9.9"),
    *("192.168.1.1", "169.254.169.254", "169.254.0.1", "100.64.0.1", "100.127.255.255"),
    *("192.0.0.192", "192.0.2.1", "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1"),
    *("224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255", "168.63.129.16"),
    *("192.88.99.1", "100.100.100.200", "192.175.48.1"),
    *("::", "::1", "::2", "fe80::1", "fe80::1%1", "fec0::1", "fc00::1", "fd00:ec2::254"),
    *("ff02::1", "ff0e::1", "2001:db8::1", "100::1", "2001::1", "2001:10::1", "3fff::1", "5f00::1"),
    # Other spellings of IPv4 addresses.
    *("::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "::127.0.0.1", "::ffff:0:127.0.0.1"),
    *(
        "64:ff9b::127.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
    ),
    *("2002:0a00:0001::1", "2a00::5efe:127.0.0.1", "2a00::200:5efe:10.0.0.1", "fe80::5efe:8.8.8.8"),
]
PUBLIC = [
    *(
        "8.8.8.8",
        "1.1.1.1",
        "100.63.255.255",
        "100.128.0.1",
        "172.15.0.1",
        "172.32.0.1",
        "223.1.1.1",
    ),
    *("192.0.1.1", "198.17.255.255", "198.20.0.1", "2600::1", "2a00:1450::1", "2606:4700::1111"),
    *("::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:0808:0808::1", "2a00::5efe:8.8.8.8"),
]


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_non_public_addresses_are_forbidden_by_default(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert not is_public(address)
    assert not may_connect(address)
    assert may_connect(address, EVERYWHERE)


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_are_recognised(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@given(st.ip_addresses())
@example(ipaddress.ip_address("192.0.0.9"))
def test_public_addresses_agree_with_ipaddress_module(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if is_public(address) and address.version == 4:
        assert address.is_global
        assert not (address.is_multicast)
        assert not (address.is_reserved)
        assert not (address.is_private)
    if is_public(address) and address.version == 6 and address.ipv4_mapped is None:
        assert not (address.is_multicast)
        assert not (address.is_link_local)
        assert not (address.is_site_local)


@given(st.ip_addresses(v=4))
def test_ipv6_forms_of_ipv4_address_are_as_public_as_the_address(
    address: ipaddress.IPv4Address,
) -> None:
    bits = int(address)
    mapped, translated, six_to_four, isatap = (
        ipaddress.IPv6Address(value)
        for value in (
            0xFFFF << 32 | bits,
            0x64FF9B << 96 | bits,
            0x2002 << 112 | bits << 80 | 1,
            0x2A00 << 112 | 0x5EFE << 32 | bits,
        )
    )
    expected = is_public(address)
    assert [is_public(ip) for ip in (mapped, translated, six_to_four, isatap)] == [expected] * 4


def test_only_networks_of_operator_are_allowed_beside_public_ones() -> None:
    allowed = (ipaddress.ip_network("10.20.0.0/16"), ipaddress.ip_network("fd12::/32"))
    for text in ("10.20.3.4", "::ffff:10.20.3.4", "fd12::9", "8.8.8.8"):
        assert may_connect(ipaddress.ip_address(text), allowed)
    for text in ("10.21.0.1", "::ffff:10.21.0.1", "fd13::9", "127.0.0.1", "169.254.169.254"):
        assert not may_connect(ipaddress.ip_address(text), allowed)


def test_ports_of_other_services_are_allowed_only_in_operator_networks() -> None:
    allowed = (ipaddress.ip_network("10.20.0.0/16"),)
    own, public = ipaddress.ip_address("10.20.0.1"), ipaddress.ip_address("8.8.8.8")
    assert [may_connect(own, allowed, port) for port in (22, 80, 6379)] == [True] * 3
    assert [may_connect(public, allowed, port) for port in (22, 80, 6379)] == [False, True, True]
    assert read_address("http://10.20.0.1:81/", allowed).port == 81
    with pytest.raises(CallbackAddressError, match="does not call"):
        read_address("http://8.8.8.8:25/", allowed)


# Addresses that users may give

TAKEN = {
    "https://example.org": Address(
        CallbackKind.GET, scheme="https", host="example.org", port=443, target="/"
    ),
    "HTTP://Example.ORG.:8080/done?run=7#part": Address(
        CallbackKind.GET, scheme="http", host="example.org", port=8080, target="/done?run=7"
    ),
    "post+https://example.org/a%20b": Address(
        CallbackKind.POST, scheme="https", host="example.org", port=443, target="/a%20b"
    ),
    "every+POST+http://example.org/": Address(
        CallbackKind.POST, scheme="http", host="example.org", port=80, target="/"
    ),
    "every+https://example.org/?a": Address(
        CallbackKind.GET, scheme="https", host="example.org", port=443, target="/?a"
    ),
    "http://[2a00:1450::1]/": Address(
        CallbackKind.GET, scheme="http", host="2a00:1450::1", port=80, target="/"
    ),
    "https://xn--bcher-kva.example/": Address(
        CallbackKind.GET, scheme="https", host="xn--bcher-kva.example", port=443, target="/"
    ),
    "ada.lovelace+ndif@mail.example.org": Address(
        CallbackKind.MAIL, mail="ada.lovelace+ndif@mail.example.org"
    ),
}


@pytest.mark.parametrize("text", TAKEN)
def test_valid_callback_addresses_are_parsed(text: str) -> None:
    assert read_address(text) == TAKEN[text]


REFUSED = {
    "must be an http or https URL or an e-mail address": [
        *("x", "", " https://example.org/", "gopher://example.org/", "file:///etc/passwd"),
        *("//example.org/", "post+", "post+ftp://example.org/", "ftp://ada@example.org/"),
        *("unix:///var/run/docker.sock", "every+ada@example.org", "post+ada@example.org"),
        *("post+every+http://example.org/", "every+every+http://example.org/"),
    ],
    "unusual form of an IP address": [
        *("http://2130706433/", "http://0x7f000001/", "http://0x7f.1/", "http://017700000001/"),
        *("http://0177.0.0.1/", "http://127.1/", "http://127.0.1/", "http://127.0.0.0x1/"),
        *("http://0/", "http://0x/", "http://127.0.0.01/", "http://1.1.1.1.1/", "http://a.1/"),
        *("http://256.256.256.256/", "https://0x7f.0.0.1./"),
    ],
    "this server does not call: the address must be public": [
        *(
            "http://127.0.0.1/",
            "http://127.0.0.1./",
            "HTTP://LOCALHOST/",
            "http://localhost.:8080/",
        ),
        *("http://a.localhost/", "http://169.254.169.254/latest/", "http://[::1]/", "http://[::]/"),
        *(
            "http://[::ffff:127.0.0.1]/",
            "http://[0:0:0:0:0:ffff:7f00:1]/",
            "http://[fd00:ec2::254]/",
        ),
        *("http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/", "http://10.0.0.1:8080/"),
        *(
            "every+http://0.0.0.0/",
            "http://100.64.0.1/",
            "http://224.0.0.1/",
            "post+http://127.0.0.1/",
        ),
    ],
    "names a user or password": [
        *("https://user:password@example.org/", "http://example.org@127.0.0.1/"),
        *("https://@example.org/", "http://a:b@c@127.0.0.1/"),
    ],
    "is not a URL like": [
        *("http://", "http:///path", "http://exa mple.org/", "http://example.org\\.evil.org/"),
        *("http://[::1", "http://[1.2.3.4]/", "http://[fe80::1%25eth0]/", "http://example.org:x/"),
        *("http://example.org:/", "http://example%2eorg/", "http://exa\tmple.org/"),
        *("http://example.org/\r\nX-Header: 1", "http://example.org/ HTTP/1.1", "https://a,b/"),
        "http://[::ffff:127.0.0.1]evil.org/",
    ],
    "beyond ASCII": [
        *("http://bücher.example/", "http://①②⑦.⓪.⓪.①/", "http://127。0。0。1/", "ada@exämple.org"),
        "http://example.org/ü",
    ],
    "is not a web server's port": [
        *("http://example.org:22/", "http://example.org:25/", "https://example.org:0/"),
        *("http://example.org:65536/", "http://example.org:99999/"),
    ],
    "names no valid host": [
        *("http://-a.example/", "http://a..example/", "http://.example.org/", "http://./"),
        *(f"http://{'a' * 64}.example/", "http://[1::2::3]/", f"http://{'a.' * 130}example/"),
    ],
    "is not one e-mail address": [
        *("@example.org", "ada@", "ada@localhost", "ada@[127.0.0.1]", "ada@127.0.0.1"),
        *("a@b.example,c@d.example", "ada@example.org\nBcc: bob@example.org", "a b@example.org"),
        *(
            '"a@b"@example.org',
            "Ada <ada@example.org>",
            "a..b@example.org",
            f"{'a' * 65}@b.example",
        ),
        "ada@-x.example",
    ],
    "longer than": ["http://example.org/" + "a" * 2000],
}


@pytest.mark.parametrize(
    ("sentence", "text"), [(sentence, text) for sentence, all_ in REFUSED.items() for text in all_]
)
def test_invalid_callback_addresses_are_rejected_with_reason(sentence: str, text: str) -> None:
    with pytest.raises(CallbackAddressError, match=sentence) as refused:
        read_address(text)
    assert len(str(refused.value)) < 300
    assert str(refused.value).endswith(".")


@given(
    st.text(max_size=60) | st.from_regex(r"https?://[\[\]@:%.a-f0-9\\/#?]{0,30}", fullmatch=True)
)
@example("http://[")
@example("https://a:99999999999999999999/")
def test_any_text_is_parsed_or_raises_address_error(text: str) -> None:
    with contextlib.suppress(CallbackAddressError):
        read_address(text)


def test_host_of_url_has_one_form() -> None:
    hosts = [
        *("Example.org", "example.org.", "EXAMPLE.ORG.:443", "8.8.8.8", "8.8.8.8.", "[2A00:0::1]"),
        *("[::ffff:8.8.8.8]", "[2a00::0.0.0.1]"),
    ]
    normal = [read_address(f"https://{host}/").host for host in hosts]
    assert normal == [*["example.org"] * 3, *["8.8.8.8"] * 2, "2a00::1", "8.8.8.8", "2a00::1"]


def test_query_of_url_is_kept() -> None:
    fields = {"status": "COMPLETED", "id": "7"}
    for text, target in (
        ("https://example.org", "/?status=COMPLETED&id=7"),
        ("https://example.org/done?", "/done?status=COMPLETED&id=7"),
        ("https://example.org/done?a=b%26c&d", "/done?a=b%26c&d&status=COMPLETED&id=7"),
    ):
        assert read_address(text).target_with(**fields) == target


def test_shown_address_hides_its_secrets() -> None:
    assert (
        shown("post+https://example.org:8443/hook/abc?token=s") == "post+https://example.org:8443/…"
    )
    assert shown("http://example.org?token=s") == "http://example.org/…"
    assert shown("ada@example.org") == "a…@example.org"


# Connections of the server


class Canary:
    """A listener on loopback, for both families, that counts connections."""

    def __init__(self) -> None:
        self.heard = 0
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard += 1
        await reader.readline()
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def canary() -> AsyncIterator[Canary]:
    listening = Canary()
    every = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    listening.port = every.getsockname()[1]
    server = await asyncio.start_server(listening.answer, sock=every)
    try:
        yield listening
    finally:
        server.close()


class Names:
    """A resolver whose names change their addresses from one look-up to the next."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = [*answers]
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


async def fetch(backend: GuardedBackend, host: str, port: int) -> int:
    async with httpcore.AsyncConnectionPool(network_backend=backend) as pool:
        url = httpcore.URL(scheme="http", host=host, port=port, target="/")
        timeouts = {"connect": PATIENCE_S, "read": PATIENCE_S}
        return (await pool.request("GET", url, extensions={"timeout": timeouts})).status


SPELLINGS = [
    *("127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "0177.0.0.1"),
    *("017700000001", "0", "0.0.0.0", "127.255.255.254", "localhost", "LOCALHOST", "localhost."),
    *("::1", "::", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1", "::ffff:7f00:1", "::ffff:0.0.0.0"),
]


@pytest.mark.parametrize("host", SPELLINGS)
@on_loop
async def test_guard_rejects_every_spelling_of_loopback(host: str) -> None:
    async with canary() as listening:
        with pytest.raises((ForbiddenAddressError, NoAddressError)):
            await fetch(GuardedBackend((), Resolver()), host, listening.port)
        assert listening.heard == 0


@on_loop
async def test_guard_connects_to_allowed_loopback() -> None:
    async with canary() as listening:
        for host in ("127.0.0.1", "127.1", "::1", "localhost"):
            backend = GuardedBackend(LOOPBACK, Resolver())
            assert await fetch(backend, host, listening.port) == 204
        assert listening.heard == 4


@on_loop
async def test_dns_rebinding_does_not_reach_loopback() -> None:
    """A public address at the first look-up, loopback at every later one."""
    async with canary() as listening:
        names = Names(["192.0.2.77"], ["127.0.0.1"])
        # This test treats an unused address as public.
        allowed = (ipaddress.ip_network("192.0.2.77/32"),)
        backend = GuardedBackend(allowed, names)
        with pytest.raises((httpcore.ConnectError, httpcore.ConnectTimeout)):
            await fetch(backend, "rebinding.example", listening.port)
        # The connection went to the checked address, without a second look-up.
        assert (names.asked, listening.heard) == (["rebinding.example"], 0)
        with pytest.raises(ForbiddenAddressError):
            await fetch(backend, "rebinding.example", listening.port)
        assert listening.heard == 0


@pytest.mark.parametrize(
    "addresses", [["8.8.8.8", "127.0.0.1"], ["127.0.0.1", "8.8.8.8"], ["2600::1", "::1"]]
)
@on_loop
async def test_host_with_one_forbidden_address_is_rejected(addresses: list[str]) -> None:
    async with canary() as listening:
        with pytest.raises(ForbiddenAddressError):
            await fetch(GuardedBackend((), Names(addresses)), "both.example", listening.port)
        assert listening.heard == 0


@on_loop
async def test_next_address_of_host_is_tried() -> None:
    listening = Canary()
    server = await asyncio.start_server(listening.answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    names = Names(["127.0.0.9", "127.0.0.1"])  # nobody listens at the first
    assert await fetch(GuardedBackend(LOOPBACK, names), "two.example", port) == 204
    server.close()


@on_loop
async def test_empty_name_resolution_raises_error() -> None:
    with pytest.raises(NoAddressError):
        await fetch(GuardedBackend(LOOPBACK, Names([])), "none.example", 80)


@on_loop
async def test_guard_rejects_unix_sockets() -> None:
    with pytest.raises(ForbiddenAddressError):
        await GuardedBackend(EVERYWHERE, Resolver()).connect_unix_socket("/run/docker.sock")


@on_loop
async def test_failed_name_resolution_raises_error() -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    with pytest.raises(NoAddressError):
        await fetch(GuardedBackend((), resolve), "nobody.example", 80)
