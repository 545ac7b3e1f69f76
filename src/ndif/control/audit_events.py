"""Events for the operators' log, as pure functions of an operation and its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ndif.control.account_operations import (
    AccountOperation,
    AssignTier,
    ChangeTier,
    CreateKey,
    CreateTier,
    DeleteTier,
    ImportKeys,
    MigrateKeys,
    RevokeKey,
    WithdrawTier,
)
from ndif.control.answers import (
    Collected,
    Evicted,
    Killed,
    KilledJobs,
    Outcomes,
    Restarted,
    Retried,
)
from ndif.control.operations import (
    CollectGarbage,
    Deploy,
    Evict,
    Kill,
    KillKey,
    Operation,
    Restart,
    RetryCallbacks,
    Scale,
    SendTestAlerts,
    Stop,
)
from ndif.schema.account import ApiKey, ImportedKeys, RevokedApiKey
from ndif.schema.alerts import TestedAlerts
from ndif.schema.model_key import Variant
from ndif.stores.events import Kind, OperatorsEvent, event

_MAX_TEXT = 500

_Entries = Iterator[tuple[Kind, str, str]]


def events_of(
    operation: Operation | AccountOperation, answer: Any, by: str, at: float | None = None
) -> list[OperatorsEvent]:
    """Return the events of an operation that `by` performed; a read-only operation has none."""
    if isinstance(operation, AccountOperation):
        entries = _account_entries(operation, answer)
    else:
        entries = _operation_entries(operation, answer)
    return [event(kind, subject, text[:_MAX_TEXT], by, at) for kind, subject, text in entries]


def _operation_entries(operation: Operation, answer: Any) -> _Entries:
    match operation, answer:
        case Deploy(), Outcomes():
            yield from _outcome_entries("deployed", answer)
        case Scale(), Outcomes():
            yield from _outcome_entries("scaled", answer)
        case Restart(model=model), Restarted(restarted=restarted):
            yield "restarted", model, f"{_replicas(len(restarted))} replaced."
        case Evict(cold=cold), Evicted():
            to = "off the devices and the host's memory" if cold else "off the devices"
            by_model: dict[str, int] = {}
            for replica in answer.evicted:
                name, _ = _variant(replica.model_key)
                by_model[name] = by_model.get(name, 0) + (replica.replica_id is not None)
            for name, count in by_model.items():
                text = f"{_replicas(count)} {to}." if count else "It had no replica."
                yield "evicted", name, text
        case Kill(), Killed(request_id=request_id):
            yield "killed", request_id, "The job is ended."
        case KillKey(account=account), KilledJobs(killed=killed):
            yield "killed", f"key {account[:8]}", f"{killed} jobs of the key are ended."
        case RetryCallbacks(), Retried(retried=retried):
            yield "call-backs retried", f"{len(retried)} webhooks and mails", ""
        case CollectGarbage(dry_run=False), Collected(expired=expired):
            yield "expired deleted", f"{sum(expired.values())} entries", ""
        case SendTestAlerts(), TestedAlerts(destinations=destinations):
            yield "alerts tested", f"{len(destinations)} destinations", ""
        case Stop(), _:
            yield "stopped", "the server", ""


def _account_entries(operation: AccountOperation, answer: Any) -> _Entries:
    match operation, answer:
        case CreateKey(), ApiKey(tiers=tiers):
            yield "key made", _key(answer), f"Tiers: {', '.join(tiers)}." if tiers else ""
        case RevokeKey(), RevokedApiKey(killed=killed):
            yield "key revoked", _key(answer), f"{killed} jobs of the key are ended."
        case ((ImportKeys() | MigrateKeys()), ImportedKeys(imported=imported, known=known)):
            yield "keys imported", f"{imported} keys", f"{known} existed already."
        case CreateTier(tier=tier), _:
            yield "tier made", tier, ""
        case ChangeTier(tier=tier), _:
            changed = operation.model_dump(exclude={"tier"}, exclude_none=True)
            yield "tier changed", tier, ", ".join(f"{k}: {v}" for k, v in changed.items())
        case DeleteTier(tier=tier), _:
            yield "tier deleted", tier, ""
        case AssignTier(tier=tier), ApiKey():
            yield "tier given", tier, f"To the key {_key(answer)}."
        case WithdrawTier(tier=tier), ApiKey():
            yield "tier withdrawn", tier, f"From the key {_key(answer)}."


def _outcome_entries(kind: Kind, answer: Outcomes) -> _Entries:
    for model in answer.models:
        if model.problem and not model.replicas:
            text = f"Failed for nnsight {model.generation}: {model.problem}"
        else:
            text = f"{_replicas(len(model.replicas))} for nnsight {model.generation}."
            changes = ", ".join(map(str, model.changes))
            text = " ".join(filter(None, (text, changes and f"{changes}.", model.problem)))
        yield kind, model.repo_id, text
        own = model.repo_id.lower(), model.generation
        for name in dict.fromkeys(other.model for other in model.evicted):
            # The text above already counts the model's own replicas.
            repo_id, generation = _variant(name)
            if (repo_id.lower(), generation) != own:
                yield "evicted", repo_id, f"Its memory went to {model.repo_id}."


def _replicas(count: int) -> str:
    return f"{count} replica{'s' * (count != 1)}"


def _variant(model_key: str) -> tuple[str, str]:
    """Return the repo id and the generation of a variant's key; for another text, the text and ""."""
    try:
        variant = Variant.parse(model_key)
    except ValueError:
        return model_key, ""
    return variant.model.repo_id, variant.generation


def _key(key: ApiKey) -> str:
    """Describe a key for logs: the beginning of its id, its user and its name."""
    return ", ".join(filter(None, (key.id[:12], key.user, key.name)))
