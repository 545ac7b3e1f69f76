"""The questions to the processes that measure models, and their answers; each is a line of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ndif.runtime.spec import ModelSpec
from ndif.sandbox.confinement.confinement import Mode


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer of a process that cannot do its task."""

    failed: str


@dataclass(frozen=True, slots=True)
class RepositoryFacts:
    """The folder of a model's files, and facts from its hub."""

    folder: str
    repo_id: str | None = None
    """The repository's name as the hub spells it; None if no hub answered."""
    card: str | None = None
    """The task that the repository's card names."""
    gated: bool = False
    """True if the hub gives the files only to permitted accounts."""
    commit: str | None = None
    license: str | None = None
    tokenizer: bool | None = None
    """True if the repository has a tokenizer; None if unknown."""
    on_branch: bool = True
    """False if the hub says that no branch or tag contains the commit."""


@dataclass(frozen=True, slots=True)
class OutlineQuestion:
    """A question for a folder from which the size of a repository's model can be measured."""

    spec: ModelSpec
    folder: str
    """An empty folder, which receives the outline if the answer needs one."""
    environment: Mapping[str, str]
    """The operator's environment variables."""


@dataclass(frozen=True, slots=True)
class SizeQuestion:
    """A question for the size of the model in a folder."""

    spec: ModelSpec
    folder: str
    cuda: bool
    """True to report whether torch finds a GPU."""
    sandbox: Mode


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The size, number of parameters, and structure of a model."""

    bytes: int
    """Size of the loaded parameters and buffers, in their dtypes."""
    parameters: int
    structure: Mapping[str, Any] | None = None
    """See `ndif.runtime.structure`."""
    cuda: bool | None = None
