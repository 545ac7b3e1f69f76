"""Webhooks: a GET with the status in its query, or a signed POST as Standard Webhooks describes it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ssl
from collections.abc import Callable, Sequence
from http import HTTPStatus

import httpcore
import httpx

from ndif.config.units import format_duration
from ndif.delivery.loop import DeliveryError
from ndif.queue.callbacks.guard import (
    Address,
    CallbackKind,
    ForbiddenAddressError,
    GuardedBackend,
    Network,
    NoAddressError,
    Resolve,
    Resolver,
)
from ndif.schema.callback import Callback
from ndif.stores.broker.signing import derive
from ndif.tasks import within

_PREFIX = "whsec_"
_PURPOSE = "callbacks"
_USER_AGENT = "ndif"
_SUCCESS = range(200, 300)
_REDIRECTS = range(300, 400)


def signing_secret(server_secret: str, key: str) -> str:
    """Return the secret that signs one API key's callbacks, derived one-way from the server's secret.

    `key` is the opaque digest of the API key; empty for jobs that were sent without one.
    """
    mac = hmac.digest(derive(server_secret, _PURPOSE), key.encode(), hashlib.sha256)
    return _PREFIX + base64.b64encode(mac).decode()


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the signature of a message, in the form of the header webhook-signature."""
    key = base64.b64decode(secret.removeprefix(_PREFIX))
    mac = hmac.digest(key, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256)
    return f"v1,{base64.b64encode(mac).decode()}"


class Webhooks:
    """Sends webhooks through the guard, each on a connection of its own; no redirect is followed."""

    def __init__(
        self,
        allowed: Sequence[Network],
        secrets: Sequence[str],
        timeout_s: float,
        now: Callable[[], float],
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Prepare for webhooks signed with each of `secrets`: two or more while one replaces another."""
        self._secrets = tuple(secrets)
        self._timeout_s = timeout_s
        self._now = now
        self._resolver = Resolver()
        self._backend = GuardedBackend(allowed, resolve or self._resolver)
        self._tls = tls

    def close(self) -> None:
        """Release the resolver's threads."""
        self._resolver.close()

    async def send(self, callback: Callback, address: Address) -> None:
        """Deliver a callback, or raise a `DeliveryError`."""
        try:
            status = await within(self._status(callback, address), self._timeout_s)
        except ForbiddenAddressError as error:
            raise DeliveryError(
                "its host has an address that this server does not call", final=True
            ) from error
        except NoAddressError as error:
            raise DeliveryError("its host has no address") from error
        except (asyncio.TimeoutError, httpcore.TimeoutException) as error:
            limit = format_duration(self._timeout_s)
            raise DeliveryError(f"it did not answer within {limit}") from error
        except httpcore.NetworkError as error:
            is_tls = isinstance(error.__cause__ or error.__context__, ssl.SSLError)
            raise DeliveryError(
                "TLS with it failed, perhaps because of its certificate"
                if is_tls
                else "it cannot be reached"
            ) from error
        except httpcore.ProtocolError as error:
            raise DeliveryError("it does not speak HTTP") from error
        if status in _SUCCESS:
            return
        if status in _REDIRECTS:
            raise DeliveryError(f"it answered {status}, and no redirect is followed")
        raise DeliveryError(f"it answered {status}", final=status == HTTPStatus.GONE)

    async def _status(self, callback: Callback, address: Address) -> int:
        """Send a webhook and return the status of the answer, whose body is not read."""
        if self._tls is None and address.scheme == "https":
            self._tls = await asyncio.to_thread(httpx.create_ssl_context)
        headers = {"Host": address.host_header, "User-Agent": _USER_AGENT, "Accept": "*/*"}
        body = b""
        target = address.target
        if address.kind is CallbackKind.POST:
            body = callback.content.encode()
            headers |= {"Content-Type": "application/json", **self._signed(callback, body)}
        else:
            target = address.target_with(status=callback.content.status, id=callback.request_id)
        url = httpcore.URL(
            scheme=address.scheme, host=address.host, port=address.port, target=target
        )
        async with (
            httpcore.AsyncConnectionPool(
                self._tls, max_connections=1, network_backend=self._backend
            ) as pool,
            pool.stream(
                "POST" if address.kind is CallbackKind.POST else "GET",
                url,
                headers=[*headers.items()],
                content=body or None,
            ) as answer,
        ):
            return int(answer.status)

    def _signed(self, callback: Callback, body: bytes) -> dict[str, str]:
        message_id, timestamp = f"msg_{callback.id}", int(self._now())
        secrets = [signing_secret(secret, callback.key) for secret in self._secrets]
        signatures = [signature(secret, message_id, timestamp, body) for secret in secrets]
        return {
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": " ".join(signatures),
        }
