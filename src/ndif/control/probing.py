"""The models that probes watch: those that an operator or the calendar wants served."""

from __future__ import annotations

from collections.abc import Iterator

from ndif.cluster.controller import Controller
from ndif.control.reconciler import Reconciler
from ndif.probe.probe import Target
from ndif.probe.prober import Watched


def watched(controller: Controller, reconciler: Reconciler) -> Iterator[Watched]:
    """Yield every dedicated model in each generation that it is dedicated in.

    Other generations of a model are loaded on demand: a probe would keep them loaded.
    """
    serving = {(each.model.key, each.generation) for each in controller.replicas() if each.serving}
    for model in controller.models:
        if not model.dedicated or model.deployment.replicas < 1:
            continue
        for generation in reconciler.generations_of(model):
            yield Watched(
                Target.of(model.config.key, generation),
                (model.key, generation) in serving,
                model.problems.get(generation),
                model.withdrawals,
                model.config.trust_remote_code,
            )
