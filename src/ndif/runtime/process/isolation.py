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
    from ndif.runtime.process.model_state import ModelState
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
    """The namespaces of a process that has run no user's code; None where each runner runs one request."""
    model_state: ModelState | None = None
    """The model's state there; None also where each runner has the weights at addresses of its own."""
    settings: Sequence[ProcessSetting] | None = None
    """The process's settings, which were found and read once; None where each runner runs one request."""

    @classmethod
    def prepare(
        cls, untrusted: UntrustedSettings, folder: Path, driver: DriverFiles | None
    ) -> Isolation:
        """Prepare both layers around the model in `folder`; `driver` are the files for weights on GPUs."""
        Path(untrusted.adapters).mkdir(parents=True, exist_ok=True)
        confinement = _confinement(untrusted, folder, driver)
        policy = None
        if untrusted.protector:
            from ndif.sandbox.protector import Protector

            policy = Protector(Path(untrusted.whitelist) if untrusted.whitelist else None)
        return cls(untrusted, confinement, policy, _permitted(untrusted, confinement))

    def warm_up(self, warmup_request: WarmupRequest) -> None:
        """Run a request under the policy, so that later ones find its modules and files loaded."""
        with nullcontext() if self.policy is None else self.policy.caching_prefix():
            warmup_request.run(self.policy)

    def decode_ahead(self) -> None:
        """Decode what the next request will have in common with others."""
        if self.policy is not None:
            self.policy.decode_ahead()

    def forget_decoded(self) -> None:
        """Drop what was decoded for a request that did not come."""
        if self.policy is not None:
            self.policy.forget_decoded()

    def reusable(self, model: Any, *, on_devices: bool) -> Isolation:
        """Return the same for runners of several requests, with what a reset restores.

        Where the weights are on devices, each runner has them at addresses of its own, and looks itself.
        """
        from ndif.runtime.process.model_state import ModelState
        from ndif.runtime.process.namespaces import Namespaces
        from ndif.runtime.process.process_settings import ProcessSettings

        # Under the policy no request can write to a function that is not its own.
        found = Namespaces.of_this_process(functions=self.policy is None)
        state = None if on_devices else ModelState(model)
        settings = ProcessSettings().known
        return replace(self, namespaces=found, model_state=state, settings=settings)

    def moved(self, folder: Path, driver: DriverFiles) -> Isolation:
        """Return the same around a model whose weights have moved to other devices."""
        if self.confinement.rules is not None:
            os.close(self.confinement.rules)
        confinement = _confinement(self.untrusted, folder, driver)
        permitted = _permitted(self.untrusted, confinement)
        return replace(self, confinement=confinement, permitted=permitted)

    def enter(self, start_driver: Callable[[], None] | None) -> None:
        """Confine this process; see `Confinement.apply` and `Protector.enter`."""
        # A confined process reaches no hub: an adapter is in this cache, or is not available.
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
    """Find the modules that the operator lets a block import; return their files, wherever they are.

    A process that may not list the folders around them imports them from here on.
    """
    if not untrusted.protector or not untrusted.whitelist:
        return []
    from ndif.sandbox.protector.whitelist import Whitelist

    roots = {name.partition(".")[0] for name in Whitelist.read(Path(untrusted.whitelist)).modules}
    found: dict[str, ModuleSpec] = {}
    for root in roots:
        with suppress(ImportError, ValueError):
            if (spec := find_spec(root)) is not None:
                found[root] = spec
    sys.meta_path.insert(0, _Found(found))
    return [path for spec in found.values() for path in module_path(spec)]


class _Found(MetaPathFinder):
    """Modules that were found before their folders could no longer be listed."""

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
        # Which adapters others use is theirs to tell.
        unlisted=[Path(untrusted.adapters).resolve()],
        memory_bytes=untrusted.memory_bytes,
        result_bytes=untrusted.result_bytes,
        max_threads=untrusted.max_threads,
        driver=driver,
    )
