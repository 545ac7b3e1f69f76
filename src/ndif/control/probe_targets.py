"""The models that probes watch: every model that an operator or the calendar has deployed."""

from __future__ import annotations

from collections.abc import Iterator

from ndif.cluster.controller import Controller
from ndif.control.reconciler import Reconciler
from ndif.probe.probe import Target
from ndif.probe.prober import Watched


def watched(controller: Controller, reconciler: Reconciler) -> Iterator[Watched]:
    """Yield dedicated models in their dedicated generations, and an operator's other models while loaded.

    Models, and generations of dedicated models, that only users have loaded are left out, because probes
    would keep them loaded.
    """
    serving = {
        (replica.model.key, replica.generation)
        for replica in controller.replicas()
        if replica.serving
    }
    for model in controller.models:
        if model.dedicated:
            generations = reconciler.generations_of(model) if model.deployment.replicas else []
        elif model.on_demand:
            continue
        else:
            generations = sorted(g for g in controller.models.loaded_in(model) if model.keeps(g))
        for generation in generations:
            yield Watched(
                Target.of(model.config.key, generation),
                (model.key, generation) in serving,
                model.problems.get(generation),
                model.withdrawals,
                model.config.trust_remote_code,
            )
