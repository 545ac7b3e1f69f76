"""Commands to Redis: each gets its own answer, even if connections are lost."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from ndif.stores import redis as redis_client
from ndif.stores.broker import BrokerError
from ndif.stores.broker.redis.broker import RedisBroker
from ndif.stores.objects import FileStore
from ndif.stores.redis import connect, retry
from ndif.tasks import within
from tests.on_loop import Play, play
from tests.services.packages import need
from tests.services.process import HOST, free_port
from tests.services.redis import RedisServer
from tests.stores.broker.signers import SIGNER
from tests.waiting import PATIENCE_S, time_passes, time_passes_async

pytestmark = pytest.mark.engine

__all__ = ["play"]

SOON_S = 0.05
SHORT_S = 1.0
LARGE = b"x" * 300_000


@contextlib.asynccontextmanager
async def a_client(url: str) -> AsyncIterator[Redis]:
    client = connect(url)
    try:
        yield client
    finally:
        await client.aclose()


@pytest.fixture
def impatient(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_client, "ANSWER_S", SHORT_S)


class Cutting:
    """A proxy that ends connections: each after certain content has passed, or all at once."""

    def __init__(self, server: RedisServer, after: bytes = b"", *replies: bytes) -> None:
        """Set the proxy up. `said` are answers to the first commands with `after`, instead of an end."""
        self._server = server
        self._after = after
        self._replies = list(replies)
        self._writers: set[asyncio.StreamWriter] = set()
        self.connections = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Listen while the block runs; yield the URL."""
        listening = await asyncio.start_server(self._carry, HOST)
        port = listening.sockets[0].getsockname()[1]
        yield f"redis://{HOST}:{port}/0"
        self.cut()
        listening.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        incoming, back = await asyncio.open_connection(HOST, self._server.port)
        self._writers |= {writer, back}

        async def answers() -> None:
            while content := await incoming.read(1 << 16):
                writer.write(content)

        answering = asyncio.create_task(answers())
        with contextlib.suppress(OSError):
            while content := await reader.read(1 << 16):
                if self._after and self._after in content:
                    if not self._replies:
                        break
                    writer.write(self._replies.pop(0))
                    self._after = self._after if self._replies else b""
                    await reader.read()
                back.write(content)
        answering.cancel()
        for end in (writer, back):
            end.transport.abort()


def test_each_command_gets_its_own_answer(play: Play, redis: RedisServer) -> None:
    async def scene() -> None:
        async with a_client(redis.url) as client:
            asked = [
                client.echo(LARGE[: 100_000 * (n % 3)] + b"%d" % n)  # type: ignore[no-untyped-call]
                for n in range(300)
            ]
            answers = await asyncio.gather(*asked)
            assert [int(answer.strip(b"x")) for answer in answers] == list(range(300))

    play(scene)


def test_failed_command_does_not_affect_others(play: Play, redis: RedisServer) -> None:
    async def scene() -> None:
        async with a_client(redis.url) as client:
            await client.set("text", "some")
            asked = client.get("text"), client.rpush("text", 1), client.get("text")
            before, wrong, after = await asyncio.gather(*asked, return_exceptions=True)
            assert before == after == b"some"
            assert isinstance(wrong, BrokerError)
            with pytest.raises(BrokerError):
                await client.set("text", None)  # type: ignore[arg-type]

    play(scene)


def test_cancelled_command_takes_no_other_answer(play: Play, redis: RedisServer) -> None:
    async def scene() -> None:
        async with a_client(redis.url) as client:
            for n in range(50):
                given_up = asyncio.create_task(client.echo(f"given up {n}"))
                await asyncio.sleep(0)
                other = asyncio.create_task(client.echo(f"other {n}"))
                await asyncio.sleep(0)
                given_up.cancel()
                assert await other == b"other %d" % n

    play(scene)


