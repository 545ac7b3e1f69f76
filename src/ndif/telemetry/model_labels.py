"""The labels of models in metrics: only models that operators deploy, or that were loaded, have their own.

Clients choose the names of the models that they request, so any other name counts under `other`.
"""

from __future__ import annotations

from collections.abc import Iterable

OTHER = "other"
"""Label of each model, route and method without a label of its own."""
_MAX_LOADED = 500


class ModelLabels:
    """The labels by the names of models; a name without a label counts under `OTHER`."""

    def __init__(self, max_loaded: int = _MAX_LOADED) -> None:
        """Accept this many names of models that users alone had loaded."""
        self._max_loaded = max_loaded
        self._labels: dict[str, str] = {}
        self._loaded: set[str] = set()
        """Names of models that users alone had loaded."""

    def add_deployed(self, label: str, names: Iterable[str]) -> None:
        """Give a model that an operator or the schedule deployed a label for all of its names."""
        for name in names:
            self._labels[name] = _encodable(label)

    def add_loaded(self, label: str, names: Iterable[str]) -> None:
        """Give a model that users had loaded a label, unless as many others have one as may."""
        for name in names:
            if name not in self._labels and len(self._loaded) < self._max_loaded:
                self._loaded.add(name)
            elif name not in self._labels:
                continue
            self._labels[name] = _encodable(label)

    def of(self, name: str) -> str:
        """Return the label of a model: `OTHER` unless it was deployed or loaded."""
        return self._labels.get(name, OTHER)


MODELS = ModelLabels()
"""Labels of the models of this process's server."""


def _encodable(label: str) -> str:
    # With a lone surrogate, the whole response of /metrics could not be encoded.
    return label.encode(errors="replace").decode()
