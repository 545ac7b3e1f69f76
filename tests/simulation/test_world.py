"""Cluster files: their fields, defaults and errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ndif.config.settings import Settings
from ndif.placement.demand import PlacementRules
from ndif.placement.resources import Resources
from ndif.queue.autoscaler import Bounds
from ndif.queue.processor import QueuePolicy
from ndif.simulation import generate
from ndif.simulation.trace import read as read_trace
from ndif.simulation.world import ClusterFileError, read, read_file

GIB = 1024**3
SMALL = "nodes: [{gpus: 2x24GiB, cpu_memory: 64GiB}]\n"


def problems(text: str, source: str = "c.yaml") -> str:
    with pytest.raises(ClusterFileError) as caught:
        read(text, source)
    return str(caught.value)


def test_minimal_cluster_file_gets_defaults() -> None:
    world = read(SMALL, "c.yaml")
    (node,) = world.nodes
    assert node.resources.gpu_bytes == (24 * GIB, 24 * GIB)
    assert node.resources.cpu_bytes == int(64 * GIB * 0.9)
    assert world.rules.minimum_deployment_time_s == 3600
    assert world.weights("org/name") is None


def test_full_cluster_file_is_read() -> None:
    world = read(
        """
nodes:
  - {name: big, gpus: "1x80GiB,2x24GiB", cpu_memory: 1TiB, count: 2}
  - {cpu_memory: 100GiB}
models:
  org/large: {size: 140GB, dedicated: true, replicas: 2, padding_factor: 0, padding_bytes: 1GB}
  org/Small: 5GB
default_size: 16GB
rules: {minimum_deployment_time: 5m, drain_timeout: 10s, execution_timeout: 1h, model_cache_percentage: 0.5}
speeds: {start_up: 0s, load_bytes_per_s: 1GB, warm_bytes_per_s: 10GB, cache_bytes_per_s: 20GB,
  cpu_slowdown: 5.0}
