"""The choice of a form of accounts from the settings."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, urlsplit

from ndif.config.groups import AccountSettings, FolderSettings
from ndif.config.reference import name_of
from ndif.config.settings import Settings
from ndif.hostname import is_loopback

_DEFAULT = "accounts.sqlite"


def database_url(settings: Settings) -> str | None:
    """Return the address of the database of keys; None for another form of accounts.

    By default it is a SQLite file that outlives the server.
    """
    if settings.dev_mode or settings.api_keys is not None:
        return None
    if url := settings.database_url.get_secret_value():
        return url
    if not settings.postgres_host:
        return f"sqlite:///{default_file(settings)}"
    user, password, database = (
        quote(text, safe="")
        for text in (
            settings.postgres_user,
            settings.postgres_password.get_secret_value(),
            settings.postgres_db,
        )
    )
    host = settings.postgres_host
    host = f"[{host}]" if ":" in host else host
    return f"postgresql://{user}:{password}@{host}:{settings.postgres_port}/{database}"


def default_file(settings: FolderSettings) -> Path:
    """Return the path of the default database."""
    return settings.root / _DEFAULT


def set_variables(settings: AccountSettings) -> list[str]:
    """Return the names of the set variables that choose a form of accounts."""
    fields = {
        "dev_mode": settings.dev_mode,
        "database_url": settings.database_url.get_secret_value(),
        "postgres_host": settings.postgres_host,
        "api_keys": settings.api_keys,
    }
    return [name_of(field) for field, value in fields.items() if value]


def contradiction(settings: Settings) -> str | None:
    """Return an error if the account settings conflict, else None."""
    names = set_variables(settings)
    if len(names) > 1:
        return (
            f"{' and '.join(names)} contradict each other: one of them says who may use the server. Unset "
            "all but one."
        )
    broker = urlsplit(settings.broker_url).hostname
    if not names and broker and not is_loopback(broker):
        return (
            f"Servers on several machines share the broker at {broker}, and need the same API keys: name "
            f"their database with {name_of('database_url')} or {name_of('postgres_host')}, or a file of "
            f"keys with {name_of('api_keys')}."
        )
    return None
