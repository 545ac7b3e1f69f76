"""`GET /models/{repo_id}`: a model's tree of modules, facts about it, and traces to paste."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from packaging.version import Version
from starlette.requests import Request
from starlette.routing import BaseRoute

from ndif.cluster.models import Model, is_repo_id
from ndif.control.leader import Catalogue
from ndif.gateway.answers import READY
from ndif.gateway.authority import base_url
from ndif.gateway.http_error import HttpError
from ndif.gateway.model_answers import DescribedModel, DescribedModule
from ndif.gateway.module_paths import ROOT, Place
from ndif.gateway.openapi import ApiRoute, Description, Parameter
from ndif.gateway.snippets import snippet, suits
from ndif.host.runtimes import Runtimes
from ndif.schema.client_status import ModelStatus, ServerStatus
from ndif.schema.model_key import ModelKey
from ndif.schema.states import DeploymentLevel, ReplicaState
from ndif.schema.structure import ModelDetails, ModelStructure

_HUB = "https://huggingface.co"
_MAX_QUOTED = 200
"""Characters of a client's text that an answer repeats."""
_FRESH_S = 5.0
"""Seconds for which a model's details, and the installed generations, are cached."""
_ADAPTERS = frozenset({"0.8"})
"""Generations whose requests may name an adapter."""
_DESCRIPTION = Description(
    "the server",
    "A model: its tree of modules, facts, and traces to paste",
    "Of the models that `/status` shows, and those that were measured here. Nothing is measured for who "
    "asks. Modules of one container with the same structure stand once. Names are those that the "
    "repository's author chose: show them as text.",
    parameters=(
        Parameter("repo_id", "path", "The repository, with its owner.", "openai-community/gpt2"),
        Parameter(
            "revision", "query", "Branch, tag or commit; else the one that is served.", "main"
        ),
        Parameter(
            "generation",
            "query",
            "The nnsight that told the tree, where several load different ones; else the newest.",
            "0.8",
        ),
    ),
    refusals={
        404: "The server does not know the model.",
        503: "No process of this server leads at the moment.",
    },
)


_NO_DETAILS = ModelDetails(structures={}, load_s={})


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request to the leader for a model's details, and the states of its replicas at that time."""

    at: float
    states: Any
    task: asyncio.Task[ModelDetails]


@dataclass(eq=False)
class ModelRoutes:
    """Describes one model from the server's catalogue; a request never loads or measures a model."""

    catalogue: Catalogue
    runtimes: Runtimes
    public_url: str
    """Base URL of the server for its clients; if empty, that of each request."""
    hub: str | None
    """URL of the hub from which models come; None for the public one."""
    _looked: tuple[float, asyncio.Task[Sequence[str]]] | None = None
    _asked: dict[ModelKey, _Asked] = field(default_factory=dict)

    def routes(self) -> list[BaseRoute]:
        """Return the route."""
        return [ApiRoute("/models/{repo_id:path}", self.model, _DESCRIPTION)]

    async def model(self, http: Request) -> DescribedModel:
        """Answer with one model that `/status` lists, or that was measured and is not gated."""
        repo_id = http.path_params["repo_id"]
        revision = http.query_params.get("revision") or None
        models = await self.catalogue.models()
        found = _find(models, repo_id, revision)
        entry = _entry(await self.catalogue.status(), found, repo_id, revision)
        details = await self._details(found.key, entry) if found is not None else _NO_DETAILS
        is_known = entry is not None or (details.structures and found and not found.gated)
        if not is_known:
            raise HttpError(404, _unknown(repo_id, revision))
        installed = await self._generations()
        url = base_url(http, self.public_url)
        chosen = http.query_params.get("generation") or None
        return self._describe(found, entry, details, installed, url, chosen)

    async def _generations(self) -> Sequence[str]:
        """Return the installed nnsight generations, the newest first; cached for `_FRESH_S`."""
        now = time.monotonic()
        if self._looked is None or now - self._looked[0] >= _FRESH_S:
            self._looked = now, asyncio.create_task(self._look(), name="runtimes")
        try:
            return await asyncio.shield(self._looked[1])
        except Exception:
            self._looked = None
            raise

    async def _look(self) -> Sequence[str]:
        return [*await asyncio.to_thread(self.runtimes.installed)]

    async def _details(self, key: ModelKey, entry: ModelStatus | None) -> ModelDetails:
        """Return the details of a model, cached for `_FRESH_S`; concurrent callers share one request.

        A change of the replicas' states also ends the caching, since a model that came up may have a tree.
        """
        now = time.monotonic()
        self._asked = {
            each: asked for each, asked in self._asked.items() if now - asked.at < _FRESH_S
        }
        asked = self._asked.get(key)
        if asked is None or asked.states != _states(entry):
            task = asyncio.create_task(self.catalogue.details(key), name="details of a model")
            asked = self._asked[key] = _Asked(now, _states(entry), task)
        try:
            return await asyncio.shield(asked.task)
        except Exception:
            if self._asked.get(key) is asked:
                del self._asked[key]
            raise

    def _describe(
        self,
        model: Model | None,
        entry: ModelStatus | None,
        details: ModelDetails,
        installed: Iterable[str],
        url: str,
        chosen: str | None,
    ) -> DescribedModel:
        """Return the answer; `installed` are the server's generations, `chosen` is the requested one."""
        status = entry or _NOT_LOADED
        key = model.config.key if model is not None else ModelKey.parse(status.model_key)
        only = model.deployment.runtime if model is not None else None
        generations = [each for each in installed if only in (None, each)]
        structures = _by_generation(details.structures, generations)
        if chosen not in structures:
            chosen = next(iter(structures), None)
        structure = structures.get(chosen or "")
        task = key.task or status.task
        snippets = {
            each: snippet(each, url, key.repo_id, key.revision, task, structures[each])
            for each in structures
            if each in generations
        }
        return DescribedModel(
            repo_id=key.repo_id,
            revision=key.revision,
            task=task,
            dedicated=bool(status.dedicated),
            gated=model is not None and model.gated,
            card=self._card(key, model),
            deployment_level=status.deployment_level,
            state=status.state,
            runtimes=status.runtimes,
            replicas=status.replicas,
            generations=generations,
            adapters=[each for each in generations if each in _ADAPTERS],
            load_s=details.load_s,
            generation=chosen,
            parameters=status.parameters if structure is None else structure.tree.count,
            **{name: getattr(structure, name, None) for name in _FACTS},
            snippets={each: text for each, text in snippets.items() if text is not None},
            tree=None if structure is None else _tree(structure, structures),
        )

    def _card(self, key: ModelKey, model: Model | None) -> str | None:
        """Return the URL of a model's card at its hub; None for a model from a folder."""
        checkpoint = key.repo_id if model is None else model.config.checkpoint
        if not is_repo_id(checkpoint):
            return None
        revision = f"/tree/{quote(key.revision, safe='')}" if key.revision else ""
        return f"{_shown_address(self.hub) or _HUB}/{key.repo_id}{revision}"


