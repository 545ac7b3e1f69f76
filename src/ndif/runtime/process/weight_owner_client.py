"""The zygote's end of owners: one that loads the weights, and others that have them after a pause."""

from __future__ import annotations

import os
import pickle
import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ndif.runtime.driver import Driver
from ndif.runtime.frames import Channel
from ndif.runtime.generations import Generation
from ndif.runtime.memory import runner_shares
from ndif.runtime.owner import Owned, own, own_again
from ndif.runtime.spec import ModelSpec
from ndif.runtime.weights import install

if TYPE_CHECKING:
    from ndif.runtime.cached import Cached

BeChild = Callable[[Callable[[], None]], NoReturn]
"""Runs something in a fork of the zygote, and ends the fork."""

_KEPT_FREE = 0.1
"""The part of the machine's memory that stays available beside weights that are kept there unused."""


class Custody:
    """Weights that are in another process, or in memory that waits for the next.

    Owns the channel to the process that has them, and the memory. The zygote asks it; runners, which are
    forks of the zygote, map the weights through it.
    """

    def __init__(
        self,
        control: Channel,
        spec: ModelSpec,
        generation: Generation,
        driver: Driver,
        be_child: BeChild,
    ) -> None:
        """Have an owner load the model.

        Raises:
            RuntimeError: if it ended over it.
        """
        self._control = control
        self._node_spec = spec
        self._spec = spec = driver.select(spec)
        self._generation = generation
        self._driver = driver
        self._be_child = be_child
        self._memory: tuple[Cached, int] | None = None
        """Unchanged weights in the CPU's memory, and a descriptor of it."""
        self.owner: int | None = None
        """Process id of the owner; None if there is none."""
        self.owned = self._have(lambda channel: own(channel, spec, generation, driver))

    @property
    def channel(self) -> socket.socket:
        """The owner's channel, on which its answers come."""
        return self._channel.socket

    def ask_to_verify(self) -> None:
        """Ask the owner to verify its weights and to restore those that changed; `answer` follows."""
        if not _can_spare():
            self._forget_memory()
        self._channel.send({"kind": "verify", "keep_memory": self._memory is not None})

    def answer(self) -> tuple[dict[str, Any], bytes]:
        """Return the owner's next answer.

        Raises:
            EOFError: if it has ended.
        """
        header, body, _ = self._channel.receive()
        return header, bytes(body)

    def cache(self) -> None:
        """Move the weights to the CPU's memory and end the owner. No runner may be there any more.

        Raises:
            RuntimeError: if the owner cannot.
        """
        self._channel.send({"kind": "cache"})
        header, body, fds = self._channel.receive()
        if header["kind"] == "failed":
            raise RuntimeError(body.decode(errors="replace"))
        if fds:
            self._forget_memory()
            self._memory = pickle.loads(body), fds[0]  # noqa: S301 - its maker is a fork of this
        self._reap()
        self._channel.socket.close()

    def uncache(self, max_memory: Mapping[int, int] | None) -> None:
        """Have another owner put them on devices; there is no way back from a failure.

        Raises:
            RuntimeError: if it ended over it.
        """
        assert self._memory is not None  # noqa: S101 - the host knows what is cached
        (cached, fd), before = self._memory, self.owned
        self._node_spec = replace(self._node_spec, max_memory=max_memory)
        self._spec = spec = self._driver.select(self._node_spec)
        # Those who are trusted may change weights for good, and nobody would know.
        keep = spec.untrusted is not None and _can_spare()
        self.owned = self._have(
            lambda channel: own_again(
                channel, spec, self._generation, self._driver, cached, fd, before, keep=keep
            )
        )
        if not keep:
            self._forget_memory()
        self._generation.move(self.owned.placement)

    def leave_to_parent(self) -> None:
        """Close this process's end of the owner's channel, in a fork that will be a runner.

        Before the runner parts with its parent's descriptors, whose numbers others may have then.
        """
        self._channel.socket.close()

    def start(self) -> None:
        """Start the driver and have the weights in this process, which is a runner."""
        shares = runner_shares(self._spec.max_memory, self.owned.weight_bytes)
        self._driver.start(self.owned.placement.device, shares)
        install(self._generation.model._module, self.owned.weights.tensors())

    def _forget_memory(self) -> None:
        if self._memory is not None:
            os.close(self._memory[1])
            self._memory = None

    def _have(self, run: Callable[[Channel], None]) -> Owned:
        """Fork an owner that does `run`, and wait until it has the weights."""
        connection, theirs = socket.socketpair()
        self.owner = os.fork()
        if self.owner == 0:
            connection.close()
            self._be_child(lambda: run(Channel(theirs)))
        theirs.close()
        # It stays open: its end is the owner's sign to end.
        self._channel = Channel(connection)
        while True:
            try:
                header, body, _ = self._channel.receive()
            except EOFError as error:
                raise RuntimeError(
                    f"the process that loads the weights ended ({self._reap()})"
                ) from error
            match header["kind"]:
                case "progress":
                    self._control.send(header)
                case "failed":
                    self._control.send(header, bytes(body))
                    sys.exit(1)
                case "owned":
                    owned: Owned = pickle.loads(body)  # noqa: S301 - its maker is a fork of this
                    return owned

    def _reap(self) -> int:
        """Wait for the owner's end; return its exit code."""
        assert self.owner is not None  # noqa: S101 - it was forked
        owner, self.owner = self.owner, None
        return os.waitstatus_to_exitcode(os.waitpid(owner, 0)[1])


def _can_spare() -> bool:
    """Return True if the machine has memory for weights that only spare a later copy."""
    fields = re.findall(
        r"^(MemTotal|MemAvailable):\s+(\d+)", Path("/proc/meminfo").read_text(), re.M
    )
    known = {name: int(kib) * 1024 for name, kib in fields}
    return known["MemAvailable"] > known["MemTotal"] * _KEPT_FREE
