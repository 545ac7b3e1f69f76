"""`ndif tiers`: named sets of rights and limits of API keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from ndif.cli.accounts_client import AccountsClient, with_accounts
from ndif.cli.output import show, show_answer, table

if TYPE_CHECKING:
    from ndif.schema.account import AccountTier, ApiKey


class LimitsParam(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3
    """A JSON object of limits by name."""

    name = "limits"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        try:
            limits = json.loads(value)
        except ValueError:
            limits = None
        if not isinstance(limits, dict):
            self.fail(f"{value!r} is not a JSON object of limits by name", param, ctx)
        return limits


@click.group("tiers")
def command() -> None:
    """Manage rate-limit tiers.

    A tier is a named set of rights and limits of API keys, and a weight in fair scheduling. A key with
    several tiers has all their rights, the greatest weight and the widest limits. A change takes effect
    within NDIF_ACCOUNTS_CACHE_S.
    """


def _properties(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each property of a tier."""
    helps = {
        "gated": "Load gated and private models on demand, with the operator's account of the hub.",
        "trusted": "Run the users' code unconfined, with the rights of the server.",
        "priority": "Serve requests first, with a head start of NDIF_LINE_HEAD_START_S.",
        "hotswapping": "Load models on demand.",
    }
    decorated = click.option(
        "--limits",
        type=LimitsParam(),
        metavar="JSON",
        help="Limits by name; {}: the server's limits.",
    )(function)
    decorated = click.option(
        "--weight",
        type=click.FloatRange(0, 1000, min_open=True),
        help="Share of a model relative to other users.",
    )(decorated)
    for right, text in helps.items():
        decorated = click.option(f"--{right}/--no-{right}", default=None, help=text)(decorated)
    return decorated


@command.command("create")
@click.argument("tier")
@_properties
@with_accounts
def create(accounts: AccountsClient, as_json: bool, /, tier: str, **properties: Any) -> None:
    """Create a tier. By default, the tier has no rights and the weight 1."""
    from ndif.schema.account import AccountTier

    answer = accounts.post(AccountTier, "tiers/create", tier=tier, **_set_properties(properties))
    show_answer(answer, as_json, [f"Tier {tier} is created."])


@command.command("change")
@click.argument("tier")
@_properties
@with_accounts
def change(accounts: AccountsClient, as_json: bool, /, tier: str, **properties: Any) -> None:
    """Change the given properties of a tier."""
    from ndif.schema.account import AccountTier

    answer = accounts.post(AccountTier, "tiers/change", tier=tier, **_set_properties(properties))
    show_answer(answer, as_json, [f"Tier {tier} is changed."])


@command.command("delete")
@click.argument("tier")
@with_accounts
def delete(accounts: AccountsClient, as_json: bool, tier: str) -> None:
    """Delete a tier that no key has."""
    from ndif.schema.account import DeletedTier

    answer = accounts.post(DeletedTier, "tiers/delete", tier=tier)
    show_answer(answer, as_json, [f"Tier {tier} is deleted."])


@command.command("list")
@with_accounts
def list_tiers(accounts: AccountsClient, as_json: bool) -> None:
    """Show all tiers."""
    from ndif.schema.account import AccountTiers

    headings = ("tier", "rights", "weight", "limits", "keys")
    answer = accounts.get(AccountTiers, "tiers")
    show(answer, as_json, lambda tiers: table("Tiers", headings, map(_row, tiers.tiers)))


@command.command("assign")
@click.argument("tier")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@with_accounts
def assign(accounts: AccountsClient, as_json: bool, tier: str, keys: tuple[str, ...]) -> None:
    """Add a tier to keys."""
    from ndif.schema.account import ApiKey, ApiKeys

    changed = [accounts.post(ApiKey, "tiers/assign", tier=tier, key=key) for key in keys]
    show_answer(ApiKeys(keys=changed), as_json, map(_tiers_sentence, changed))


@command.command("withdraw")
@click.argument("tier")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@with_accounts
def withdraw(accounts: AccountsClient, as_json: bool, tier: str, keys: tuple[str, ...]) -> None:
    """Remove a tier from keys."""
    from ndif.schema.account import ApiKey, ApiKeys

    changed = [accounts.post(ApiKey, "tiers/withdraw", tier=tier, key=key) for key in keys]
    show_answer(ApiKeys(keys=changed), as_json, map(_tiers_sentence, changed))


def _set_properties(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in properties.items() if value is not None}


def _row(tier: AccountTier) -> tuple[object, ...]:
    limits = json.dumps(tier.limits) if tier.limits else None
    return tier.name, ", ".join(tier.rights) or None, f"{tier.weight:g}", limits, tier.keys


def _tiers_sentence(key: ApiKey) -> str:
    return f"Key {key.id} has {', '.join(key.tiers) or 'no tier'}."
