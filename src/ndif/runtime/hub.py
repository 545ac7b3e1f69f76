"""What a hub says of a repository, and what its errors mean to the operator who asked for a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from huggingface_hub import HfApi, errors

from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import sentence

_PATIENCE_S = 10.0


def ask(spec: ModelSpec, *, sizes: bool = False) -> Any:
    """The repository's `ModelInfo`; `sizes`: with those of its files."""
    return HfApi().model_info(
        spec.checkpoint, revision=spec.revision, timeout=_PATIENCE_S, files_metadata=sizes
    )


def why(spec: ModelSpec, error: BaseException) -> str:
    """Why a model is not to be had, in a sentence."""
    chain = list(_chain(error))
    name = repr(spec.checkpoint)
    at = f" at revision {spec.revision!r}" if spec.revision else ""

    def is_one_of(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in chain)

    if spec.is_folder and not os.path.exists(os.path.join(spec.checkpoint, "config.json")):  # noqa: PTH110, PTH118 - a name from outside, as it is
        return f"The folder {name} holds no config.json: it is not a checkpoint's folder."
    if is_one_of(errors.HFValidationError):
        return f"{name} is neither a folder on this machine nor the name of a repository."
    if is_one_of(errors.GatedRepoError):
        return (
            f"{name} is gated, and this server has no token of somebody who may read it: accept its "
            "terms on the hub, and set HF_TOKEN."
        )
    if is_one_of(errors.RevisionNotFoundError):
        return f"{name} has no revision {spec.revision!r} on the hub."
    if is_one_of(errors.RepositoryNotFoundError):
        return f"There is no repository {name} on the hub that this server may read."
    if is_one_of(errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        return (
            f"{name}{at} is not in this machine's cache, and the hub cannot be reached. Download it "
            "first, or give a folder."
        )
    if is_one_of(errors.EntryNotFoundError):
        return f"{name}{at} has no config.json: it is no model that transformers can load."
    if not spec.trust_remote_code and "trust_remote_code" in str(error):
        return (
            f"{name} comes with code of its own. If you trust it, deploy it with trust_remote_code."
        )
    return sentence(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
