"""The reset of a trusted runner between two requests.

Each request finds the model and the settings of the process as they were before the first request. The
module tree, its surroundings and the settings are restored. A changed weight or a patched class is only
detected: the process ends, and the next request gets a new fork of the model process.

Other effects of a trusted request stay: its user has the rights of the server.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ndif.runtime.process.model_state import ModuleTreeState, ResetError, WeightsMemory
from ndif.runtime.process.namespaces import DictVersions, copied, members_of
from ndif.runtime.process.process_settings import ProcessSettings
from ndif.runtime.process.procfs import ProcFiles

if TYPE_CHECKING:
    from ndif.runtime.generations import Generation
    from ndif.runtime.process.cuda import Cuda


class ModelReset:
    """The reset of model and settings to the state that `begin` recorded."""

    def __init__(self, generation: Generation, driver: Cuda | None) -> None:
        self._generation = generation
        # The weight owner verifies weights on devices.
        self._has_weights = driver is None
        self._proc_files: ProcFiles | None = None
        with contextlib.suppress(OSError):
            self._proc_files = ProcFiles.open()

    def begin(self) -> None:
        """Record the present state, before the first request and after a change of the model's adapter."""
        model = self._generation.model
        self._settings = ProcessSettings()
        self._state = ModuleTreeState(model)
        self._code = _Code(model._module)
        self._weights = None
        if self._has_weights and self._proc_files is not None:
            self._weights = WeightsMemory(model._module, self._proc_files)

    def __call__(self) -> None:
        """Restore model and settings; raise ResetError if that is not possible."""
        self._generation.forget()
        if (setting := self._settings.restore()) is not None:
            raise ResetError(f"{setting} cannot be restored")
        self._state.restore()
        self._code.check()
        if self._weights is not None:
            self._weights.check()
        elif self._has_weights:
            raise ResetError("this system does not show which memory was written to")


class _Code:
    """The functions that a model's modules run: members of their classes and of the defining files."""

    def __init__(self, module: torch.nn.Module) -> None:
        kinds = {kind for part in module.modules() for kind in type(part).__mro__} - {object}
        files = {sys.modules.get(kind.__module__) for kind in kinds} | {torch, torch.nn.functional}
        owners: list[tuple[str, dict[Any, Any]]] = [
            *((f"the class {kind.__qualname__}", members_of(kind)) for kind in kinds),
            *((f"the module {file.__name__}", vars(file)) for file in files if file is not None),
        ]
        self._names = [name for name, _ in owners]
        self._members = [members for _, members in owners]
        self._before = [copied(members) for members in self._members]
        self._versions = DictVersions(self._members)

    def check(self) -> None:
        """Raise ResetError if a function was replaced; attributes that libraries add lazily may stay."""
        for at in self._versions.changed():
            if (name := _replaced(self._members[at], self._before[at].items())) is not None:
                raise ResetError(f"{name} of {self._names[at]} was replaced")
        self._versions.record()


def _replaced(now: dict[Any, Any], before: Iterable[tuple[Any, Any]]) -> str | None:
    """Return the name under which another object has replaced a function or class, else None."""
    for name, value in before:
        if callable(value) and now.get(name) is not value:
            return str(name)
    return None
