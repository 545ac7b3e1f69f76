"""The Redis or Valkey at `NDIF_BROKER_URL`, or one that this machine runs there."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ndif.config.groups import OLDEST_REDIS
from ndif.config.reference import name_of, without_secrets
from ndif.config.settings import Settings
from ndif.hostname import host_name, is_loopback
from ndif.launch.run_folder import RunFolder, RunFolders
from ndif.launch.services.service import (
    Program,
    Service,
    ServiceError,
    accepts_connections,
    require_package,
    require_program,
)
from ndif.net import with_password
from ndif.stores.disk import open_private

NAME = "broker"
_VARIABLE = name_of("broker_url")
_ALLOW_OPEN = name_of("allow_open_broker")
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


def url_with_password(options: Settings) -> str:
    """Return the broker's URL, with the password if a live run of this session root generated one."""
    parts = urlsplit(options.broker_url)
    run_folders = RunFolders(options.session_root)
    for running in (run_folders.running(), run_folders.of_service(NAME).running()):
        if running is not None:  # the password of an ended run is useless
            file = _password_file(running[0].folder / "data" / NAME, parts.port or _PORT)
            if file.is_file() and is_loopback(parts.hostname or "localhost"):
                return with_password(options.broker_url, file.read_text().strip())
    return options.broker_url


def broker(options: Settings, *, may_start: bool, needs_password: bool = True) -> Service | None:
    """Return the broker to start; None if a suitable one answers already or none is configured.

    `needs_password`: False for a machine whose replicas get the broker's password from the leader.
    """
    url = url_with_password(options)
    if not url:
        return None
    require_package("redis", _VARIABLE)
    parts = urlsplit(url)
    host, port = parts.hostname or "localhost", parts.port or _PORT
    display_url = without_secrets(url)
    if parts.scheme == "unix" or accepts_connections(host, port):
        _check(url, display_url, needs_password=needs_password)
        if not options.allow_open_broker and parts.scheme != "unix" and _is_open(url, host):
            raise ServiceError(
                f"The broker at {display_url} takes commands from every machine that reaches it, without a "
                f"password. Give it one (`requirepass` in Redis' configuration) and put it into "
                f"{_VARIABLE}, or set {_ALLOW_OPEN}=true."
            )
        return None
    no_answer = f"Nothing answers at {display_url} ({_VARIABLE})."
    if parts.scheme != "redis" or not is_loopback(host):
        raise ServiceError(f"{no_answer} Start Redis there, or name another.")
    if not may_start:
        raise ServiceError(
            f"{no_answer} `ndif start broker` starts one there, and so does `ndif start`."
        )
    binary = require_program("redis-server", "valkey-server", port=port)
    if parts.username:
        raise ServiceError(
            f"A broker that ndif starts has no users: leave the user's name out of {_VARIABLE}."
        )

    async def make(run_folder: RunFolder) -> Program:
        data = run_folder.service_data(NAME)
        file = data / "redis.conf"
        password = unquote(parts.password or "") or secrets.token_urlsafe(32)
        text = _CONFIGURATION.format(host=_ip(host), port=port, folder=data)
        text += f'requirepass "{_quoted(password)}"\n'
        with open_private(file) as output:
            output.write(text)
        if not parts.password:
            with open_private(_password_file(data, port)) as output:
                output.write(f"{password}\n")
        return Program([binary, str(file)])

    def answers(run_folder: RunFolder) -> bool:
        file = _password_file(run_folder.service_data(NAME), port)
        return _answers(with_password(url, file.read_text().strip()) if file.is_file() else url)

    return Service(NAME, display_url, host, port, make, answers)


def _password_file(data: Path, port: int) -> Path:
    """Return the file of a generated password, which only this user can read."""
    return data / f"password-{port}"


def _is_open(url: str, host: str) -> bool:
    """Return True if other machines may reach the server, and it accepts commands without a password."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        addresses = {host}
    if all(map(is_loopback, addresses)):
        return False
    parts = urlsplit(url)
    _, _, address = parts.netloc.rpartition("@")
    # The certificate is not checked: the question is only whether strangers have access.
    query = "ssl_cert_reqs=none" if parts.scheme == "rediss" else ""
    return _answers(parts._replace(netloc=address, query=query).geturl())


def _check(url: str, shown: str, *, needs_password: bool) -> None:
    """Raise a ServiceError unless a suitable Redis answers."""
    from redis.exceptions import AuthenticationError, AuthorizationError, RedisError

    from ndif.stores.redis import is_too_old

    try:
        with _connect(url) as client:
            info = client.info()
    except (AuthenticationError, AuthorizationError) as error:
        if not needs_password and not urlsplit(url).password:
            return
        has_password = urlsplit(url).password is not None
        why = f"refuses this user and password ({error})" if has_password else "asks for a password"
        raise ServiceError(
            f"The broker at {shown} {why}. Set {_VARIABLE} to redis://USER:PASSWORD@HOST:PORT/0."
        ) from error
    except (RedisError, OSError, ValueError) as error:
        raise ServiceError(
            f"The server at {shown} ({_VARIABLE}) is no Redis that can be used: {error}."
        ) from error
    version = str(info["redis_version"])
    if is_too_old(version):
        raise ServiceError(
            f"The broker at {shown} is Redis {version}; {OLDEST_REDIS} or newer is needed."
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ServiceError(
            f"The broker at {shown} drops requests when its memory is full (maxmemory-policy {policy}): "
            "run `redis-cli config set maxmemory-policy noeviction` there, and add it to its "
            "configuration."
        )


def obstacle_to(url: str, secrets: Sequence[str]) -> str | None:
    """Return a clause on why a server cannot work with the leader there; None if it can."""
    from redis.exceptions import RedisError

    from ndif.control.publisher import MODELS
    from ndif.stores.leader import obstacle

    try:
        with _connect(url) as client:
            return obstacle(client, secrets, MODELS)
    except (RedisError, OSError):
        return None


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
    name = host_name(host)
    return "127.0.0.1 -::1" if name is None or name.address is None else name.text


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
