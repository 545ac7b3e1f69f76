"""Model keys: the names by which clients ask for models."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelKey:
    """`import.path.Class:{"repo_id": …}`, parsed; the revision `main` is None."""

    import_path: str
    repo_id: str
    revision: str | None = None
    task: str | None = None

    @classmethod
    def parse(cls, text: str) -> ModelKey:
        """Parse a key as clients send it; of any other, a `ValueError` tells the user what is wrong."""
        import_path, colon, suffix = text.partition(":")
        try:
            fields = json.loads(suffix) if colon else None
        except (ValueError, RecursionError):
            fields = None
        if not import_path or not isinstance(fields, dict):
            raise ValueError(
                f"{text[:200]!r} is not a model key. A key reads "
                'import.path.Class:{"repo_id": "org/name", "revision": null}; '
                "nnsight makes it for you with model.to_model_key()."
            )
        repo_id, revision, task = (fields.get(name) for name in ("repo_id", "revision", "task"))
        if not isinstance(repo_id, str) or not repo_id:
            raise ValueError(f"The model key {text[:200]!r} names no repo_id.")
        if not (isinstance(revision, str | None) and isinstance(task, str | None)):
            raise ValueError(f"revision and task in the model key {text[:200]!r} must be text.")
        return cls(import_path, repo_id, None if revision == "main" else revision, task)

    def __str__(self) -> str:
        fields = {"repo_id": self.repo_id, "revision": self.revision}
        if self.task is not None:
            fields["task"] = self.task
        return f"{self.import_path}:{json.dumps(fields)}"


@dataclass(frozen=True, slots=True)
class Variant:
    """One model in one nnsight generation: `import.path.Class:{"repo_id": …}@0.8`."""

    model: ModelKey
    generation: str

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Parse a variant as `str` writes it."""
        model, at, generation = text.rpartition("@")
        if not at or not generation:
            raise ValueError(f"{text[:200]!r} names no model in a generation.")
        return cls(ModelKey.parse(model), generation)

    def __str__(self) -> str:
        return f"{self.model}@{self.generation}"
