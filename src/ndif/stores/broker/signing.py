"""Signatures over messages between the processes of one server, which Redis carries.

An attacker who writes to Redis can repeat, delay and delete messages, but cannot forge, change or move one:
each signature covers the content and its *place*, such as the name of its channel.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

_ALGORITHM = "sha256"
_HEAD = Struct(">32sI")
"""The signature, and the length of the content that follows it."""
_PLACE = Struct(">I")

PROTOCOL = 1
"""Version of the messages between the processes of a server, through Redis and Ray.

Processes of different versions do not work together. Changes of stored data do not change the version.
"""

UNSIGNED = (
    "it carries no signature of this server's NDIF_CLUSTER_SECRET: a process with another secret, another "
    "server or an attacker wrote it to Redis"
)
"""Clause for the log about a refused message."""


class SignatureError(ValueError):
    """A message is not signed with a secret of this server for the place where it was found."""


class Signed(NamedTuple):
    """A message with a valid signature."""

    content: bytes
    rest: bytes
    """Bytes after the content, which the signature does not cover."""


class Signer:
    """Signs messages with the first of a server's secrets, and verifies them with any.

    Two secrets are in use while an operator replaces one. Redis never holds a secret.
    """

    def __init__(self, secrets: Sequence[str]) -> None:
        self.renew(secrets)

    def renew(self, secrets: Sequence[str]) -> None:
        """Use these secrets from now on."""
        if not secrets or not all(secrets):
            raise ValueError("an empty secret would let everyone sign")
        self.secrets = tuple(secrets)
        # Copying a keyed HMAC takes a fifth of the time of creating one.
        self._macs = tuple(
            hmac.new(derive(secret, "broker"), digestmod=_ALGORITHM) for secret in secrets
        )

    def sign(self, place: str, content: bytes) -> bytes:
        """Return the content with its signature; unsigned bytes may be appended."""
        mac = _mac(self._macs[0], place, content)
        return _HEAD.pack(mac, len(content)) + content

    def split(self, place: str, message: bytes) -> Signed:
        """Return a signed message's content and the bytes appended to it, or raise a `SignatureError`."""
        if len(message) < _HEAD.size:
            raise SignatureError(UNSIGNED)
        mac, length = _HEAD.unpack_from(message)
        end = _HEAD.size + length
        content = message[_HEAD.size : end]
        if not any(hmac.compare_digest(mac, _mac(keyed, place, content)) for keyed in self._macs):
            raise SignatureError(UNSIGNED)
        return Signed(content, message[end:])

    def verify(self, place: str, message: bytes) -> bytes:
        """Return the content of a message that is signed as a whole, or raise a `SignatureError`."""
        content, rest = self.split(place, message)
        if rest:
            raise SignatureError(UNSIGNED)
        return content


def unverified(message: bytes) -> bytes:
    """Return the content of a message, signed or not, without verifying it."""
    if len(message) >= _HEAD.size:
        _, length = _HEAD.unpack_from(message)
        if length == len(message) - _HEAD.size:
            return message[_HEAD.size :]
    return message


def derive(secret: str, use: str) -> bytes:
    """Derive a key for one use; it reveals neither the server's secret nor another key."""
    return hmac.digest(secret.encode(), f"ndif {use}".encode(), _ALGORITHM)


def digest(payload: bytes | bytearray) -> str:
    """Return the digest by which a signed request names its payload."""
    return hashlib.sha256(payload).hexdigest()


def _mac(keyed: hmac.HMAC, place: str, content: bytes) -> bytes:
    place_bytes, mac = place.encode(errors="surrogatepass"), keyed.copy()
    # The length separates the end of the place from the beginning of the content.
    mac.update(_PLACE.pack(len(place_bytes)) + place_bytes)
    mac.update(content)
    return mac.digest()
