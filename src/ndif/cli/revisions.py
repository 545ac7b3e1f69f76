"""Revisions on the command line: a branch, a tag or a commit."""

from __future__ import annotations

from typing import Any

import click

from ndif.schema.revision import require_revision


class RevisionParam(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3
    """The type of an option whose value is a well-formed revision."""

    name = "revision"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return require_revision(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}.", param, ctx)
