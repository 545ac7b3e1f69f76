"""Types of variables; each validates its value and reports the expected form."""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import ip_network
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BeforeValidator, FilePath, SecretStr

from ndif.config.mail_template import split_template
from ndif.config.units import Unit, parse_gpus, parse_limit, read_duration, read_size
from ndif.hostname import HostName, host_name

_HOST = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*", re.ASCII)
_MAIL = re.compile(r"[^\s@<>,]+@[\w-]+(\.[\w-]+)*", re.ASCII)
_TIME = re.compile(r"([01][0-9]|2[0-3]):[0-5][0-9]", re.ASCII)
_FORM = re.compile(r"(slack|discord|json)\+")
_PASSWORD_HASH = re.compile(
    r"\$argon2id\$v=\d+\$m=\d+,t=\d+,p=\d+\$[\w+/]+\$[\w+/]+|\$2[aby]\$\d\d\$[./0-9A-Za-z]{53}",
    re.ASCII,
)
_WEB_PORTS = {"http": 80, "https": 443}
_SECRET_LENGTH = 16


def split(text: str) -> tuple[str, ...]:
    """Return the non-empty parts of comma-separated text."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def split_secrets(text: str) -> tuple[str, ...]:
    """Return the secrets in text, separated by commas or lines; raise a ValueError if one is too short."""
    secrets = split(text.replace("\n", ","))
    if any(len(secret) < _SECRET_LENGTH for secret in secrets):
        raise ValueError(f"must have at least {_SECRET_LENGTH} characters")
    return secrets


def _checked(check: Callable[[str], object]) -> AfterValidator:
    """Return a validator that calls `check` with non-empty text and keeps the value."""

    def validate(value: str | SecretStr) -> str | SecretStr:
        if text := value.get_secret_value() if isinstance(value, SecretStr) else value:
            check(text)
        return value

    return AfterValidator(validate)


def _is_like(pattern: re.Pattern[str], form: str, *, many: bool = False) -> AfterValidator:
    """Return a validator that requires text, or each comma-separated part, to match a pattern."""

    def check(text: str) -> None:
        for part in split(text) if many else (text,):
            if not pattern.fullmatch(part):
                raise ValueError(f"{part!r} is not {form}")

    return _checked(check)


def _split_address(text: str, *schemes: str) -> SplitResult | None:
    """Return the parts of an address with one of these schemes, a host and a valid port; else None."""
    try:
        parts = urlsplit(text)
        is_whole = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        return None
    return parts if is_whole else None


def _http(text: str) -> SplitResult | None:
    parts = _split_address(text, "http", "https")
    return None if parts is None or parts.query or parts.fragment else parts


def _check_hash(text: str) -> None:
    if not _PASSWORD_HASH.fullmatch(text):
        # In double quotes, a shell expands the text after a dollar sign as a variable.
        raise ValueError(
            "is not a hash of `ndif admin password`; write the hash in single quotes, because it has "
            "dollar signs"
        )


def _read_version(text: str) -> str:
    try:
        return str(Version(text)) if text else ""
    except InvalidVersion as error:
        raise ValueError("must be a version, like 0.8.1") from error


def _check_host_names(text: str) -> None:
    for name in split(text):
        host = host_name(name.removeprefix("*."))
        is_domain = host is not None and host.address is None
        if name != "*" and (host is None or (name.startswith("*.") and not is_domain)):
            raise ValueError(f"{name!r} is not a host's name, like ndif.example.org")


def _check_networks(text: str) -> None:
    for part in split(text):
        try:
            ip_network(part)
        except ValueError as error:
            raise ValueError(f"{error}: write a network like 10.20.0.0/16") from error


def _check_mail_server(text: str) -> None:
    parts = _split_address(text, "smtp", "smtps")
    if parts is None or parts.path.strip("/") or parts.query:
        raise ValueError("is not like smtp://user:password@host:587; escape special characters")


def _check_webhooks(text: str) -> None:
    for number, address in enumerate(split(text), 1):
        url = address[prefix.end() :] if (prefix := _FORM.match(address)) else address
        if _split_address(url, "http", "https") is None or re.search(r"[\s\x00-\x1f\x7f]", url):
            # A webhook's address is a secret, so the error does not quote it.
            raise ValueError(
                f"its address {number} is not like https://hooks.slack.com/services/… or json+https://…"
            )


def _check_template(file: FilePath) -> FilePath:
    try:
        split_template(file.read_text())
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror})") from error
    return file


def _check_database(text: str) -> None:
    if (parts := _http(text)) is None or not parts.path.strip("/"):
        raise ValueError("is not like https://user:password@host:8086/database")


def _is_store(port: int) -> AfterValidator:
    def check(text: str) -> None:
        if _http(text) is None:
            raise ValueError(f"is not like https://user:password@host:{port}")

    return _checked(check)


def _check_origins(text: str) -> None:
    for origin in split(text):
        parts = _split_address(origin, "http", "https")
        name = "" if parts is None else parts.hostname or ""
        host = host_name(name)
        is_host = host is not None and not host.zone and not name.endswith(".")
        # Only a scheme, a host and optionally a port.
        is_bare = parts is not None and origin.partition("://")[2].lower() == parts.netloc.lower()
        if "@" in origin or not is_host or not is_bare:
            raise ValueError(
                f"{origin!r} is not the origin of a web page, like https://notebook.example.org"
            )


def origin_of_page(text: str) -> str:
    """Return an origin as browsers send it: with the host's normal form, and without a default port."""
    parts = urlsplit(text)
    host = HostName.parse(parts.hostname or "").in_url
    has_port = parts.port not in (None, _WEB_PORTS[parts.scheme])
    return f"{parts.scheme}://{host}:{parts.port}" if has_port else f"{parts.scheme}://{host}"


