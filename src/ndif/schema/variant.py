"""A model in one runtime: what has a processor, a line and replicas of its own."""

from __future__ import annotations

from dataclasses import dataclass

from ndif.schema.model_key import ModelKey


@dataclass(frozen=True, slots=True)
class Variant:
    """One model as one nnsight generation runs it: `import.path.Class:{"repo_id": …}@0.8`."""

    model: ModelKey
    generation: str

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read one as `str` writes it.

        Raises:
            ValueError: with a sentence, when it is not one.
        """
        model, at, generation = text.rpartition("@")
        if not at or not generation:
            raise ValueError(f"{text[:200]!r} names no model in a runtime.")
        return cls(ModelKey.parse(model), generation)

    def __str__(self) -> str:
        return f"{self.model}@{self.generation}"
