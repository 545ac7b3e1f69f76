"""Which of the replicas that another controller left are taken over, and as what: a pure decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ndif.cluster.asking import Living
from ndif.cluster.cluster import Cluster
from ndif.cluster.deployment import Deployment
from ndif.cluster.level import DeploymentLevel
from ndif.cluster.models import Model, Models
from ndif.schema.variant import Variant


@dataclass(frozen=True, slots=True)
class Adoption:
    """What becomes of them."""

    cluster: Cluster
    kept: tuple[tuple[Living, Deployment, Model], ...]
    dropped: tuple[Living, ...]
    """Those for which there is no node, no room, or no use."""


def adopt(cluster: Cluster, models: Models, found: Sequence[Living]) -> Adoption:
    """Have them where they are, those that serve before others. Models that nobody knew are added."""
    kept, dropped = [], []
    for one in sorted(found, key=lambda living: living.deployment.level is not DeploymentLevel.HOT):
        model = _model(models, one)
        try:
            deployment = _as_it_is(cluster, one, model)
            cluster = cluster.with_replica(deployment)
        except (KeyError, IndexError, ValueError):
            dropped.append(one)
        else:
            kept.append((one, deployment, model))
            if model not in models:
                models.add(model)
    return Adoption(cluster, tuple(kept), tuple(dropped))


def _model(models: Models, one: Living) -> Model:
    """The model that it is one of, which may be known by what it was first called alone."""
    key = Variant.parse(one.deployment.model_key).model
    known = models.find(key)
    # An operator's word about a model is not told by its replicas.
    return known or Model(key, replace(one.config, dedicated=False), on_demand=True)


def _as_it_is(cluster: Cluster, one: Living, model: Model) -> Deployment:
    """Its place in the books.

    Raises:
        ValueError: if its model is another by now, or it is there twice.
    """
    deployment = one.deployment
    is_another = Variant.parse(deployment.model_key).model != model.key
    if is_another or model.wanted.as_loaded != one.config.as_loaded or cluster.find(deployment.key):
        raise ValueError(f"{deployment.name} is nothing that is asked for.")
    if deployment.level is DeploymentLevel.WARM:
        return deployment.warm()
    return replace(
        deployment,
        dedicated=model.dedicated,
        gpu_memory_fraction=_fraction(cluster, deployment),
    )


def _fraction(cluster: Cluster, deployment: Deployment) -> float | None:
    """Its share of the one GPU that it shares."""
    totals = cluster.nodes[deployment.node_id].resources.gpu_bytes
    shares = [held / totals[index] for index, held in deployment.gpu_mem_bytes_by_id.items()]
    return shares[0] if len(shares) == 1 and shares[0] < 1 else None
