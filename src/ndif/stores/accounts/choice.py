"""The choice of a form of accounts, by the variables that are set."""

from __future__ import annotations

from urllib.parse import quote

from ndif.config.reference import name_of
from ndif.config.settings import Settings


def database_url(settings: Settings) -> str | None:
    """Return the address of the database of keys; None for another form."""
    if settings.dev_mode:
        return None
    if url := settings.database_url.get_secret_value():
        return url
    if not settings.postgres_host:
        return None
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


def contradiction(settings: Settings) -> str | None:
    """Return the sentence that several forms are named at once; None if at most one is."""
    fields = {
        "dev_mode": settings.dev_mode,
        "database_url": settings.database_url.get_secret_value(),
        "postgres_host": settings.postgres_host,
        "api_keys": settings.api_keys,
    }
    named = [name_of(field) for field, value in fields.items() if value]
    if len(named) < 2:
        return None
    return (
        f"{' and '.join(named)} contradict each other: one of them says who may use the server. Unset all "
        "but one."
    )
