"""Model keys: the names by which clients ask for models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ndif.schema.revision import REVISION_RULE, is_revision

NEWEST_CLASS = "nnsight.modeling.transformers.TransformersModel"
"""Import path in the keys of the newest clients."""

# Older clients name the class that defines the key's last part: HuggingFaceModel for a TransformersModel.
_HEADER_WIRE_CLASSES = frozenset(
    {"nnsight.modeling.language.LanguageModel", "nnsight.modeling.huggingface.HuggingFaceModel"}
)
SERVED_CLASSES: Mapping[str, frozenset[str]] = {
    "0.8": frozenset({NEWEST_CLASS}),
    "0.7": _HEADER_WIRE_CLASSES,
    "0.6": _HEADER_WIRE_CLASSES,
}
"""Import paths that `to_model_key()` gives for TransformersModel and LanguageModel, by generation."""

_OWN_SUBCLASS = (
    " If yours is a subclass of TransformersModel, name that class for the server: add to yours "
    "`def _remoteable_class(self): return TransformersModel`."
)
_IMAGES = (
    ' With nnsight 0.8, `TransformersModel(…, task="image-text-to-text")` makes a model that takes '
    "images."
)
_MAX_QUOTED = 200
"""Maximum number of characters of a client's text that an error quotes."""


@dataclass(frozen=True, slots=True)
class ModelKey:
    """`import.path.Class:{"repo_id": …}`, parsed; the revision `main` is None."""

    import_path: str
    repo_id: str
    revision: str | None = None
    task: str | None = None

    @classmethod
    def parse(cls, text: str) -> ModelKey:
        """Parse a key as clients send it; raise a `ValueError` with a message for the user."""
        import_path, colon, suffix = text.partition(":")
        try:
            fields = json.loads(suffix) if colon else None
        except (ValueError, RecursionError):
            fields = None
        if not import_path or not isinstance(fields, dict):
            raise ValueError(
                f"{text[:_MAX_QUOTED]!r} is not a model key. A key reads "
                'import.path.Class:{"repo_id": "org/name", "revision": null}; '
                "nnsight makes it for you with model.to_model_key()."
            )
        repo_id, revision, task = (fields.get(name) for name in ("repo_id", "revision", "task"))
        if not isinstance(repo_id, str) or not repo_id:
            raise ValueError(f"The model key {text[:_MAX_QUOTED]!r} names no repo_id.")
        if not (isinstance(revision, str | None) and isinstance(task, str | None)):
            raise ValueError(
                f"revision and task in the model key {text[:_MAX_QUOTED]!r} must be text."
            )
        if revision is not None and not is_revision(revision):
            raise ValueError(
                f"The revision {revision[:_MAX_QUOTED]!r} in the model key {REVISION_RULE}."
            )
        return cls(import_path, repo_id, None if revision == "main" else revision, task)

    @property
    def label(self) -> str:
        """Return the repository, followed by `@` and the revision if one is named."""
        return self.repo_id + (f"@{self.revision}" if self.revision else "")

    def __str__(self) -> str:
        fields = {"repo_id": self.repo_id, "revision": self.revision}
        if self.task is not None:
            fields["task"] = self.task
        return f"{self.import_path}:{json.dumps(fields)}"


A_MODEL = ModelKey(NEWEST_CLASS, "openai-community/gpt2", None, "text-generation")
"""The model in the examples of answers."""


def explain_class(key: ModelKey, generation: str | None = None) -> str | None:
    """Return a message for the client if this generation does not serve the key's class; None if it does.

    Without a generation, a class of any generation is served.
    """
    if generation is None:
        served = any(key.import_path in classes for classes in SERVED_CLASSES.values())
    else:
        served = key.import_path in SERVED_CLASSES.get(generation, ())
    if served:
        return None
    names, of_them, hint = "TransformersModel or LanguageModel", "one of them", ""
    if SERVED_CLASSES.get(generation or "") == _HEADER_WIRE_CLASSES:
        names, of_them = "LanguageModel", "it"
        if key.import_path.endswith(".VisionLanguageModel"):
            hint = _IMAGES
    elif generation == "0.8":
        hint = _OWN_SUBCLASS
    return (
        f"This server serves models that are made with nnsight's {names}, not with "
        f"{key.import_path[:_MAX_QUOTED]!r}. Make {key.repo_id[:_MAX_QUOTED]!r} with {of_them}.{hint}"
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """One model in one nnsight generation: `import.path.Class:{"repo_id": …}@0.8`."""

    model: ModelKey
    generation: str

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Parse a variant as `str` writes it; raise a `ValueError` if it is invalid."""
        model, at, generation = text.rpartition("@")
        if not at or not generation:
            raise ValueError(f"{text[:_MAX_QUOTED]!r} names no model in a generation.")
        return cls(ModelKey.parse(model), generation)

    def __str__(self) -> str:
        return f"{self.model}@{self.generation}"
