"""The repositories from which users may load models and adapters on demand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ndif.config.groups import AccountSettings

_MAX_QUOTED = 200
GATED = (
    "{repo_id!r} is gated or private on the hub, so that it is loaded on demand only for users with the "
    "right `gated`, which you do not have: ask the server's operator for it (`ndif tiers change TIER "
    "--gated`), or to deploy the model for everybody."
)
"""Refusal of a model that only the operator's account may read, for a user without the right `gated`."""


@dataclass(frozen=True, slots=True)
class Repositories:
    """Patterns of repository names. `*` matches any text, and case is ignored."""

    allowed: tuple[str, ...] = ()
    """Patterns of repositories that users may load from; empty: all."""
    denied: tuple[str, ...] = ()
    """Patterns of repositories that users may not load from, even if `allowed` matches."""

    @classmethod
    def of(cls, settings: AccountSettings) -> Repositories:
        """Return the patterns in the settings."""
        return cls(settings.allowed_repository_patterns, settings.denied_repository_patterns)

    def permit(self, name: str) -> bool:
        """Return True if models and adapters in this repository may be loaded."""
        is_allowed = not self.allowed or _matches(name, self.allowed)
        return is_allowed and not _matches(name, self.denied)

    def refusal(self, *names: str) -> str | None:
        """Return the message for a user who requests these repositories; None if all may be loaded."""
        for name in names:
            if not self.permit(name):
                allowed = f" Allowed are {', '.join(self.allowed)}." if self.allowed else ""
                return (
                    f"{name[:_MAX_QUOTED]!r} is not loaded on demand on this server: its operator does not "
                    f"allow that repository.{allowed} Ask them for it, or use a model that /status shows."
                )
        return None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)
