"""Invariants of a cluster that hold through any sequence of events."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import event, given
from hypothesis import strategies as st

from ndif.placement.cluster import Cluster, Decision
from ndif.placement.delta import build
from ndif.placement.demand import DEFAULT_RULES, Demand, Device
from ndif.placement.node import Node
from ndif.placement.replica import CandidateLevel, ReplicaKey
from ndif.placement.resources import Resources
from ndif.schema.states import DeploymentLevel
from tests.placement.worlds import apply_to

HOT, WARM = DeploymentLevel.HOT, DeploymentLevel.WARM

MODELS = "abcde"


def a_machine(rng: random.Random) -> Resources:
    gpus = [rng.choice([24, 24, 30, 80]) for _ in range(rng.choice([0, 1, 2, 3, 4]))]
    return Resources.of(gpus, rng.choice([0, 40, 100, 200]), 1.0)


def wishes(rng: random.Random) -> list[Demand]:
    return [
        Demand(
            model_key=model,
            size_bytes=rng.randint(1, rng.choice([8, 12, 30, 100])),
            replicas=rng.randint(0, 4),
            dedicated=rng.random() < 0.2,
            device=rng.choice([Device.GPU, Device.GPU, Device.AUTO, Device.CPU]),
        )
        for model in rng.sample(MODELS, rng.choice([1, 1, 1, 2, 3]))
    ]


def holds_what_it_says(node: Node) -> None:
    """Check a node's memory against the sum of its replicas."""
    resources = node.resources
    used = [0] * len(resources.gpu_bytes)
    tenants: Counter[int] = Counter()
    shared = [0] * len(resources.gpu_bytes)
    for replica in node.replicas():
        gpus = replica.gpu_mem_bytes_by_id
        on_gpus = replica.level is HOT and not replica.on_cpu
        assert bool(gpus) == on_gpus
        tenants.update(gpus)
        for index, held in gpus.items():
            used[index] += held
            if replica.gpu_memory_fraction is None:
                assert held == resources.gpu_bytes[index]
            else:
                shared[index] += held
                assert held == replica.size_bytes
                assert replica.gpu_memory_fraction == held / resources.gpu_bytes[index]
        if on_gpus:
            assert sum(gpus.values()) >= replica.size_bytes
    for index, total in enumerate(resources.gpu_bytes):
        assert used[index] <= total
        assert resources.free_gpu_bytes[index] == total - used[index]
        assert shared[index] <= 0.8 * total
        if shared[index] < used[index]:
            whole = [d for d in node.replicas() if index in d.gpu_mem_bytes_by_id]
            assert len(whole) == 1
    cpu = sum(d.size_bytes for d in node.replicas() if d.on_cpu or d.level is WARM)
    assert resources.free_cpu_bytes == resources.cpu_bytes - cpu >= 0


def carried_out_step_by_step(before: Cluster, after: Cluster) -> None:
    """Apply a delta in order; a node raises if memory is taken before it is free."""
    delta = build(before, after)
    nodes = dict(before.nodes)
    for replica in delta.to_delete:
        nodes[replica.node_id] = nodes[replica.node_id].without([replica.key])
    for replica in delta.to_cache:
        node = nodes[replica.node_id].without([replica.key])
        nodes[node.id] = node.with_replica(replica.as_warm())
    for replica in delta.from_cache:
        node = nodes[replica.node_id].without([replica.key])
        nodes[node.id] = node.with_replica(replica)
    for replica in delta.to_create:
        nodes[replica.node_id] = nodes[replica.node_id].with_replica(replica)
    assert {n.id: n.resources for n in nodes.values()} == {
        n.id: n.resources for n in after.nodes.values()
    }


