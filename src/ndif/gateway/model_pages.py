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
from ndif.gateway.snippets import can_load, snippet
from ndif.host.runtimes import Runtimes
from ndif.schema.client_status import ModelStatus, ServerStatus
from ndif.schema.model_key import ModelKey
from ndif.schema.revision import REVISION_RULE, is_revision
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
    "For the models that `/status` lists, and the models that were measured here. A request never measures "
    "a model. Modules of one container with the same structure are listed once. The repository's author "
    "chose the names: show them as text.",
    parameters=(
        Parameter("repo_id", "path", "The repository, with its owner.", "openai-community/gpt2"),
        Parameter("revision", "query", "Branch, tag or commit; by default the served one.", "main"),
        Parameter(
            "generation",
            "query",
            "nnsight generation whose tree is shown, if they load different ones; else the newest.",
            "0.8",
        ),
    ),
    refusals={
        400: "The revision is malformed.",
        404: "The server does not know the model.",
        503: "This server has no leader at the moment.",
    },
)


_NO_DETAILS = ModelDetails(structures={}, load_s={})


@dataclass(frozen=True, slots=True)
class _DetailsRequest:
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
    """Base URL of the server for its clients; if empty, each request's own base URL is used."""
    hub: str | None
    """URL of the hub from which models come; None for the public one."""
    _installed: tuple[float, asyncio.Task[Sequence[str]]] | None = None
    _requests: dict[ModelKey, _DetailsRequest] = field(default_factory=dict)

    def routes(self) -> list[BaseRoute]:
        """Return the route."""
        return [ApiRoute("/models/{repo_id:path}", self.model, _DESCRIPTION)]

    async def model(self, http: Request) -> DescribedModel:
        """Answer with one model that `/status` lists, or that was measured and is not gated."""
        repo_id = http.path_params["repo_id"]
        revision = http.query_params.get("revision") or None
        if revision is not None and not is_revision(revision):
            raise HttpError(400, f"The revision {revision[:_MAX_QUOTED]!r} {REVISION_RULE}.")
        models = await self.catalogue.models()
        model = _find(models, repo_id, revision)
        entry = _entry(await self.catalogue.status(), model, repo_id, revision)
        details = await self._details(model.key, entry) if model is not None else _NO_DETAILS
        is_known = entry is not None or (details.structures and model and not model.gated)
        if not is_known:
            raise HttpError(404, _unknown(repo_id, revision))
        installed = await self._generations()
        url = base_url(http, self.public_url)
        chosen = http.query_params.get("generation") or None
        return self._describe(model, entry, details, installed, url, chosen)

    async def _generations(self) -> Sequence[str]:
        """Return the installed nnsight generations, the newest first; cached for `_FRESH_S`."""
        now = time.monotonic()
        if self._installed is None or now - self._installed[0] >= _FRESH_S:
            self._installed = now, asyncio.create_task(self._read_installed(), name="runtimes")
        try:
            return await asyncio.shield(self._installed[1])
        except Exception:
            self._installed = None
            raise

    async def _read_installed(self) -> Sequence[str]:
        return [*await asyncio.to_thread(self.runtimes.installed)]

    async def _details(self, key: ModelKey, entry: ModelStatus | None) -> ModelDetails:
        """Return the details of a model, cached for `_FRESH_S`; concurrent callers share one request.

        A change of the replicas' states also ends the caching, because a loaded model may have a tree.
        """
        now = time.monotonic()
        self._requests = {
            other: request
            for other, request in self._requests.items()
            if now - request.at < _FRESH_S
        }
        request = self._requests.get(key)
        if request is None or request.states != _states(entry):
            task = asyncio.create_task(self.catalogue.details(key), name="details of a model")
            request = self._requests[key] = _DetailsRequest(now, _states(entry), task)
        try:
            return await asyncio.shield(request.task)
        except Exception:
            if self._requests.get(key) is request:
                del self._requests[key]
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
        only_generation = model.deployment.runtime if model is not None else None
        generations = [
            generation for generation in installed if only_generation in (None, generation)
        ]
        structures = _by_generation(details.structures, generations)
        if chosen not in structures:
            chosen = next(iter(structures), None)
        structure = structures.get(chosen or "")
        task = key.task or status.task
        snippets = {
            generation: snippet(
                generation, url, key.repo_id, key.revision, task, structures[generation]
            )
            for generation in structures
            if generation in generations
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
            adapters=[generation for generation in generations if generation in _ADAPTERS],
            load_s=details.load_s,
            generation=chosen,
            parameters=status.parameters if structure is None else structure.tree.count,
            **{name: getattr(structure, name, None) for name in _FACTS},
            snippets={
                generation: text for generation, text in snippets.items() if text is not None
            },
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
        item
        for item in status.deployments.values()
        if item.repo_id.lower() == repo_id.lower() and (revision is None or item.revision == wanted)
    )
    key = "" if model is None else str(model.config.key)
    return next(named, None) if model is None else status.deployments.get(key)


def _states(entry: ModelStatus | None) -> Any:
    return entry and entry.runtimes


def _unknown(repo_id: str, revision: str | None) -> str:
    place = f" at revision {revision[:_MAX_QUOTED]!r}" if revision else ""
    return (
        f"This server does not know {repo_id[:_MAX_QUOTED]!r}{place}: `/status` shows its models. "
        "Another model is known once the server's operator deploys it, or a user with the right to "
        "load it sends a job for it."
    )


def _by_generation(
    structures: Mapping[str, ModelStructure], generations: Iterable[str]
) -> dict[str, ModelStructure]:
    """Return the structure that each generation would load, the newest generation first.

    A generation that neither measured nor loaded the model gets the newest other structure that suits it.
    """
    newest_first = sorted(structures, key=Version, reverse=True)
    by_generation: dict[str, ModelStructure] = {}
    for generation in generations:
        suiting = (other for other in (generation, *newest_first) if other in structures)
        fitting = (
            structures[other]
            for other in suiting
            if other == generation or can_load(generation, structures[other])
        )
        if (structure := next(fitting, None)) is not None:
            by_generation[generation] = structure
    if not by_generation:  # only generations that are no longer installed have a structure
        return {generation: structures[generation] for generation in newest_first}
    return dict(sorted(by_generation.items(), key=lambda item: Version(item[0]), reverse=True))


def _tree(structure: ModelStructure, structures: Mapping[str, ModelStructure]) -> DescribedModule:
    """Return the tree of a structure, with its paths in each generation that has an equal tree."""
    equal = [generation for generation, other in structures.items() if other.tree == structure.tree]
    return _module([Place(ROOT, structure.tree, generation) for generation in equal])


def _module(places: list[Place]) -> DescribedModule:
    """Return the description of a module, given its place in each generation."""
    node = places[0].node
    children = zip(*(place.children() for place in places), strict=True)
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
        children=[_module(list(siblings)) for siblings in children],
    )


def _shown_address(endpoint: str | None) -> str | None:
    """Return a hub's URL without user and password; None if it is not http or https."""
    try:
        parts = urlsplit(endpoint or "")
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
