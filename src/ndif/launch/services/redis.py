"""The Redis or Valkey at `NDIF_BROKER_URL`, or one that this machine runs there."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from ndif.config.reference import name_of, without_secrets
from ndif.config.settings import OLDEST_REDIS, Settings
from ndif.launch.run_folder import RunFolder, open_private
from ndif.launch.services.service import (
    Program,
    Service,
    ServiceError,
    accepts_connections,
    require_package,
    require_program,
)
from ndif.net import is_loopback

NAME = "broker"
_VARIABLE = name_of("broker_url")
_PORT = 6379
_TIMEOUT_S = 2.0
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
    """Return the broker to start; None if a suitable one answers already or none is configured."""
    url = options.broker_url
    if not url:
        return None
    require_package("redis", _VARIABLE)
    parts = urlsplit(url)
    host, port = parts.hostname or "localhost", parts.port or _PORT
    shown = without_secrets(url)
    if parts.scheme == "unix" or accepts_connections(host, port):
        _check(url, shown)
        return None
    nothing = f"Nothing answers at {shown} ({_VARIABLE})."
    if parts.scheme != "redis" or not is_loopback(host):
        raise ServiceError(f"{nothing} Start Redis there, or name another.")
    if not may_start:
        raise ServiceError(
            f"{nothing} `ndif start broker` starts one there, and so does `ndif start`."
        )
    binary = require_program("redis-server", "valkey-server", port=port)
    if parts.username:
        raise ServiceError(
            f"A broker that ndif starts has no users: leave the user's name out of {_VARIABLE}."
        )

    async def make(run_folder: RunFolder) -> Program:
        data = run_folder.service_data(NAME)
        file = data / "redis.conf"
        text = _CONFIGURATION.format(host=_ip(host), port=port, folder=data)
        if parts.password:
            text += f'requirepass "{_quoted(unquote(parts.password))}"\n'
        with open_private(file) as written:
            written.write(text)
        return Program([binary, str(file)])

    return Service(NAME, shown, host, port, make, lambda _: _answers(url))


def _check(url: str, shown: str) -> None:
    """Raise a ServiceError unless a suitable Redis answers."""
    from redis.exceptions import AuthenticationError, AuthorizationError, RedisError

    from ndif.stores.redis import is_too_old

    try:
        with _connect(url) as client:
            found = client.info()
    except (AuthenticationError, AuthorizationError) as error:
        raise ServiceError(
            f"The broker at {shown} refuses the connection ({error}). Set {_VARIABLE} to "
            "redis://USER:PASSWORD@HOST:PORT/0."
        ) from error
    except (RedisError, OSError, ValueError) as error:
        raise ServiceError(
            f"The server at {shown} ({_VARIABLE}) is no Redis that can be used: {error}."
        ) from error
    version = str(found["redis_version"])
    if is_too_old(version):
        raise ServiceError(
            f"The broker at {shown} is Redis {version}; {OLDEST_REDIS} or newer is needed."
        )
    policy = found.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ServiceError(
            f"The broker at {shown} drops requests when its memory is full (maxmemory-policy {policy}): "
            "run `redis-cli config set maxmemory-policy noeviction` there, and add it to its "
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

    return Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)


def _ip(host: str) -> str:
    # `localhost` may be two addresses, and a client uses either.
    return host if host.replace(".", "").isdigit() or ":" in host else "127.0.0.1 -::1"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
