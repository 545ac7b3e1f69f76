"""The two layers around untrusted code: the kernel's confinement and the policy for Python code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants

from ndif.runtime.spec import UntrustedSettings
from ndif.sandbox.confinement.confinement import (
    Confinement,
    DriverFiles,
    checkpoint_paths,
    module_path,
)

if TYPE_CHECKING:
    from ndif.runtime.process.model_state import ModuleTreeState
    from ndif.runtime.process.namespaces import Namespaces
    from ndif.runtime.process.process_settings import ProcessSetting
    from ndif.runtime.process.warmup_request import WarmupRequest
    from ndif.sandbox.protector import Protector
    from ndif.sandbox.protector.audit import PermittedPaths


@dataclass(frozen=True, slots=True)
class Isolation:
    """The confinement and the policy for untrusted code: prepared by the zygote, entered by each runner."""

    untrusted: UntrustedSettings
    confinement: Confinement
    policy: Protector | None
    permitted: PermittedPaths | None
    """Files that the policy lets Python open; None without a policy."""
    namespaces: Namespaces | None = None
    """The namespaces before any user code has run; None if each runner runs one request."""
    model_state: ModuleTreeState | None = None
    """The model's state before any user code has run.

    None if each runner runs one request, or maps the weights at its own addresses.
    """
    settings: Sequence[ProcessSetting] | None = None
    """The list of the process's settings, determined once; None if each runner runs one request."""

    @classmethod
    def prepare(
        cls, untrusted: UntrustedSettings, folder: Path, driver: DriverFiles | None
    ) -> Isolation:
        """Prepare both layers for the model in `folder`; `driver` has the files for weights on GPUs."""
        Path(untrusted.adapters).mkdir(parents=True, exist_ok=True)
        confinement = _confinement(untrusted, folder, driver)
        policy = None
        if untrusted.protector:
            from ndif.sandbox.protector import Protector

            policy = Protector(Path(untrusted.whitelist) if untrusted.whitelist else None)
        return cls(untrusted, confinement, policy, _permitted(untrusted, confinement))

    def warm_up(self, warmup_request: WarmupRequest) -> None:
        """Run the warm-up request under the policy: later requests then find modules and files loaded."""
        with nullcontext() if self.policy is None else self.policy.caching_prefix():
            warmup_request.run(self.policy)

    def decode_ahead(self) -> None:
        """Decode the part of the next payload that is common to all payloads."""
        if self.policy is not None:
            self.policy.decode_ahead()

    def forget_decoded(self) -> None:
        """Drop decoded objects that no request has used."""
        if self.policy is not None:
            self.policy.forget_decoded()

    def reusable(self, model: Any, *, on_devices: bool) -> Isolation:
        """Return this isolation for runners of several requests, with the state that a reset restores.

        On devices, each runner maps the weights at its own addresses and records the model's state itself.
        """
        from ndif.runtime.process.model_state import ModuleTreeState
        from ndif.runtime.process.namespaces import Namespaces
        from ndif.runtime.process.process_settings import ProcessSettings

        # Under the policy, a request can change no functions but its own.
        namespaces = Namespaces.of_this_process(functions=self.policy is None)
        state = None if on_devices else ModuleTreeState(model)
        settings = ProcessSettings().settings
        return replace(self, namespaces=namespaces, model_state=state, settings=settings)

    def moved(self, folder: Path, driver: DriverFiles) -> Isolation:
        """Return this isolation for a model whose weights have moved to other devices."""
        if self.confinement.rules is not None:
            os.close(self.confinement.rules)
        confinement = _confinement(self.untrusted, folder, driver)
        permitted = _permitted(self.untrusted, confinement)
        return replace(self, confinement=confinement, permitted=permitted)

    def enter(self, start_driver: Callable[[], None] | None) -> None:
        """Confine this process; see `Confinement.apply` and `Protector.enter`."""
        # A confined process cannot reach the hub: only adapters in this cache are available.
        constants.HF_HUB_OFFLINE = True
        constants.HF_HUB_CACHE = self.untrusted.adapters
        self.confinement.apply(start_driver)
        if self.policy is not None and self.permitted is not None:
            self.policy.enter(self.permitted)


def _permitted(untrusted: UntrustedSettings, confinement: Confinement) -> PermittedPaths | None:
    if not untrusted.protector:
        return None
    from ndif.sandbox.protector.audit import PermittedPaths

    return PermittedPaths.of(*confinement.paths(), confinement.unlisted)


def operator_modules(untrusted: UntrustedSettings) -> list[Path]:
    """Find the modules that the operator permits blocks to import, and return their files.

    An import finder is installed, because a confined process cannot list the folders of these modules.
    """
    if not untrusted.protector or not untrusted.whitelist:
        return []
    from ndif.sandbox.protector.whitelist import Whitelist

    roots = {name.partition(".")[0] for name in Whitelist.read(Path(untrusted.whitelist)).modules}
    specs: dict[str, ModuleSpec] = {}
    for root in roots:
        with suppress(ImportError, ValueError):
            if (spec := find_spec(root)) is not None:
                specs[root] = spec
    sys.meta_path.insert(0, _LocatedModules(specs))
    return [path for spec in specs.values() for path in module_path(spec)]


class _LocatedModules(MetaPathFinder):
    """An import finder for modules that were located before confinement."""

    def __init__(self, modules: dict[str, ModuleSpec]) -> None:
        self._modules = modules

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        return self._modules.get(fullname)


def _confinement(
    untrusted: UntrustedSettings, folder: Path, driver: DriverFiles | None
) -> Confinement:
    return Confinement.prepare(
        untrusted.sandbox,
        readable=(*checkpoint_paths(folder), *operator_modules(untrusted)),
        # Unlisted, so that a request cannot see which adapters others use.
        unlisted=[Path(untrusted.adapters).resolve()],
        memory_bytes=untrusted.memory_bytes,
        result_bytes=untrusted.result_bytes,
        max_threads=untrusted.max_threads,
        driver=driver,
    )
