"""Questions to the processes that find out how large a model is, and their answers: lines of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ndif.runtime.spec import ModelSpec
from ndif.sandbox.confinement.confinement import Mode


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer of a process that cannot do what it was asked for."""

    failed: str


@dataclass(frozen=True, slots=True)
class RepositoryFacts:
    """The folder of a model's files, and facts that only its hub knows."""

    folder: str
    repo_id: str | None = None
    """The repository's name as the hub spells it; None if no hub answered."""
    card: str | None = None
    """The task that the repository's card names."""
    gated: bool = False
    """True if the hub gives the files only to those who were permitted."""
    commit: str | None = None
    license: str | None = None
    tokenizer: bool | None = None
    """True if the repository has a tokenizer; None if that is not known."""


@dataclass(frozen=True, slots=True)
class OutlineQuestion:
    """A question for a folder from which the size of a repository's model can be read."""

    spec: ModelSpec
    folder: str
    """An empty folder for an outline."""
    environment: Mapping[str, str]
    """The operator's environment."""


@dataclass(frozen=True, slots=True)
class SizeQuestion:
    """A question for the size of the model in a folder."""

    spec: ModelSpec
    folder: str
    cuda: bool
    """True to say if torch finds a GPU."""
    sandbox: Mode


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The bytes and the number of a model's parameters and buffers, and its structure."""

    bytes: int
    parameters: int
    structure: Mapping[str, Any] | None = None
    """See `ndif.runtime.structure`."""
    cuda: bool | None = None
