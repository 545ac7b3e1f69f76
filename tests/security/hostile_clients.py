"""Handwritten clients that send endlessly, and the memory of a server's processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.waiting import PATIENCE_S

MB = 1_000_000
BOUNDARY = "hostile"
KEY = "nnsight.modeling.transformers.TransformersModel"
OLD_KEY = "nnsight.modeling.language.LanguageModel"
NAME = "test-org/tiny-gpt2"
_STUCK_S = 3.0
"""Seconds after which a server that accepts no more data counts as stuck."""
_PIECE = bytes(1 << 20)
_ZSTD = b"\x28\xb5\x2f\xfd"


def memory(pid: int) -> int:
    """Return the memory of a process and its descendants, without files; shared pages count once."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):  # the process has ended
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total += sum(
                int(kb) for kb in re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", text, re.M)
            )
    return total << 10


class Hostile:
    """One client, to which the proxy header gives a separate address."""

    def __init__(self, url: str, address: str, model: str = NAME) -> None:
        self.url = url
        self.address = address
        self._model = model
        parts = urlsplit(url)
        assert parts.hostname
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S)
        self.socket.settimeout(_STUCK_S)
        self.answer = b""

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def send(self, pieces: Iterable[bytes]) -> None:
        """Send as much as the server accepts."""
        try:
            for piece in pieces:
                self.socket.sendall(piece)
        except OSError:
            return

    def read_answer(self) -> str:
        """Read the answer's head and as much of its body as comes with it."""
        with contextlib.suppress(OSError):
            self.answer += self.socket.recv(1 << 16)
        return self.answer.decode(errors="replace")

    @property
    def is_unknown(self) -> bool:
        """Return True if the server rejected this client with 401."""
        self.socket.setblocking(False)
        return self.read_answer().startswith("HTTP/1.1 401")

    def post(self, body: Iterable[bytes], length: int, *headers: str) -> None:
        """Send a POST to /request."""
        head = [
            "POST /request HTTP/1.1",
            "Host: 127.0.0.1",
            f"X-Forwarded-For: {self.address}",
            f"Content-Length: {length}",
            *headers,
        ]
        self.send([("\r\n".join(head) + "\r\n\r\n").encode()])
        self.send(body)

    def post_envelope(self, body: Iterable[bytes], length: int) -> None:
        """Send a request of nnsight 0.8."""
        content_type = f"Content-Type: multipart/form-data; boundary={BOUNDARY}"
        self.post(body, length, f"nnsight-version: {version('nnsight')}", content_type)

    def open_websocket(self, path: str) -> bytes:
        """Open a WebSocket; return the data that came with the answer."""
        head = (
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Forwarded-For: {self.address}\r\n"
            "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        self.send([head.encode()])
        self.socket.settimeout(PATIENCE_S)
        while b"\r\n\r\n" not in self.answer:
            self.answer += self.socket.recv(1 << 16)
        self.socket.settimeout(_STUCK_S)
        head_, _, rest = self.answer.partition(b"\r\n\r\n")
        assert b" 101 " in head_, self.answer
        return rest

    def open_socket_io(self) -> None:
        """Open a channel of nnsight 0.7."""
        self.open_websocket("/ws/socket.io/?EIO=4&transport=websocket")
        self.send([frame(b"40", opcode=1)])
        self.socket.recv(1 << 16)

    def model_key(self) -> str:
        """Return the key of the model as clients of nnsight 0.8 write it."""
        names = {"repo_id": self._model, "revision": None, "task": "text-generation"}
        return f"{KEY}:{json.dumps(names)}"


def frame(
    content: bytes, *, opcode: int = 2, final: bool = True, length: int | None = None
) -> bytes:
    """Return a masked WebSocket frame whose head may promise more than its content."""
    size = len(content) if length is None else length
    head = bytes([(0x80 if final else 0) | opcode])
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 1 << 16:
        head += bytes([0x80 | 126]) + struct.pack("!H", size)
    else:
        head += bytes([0x80 | 127]) + struct.pack("!Q", size)
    return head + bytes(4) + content


def part(name: str, content: bytes = b"") -> bytes:
    """Return a part of a multipart body."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
    return head.encode() + content + b"\r\n"


def pieces(size: int) -> Iterable[bytes]:
    """Yield about `size` bytes."""
    for _ in range(size >> 20):
        yield _PIECE


Attack = Callable[[Hostile], None]


def uploads_without_end(client: Hostile) -> None:
    """Send 60 MB of a payload without its end."""
    data = part("data", json.dumps({"model_key": client.model_key()}).encode())
    client.post_envelope([data, part("blob")[:-2], *pieces(60 * MB)], 200 * MB)


def uploads_of_an_older_client_without_end(client: Hostile) -> None:
    """Send 60 MB of a payload like nnsight 0.7, without its end."""
    names = json.dumps({"repo_id": NAME, "revision": None})
    client.post(
        pieces(60 * MB),
        200 * MB,
        "nnsight-version: 0.7.0",
        f"nnsight-model-key: {OLD_KEY}:{names}",
    )


def envelopes_without_end(client: Hostile) -> None:
    """Send 120 MB of an envelope whose env is an endless list of lists."""
    head = part(
        "data", f'{{"model_key": {json.dumps(client.model_key())}, "env": {{"a": ['.encode()
    )
    many = b"[]," * (1 << 18)
    client.post_envelope([head[:-2], *[many] * 150], 200 * MB)
    client.read_answer()


def large_environments(client: Hostile) -> None:
    """Send a small payload with an env of 10 MB, which takes far more memory as objects."""
    env = f'{{"a": [{",".join(["[]"] * (3 * MB))}]}}'
    data = f'{{"model_key": {json.dumps(client.model_key())}, "env": {env}}}'.encode()
    body = part("data", data) + part("blob", bytes(12)) + f"--{BOUNDARY}--\r\n".encode()
    client.post_envelope([body], len(body))
    client.read_answer()


def refused_bodies(client: Hostile) -> None:
    """Send 60 MB that are refused at the end, since they are not zstd."""
    head = part("data", json.dumps({"model_key": client.model_key(), "compress": True}).encode())
    head += part("blob")[:-2]
    end = f"\r\n--{BOUNDARY}--\r\n".encode()
    length = len(head) + len(_PIECE) * 60 + len(end)
    client.post_envelope([head, *[_PIECE] * 60, end], length)
    client.read_answer()


def messages_without_end(client: Hostile) -> None:
    """Send 90 MB of a WebSocket message in fragments, without its end."""
    client.open_websocket("/subscribe")
    client.send([frame(_PIECE, final=False)])
    client.send(frame(_PIECE, opcode=0, final=False) for _ in range(85))


def frames_without_end(client: Hostile) -> None:
    """Send 90 MB of one WebSocket frame that promises 95, over Socket.IO."""
    client.open_socket_io()
    client.send([frame(b"", length=95 * MB), *pieces(90 * MB)])


def attachments_without_end(client: Hostile) -> None:
    """Announce a packet with a thousand attachments, and send 90 of 900 kB each."""
    client.open_socket_io()
    client.send([frame(b'51000-["stream_upload"]', opcode=1)])
    client.send(frame(_PIECE[: 900 * 1000]) for _ in range(90))


def many_fragments(client: Hostile) -> None:
    """Send a message in half a million fragments of one byte."""
    client.open_websocket("/subscribe")
    client.send([frame(b"a", final=False)])
    client.send([frame(b"a", opcode=0, final=False) * (1 << 19)])


def bodies_of_polling(client: Hostile) -> None:
    """Open a Socket.IO channel by polling, and send 90 MB of a body to it."""
    get = "GET /ws/socket.io/?EIO=4&transport=polling HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    client.send([get.encode()])
    match = re.search(r'"sid":"([^"]+)"', client.read_answer())
    session = match[1] if match else "none"
    client.send(
        [
            f"POST /ws/socket.io/?EIO=4&transport=polling&sid={session} HTTP/1.1\r\n"
            f"Host: 127.0.0.1\r\nContent-Length: {95 * MB}\r\n\r\n".encode()
        ]
    )
    client.send(pieces(90 * MB))


def heads_without_end(client: Hostile) -> None:
    """Send 60 MB of headers."""
    client.send([b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
    client.send(os.urandom(4).hex().encode() + b": " + b"a" * 8000 + b"\r\n" for _ in range(7500))


def one_header_without_end(client: Hostile) -> None:
    """Send 60 MB of one header."""
    client.send([b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\na: "])
    client.send(b"a" * MB for _ in range(60))


def never_reads(payload: bytes) -> Attack:
    """Return an attack that submits forty jobs with this payload and reads none of their results."""

    def attack(client: Hostile) -> None:
        answer = client.open_websocket("/subscribe")
        while (match := re.search(rb'"session_id": ?"([^"]+)"', answer)) is None:
            answer += client.socket.recv(1 << 16)
        data = {
            "model_key": client.model_key(),
            "session_id": match[1].decode(),
            "compress": payload.startswith(_ZSTD),
        }
        body = part("data", json.dumps(data).encode()) + part("blob", payload)
        body += f"--{BOUNDARY}--\r\n".encode()
        for _ in range(40):
            if client.socket.fileno() < 0:
                break
            with contextlib.closing(Hostile(client.url, client.address)) as other:
                other.post_envelope([body], len(body))
                other.read_answer()

    return attack


ATTACKS: tuple[Attack, ...] = (
    uploads_without_end,
    uploads_of_an_older_client_without_end,
    envelopes_without_end,
    large_environments,
    refused_bodies,
    messages_without_end,
    frames_without_end,
    attachments_without_end,
    many_fragments,
    bodies_of_polling,
    heads_without_end,
    one_header_without_end,
)