_NOT_LOADED = replace(READY, deployment_level=DeploymentLevel.COLD, state=ReplicaState.NOT_STARTED)
"""Status of a known model that `/status` does not list."""
_FACTS = (
    *("license", "dtype", "bytes", "hidden_size", "layers", "heads", "vocabulary"),
    *("context_length", "tokenizer"),
)
"""Fields of the answer that `ModelStructure` has under the same names; None without a structure."""


def _find(models: Iterable[Model], repo_id: str, revision: str | None) -> Model | None:
    """Return the model of that name; of several, prefer one without a revision, then a dedicated one."""
    wanted = None if revision in (None, "main") else revision
    named = [
        model
        for model in models
        if model.called(repo_id) and (revision is None or model.config.key.revision == wanted)
    ]
    return min(
        named,
        key=lambda model: (model.config.key.revision is not None, not model.dedicated),
        default=None,
    )


def _entry(
    status: ServerStatus, model: Model | None, repo_id: str, revision: str | None
) -> ModelStatus | None:
    """Return the model's entry in the answer of `/status`; None if it has none."""
    # A model of the calendar may have an entry without being in `models`: look it up by name.
    wanted = None if revision == "main" else revision
    named = (
        each
        for each in status.deployments.values()
        if each.repo_id.lower() == repo_id.lower() and (revision is None or each.revision == wanted)
    )
    key = "" if model is None else str(model.config.key)
    return next(named, None) if model is None else status.deployments.get(key)


def _states(entry: ModelStatus | None) -> Any:
    """Return the replicas' state by generation, from the model's entry in `/status`."""
    return entry and entry.runtimes


def _unknown(repo_id: str, revision: str | None) -> str:
    of = f" at revision {revision[:_MAX_QUOTED]!r}" if revision else ""
    return (
        f"This server does not know {repo_id[:_MAX_QUOTED]!r}{of}: `/status` shows its models. Another is "
        "known once the server's operator deploys it, or a user who may have it loaded sends a job for it."
    )


def _by_generation(
    told: Mapping[str, ModelStructure], generations: Iterable[str]
) -> dict[str, ModelStructure]:
    """Return the structure that each generation would load, the newest generation first.

    A generation that has neither measured nor loaded the model gets the newest other structure that suits.
    """
    known = sorted(told, key=Version, reverse=True)
    found: dict[str, ModelStructure] = {}
    for each in generations:
        suiting = (other for other in (each, *known) if other in told)
        fitting = (told[other] for other in suiting if other == each or suits(each, told[other]))
        if (structure := next(fitting, None)) is not None:
            found[each] = structure
    if not found:  # only generations that are not installed any more have one
        return {each: told[each] for each in known}
    return dict(sorted(found.items(), key=lambda one: Version(one[0]), reverse=True))


def _tree(structure: ModelStructure, of: Mapping[str, ModelStructure]) -> DescribedModule:
    """Return the tree of a structure, with its paths in each generation that has an equal tree."""
    same = [each for each, other in of.items() if other.tree == structure.tree]
    return _module([Place(ROOT, structure.tree, each) for each in same])


def _module(places: list[Place]) -> DescribedModule:
    """Return the description of a module, given its place in each generation."""
    node = places[0].node
    below = zip(*(place.children() for place in places), strict=True)
    return DescribedModule(
        name=node.name,
        class_name=node.class_name,
        paths={place.generation: place.path for place in places},
        renamed={place.generation: place.renamed for place in places if place.renamed},
        parameters=node.parameters,
        count=node.count,
        number=node.number,
        indices=node.indices,
        omitted=node.omitted,
        children=[_module(list(each)) for each in below],
    )


def _shown_address(endpoint: str | None) -> str | None:
    """Return a hub's URL without user and password; None if it is not http or https."""
    try:
        parts = urlsplit(endpoint or "")
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, place, parts.path.rstrip("/"), "", ""))
