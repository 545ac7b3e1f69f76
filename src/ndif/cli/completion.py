"""What the shell completes: the models of the server that runs here, and nothing where there is none."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def models(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The repo ids that begin so."""
    from click.shell_completion import CompletionItem

    from ndif.cli.admin import CommandError, connect

    with contextlib.suppress(CommandError, OSError, ValueError, KeyError, TypeError):
        server = connect(context.params.get("url"), context.params.get("token"))
        found = {str(model["repo_id"]) for model in server.get("/admin/status")["models"]}
        begun = incomplete.lower()
        return [CompletionItem(name) for name in sorted(found) if name.lower().startswith(begun)]
    return []
