"""Deltas between clusters; an applied delta leaves no difference."""

from __future__ import annotations

from ndif.placement.cluster import Cluster
from ndif.placement.delta import DeploymentDelta, build
from ndif.placement.replica import PlacedReplica
from tests.placement.worlds import (
    a_node,
    apply_to,
    deploy,
    levels,
    want,
    with_cpu,
    with_hot,
    with_warm,
)


def names(hot: tuple[PlacedReplica, ...]) -> list[str]:
    return [replica.replica_id for replica in hot]


def test_delta_of_equal_clusters_is_empty() -> None:
    cluster = Cluster.of(with_warm(with_hot(a_node("1x24GiB"), "a", 20, [0]), "b", 20))
    assert build(cluster, cluster) == DeploymentDelta()
    assert not build(cluster, cluster)
    assert not build(cluster, cluster.with_dedicated("a", 1))


def test_delta_sorts_changes_into_delete_cache_return_and_create() -> None:
    node = with_hot(a_node("3x24GiB", cpu=30), "leaves", 20, [0])
    node = with_warm(node, "dropped", 20)
    node = with_hot(node, "stays", 20, [1], dedicated=True)
    before = Cluster.of(with_warm(node, "returns", 10))
    after = deploy(before, want("new", 20), want("returns", 10)).cluster
    delta = build(before, after)
    assert names(delta.to_delete) == ["dropped-1"]
    assert names(delta.to_cache) == ["leaves-1"]
    assert names(delta.from_cache) == ["returns-1"]
    assert [d.model_key for d in delta.to_create] == ["new"]
    assert levels(apply_to(before, delta)) == levels(after)
    assert not build(apply_to(before, delta), after)


def test_delta_contains_current_and_future_gpus_of_replicas() -> None:
    before = Cluster.of(with_hot(a_node("1x24GiB"), "a", 20, [0]))
    after = deploy(before, want("b", 20)).cluster
    delta = build(before, after)
    assert delta.to_cache[0].gpu_mem_bytes_by_id
    assert delta.to_create[0].gpu_mem_bytes_by_id == delta.to_cache[0].gpu_mem_bytes_by_id


def test_replica_moved_to_other_gpus_is_cached_and_returns() -> None:
    before = Cluster.of(with_hot(a_node("2x24GiB"), "a", 20, [0]))
    after = Cluster.of(with_hot(a_node("2x24GiB"), "a", 20, [1]))
    delta = build(before, after)
    assert (names(delta.to_cache), names(delta.from_cache)) == (["a-1"], ["a-1"])
    assert (delta.to_delete, delta.to_create) == ((), ())
    assert apply_to(before, delta) == after


def test_replica_moved_to_other_node_or_device_is_deleted_and_recreated() -> None:
    nodes = a_node("1x24GiB", node_id="n1"), a_node("1x24GiB", node_id="n2")
    before = Cluster.of(with_hot(nodes[0], "a", 20, [0]), nodes[1])
    for after in (
        Cluster.of(nodes[0], with_hot(nodes[1], "a", 20, [0])),
        Cluster.of(with_cpu(nodes[0], "a", 20), nodes[1]),
    ):
        delta = build(before, after)
        assert (names(delta.to_delete), names(delta.to_create)) == (["a-1"], ["a-1"])
        assert (delta.to_cache, delta.from_cache) == ((), ())
        assert apply_to(before, delta) == after


def test_nonexistent_warm_replica_is_not_created() -> None:
    empty = a_node("1x24GiB")
    after = Cluster.of(with_warm(empty, "a", 20))
    delta = build(Cluster.of(empty), after)
    assert not delta
    back = deploy(after, want("a", 20)).cluster
    assert names(build(Cluster.of(empty), back).to_create) == ["a-1"]


def test_cpu_replica_is_cached_and_returns() -> None:
    hot = Cluster.of(with_cpu(a_node(), "a", 20))
    warm = hot.evict(["a"]).cluster
    assert names(build(hot, warm).to_cache) == ["a-1"]
    assert names(build(warm, hot).from_cache) == ["a-1"]


def test_replicas_of_removed_node_are_deleted() -> None:
    before = Cluster.of(with_hot(a_node("1x24GiB"), "a", 20, [0]), a_node(node_id="n2"))
    after = before.with_nodes([a_node(node_id="n2")]).cluster
    delta = build(before, after)
    assert names(delta.to_delete) == ["a-1"]
    assert not build(apply_to(before, delta), after)