def test_cancelled_blocking_pop_takes_no_item(play: Play, redis: RedisServer) -> None:
    async def scene() -> None:
        async with a_client(redis.url) as client:
            await client.delete("things")
            waiting = asyncio.create_task(client.blpop(["things"], timeout=PATIENCE_S))
            await time_passes_async(SOON_S)
            waiting.cancel()
            await asyncio.wait([waiting])
            await time_passes_async(SOON_S)
            await client.rpush("things", "one")
            assert await client.blpop(["things"], timeout=PATIENCE_S) == (b"things", b"one")

    play(scene)


def test_blocking_commands_do_not_block_others(play: Play, redis: RedisServer) -> None:
    async def scene() -> None:
        async with a_client(redis.url) as client:
            await client.delete("one", "two")
            waiting = [
                asyncio.create_task(client.blpop([k], timeout=PATIENCE_S)) for k in ("one", "two")
            ]
            await time_passes_async(SOON_S)
            await client.rpush("two", "b")
            assert await waiting[1] == (b"two", b"b")
            await client.rpush("one", "a")
            assert await waiting[0] == (b"one", b"a")

    play(scene)


def test_unanswered_commands_are_resent_after_lost_connection(
    play: Play, redis: RedisServer
) -> None:
    async def scene() -> None:
        way = Cutting(redis)
        async with way.open() as url, a_client(url) as client:
            await client.delete("once")
            for n in range(20):
                asked = [asyncio.create_task(client.echo(f"{n} {k}")) for k in range(20)]
                await time_passes_async(0.001 * (n % 4))
                way.cut()
                assert await asyncio.gather(*asked) == [b"%d %d" % (n, k) for k in range(20)]
            assert way.connections > 10

    play(scene)


def test_command_that_breaks_connections_is_retried_few_times(
    play: Play, redis: RedisServer
) -> None:
    async def scene() -> None:
        way = Cutting(redis, after=b"deadly")
        async with way.open() as url, a_client(url) as client:
            with pytest.raises(BrokerError):
                await client.echo("deadly")
            assert way.connections == 3
            assert await client.echo("harmless") == b"harmless"

    play(scene)


@pytest.mark.usefixtures("impatient")
def test_commands_fail_if_server_does_not_answer_in_time(play: Play, redis: RedisServer) -> None:
    async def scene() -> None:
        async with a_client(redis.url) as client:
            await client.ping()
            redis.pause()
            try:
                loop = asyncio.get_running_loop()
                for _ in range(2):  # the second round finds no connection
                    began = loop.time()
                    # Many more than may be unanswered at once: one after the other, they would take 100 s.
                    many = (client.ping() for _ in range(1600))
                    asked = client.ping(), client.blpop(["nothing"], timeout=1), *many
                    outcomes = await asyncio.gather(*asked, return_exceptions=True)
                    assert all(isinstance(o, BrokerError) for o in outcomes), outcomes
                    assert loop.time() - began < 60 * SHORT_S
            finally:
                redis.resume()
            assert await retry(client.ping, PATIENCE_S)

    play(scene)


