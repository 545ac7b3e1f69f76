"""httpx in the processes of the tests: calls wait longer, and share a TLS context."""

from __future__ import annotations

import functools
import os
import ssl
from typing import Any

import httpx
from httpx._transports import default as transports

from tests.waiting import PATIENCE_S

_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE")
"""Variables that a TLS context depends on."""


def prepare_http() -> None:
    """Let calls that name no timeout wait, as a busy machine may take the usual five seconds.

    Calls share their TLS contexts: each of a module's functions, such as `httpx.get`, would read all
    certificates, which takes 40 ms of a core.
    """
    timeout: httpx.Timeout = httpx.get.__kwdefaults__["timeout"]  # type: ignore[index]
    timeout.connect = timeout.read = timeout.write = timeout.pool = PATIENCE_S
    transports.create_ssl_context = _context  # type: ignore[assignment]


def _context(**options: Any) -> ssl.SSLContext:
    return _context_by(tuple(map(os.environ.get, _VARIABLES)), **options)


@functools.lru_cache(maxsize=32)
def _context_by(_variables: tuple[str | None, ...], **options: Any) -> ssl.SSLContext:
    return httpx.create_ssl_context(**options)