autoscale: {max_replicas: 3, target_wait: 20s, idle: 5m, cooldown: 30s, backoff: 10s, longest_backoff: 1h}
line: {head_start: 30s, patience: 8, max_attempts: 1}
""",
        "c.yaml",
    )
    assert [node.name for node in world.nodes] == ["big-0", "big-1", "node-2"]
    assert len({node.id for node in world.nodes}) == 3
    assert world.nodes[0].resources.gpu_bytes == (80 * GIB, 24 * GIB, 24 * GIB)
    assert world.nodes[2].resources.cpu_bytes == 50 * GIB
    (large,) = world.models
    assert (large.repo_id, large.dedicated, large.replicas) == ("org/large", True, 2)
    assert world.names == ("org/large", "org/Small")
    assert world.replica_bytes(large) == 141 * 10**9
    assert world.weights("ORG/small") == 5 * 10**9
    assert world.weights("org/other") == 16 * 10**9
    assert (world.rules.minimum_deployment_time_s, world.rules.drain_s) == (300, 10)
    assert world.speeds.loading_s(5 * 10**9) == 5.0
    assert world.speeds.returning_s(5 * 10**9) == 0.5
    assert world.speeds.caching_s(5 * 10**9) == 0.25
    assert (world.autoscale.most, world.autoscale.idle_s) == (3, 300)
    assert (world.autoscale.backoff_s, world.autoscale.longest_backoff_s) == (10, 3600)
    assert (world.queue_policy.patience, world.queue_policy.max_attempts) == (8, 1)
    assert (world.execution_timeout_s, world.speeds.cpu_slowdown) == (3600, 5)


def test_omitted_fields_equal_server_defaults() -> None:
    world = read(SMALL, "c.yaml")
    server = {name: field.default for name, field in Settings.model_fields.items()}
    assert world.rules == PlacementRules(
        minimum_deployment_time_s=server["minimum_deployment_time_seconds"],
        drain_s=server["drain_timeout_s"],
    )
    assert world.execution_timeout_s == server["execution_timeout_seconds"]
    assert world.autoscale == Bounds(
        most=server["autoscale_max_replicas"],
        target_wait_s=server["autoscale_target_wait_s"],
        idle_s=server["autoscale_idle_s"],
        cooldown_s=server["autoscale_cooldown_s"],
        backoff_s=server["autoscale_backoff_s"],
        longest_backoff_s=server["autoscale_longest_backoff_s"],
    )
    assert world.queue_policy == QueuePolicy(
        max_attempts=server["max_attempts"],
        head_start_s=server["line_head_start_s"],
        patience=server["line_patience"],
    )
    cached = server["model_cache_percentage"]
    assert world.nodes[0].resources == Resources.of([24 * GIB] * 2, 64 * GIB, cached)


def test_documentation_examples_are_valid() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
    examples = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (day,) = (example for example in examples if example.startswith("{"))
    (cluster,) = (example for example in examples if example.startswith("nodes:"))
    assert len(read_trace(day.splitlines(), "day.jsonl")) == 2
    world = read(cluster, "c.yaml")
    assert len(world.nodes) == 5
    plain = read(SMALL, "c.yaml")
    for field in ("rules", "speeds", "autoscale", "queue_policy", "execution_timeout_s"):
        assert getattr(world, field) == getattr(plain, field), field


def test_json_cluster_file_equals_yaml() -> None:
    text = '{"nodes": [{"gpus": "2x24GiB", "cpu_memory": "64GiB"}]}'
    assert read(text, "c.json") == read(SMALL, "c.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "must contain nodes and models, not None"),
        ("models: {}", "nodes is missing."),
        ("nodes: []", "nodes: "),
        ("nodes: [{gpus: 8x80GiB}]", "nodes.0.cpu_memory is missing."),
        ("nodes: [{gpus: many, cpu_memory: 1GiB}]", "nodes.0.gpus: 'many' does not declare GPUs"),
        ("nodes: [{gpus: 8, cpu_memory: 1GiB}]", "must be the number of GPUs and their size"),
        ("nodes: [{gpus: 1x8GiB, cpu_memory: 1}, {}]", "nodes.1.cpu_memory is missing."),
        (SMALL + "nods: 1", "nods is not a known field."),
        (SMALL + "models: {org/x: {}}", "'org/x': size must be a size"),
        (SMALL + "models: {org/x: 0}", "'org/x': size must be more than 0 bytes, not 0."),
        (SMALL + "models: {org/x: {size: 1GB, dedicate: true}}", "did you mean 'dedicated'?"),
        (SMALL + "models: {no repo: 1GB}", "names no model"),
        (SMALL + "models: {org/x: 1GB, ORG/X: 1GB}", "'ORG/X' is listed more than once."),
        (SMALL + "rules: {minimum_deployment_time: soon}", "must be a duration"),
        (SMALL + "rules: {fraction_largest_possible: 2.0}", "must lie between 0 and 1"),
        (SMALL + "speeds: {load_bytes_per_s: 0}", "must be more than 0 bytes a second"),
        (
            SMALL + "autoscale: {cooldown: 1h, idle: 1m}",
            "cooldown must be more than 0 and no more than idle.",
        ),
        (SMALL + "autoscale: {backoff: 1h, longest_backoff: 1m}", "than longest_backoff."),
        ("nodes: [", "c.yaml, line 1: this is not YAML"),
    ],
)
def test_invalid_cluster_file_is_reported(text: str, expected: str) -> None:
    assert expected in problems(text)


def test_broken_json_is_reported_with_line() -> None:
    assert "c.json, line 2: this is not JSON" in problems('{"nodes":\n}', "c.json")


def test_all_problems_are_reported_at_once() -> None:
    message = problems("nodes: [{}]\nmodels: {org/a: {}, org/b: {}}")
    assert message.count("\n") == 2


def test_unreadable_cluster_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ClusterFileError, match="cannot be read"):
        read_file(tmp_path / "none.yaml")
    (tmp_path / "c.yaml").write_text(SMALL)
    assert read_file(tmp_path / "c.yaml") == read(SMALL, "c.yaml")


def test_generated_cluster_file_is_read() -> None:
    names = generate.names(200)
    world = read(generate.cluster(names, 3), "c.yaml")
    assert world.names == tuple(names)
    assert [config.repo_id for config in world.models] == names[:2]
    assert all(config.dedicated for config in world.models)
    assert min(world.sizes.values()) < 10**9 < 10**11 < max(world.sizes.values())
