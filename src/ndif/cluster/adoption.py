"""The decision which replicas of an earlier controller to adopt, without side effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ndif.cluster.controller_types import OrphanReplica
from ndif.cluster.models import Model, Models
from ndif.placement.cluster import Cluster
from ndif.placement.replica import PlacedReplica
from ndif.schema.model_key import Variant
from ndif.schema.states import DeploymentLevel


@dataclass(frozen=True, slots=True)
class Adoption:
    """The cluster after adoption, and the decision on each orphan."""

    cluster: Cluster
    kept: tuple[tuple[OrphanReplica, PlacedReplica, Model], ...]
    dropped: tuple[OrphanReplica, ...]
    """Orphans whose node or memory is missing, or that match no deployment."""


def adopt(cluster: Cluster, models: Models, orphans: Sequence[OrphanReplica]) -> Adoption:
    """Keep orphans in their places, HOT ones first, and add unknown models."""
    kept, dropped = [], []
    for orphan in sorted(
        orphans, key=lambda orphan: orphan.placed.level is not DeploymentLevel.HOT
    ):
        model = _model(models, orphan)
        try:
            placed = _record(cluster, orphan, model)
            cluster = cluster.with_replica(placed)
        except (KeyError, IndexError, ValueError):
            dropped.append(orphan)
        else:
            kept.append((orphan, placed, model))
            if model not in models:
                models.add(model)
    return Adoption(cluster, tuple(kept), tuple(dropped))


def _model(models: Models, orphan: OrphanReplica) -> Model:
    key = Variant.parse(orphan.placed.model_key).model
    model = models.find(key)
    # A replica does not say whether an operator deployed its model.
    return model or Model(key, replace(orphan.config, dedicated=False), on_demand=True)


def _record(cluster: Cluster, orphan: OrphanReplica, model: Model) -> PlacedReplica:
    """Return the record of an orphan; raise a `ValueError` if it matches no current deployment."""
    placed = orphan.placed
    is_another = Variant.parse(placed.model_key).model != model.key
    if (
        is_another
        or model.deployment.as_loaded != orphan.config.as_loaded
        or cluster.find(placed.key)
    ):
        raise ValueError(f"{placed.name} belongs to no model as it is deployed now.")
    if placed.level is DeploymentLevel.WARM:
        return placed.as_warm()
    totals = cluster.nodes[placed.node_id].resources.gpu_bytes
    shares = [held / totals[index] for index, held in placed.gpu_mem_bytes_by_id.items()]
    fraction = shares[0] if len(shares) == 1 and shares[0] < 1 else None
    return replace(placed, dedicated=model.dedicated, gpu_memory_fraction=fraction)
