"""Redis or Valkey: what answers at `NDIF_BROKER_URL`, and one of our own on this machine."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from ndif.config import Settings
from ndif.gateway.origin import is_loopback
from ndif.services.missing import library, program
from ndif.services.service import Program, Service, ServiceError, folder, is_taken
from ndif.session.folder import Session
from ndif.variables import name_of, without_secrets

NAME = "broker"
_VARIABLE = name_of("broker_url")
_PORT = 6379
_OLDEST = (6, 2)
_LOOK_S = 2.0
_CONFIGURATION = """\
bind {host}
port {port}
dir "{folder}"
appendonly yes
save ""
maxmemory-policy noeviction
daemonize no
"""


def broker(options: Settings, *, may_start: bool) -> Service | None:
    """What is to be started so that there is a broker; None where one answers, or none is wanted.

    Raises:
        ServiceError: if there is none and there can be none, or what answers cannot be used.
    """
    url = options.broker_url
    if not url:
        return None
    library("redis", _VARIABLE)
    parts = urlsplit(url)
    host, port = parts.hostname or "localhost", parts.port or _PORT
    shown = without_secrets(url)
    if parts.scheme == "unix" or is_taken(host, port):
        _check(url, shown)
        return None
    if parts.scheme != "redis" or not is_loopback(host):
        raise ServiceError(
            f"Nothing answers at {shown} ({_VARIABLE}). Start Redis there, or name another."
        )
    if not may_start:
        raise ServiceError(
            f"Nothing answers at {shown} ({_VARIABLE}). `ndif start broker` starts one there, and so does "
            "`ndif start`."
        )
    binary = program("redis-server", "valkey-server", port=port)
    if parts.username:
        raise ServiceError(
            f"A broker that is started here has no users; leave the name out of {_VARIABLE}."
        )

    async def make(session: Session) -> Program:
        data = folder(session, NAME)
        file = data / "redis.conf"
        text = _CONFIGURATION.format(host=_ip(host), port=port, folder=data)
        if parts.password:
            text += f'requirepass "{_quoted(unquote(parts.password))}"\n'
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as written:
            written.write(text)
        return Program([binary, str(file)])

    return Service(
        NAME,
        shown,
        host,
        port,
        make,
        lambda _: _answers(url),
        comes_up_within_s=60,
        ends_within_s=20,
    )


def _check(url: str, shown: str) -> None:
    """See that what answers is a Redis that can be used."""
    from redis.exceptions import AuthenticationError, AuthorizationError, RedisError

    try:
        with _connect(url) as client:
            found = client.info()
    except (AuthenticationError, AuthorizationError) as error:
        raise ServiceError(
            f"The broker at {shown} does not let us in ({error}): {_VARIABLE} is "
            "redis://USER:PASSWORD@HOST:PORT/0."
        ) from error
    except (RedisError, OSError, ValueError) as error:
        raise ServiceError(
            f"What answers at {shown} ({_VARIABLE}) is no Redis that can be used: {error}."
        ) from error
    version = str(found["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ServiceError(
            f"The broker at {shown} is Redis {version}; {'.'.join(map(str, _OLDEST))} or newer is needed."
        )
    policy = found.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ServiceError(
            f"The broker at {shown} forgets requests when its memory is full (maxmemory-policy {policy}): "
            "run `redis-cli config set maxmemory-policy noeviction` there, and have it in its "
            "configuration."
        )


def _answers(url: str) -> bool:
    from redis.exceptions import RedisError

    try:
        with _connect(url) as client:
            return bool(client.ping())
    except (RedisError, OSError):
        return False


def _connect(url: str):  # type: ignore[no-untyped-def]
    from redis import Redis

    return Redis.from_url(url, socket_timeout=_LOOK_S, socket_connect_timeout=_LOOK_S)


def _ip(host: str) -> str:
    # `localhost` may be two addresses, of which clients take either.
    return host if host.replace(".", "").isdigit() or ":" in host else "127.0.0.1 -::1"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
