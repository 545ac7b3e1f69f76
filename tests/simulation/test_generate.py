"""Generated traces: identical for the same seed, and of the documented shape."""

from __future__ import annotations

import statistics
from collections import Counter

from ndif.simulation import generate

NAMES = generate.names(100)
DAY = generate.trace(NAMES, 20_000, seed=1)


def test_same_seed_gives_same_trace() -> None:
    assert generate.trace(NAMES, 500, seed=1) == generate.trace(NAMES, 500, seed=1)
    assert generate.trace(NAMES, 500, seed=1) != generate.trace(NAMES, 500, seed=2)


def test_trace_has_requested_count_and_length() -> None:
    for count in (1, 2, 499):
        requests = generate.trace(NAMES, count, seed=5, users=3, length_s=600)
        assert len(requests) == count
        assert all(0 <= request.at <= 600 for request in requests)
        assert {request.user for request in requests} <= {"user-0", "user-1", "user-2"}
    assert [r.at for r in DAY] == sorted(r.at for r in DAY)


def test_generated_names_are_unique() -> None:
    assert len(set(generate.names(5000))) == 5000


def test_first_models_are_requested_most() -> None:
    asked = Counter(request.model.repo_id for request in DAY)
    assert asked[NAMES[0]] > 5 * asked[NAMES[20]] > 0
    assert len(asked) > 90


def test_days_are_busier_than_nights() -> None:
    hours = Counter(int(request.at // 3600) for request in DAY)
    assert sum(hours[h] for h in range(12, 18)) > 3 * sum(hours[h] for h in range(6))


def test_run_times_have_a_long_tail() -> None:
    runs = [request.run_s for request in DAY]
    assert statistics.fmean(runs) > 2 * statistics.median(runs) > 0
    assert max(runs) <= 1800


def test_users_come_in_bursts() -> None:
    """A user is most likely to request the same model again."""
    last: dict[str, str] = {}
    again = 0
    for request in DAY:
        again += last.get(request.user) == request.model.repo_id
        last[request.user] = request.model.repo_id
    assert again > len(DAY) / 2


def test_some_requests_are_of_older_generation_and_some_have_priority() -> None:
    assert 0 < sum(request.generation == "0.7" for request in DAY) < len(DAY) / 4
    assert 0 < sum(request.priority for request in DAY) < len(DAY) / 10
