"""What a runner of untrusted code does before it reads a byte of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants

from ndif.runtime.generations.port import Policy
from ndif.runtime.spec import Untrusted
from ndif.sandbox.confinement import Confinement, DriverFiles, of_checkpoint

if TYPE_CHECKING:
    from ndif.runtime.namespaces import Namespaces
    from ndif.runtime.rehearsal import Rehearsal


@dataclass(frozen=True, slots=True)
class Stranger:
    """The two layers around the code of somebody unknown, made once and entered by each runner."""

    confinement: Confinement
    policy: Policy | None
    adapters: str
    namespaces: Namespaces | None = None
    """The namespaces of a process that has run nobody's code; None where each runs one request."""

    @classmethod
    def prepare(
        cls,
        untrusted: Untrusted,
        folder: Path,
        driver: DriverFiles | None,
        rehearsal: Rehearsal | None,
    ) -> Stranger:
        """Make both, and have what they import and read here for every fork.

        Args:
            folder: The model's.
            driver: Files that runners need where the weights are on GPUs.
            rehearsal: None where this process has no weights.

        Raises:
            ConfinementError: if this machine cannot hold what it must.
            ValueError: if the operator's whitelist cannot be read.
        """
        Path(untrusted.adapters).mkdir(parents=True, exist_ok=True)
        confinement = _confinement(untrusted, folder, driver)
        policy = _policy(untrusted)
        stranger = cls(confinement, policy, untrusted.adapters)
        if rehearsal is not None:
            stranger.rehearse(rehearsal)
        return stranger

    def rehearse(self, rehearsal: Rehearsal) -> None:
        """Run a request under the policy, so that those that come find what it imports and reads."""
        with nullcontext() if self.policy is None else self.policy.foreseeing():
            rehearsal.run(self.policy)

    def reusable(self) -> Stranger:
        """Return the same for runners of more than one request, which have to know what to go back to."""
        from ndif.runtime.namespaces import Namespaces

        return replace(self, namespaces=Namespaces())

    def moved(self, untrusted: Untrusted, folder: Path, driver: DriverFiles) -> Stranger:
        """Return the same around a model whose weights have come to other memory.

        Raises:
            ConfinementError: if this machine cannot hold what it must.
        """
        if self.confinement.rules is not None:
            os.close(self.confinement.rules)
        return replace(self, confinement=_confinement(untrusted, folder, driver))

    def enter(self, start_driver: Callable[[], None] | None) -> None:
        """Confine this process; see `Confinement.enter`.

        Raises:
            ConfinementError: if this machine cannot, and must.
        """
        # What it could not fetch it shall not try to: an adapter is here, or is not to be had.
        constants.HF_HUB_OFFLINE = True
        constants.HF_HUB_CACHE = self.adapters
        self.confinement.enter(start_driver)


def _confinement(untrusted: Untrusted, folder: Path, driver: DriverFiles | None) -> Confinement:
    return Confinement.prepare(
        untrusted.sandbox,
        readable=(*of_checkpoint(folder), Path(untrusted.adapters).resolve()),
        memory_bytes=untrusted.memory_bytes,
        result_bytes=untrusted.result_bytes,
        max_threads=untrusted.max_threads,
        driver=driver,
    )


def _policy(untrusted: Untrusted) -> Policy | None:
    if not untrusted.protector:
        return None
    from ndif.sandbox.protector import Protector

    return Protector(Path(untrusted.whitelist) if untrusted.whitelist else None)
