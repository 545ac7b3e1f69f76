"""Fair scheduling of requests: fairness, priority, ageing, positions and invariants."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndif.queue.fair_queue import FairQueue
from tests.fuzzing import examples
from tests.queue.entries import Waiting

Step = tuple[Any, ...]

FOREVER = 10**9
_numbers = itertools.count()


def entry(
    user: str = "ann", *, priority: bool = False, weight: float = 1.0, cost: float = 1.0
) -> Waiting:
    number = next(_numbers)
    return Waiting(
        f"{user}-{number}", user, float(number), weight=weight, priority=priority, cost=cost
    )


def add(line: FairQueue[Waiting], user: str, count: int = 1, **kwargs: float) -> list[Waiting]:
    added = [entry(user, **kwargs) for _ in range(count)]  # type: ignore[arg-type]
    for waiter in added:
        line.add(waiter)
    return added


def takes(line: FairQueue[Waiting], count: int = FOREVER) -> list[Waiting]:
    return list(itertools.islice(iter(line.take, None), count))


def users(entries: list[Waiting]) -> list[str]:
    return [waiter.user for waiter in entries]


# Fairness


def test_requests_of_one_user_are_served_in_order() -> None:
    line: FairQueue[Waiting] = FairQueue()
    came = add(line, "ann", 50)
    assert takes(line) == came


def test_flood_of_one_user_does_not_delay_another_user() -> None:
    line: FairQueue[Waiting] = FairQueue()
    add(line, "ann", 1000)
    takes(line, 100)
    add(line, "bob")
    assert "bob" in users(takes(line, 3))


def test_users_are_served_round_robin() -> None:
    line: FairQueue[Waiting] = FairQueue()
    for user in ("ann", "bob", "carol"):
        add(line, user, 4)
    assert users(takes(line)) == ["ann", "bob", "carol"] * 4


def test_user_with_weight_three_is_served_three_times_as_often() -> None:
    line: FairQueue[Waiting] = FairQueue()
    add(line, "ann", 400, weight=1)
    add(line, "bob", 400, weight=3)
    served = Counter(users(takes(line, 400)))
    assert abs(served["bob"] - 300) <= 4


def test_long_jobs_get_equal_share_of_time() -> None:
    line: FairQueue[Waiting] = FairQueue()
    add(line, "ann", 100, cost=10)
    add(line, "bob", 1000, cost=1)
    seconds: Counter[str] = Counter()
    for taken in takes(line, 220):
        seconds[taken.user] += round(taken.cost)
    assert abs(seconds["ann"] - seconds["bob"]) <= 11


def test_measured_run_time_corrects_estimated_cost() -> None:
    line: FairQueue[Waiting] = FairQueue()
    add(line, "ann", 400)
    add(line, "bob", 400)
    seconds: Counter[str] = Counter()
    for taken in takes_settled(line, {"ann": 9.0, "bob": 1.0}, 200):
        seconds[taken.user] += 9 if taken.user == "ann" else 1
    assert abs(seconds["ann"] - seconds["bob"]) <= 10


def takes_settled(
    line: FairQueue[Waiting], runs_s: dict[str, float], count: int
) -> Iterator[Waiting]:
    for _ in range(count):
        taken = line.take()
        assert taken is not None
        line.settle(taken, runs_s[taken.user])
        yield taken


def test_settling_after_reset_has_no_effect() -> None:
    line: FairQueue[Waiting] = FairQueue()
    [request] = add(line, "ann")
    line.take()
    line.reset()
    line.settle(request, 3600.0)
    add(line, "ann")
    add(line, "bob")
    assert users(takes(line)) == ["ann", "bob"]


def test_idle_user_accumulates_no_credit() -> None:
    line: FairQueue[Waiting] = FairQueue()
    add(line, "bob")
    add(line, "ann", 500)
    add(line, "carol", 500)
    takes(line, 401)  # bob has gone, for four hundred turns
    add(line, "bob", 100)
    assert Counter(users(takes(line, 30))) == {"ann": 10, "bob": 10, "carol": 10}


def test_debt_of_user_survives_short_absence() -> None:
    line: FairQueue[Waiting] = FairQueue()
    add(line, "ann", cost=20)
    add(line, "bob", 100)
    takes(line, 2)
    add(line, "ann", cost=20)
    assert users(takes(line, 19)) == ["bob"] * 19
    assert "ann" in users(takes(line, 2))


def test_reset_of_idle_queue_clears_debt() -> None:
    line: FairQueue[Waiting] = FairQueue()
    add(line, "ann", cost=3600)
    takes(line, 1)
    assert line.take() is None
    line.reset()  # a replica stood idle
    add(line, "bob", 10)
    add(line, "ann", 10)
    assert Counter(users(takes(line, 10))) == {"ann": 5, "bob": 5}


# Priority and age


def test_priority_requests_go_first() -> None:
    line: FairQueue[Waiting] = FairQueue()
    add(line, "ann", 10)
    takes(line, 5)
    add(line, "bob", 10)
    add(line, "carol", 3, priority=True)
    assert users(takes(line, 3)) == ["carol"] * 3


def test_priority_request_precedes_ordinary_requests_of_its_user() -> None:
    line: FairQueue[Waiting] = FairQueue()
    add(line, "ann", 3)
    [urgent] = add(line, "ann", priority=True)
    assert line.take() is urgent


def test_priority_request_brings_its_waiting_user_forward() -> None:
    line: FairQueue[Waiting] = FairQueue()
    add(line, "ann", 5)
    add(line, "bob", 5)
    takes(line, 1)
    [urgent] = add(line, "ann", priority=True)
    assert line.take() is urgent


def test_new_user_does_not_pay_for_head_start_of_another() -> None:
    line: FairQueue[Waiting] = FairQueue(head_start_s=50, patience=FOREVER)
    add(line, "ann", 500)
    add(line, "bob", 500, priority=True)
    takes(line, 60)
    add(line, "carol")
    assert "carol" in users(takes(line, 4))


def test_new_user_does_not_pay_for_request_that_was_due_by_age() -> None:
    line: FairQueue[Waiting] = FairQueue(patience=4)
    add(line, "bob", cost=500)
    takes(line, 1)
    [due] = add(line, "bob")
    add(line, "ann", 500)
    assert due in takes(line, 4)
    add(line, "carol")
    assert "carol" in users(takes(line, 4))


def test_flood_of_priority_requests_uses_up_head_start() -> None:
    line: FairQueue[Waiting] = FairQueue(head_start_s=20, patience=FOREVER)
    add(line, "ann", 1000, priority=True)
    add(line, "bob", 1000)
    first = users(takes(line, 22))
    assert first.count("ann") == 21
    assert Counter(users(takes(line, 100))) == {"ann": 50, "bob": 50}


def test_head_start_is_restored_while_user_waits() -> None:
    line: FairQueue[Waiting] = FairQueue(head_start_s=20, patience=FOREVER)
    add(line, "ann", 20, priority=True)
    add(line, "bob", 1000)
    takes(line, 20)
    add(line, "ann", 40, priority=True)
    assert users(takes(line, 4)).count("bob") >= 1
    line.remove_all(lambda waiting: waiting.user == "ann")
    takes(line, 60)
    add(line, "ann", 20, priority=True)
    assert users(takes(line, 20)) == ["ann"] * 20


@pytest.mark.parametrize("patience", [1, 2, 8, 32])
@pytest.mark.parametrize("ahead", [0, 5])
def test_request_does_not_starve_behind_endless_new_users(patience: int, ahead: int) -> None:
    line: FairQueue[Waiting] = FairQueue(patience=patience)
    add(line, "ann", ahead)
    [waits] = add(line, "ann")
    most = (patience - 1) * (ahead + 1)
    for strangers in range(FOREVER):
        add(line, f"stranger-{strangers}", 2, priority=True, cost=0.0)
        if line.take() is waits:
            break
        assert strangers <= most + ahead
    assert strangers <= most + ahead


def test_request_starves_without_ageing() -> None:
    """Fair scheduling alone does not prevent the starvation of the previous test."""
    line: FairQueue[Waiting] = FairQueue(patience=FOREVER)
    add(line, "ann")
    for number in range(2000):
        add(line, f"stranger-{number}", priority=True, cost=0.0)
        taken = line.take()
        assert taken is not None
        assert taken.user != "ann"


# Histories

_arrivals = st.tuples(
    st.just("add"),
    st.sampled_from("abcdef"),
    st.booleans(),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.1, 1.0, 7.0, 100.0]),
)
_steps = st.one_of(
    _arrivals,
    _arrivals,
    st.tuples(st.just("take")),
    st.tuples(st.just("take")),
    st.tuples(st.sampled_from(["remove", "give back", "settle"]), st.integers(0, 10**6)),
)
_histories = st.builds(
    lambda crowd, steps: [*crowd, *steps],
    st.lists(_arrivals, max_size=30),
    st.lists(_steps, max_size=60),
)
_lines = st.builds(
    lambda head_start_s, patience: FairQueue[Waiting](head_start_s, patience),
    st.sampled_from([0.0, 5.0, 60.0]),
    st.sampled_from([1, 2, 3, 5, 32]),
)


@dataclass
class History:
    """A history applied to a queue, with a count of overtaken requests."""

    line: FairQueue[Waiting]
    ahead: dict[str, int] = field(default_factory=dict)
    came: dict[str, int] = field(default_factory=dict)
    overtaken: Counter[str] = field(default_factory=Counter)
    taken: list[Waiting] = field(default_factory=list)
    """Requests that were taken and not given back."""
    taken_once: set[str] = field(default_factory=set)
    """Requests that were taken at least once."""

    def run(self, steps: list[Step]) -> None:
        for step in steps:
            self.do(*step)

    def do(self, action: str, *arguments: Any) -> None:
        if action == "add":
            user, priority, weight, cost = arguments
            request = entry(user, priority=priority, weight=weight, cost=cost)
            self.ahead[request.id] = len(self.line)
            self.came[request.id] = len(self.came)
            self.line.add(request)
        elif action == "take":
            self.took(self.line.take())
        elif action == "remove" and len(self.line):
            waiting = list(self.line)
            request = waiting[arguments[0] % len(waiting)]
            assert self.line.remove(request.id) is request
        elif action in ("give back", "settle") and self.taken:
            request = self.taken.pop(arguments[0] % len(self.taken))
            if action == "give back":
                self.line.give_back(request)
            else:
                self.line.settle(request, 3.0)

    def took(self, waiting: Waiting | None) -> None:
        if waiting is None:
            assert len(self.line) == 0
            self.line.reset()
            return
        self.taken.append(waiting)
        if waiting.id in self.taken_once:
            return
        self.taken_once.add(waiting.id)
        for waits in self.line:
            if self.came[waits.id] < self.came[waiting.id] and waits.id not in self.taken_once:
                self.overtaken[waits.id] += 1


@given(_lines, _histories)
def test_positions_match_order_of_takes(line: FairQueue[Waiting], steps: list[Step]) -> None:
    History(line).run(steps)
    positions = line.positions()
    assert line.positions() == positions, "asking changes nothing"
    assert [place for _, place in positions] == list(range(1, len(line) + 1))
    assert all(line.position(waiter.id) == place for waiter, place in positions)
    assert takes(line) == [waiter for waiter, _ in positions]


@settings(max_examples=examples(2))
@given(_lines, _histories, st.integers(0, 60))
def test_number_of_overtaking_requests_is_bounded(
    line: FairQueue[Waiting], steps: list[Step], strangers: int
) -> None:
    history = History(line)
    history.run(steps)
    for number in range(strangers):  # and then as bad a history as there is
        history.do("add", f"stranger-{number}", True, 3.0, 0.0)
        history.do("take")
    while len(line):
        history.do("take")
    for entry_id, count in history.overtaken.items():
        assert count <= (line.patience - 1) * (history.ahead[entry_id] + 1)


@given(_lines, _histories)
def test_no_request_is_lost_or_duplicated(line: FairQueue[Waiting], steps: list[Step]) -> None:
    history = History(line)
    history.run(steps)
    waiting = sorted(waiter.id for waiter in line)
    assert len(waiting) == len(set(waiting)) == len(line)
    assert all(request_id in line for request_id in waiting)
    left = takes(line)
    assert sorted(waiter.id for waiter in left) == waiting
    assert len(line) == 0
    for user in "abcdef":
        for priority in (True, False):
            first = [
                request for request in left if (request.user, request.priority) == (user, priority)
            ]
            again = [request for request in first if request.id in history.taken_once]
            never = [request for request in first if request.id not in history.taken_once]
            assert first == again + never
            assert never == sorted(never, key=lambda request: history.came[request.id])


@given(
    st.dictionaries(
        st.sampled_from("abcde"),
        st.tuples(
            st.sampled_from([0.5, 1.0, 2.0, 5.0]),
            st.lists(st.floats(0.01, 50), min_size=20, max_size=40),
        ),
        min_size=2,
    ),
    st.integers(1, 20),
    st.integers(1, 20),
)
def test_waiting_users_are_served_equally(
    demands: dict[str, tuple[float, list[float]]], since: int, count: int
) -> None:
    """Start-time fair queueing: two users differ by at most one weighted entry of each."""
    line: FairQueue[Waiting] = FairQueue(patience=FOREVER)
    for user, (weight, costs) in demands.items():
        for cost in costs:
            line.add(entry(user, weight=weight, cost=cost))
    takes(line, since)
    served = dict.fromkeys(demands, 0.0)
    for _ in range(count):
        if len({waiter.user for waiter in line}) < len(demands):
            return  # the bound holds only while all users wait
        [taken] = takes(line, 1)
        served[taken.user] += taken.cost / taken.weight
        for a, b in itertools.combinations(demands, 2):
            (weight_a, costs_a), (weight_b, costs_b) = demands[a], demands[b]
            most = max(costs_a) / weight_a + max(costs_b) / weight_b
            assert abs(served[a] - served[b]) <= most + 1e-6


# Returned and removed requests


def test_returned_request_goes_next_and_is_charged_once() -> None:
    line: FairQueue[Waiting] = FairQueue()
    add(line, "ann", 100, cost=5)
    add(line, "bob", 500)
    first = line.take()
    assert first is not None
    for _ in range(10):
        line.give_back(first)
        assert line.positions()[0] == (first, 1)
        assert line.take() is first
    served = users([first, *takes(line, 59)])
    assert served.count("ann") == 10


def test_returned_requests_keep_their_order() -> None:
    line: FairQueue[Waiting] = FairQueue()
    came = add(line, "ann", 5)
    out = takes(line, 3)
    for request in (out[1], out[2], out[0]):
        line.give_back(request)
    assert list(line) == came
    assert takes(line) == came


def test_request_in_middle_of_queue_is_removed() -> None:
    line: FairQueue[Waiting] = FairQueue()
    came = add(line, "ann", 5)
    bobs = add(line, "bob", 2)
    assert line.remove(came[2].id) is came[2]
    assert line.remove(came[2].id) is None
    assert came[2].id not in line
    assert [request for request in takes(line) if request.user == "ann"] == [*came[:2], *came[3:]]
    assert bobs[0].id not in line


def test_removing_later_request_does_not_move_first_one() -> None:
    line: FairQueue[Waiting] = FairQueue()
    came = add(line, "ann", 3)
    add(line, "bob", 3)
    line.remove(came[2].id)
    assert line.take() is came[0]


def test_removed_priority_request_leaves_no_head_start() -> None:
    line: FairQueue[Waiting] = FairQueue()
    add(line, "bob", 3)
    add(line, "ann", 1)
    [urgent] = add(line, "ann", priority=True)
    line.remove(urgent.id)
    assert users(takes(line, 2)) == ["bob", "ann"]


def test_returned_request_can_be_removed() -> None:
    line: FairQueue[Waiting] = FairQueue()
    came = add(line, "ann", 2)
    line.take()
    line.give_back(came[0])
    assert line.remove(came[0].id) is came[0]
    assert list(line) == came[1:]


def test_remove_all_removes_matching_requests() -> None:
    line: FairQueue[Waiting] = FairQueue()
    anns = add(line, "ann", 3)
    bobs = add(line, "bob", 3)
    line.take()
    line.give_back(anns[0])
    assert line.remove_all(lambda request: request.user == "ann") == anns
    assert list(line) == bobs
    assert line.remove_all(lambda request: request.user == "ann") == []


def test_position_search_is_bounded() -> None:
    line: FairQueue[Waiting] = FairQueue()
    came = add(line, "ann", 20)
    assert line.position(came[4].id, within=5) == 5
    assert line.position(came[5].id, within=5) is None
    assert line.position("nobody") is None


# Invalid arguments


def test_duplicate_request_is_rejected() -> None:
    line: FairQueue[Waiting] = FairQueue()
    [request] = add(line, "ann")
    for put in (line.add, line.give_back):
        with pytest.raises(ValueError, match="already"):
            put(request)
    line.take()
    line.give_back(request)
    with pytest.raises(ValueError, match="already"):
        line.add(request)


@pytest.mark.parametrize("number", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_weight_is_rejected(number: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        FairQueue().add(entry(weight=number))


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_invalid_cost_is_rejected(number: float) -> None:
    with pytest.raises(ValueError, match="cost"):
        FairQueue().add(entry(cost=number))


@pytest.mark.parametrize(("head_start_s", "patience"), [(-1.0, 1), (float("nan"), 1), (1.0, 0)])
def test_invalid_queue_settings_are_rejected(head_start_s: float, patience: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        FairQueue(head_start_s, patience)


def test_busy_queue_forgets_former_users() -> None:
    line: FairQueue[Waiting] = FairQueue()
    add(line, "ann", 2)
    dice = random.Random(0)
    for number in range(20_000):
        add(line, f"user-{number}", priority=dice.random() < 0.2)
        add(line, "ann")
        takes(line, 2)
    assert len(line._accounts) < 5_000
    assert len(line._heap) < 5_000


def test_queue_without_takes_forgets_removed_requests() -> None:
    line: FairQueue[Waiting] = FairQueue()
    add(line, "ann", cost=100)
    takes(line, 1)
    add(line, "bob")  # whose turn is next, while ann's comes and goes
    add(line, "ann")
    for _ in range(20_000):
        line.remove(add(line, "ann", priority=True)[0].id)
    assert len(line._heap) < 5_000
    assert users(takes(line)) == ["bob", "ann"]


def test_debt_of_user_survives_many_other_users() -> None:
    line: FairQueue[Waiting] = FairQueue()
    add(line, "ann", cost=10_000)
    add(line, "bob", 10)
    takes(line, 2)
    for number in range(5_000):
        add(line, f"user-{number}")
        takes(line, 1)
    add(line, "carol", 20)
    add(line, "ann")
    assert "ann" not in users(takes(line, 20))
