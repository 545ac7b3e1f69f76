"""The two layers around untrusted code: the kernel's confinement and the policy for Python code."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants

from ndif.runtime.generations.port import CodePolicy
from ndif.runtime.spec import UntrustedSettings
from ndif.sandbox.confinement.confinement import Confinement, DriverFiles, checkpoint_paths

if TYPE_CHECKING:
    from ndif.runtime.process.namespaces import Namespaces
    from ndif.runtime.process.warmup_request import WarmupRequest


@dataclass(frozen=True, slots=True)
class Isolation:
    """The confinement and the policy for untrusted code.

    The zygote prepares them once; each runner enters the confinement before it reads a byte of a request
    and runs requests under the policy.
    """

    confinement: Confinement
    policy: CodePolicy | None
    adapters: str
    namespaces: Namespaces | None = None
    """The namespaces of a process that has run no user's code; None where each runner runs one request."""

    @classmethod
    def prepare(
        cls,
        untrusted: UntrustedSettings,
        folder: Path,
        driver: DriverFiles | None,
        warmup_request: WarmupRequest | None,
    ) -> Isolation:
        """Prepare both layers, and load the modules and files that every fork needs for them.

        Args:
            untrusted: The settings for untrusted code.
            folder: The checkpoint's folder.
            driver: Files that runners need where the weights are on GPUs.
            warmup_request: A request to run under the policy; None where this process has no weights.

        Raises:
            ConfinementError: if this machine cannot confine a process as the settings require.
            ValueError: if the operator's whitelist cannot be read.
        """
        Path(untrusted.adapters).mkdir(parents=True, exist_ok=True)
        confinement = _confinement(untrusted, folder, driver)
        policy = _policy(untrusted)
        isolation = cls(confinement, policy, untrusted.adapters)
        if warmup_request is not None:
            isolation.warm_up(warmup_request)
        return isolation

    def warm_up(self, warmup_request: WarmupRequest) -> None:
        """Run a request under the policy, so that later ones find its modules and files loaded."""
        with nullcontext() if self.policy is None else self.policy.caching_prefix():
            warmup_request.run(self.policy)

    def reusable(self) -> Isolation:
        """Return the same for runners of several requests, with the namespaces that a reset restores."""
        from ndif.runtime.process.namespaces import Namespaces

        return replace(self, namespaces=Namespaces())

    def moved(self, untrusted: UntrustedSettings, folder: Path, driver: DriverFiles) -> Isolation:
        """Return the same around a model whose weights have moved to other devices.

        Raises:
            ConfinementError: if this machine cannot confine a process as the settings require.
        """
        if self.confinement.rules is not None:
            os.close(self.confinement.rules)
        return replace(self, confinement=_confinement(untrusted, folder, driver))

    def enter(self, start_driver: Callable[[], None] | None) -> None:
        """Confine this process; see `Confinement.apply`.

        Raises:
            ConfinementError: if the process cannot be confined, and must be.
        """
        # A confined process reaches no hub: an adapter is in this cache, or is not available.
        constants.HF_HUB_OFFLINE = True
        constants.HF_HUB_CACHE = self.adapters
        self.confinement.apply(start_driver)


def _confinement(
    untrusted: UntrustedSettings, folder: Path, driver: DriverFiles | None
) -> Confinement:
    return Confinement.prepare(
        untrusted.sandbox,
        readable=(*checkpoint_paths(folder), Path(untrusted.adapters).resolve()),
        memory_bytes=untrusted.memory_bytes,
        result_bytes=untrusted.result_bytes,
        max_threads=untrusted.max_threads,
        driver=driver,
    )


def _policy(untrusted: UntrustedSettings) -> CodePolicy | None:
    if not untrusted.protector:
        return None
    from ndif.sandbox.protector import Protector

    return Protector(Path(untrusted.whitelist) if untrusted.whitelist else None)
