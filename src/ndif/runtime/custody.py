"""The zygote's end of owners: one that loads the weights, and others that have them after a pause."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from ndif.runtime.frames import Channel
from ndif.runtime.generations import Generation
from ndif.runtime.memory import limit
from ndif.runtime.owner import Owned, own, own_again
from ndif.runtime.spec import ModelSpec
from ndif.runtime.weights import Export, install

if TYPE_CHECKING:
    from ndif.runtime.cached import Cached

BeChild = Callable[[Callable[[], None]], NoReturn]
"""What a fork of the zygote does: run something, and end."""


class Custody:
    """Weights that are in another process, or in memory that waits for the next."""

    def __init__(
        self,
        control: Channel,
        spec: ModelSpec,
        generation: Generation,
        export: Export,
        be_child: BeChild,
    ) -> None:
        """Have an owner load the model.

        Raises:
            RuntimeError: if it ended over it.
        """
        self._control = control
        self._spec = spec
        self._generation = generation
        self._export = export
        self._be_child = be_child
        self._cached: tuple[Cached, int] | None = None
        self.owner: int | None = None
        """Its process."""
        self.owned = self._have(lambda channel: own(channel, spec, generation, export))

    def verify(self) -> int:
        """Have the owner see that its weights are as they were, and make them so; how many were not."""
        self._channel.send({"kind": "verify"})
        header, _, _ = self._channel.receive()
        return int(header["restored"])

    def cache(self) -> None:
        """Have the weights in the CPU's memory, and no owner. No runner may be there any more."""
        self._channel.send({"kind": "cache"})
        _, body, fds = self._channel.receive()
        self._cached = pickle.loads(body), fds[0]  # noqa: S301 - its maker is a fork of this
        self._reap()
        self._channel.socket.close()

    def uncache(self, max_memory: Mapping[int, int] | None) -> None:
        """Have another owner put them on devices; there is no way back from a failure.

        Raises:
            RuntimeError: if it ended over it.
        """
        assert self._cached is not None  # noqa: S101 - the host knows what is cached
        (cached, fd), before = self._cached, self.owned
        self._spec = spec = replace(self._spec, max_memory=max_memory)
        self.owned = self._have(
            lambda channel: own_again(
                channel, spec, self._generation, self._export, cached, fd, before
            )
        )
        os.close(fd)
        self._cached = None
        self._generation.move(self.owned.placement)

    def install(self) -> None:
        """Have the weights in this process, which is a runner."""
        self._channel.socket.close()
        self.owned.placement.enter()
        limit(self._spec.max_memory)
        install(self._generation.model._module, self.owned.weights.tensors())

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
        """Wait for the owner's end; its exit code."""
        assert self.owner is not None  # noqa: S101 - it was forked
        owner, self.owner = self.owner, None
        return os.waitstatus_to_exitcode(os.waitpid(owner, 0)[1])
