"""The name by which a client asks for a model (specification, sections 8.1 and 001)."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelKey:
    """`import.path.Class:{"repo_id": …}`, parsed. `main` and no revision are one."""

    import_path: str
    repo_id: str
    revision: str | None = None
    task: str | None = None

    @classmethod
    def parse(cls, text: str) -> ModelKey:
        """Read a key as clients send it.

        Raises:
            ValueError: with a sentence for the user, when it is not one.
        """
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