def _read_server_address(text: str) -> str:
    if text and _split_address(text, "http", "https") is None:
        raise ValueError(f"{text!r} is not like http://host:port or https://host")
    parts = urlsplit(text)
    if parts.username or parts.query:
        raise ValueError("an address must not contain keys")
    return text.rstrip("/")


Size = Annotated[int, BeforeValidator(read_size), Unit.BYTES]
Duration = Annotated[float, BeforeValidator(read_duration), Unit.SECONDS]
SizeText = Annotated[str, _checked(read_size)]
"""A size, or "" for none."""
Limit = Annotated[str, _checked(parse_limit)]
"""A size or a share of a disk, or "" for none."""
Gpus = Annotated[str, _checked(parse_gpus)]
VersionText = Annotated[str, AfterValidator(_read_version)]
Secrets = Annotated[SecretStr, _checked(split_secrets)]
PasswordHash = Annotated[SecretStr, _checked(_check_hash)]
ServerAddress = Annotated[str, AfterValidator(_read_server_address)]
"""The HTTP address of a server, without keys; or ""."""
HostNames = Annotated[str, _checked(_check_host_names)]
Networks = Annotated[str, _checked(_check_networks)]
Origins = Annotated[str, _checked(_check_origins)]
MailServer = Annotated[SecretStr, _checked(_check_mail_server)]
MailTemplate = Annotated[FilePath, AfterValidator(_check_template)]
Mailbox = Annotated[str, _is_like(_MAIL, "an address like ndif@example.org")]
Mailboxes = Annotated[str, _is_like(_MAIL, "an address like ada@example.org", many=True)]
Domain = Annotated[str, _is_like(_HOST, "a domain like mg.example.org")]
Webhooks = Annotated[SecretStr, _checked(_check_webhooks)]
TimeOfDay = Annotated[str, _is_like(_TIME, "a time like 08:00")]
InfluxDatabase = Annotated[SecretStr, _checked(_check_database)]
LokiAddress = Annotated[SecretStr, _is_store(3100)]
OtlpAddress = Annotated[SecretStr, _is_store(4318)]
