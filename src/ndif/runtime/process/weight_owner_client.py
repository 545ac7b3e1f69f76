"""The zygote's client of weight owners: the first loads the weights, later ones take them from a cache."""

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

from ndif.runtime.frames import Channel
from ndif.runtime.generations import Generation
from ndif.runtime.process.driver import Driver, runner_shares
from ndif.runtime.process.weight_owner import ModelExport, own, own_again
from ndif.runtime.spec import ModelSpec
from ndif.runtime.weights.weights import install

if TYPE_CHECKING:
    from ndif.runtime.weights.cached_weights import CachedWeights

RunAsChild = Callable[[Callable[[], None]], NoReturn]
"""Runs a function in a fork of the zygote and ends the fork."""

_RESERVED_FRACTION = 0.1
"""Fraction of the machine's memory that must stay available beside a cache that is kept unused."""


class WeightOwnerClient:
    """Start weight owners, send them requests, and map their weights in runners.

    Owns the channel to the present owner's process and the cache of the weights in the CPU's memory. The
    zygote calls it; runners, which are forks of the zygote, map the weights through it.
    """

    def __init__(
        self,
        control: Channel,
        spec: ModelSpec,
        generation: Generation,
        driver: Driver,
        run_as_child: RunAsChild,
    ) -> None:
        """Start an owner that loads the model.

        Raises:
            RuntimeError: if the owner's process ended before the model was loaded.
        """
        self._control = control
        self._node_spec = spec
        self._spec = spec = driver.select(spec)
        self._generation = generation
        self._driver = driver
        self._run_as_child = run_as_child
        self._cached: tuple[CachedWeights, int] | None = None
        """The cache of unchanged weights in the CPU's memory, and a descriptor of the memory."""
        self.owner: int | None = None
        """Process id of the owner; None if there is none."""
        self.exported = self._start_owner(lambda channel: own(channel, spec, generation, driver))

    @property
    def channel(self) -> socket.socket:
        """Return the socket on which the owner's answers arrive."""
        return self._channel.socket

    def ask_to_verify(self) -> None:
        """Ask the owner to verify its weights and restore changed ones; `answer` returns the outcome."""
        if not _can_keep_cache():
            self._drop_cache()
        self._channel.send({"kind": "verify", "keep_cache": self._cached is not None})

    def answer(self) -> tuple[dict[str, Any], bytes]:
        """Return the owner's next answer.

        Raises:
            EOFError: if the owner has ended.
        """
        header, body, _ = self._channel.receive()
        return header, bytes(body)

    def cache(self) -> None:
        """Move the weights to the CPU's memory and end the owner; no runner may be left.

        Raises:
            RuntimeError: if the owner cannot move them.
        """
        self._channel.send({"kind": "cache"})
        header, body, fds = self._channel.receive()
        if header["kind"] == "failed":
            raise RuntimeError(body.decode(errors="replace"))
        if fds:
            self._drop_cache()
            self._cached = pickle.loads(body), fds[0]  # noqa: S301 - a fork of this process sent it
        self._reap()
        self._channel.socket.close()

    def uncache(self, max_memory: Mapping[int, int] | None) -> None:
        """Start another owner that moves the cached weights to devices; a failure cannot be undone.

        Raises:
            RuntimeError: if the owner's process ended before the weights were loaded.
        """
        assert self._cached is not None  # noqa: S101 - the host uncaches only what it cached
        (cached, fd), before = self._cached, self.exported
        self._node_spec = replace(self._node_spec, max_memory=max_memory)
        self._spec = spec = self._driver.select(self._node_spec)
        # Trusted requests may change weights for good, and no checksum would show it.
        keep = spec.untrusted is not None and _can_keep_cache()
        self.exported = self._start_owner(
            lambda channel: own_again(
                channel, spec, self._generation, self._driver, cached, fd, before, keep=keep
            )
        )
        if not keep:
            self._drop_cache()
        self._generation.move(self.exported.placement)

    def leave_to_parent(self) -> None:
        """Close the owner's channel in a fork that becomes a runner.

        Call it before the runner closes its parent's descriptors: afterwards other files may have their
        numbers.
        """
        self._channel.socket.close()

    def start(self) -> None:
        """Start the driver and map the weights in this process, which is a runner."""
        shares = runner_shares(self._spec.max_memory, self.exported.weight_bytes)
        self._driver.start(self.exported.placement.device, shares)
        install(self._generation.model._module, self.exported.weights.tensors())

    def _drop_cache(self) -> None:
        if self._cached is not None:
            os.close(self._cached[1])
            self._cached = None

    def _start_owner(self, run: Callable[[Channel], None]) -> ModelExport:
        """Fork an owner that executes `run`, and return once it has loaded the weights."""
        connection, owner_end = socket.socketpair()
        self.owner = os.fork()
        if self.owner == 0:
            connection.close()
            self._run_as_child(lambda: run(Channel(owner_end)))
        owner_end.close()
        # The socket stays open: the owner ends when it is closed.
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
                case "loaded":
                    export: ModelExport = pickle.loads(body)  # noqa: S301 - a fork of this process sent it
                    return export

    def _reap(self) -> int:
        """Wait until the owner ends and return its exit code."""
        assert self.owner is not None  # noqa: S101 - an owner was forked
        owner, self.owner = self.owner, None
        return os.waitstatus_to_exitcode(os.waitpid(owner, 0)[1])


def _can_keep_cache() -> bool:
    """Return True if the machine has memory for a cache that only saves a later copy."""
    fields = re.findall(
        r"^(MemTotal|MemAvailable):\s+(\d+)", Path("/proc/meminfo").read_text(), re.M
    )
    known = {name: int(kib) * 1024 for name, kib in fields}
    return known["MemAvailable"] > known["MemTotal"] * _RESERVED_FRACTION
