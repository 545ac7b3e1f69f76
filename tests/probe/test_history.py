"""Sums of probe outcomes, and the outcomes that count."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

from ndif.probe.history import Histories, ProbeHistory
from ndif.probe.outcome import ProbeOutcome, Value
from ndif.probe.probe import Target
from ndif.probe.prober import Prober, Watched
from ndif.schema.answer import to_plain
from ndif.schema.server_state import PublicProbe
from ndif.schema.states import ProbeKind
from ndif.stores.accounts import (
    PROBER,
    AccountsWithProber,
    NoSuchKeyError,
    OwnerAccounts,
    probe_key_of,
)
from ndif.stores.accounts.port import Caller

TARGET = Target("org/name", None, "text-generation", "0.8")
OLDER = replace(TARGET, generation="0.7")
VALUE = Value((3,), "float32", 1e-3, (1.0, 2.0, 3.0), (2, 1))
OK = ProbeOutcome(ProbeKind.OK, seconds=0.25, value=VALUE)
WATCHED = Watched(TARGET, serves=False, problem=None, withdrawals=0, trust_remote_code=False)


def test_up_share_counts_only_up_and_down_outcomes() -> None:
    history = ProbeHistory()
    assert history.public(0.0) is None
    for kind in (ProbeKind.LOADING, ProbeKind.UNSUPPORTED):
        history.record(ProbeOutcome(kind), 1.0)
    assert history.public(1.0) == PublicProbe(
        outcome=ProbeKind.UNSUPPORTED, at=1.0, seconds=None, up=None, up_share=None, probes=0
    )
    history.record(OK, 2.0)
    history.record(OK, 3.0)
    history.record(ProbeOutcome(ProbeKind.TIMEOUT, "No value came."), 4.0)
    history.record(ProbeOutcome(ProbeKind.LOADING), 5.0)
    assert history.public(5.0) == PublicProbe(
        outcome=ProbeKind.LOADING, at=5.0, seconds=None, up=False, up_share=0.6667, probes=3
    )


def test_history_is_bounded_by_age_and_number() -> None:
    history = ProbeHistory()
    for second in range(2000):
        history.record(OK, float(second))
    now = history.public(2000.0)
    assert now is not None
    assert now.probes == 1440
    late = history.public(86_400.0 + 1999.0)
    assert late is not None
    assert (late.probes, late.up_share, late.up) == (1, 1.0, True)


def test_first_value_holds_for_all_generations_until_model_is_evicted() -> None:
    histories = Histories(now=lambda: 10.0)
    histories.of(TARGET).record(OK, 1.0)
    histories.of(OLDER).record(
        ProbeOutcome(ProbeKind.WRONG, "Another.", value=replace(VALUE, tokens=())), 2.0
    )
    assert histories.first_of(OLDER) is VALUE
    assert histories.of(TARGET, withdrawals=1).first is None
    assert histories.first_of(OLDER) is None
    assert to_plain(histories.for_operator(OLDER)) == {
        **to_plain(histories.public(OLDER)),
        "reason": "Another.",
    }
    histories.keep({OLDER})
    assert histories.public(TARGET) is None
    assert histories.for_operator(TARGET) is None


def prober(**fields: float) -> Prober:
    return Prober(
        lambda: [WATCHED], dict, "http://127.0.0.1:9", "key", 60.0, 60.0, Histories(), **fields
    )


def test_model_that_does_not_serve_is_not_traced(tmp_path: Path) -> None:
    """No runtime could send a trace."""

    async def probe_once(watched: Watched, prober: Prober) -> ProbeOutcome:
        return await prober.probe(watched, tmp_path)

    patient, hasty = prober(), prober(loading_s=0.0)
    loading = asyncio.run(probe_once(WATCHED, patient))
    assert (loading.kind, loading.failed) == (ProbeKind.LOADING, False)
    late = asyncio.run(probe_once(WATCHED, hasty))
    assert late.kind is ProbeKind.DOWN
    assert re.fullmatch(r"The model has been loading for .+\.", late.reason)
    broken = asyncio.run(probe_once(replace(WATCHED, problem="There is no room."), patient))
    assert broken == ProbeOutcome(ProbeKind.DOWN, "There is no room.")
    foreign = asyncio.run(
        probe_once(replace(WATCHED, serves=True, trust_remote_code=True), patient)
    )
    assert (foreign.kind, foreign.failed) == (ProbeKind.UNSUPPORTED, False)


def test_probe_key_only_allows_running_jobs() -> None:
    key = probe_key_of("the operator's token")
    assert "token" not in key
    assert key != probe_key_of("another token")
    other_key = probe_key_of("another token")
    accounts = AccountsWithProber(OwnerAccounts(1, "owner", trusted=True), (other_key, key))
    assert key not in repr(accounts)
    account = asyncio.run(accounts.account(Caller(key)))
    assert account.user == PROBER
    assert key not in repr(account)
    rights = account.trusted, account.hotswapping, account.gated, account.priority
    assert not any(rights)
    # The wrapped accounts admit all other keys.
    assert asyncio.run(accounts.account(Caller("owner"))).trusted
    for other in ("", f"{key}0", "é"):
        try:
            asyncio.run(accounts.account(Caller(other)))
        except NoSuchKeyError:
            continue
        raise AssertionError(other)
