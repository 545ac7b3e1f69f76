"""The models that probes watch: an operator or the calendar has deployed them."""

from __future__ import annotations

from collections.abc import Iterator

from ndif.cluster.controller import Controller
from ndif.control.reconciler import Reconciler
from ndif.probe.probe import Target
from ndif.probe.prober import Watched


def watched(controller: Controller, reconciler: Reconciler) -> Iterator[Watched]:
    """Yield every dedicated model in each generation that it is dedicated in, and others while they serve.

    A model that users alone have loaded is left out, and so is another generation of a dedicated one: a
    probe would keep them loaded.
    """
    serving = {(each.model.key, each.generation) for each in controller.replicas() if each.serving}
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
