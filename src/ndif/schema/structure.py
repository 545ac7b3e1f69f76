"""The structure of a model, as described by the process that reads its repository.

`ndif.runtime.structure` writes the structure. Its texts come from the repository's author, so they are
untrusted and shown only as plain text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ndif.schema.answer import answer

_MAX_BYTES = 1 << 17
_MAX_NAME = 128
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Name = Annotated[str, Field(max_length=_MAX_NAME)]


class TensorShape(BaseModel):
    """A parameter of one module."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: _Name
    shape: Annotated[list[_Count], Field(max_length=8)]
    dtype: _Name


class ModuleNode(BaseModel):
    """A module, or several modules of one container with the same structure."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True
    )

    name: _Name
    """Name in the parent module; empty for the model itself."""
    class_name: _Name = Field(alias="class")
    parameters: Annotated[list[TensorShape], Field(max_length=32)]
    """The module's own parameters, without parameters of its submodules."""
    count: _Count
    """Number of parameters, including submodules; of one module if the node stands for several."""
    indices: Annotated[list[tuple[_Count, _Count]], Field(max_length=256)] | None = None
    """First and last index of each run of modules that the node stands for; null for one named module."""
    omitted: _Count = 0
    """Number of child modules that are not described."""
    children: Annotated[list[ModuleNode], Field(max_length=256)] = []

    @property
    def number(self) -> int:
        """Return the number of modules that the node stands for."""
        return sum(last - first + 1 for first, last in self.indices or ((0, 0),))


class ModelStructure(BaseModel):
    """A model's module tree, and facts from its config and repository."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    tree: ModuleNode
    dtype: _Name | None
    bytes: _Count
    """Size of the parameters and buffers in bytes."""
    hidden_size: _Count | None
    layers: _Count | None
    heads: _Count | None
    vocabulary: _Count | None
    context_length: _Count | None
    """Maximum number of tokens of one input, by the config."""
    encoder_decoder: bool
    tokenizer: bool
    """True if the repository has a tokenizer."""
    license: _Name | None
    """Licence in the repository's card."""

    def dump(self) -> dict[str, Any]:
        """Return the structure as a JSON-serialisable dict; `read_structure` is the inverse."""
        return self.model_dump(mode="json", by_alias=True)


@answer()
class ModelDetails:
    """Facts about one model, by nnsight generation, that are too large for `/status`."""

    structures: Mapping[str, ModelStructure]
    """Empty for a model that was never measured."""
    load_s: Mapping[str, float]
    """Seconds that the last load took."""

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> ModelDetails:
        """Return the details that another process sent, without structures of an unknown form."""
        read = {
            generation: read_structure(structure)
            for generation, structure in content["structures"].items()
        }
        structures = {
            generation: structure for generation, structure in read.items() if structure is not None
        }
        return cls(structures=structures, load_s=content["load_s"])


def read_structure(content: bytes | str | Any) -> ModelStructure | None:
    """Return the structure in JSON, or in parsed JSON; None if it is too large or has another form."""
    try:
        if isinstance(content, bytes | str):
            return (
                ModelStructure.model_validate_json(content) if len(content) <= _MAX_BYTES else None
            )
        return ModelStructure.model_validate(content)
    except ValidationError:
        return None