@pytest.mark.usefixtures("impatient")
def test_many_slow_commands_are_all_answered(
    play: Play, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Redis never pauses this long on a busy machine, and all answers together take longer.
    monkeypatch.setattr(redis_client, "ANSWER_S", 3 * SHORT_S)
    slow = """
        local function now() local t = redis.call('TIME'); return t[1] * 1000000 + t[2] end
        local done = now() + 10000
        while now() < done do end
        return redis.call('INCR', KEYS[1])
    """

    async def scene() -> None:
        async with a_client(redis.url) as client:
            await client.delete("slow")
            script = client.register_script(slow)
            # Redis answers once it has executed all commands that it had read, which are some of these.
            large = [b"x" * 4000]
            answers = await asyncio.gather(*(script(["slow"], large) for _ in range(400)))
            assert sorted(answers) == list(range(1, 401))

    play(scene)


@pytest.mark.usefixtures("impatient")
def test_stalled_process_does_not_count_as_server_outage(
    play: Play, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "_STALL_S", SHORT_S / 2)

    async def scene() -> None:
        async with a_client(redis.url) as client:
            await client.ping()
            asked = asyncio.create_task(client.ping())
            await asyncio.sleep(0)
            time_passes(2 * SHORT_S)
            assert await asked

    play(scene)


def test_loading_server_is_asked_again(play: Play, redis: RedisServer) -> None:
    async def scene() -> None:
        way = Cutting(redis, b"whether", *[b"-LOADING Redis is loading the dataset\r\n"] * 2)
        async with way.open() as url, a_client(url) as client:
            asked = client.echo("whether"), client.echo("it"), client.echo("answers")
            assert await asyncio.gather(*asked) == [b"whether", b"it", b"answers"]
            assert way.connections == 3 + 2  # the first connections, and one for each refusal

    play(scene)


def test_closed_client_connects_again(play: Play, redis: RedisServer) -> None:
    async def scene() -> None:
        async with a_client(redis.url) as client:
            asked = asyncio.create_task(client.ping())
            await asyncio.sleep(0)
            await client.aclose()
            await asyncio.wait([asked])
            assert await within(asyncio.ensure_future(client.ping()), PATIENCE_S)

    play(scene)


def test_channel_closes_at_once_after_lost_connection(
    play: Play, redis: RedisServer, tmp_path: Path
) -> None:
    async def scene() -> None:
        way = Cutting(redis)
        async with way.open() as url:
            broker = RedisBroker(url, FileStore(tmp_path, 3600), SIGNER, inline_bytes=1000)
            await broker.start()
            for _ in range(5):
                subscription = await broker.subscribe()
                closing = asyncio.create_task(subscription.close())
                await asyncio.sleep(0)
                way.cut()
                await within(closing, PATIENCE_S)
            await broker.stop()

    play(scene)


def test_client_reconnects_to_restarted_server(play: Play, tmp_path: Path) -> None:
    async def scene() -> None:
        server = RedisServer(tmp_path)
        async with a_client(server.url) as client:
            for _ in range(2):
                with pytest.raises(BrokerError):
                    await client.ping()
                with server:
                    script = client.register_script("return ARGV[1]")
                    for _ in range(2):
                        assert await script([], ["here"]) == b"here"

    play(scene)


@pytest.fixture
def confidential(tmp_path: Path) -> Iterator[str]:
    """The URL of a server with TLS and a password."""
    key, certificate, port = tmp_path / "key.pem", tmp_path / "certificate.pem", free_port()
    subprocess.run(
        [
            *(need("openssl", "openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-subj", f"/CN={HOST}"),
            *("-addext", f"subjectAltName=IP:{HOST}"),
        ],
        check=True,
        capture_output=True,
    )
    tls = "--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)
    with RedisServer(tmp_path, *tls, "--tls-auth-clients", "no") as server:
        server.command("acl", "setuser", "friend", "on", ">secret", "~*", "&*", "+@all")
        yield f"rediss://friend:secret@{HOST}:{port}/3?ssl_ca_certs={certificate}"


def test_url_sets_tls_user_password_and_database(play: Play, confidential: str) -> None:
    async def scene() -> None:
        async with a_client(confidential) as client:
            assert await client.execute_command("ACL WHOAMI") == "friend"  # type: ignore[no-untyped-call]
            assert (await client.client_info())["db"] == 3
            assert len(await client.echo(LARGE)) == len(LARGE)  # type: ignore[no-untyped-call]

    play(scene)


def test_answers_use_resp2_whatever_url_says(play: Play, redis: RedisServer) -> None:
    async def scene() -> None:
        async with a_client(f"{redis.url}?protocol=3") as client:
            assert (await client.client_info())["resp"] == "2"

    play(scene)
