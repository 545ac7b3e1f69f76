"""The repositories and revisions from which users may load models and adapters on demand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ndif.config.groups import AccountSettings
from ndif.schema.revision import is_reference

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
    revisions: tuple[str, ...] = ()
    """Patterns of revisions that may be loaded although no branch or tag contains their commits."""

    @classmethod
    def of(cls, settings: AccountSettings) -> Repositories:
        """Return the patterns in the settings."""
        return cls(
            settings.allowed_repository_patterns,
            settings.denied_repository_patterns,
            settings.allowed_revision_patterns,
        )

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

    def revision_refusal(self, revision: str | None, *, on_branch: bool) -> str | None:
        """Return the sentence for a user who asks for a model at this revision; None if it may be loaded.

        `on_branch` is False if the hub says that no branch or tag of the repository contains its commit.
        """
        if revision is None or any(fnmatchcase(revision, pattern) for pattern in self.revisions):
            return None
        if on_branch and not is_reference(revision):
            return None
        return (
            f"Revision {revision[:_MAX_QUOTED]!r} is not loaded on demand on this server: it is not known "
            "to be on a branch or tag of the repository, and anybody can open a pull request. Name a "
            "branch or a tag, or ask the server's operator to allow the revision (NDIF_ALLOWED_REVISIONS) "
            "or to deploy the model."
        )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)