class History:
    """A planned cluster, and the existing one, which follows at times."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 1_000_000.0
        self.started = 0
        machines = [self.machine() for _ in range(rng.randint(1, 4))]
        self.cluster = Cluster().with_nodes(machines).cluster
        self.exists = self.cluster

    def goes_on(self) -> None:
        """Apply one random event."""
        happens = self.rng.choices(
            [
                self.deploy,
                self.time_passes,
                self.evict,
                self.dedicate,
                self.some_fail_to_start,
                self.nodes_come_and_go,
                self.carry_out,
            ],
            [8, 6, 3, 1, 1, 1, 3],
        )
        happens[0]()

    def machine(self) -> Node:
        self.started += 1
        return Node(f"n{self.started}", f"host-{self.started}", a_machine(self.rng))

    def some_replicas(self) -> list[ReplicaKey]:
        keys = [replica.key for replica in self.cluster.replicas()]
        return self.rng.sample(keys, min(len(keys), self.rng.randint(0, 2)))

    # Events

    def deploy(self) -> None:
        demand = wishes(self.rng)
        before, state = self.cluster, self.rng.getstate()
        decision = before.deploy(demand, self.now, self.rng, DEFAULT_RULES)
        again = random.Random()
        again.setstate(state)
        assert before.deploy(demand, self.now, again, DEFAULT_RULES) == decision
        self.answers(demand, decision)
        self.displaces_only_whom_it_may(demand, decision)
        carried_out_step_by_step(before, decision.cluster)
        self.cluster = decision.cluster

    def answers(self, demand: list[Demand], decision: Decision) -> None:
        """Check that every requested replica is placed or refused."""
        refused = {refusal.model_key: refusal.replicas for refusal in decision.refused}
        for want in demand:
            hot = decision.cluster.hot(want.model_key)
            assert sorted(decision.replica_ids(want.model_key)) == sorted(d.replica_id for d in hot)
            event("refused" if want.model_key in refused else "not refused")
            before = len(self.cluster.hot(want.model_key))
            missing = refused.get(want.model_key, 0)
            assert len(hot) + missing == max(before, want.replicas)
            dedicated = sum(replica.dedicated for replica in hot)
            assert dedicated >= min(want.replicas, len(hot)) * want.dedicated
        for placement in decision.placed:
            event(placement.level.name)
            replica = placement.replica
            assert decision.cluster.find(replica.key) == replica
            was = self.cluster.find(replica.key)
            cached = (CandidateLevel.CACHED_AND_FREE, CandidateLevel.CACHED_AND_FULL)
            if was is None:
                assert placement.level in (CandidateLevel.FREE, CandidateLevel.FULL)
            elif was.level is WARM:
                assert placement.level in cached
                assert replica.node_id == was.node_id
            else:
                assert placement.level is CandidateLevel.DEPLOYED
                assert replica.has_same_place(was)

    def displaces_only_whom_it_may(self, demand: list[Demand], decision: Decision) -> None:
        asked = {want.model_key for want in demand}
        ends = {d.key for d in self.hot(self.cluster)} - {d.key for d in self.hot(decision.cluster)}
        assert len(decision.evictions) == len(set(decision.evictions))
        assert set(decision.evictions) == ends
        for key in decision.evictions:
            replica = self.cluster.find(key)
            assert replica is not None
            assert not replica.dedicated
            assert replica.model_key not in asked
            if not any(want.dedicated for want in demand):
                assert replica.deployed <= self.now - DEFAULT_RULES.minimum_deployment_time_s

    def hot(self, cluster: Cluster) -> list[object]:
        return [replica for replica in cluster.replicas() if replica.level is HOT]

    def time_passes(self) -> None:
        self.now += self.rng.choice([1.0, 600.0, 4000.0])

    def evict(self) -> None:
        models = self.rng.sample(MODELS, self.rng.randint(0, 1))
        keys = self.some_replicas()
        before = self.cluster
        decision = before.evict(models, keys, self.rng.choice([WARM, DeploymentLevel.COLD]))
        for key in decision.evictions:
            assert key[0] in models or key in keys
        assert not any(decision.cluster.hot(model) for model in models)
        carried_out_step_by_step(before, decision.cluster)
        self.cluster = decision.cluster

    def dedicate(self) -> None:
        model, dedicated = self.rng.choice(MODELS), self.rng.choice([0, 0, 1, 2])
        self.cluster = self.cluster.with_dedicated(model, dedicated)
        hot = self.cluster.hot(model)
        assert sum(d.dedicated for d in hot) == min(dedicated, len(hot))

    def some_fail_to_start(self) -> None:
        keys = self.some_replicas()
        self.cluster = self.cluster.without(keys)
        assert not any(self.cluster.find(key) for key in keys)

    def nodes_come_and_go(self) -> None:
        ids = list(self.cluster.nodes)
        removed = set(self.rng.sample(ids, min(len(ids), self.rng.randint(0, 1))))
        stay = [node.emptied() for node in self.cluster.nodes.values() if node.id not in removed]
        lost = {d.key for node_id in removed for d in self.cluster.nodes[node_id].replicas()}
        more = [self.machine() for _ in range(self.rng.randint(0, 1))]
        change = self.cluster.with_nodes([*stay, *more])
        assert (set(change.removed), set(change.lost)) == (removed, lost)
        assert change.cluster.nodes.keys() == {node.id for node in [*stay, *more]}
        self.cluster = change.cluster

    def carry_out(self) -> None:
        machines_now = [node.emptied() for node in self.cluster.nodes.values()]
        exists = self.exists.with_nodes(machines_now).cluster
        delta = build(exists, self.cluster)
        self.exists = apply_to(exists, delta)
        assert not build(self.exists, self.cluster)
        hot = {d.key: d for d in self.cluster.replicas() if d.level is HOT}
        existing = {d.key: d for d in self.exists.replicas() if d.level is HOT}
        assert hot.keys() == existing.keys()
        assert all(existing[key].has_same_place(replica) for key, replica in hot.items())

    def memory_is_never_oversubscribed(self) -> None:
        for cluster in (self.cluster, self.exists):
            for node in cluster.nodes.values():
                holds_what_it_says(node)

    def levels_and_places_are_consistent(self) -> None:
        for node_id, node in self.cluster.nodes.items():
            assert node.id == node_id
            for level, replicas in ((HOT, node.hot), (WARM, node.warm)):
                for model_key, mine in replicas.items():
                    assert mine
                    for replica_id, replica in mine.items():
                        assert replica.key == (model_key, replica_id)
                        assert (replica.level, replica.node_id) == (level, node_id)
                        assert not (level is WARM and replica.dedicated)

    def replica_ids_are_unique(self) -> None:
        ids = [replica.replica_id for replica in self.cluster.replicas()]
        assert len(ids) == len(set(ids))

    def the_quick_look_is_right(self) -> None:
        for node in self.cluster.nodes.values():
            for on_cpu, size in ((False, 7), (False, 25), (True, 30)):
                device = Device.CPU if on_cpu else Device.GPU
                demand = Demand("z", size, device=device)
                level = node.evaluate(demand, "new", self.now, DEFAULT_RULES).level
                evictable_until = DEFAULT_RULES.evictable_until(self.now, dedicated=False)
                assert (size <= node.largest_fit(on_cpu, DEFAULT_RULES)) == (
                    level is CandidateLevel.FREE
                )
                steps = node.eviction_steps(on_cpu, DEFAULT_RULES, "z", frozenset())
                fits = any(since <= evictable_until and size <= room for since, room in steps)
                assert fits == (level is not CandidateLevel.CANT_ACCOMMODATE)


@given(st.integers(0, 2**64).map(random.Random), st.integers(1, 40))
def test_invariants_hold_through_any_history_of_cluster(rng: random.Random, length: int) -> None:
    history = History(rng)
    for _ in range(length):
        history.goes_on()
        history.memory_is_never_oversubscribed()
        history.levels_and_places_are_consistent()
        history.replica_ids_are_unique()
        history.the_quick_look_is_right()
