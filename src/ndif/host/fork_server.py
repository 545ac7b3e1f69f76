"""Processes that load or measure models, forked by a server that has imported torch or started directly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from typing import IO

from ndif.host.channel import until_ready
from ndif.host.environment import environment, for_untrusted
from ndif.host.heartbeat import FROZEN_S, sign_of_life, until_frozen
from ndif.host.runtimes import Runtime
from ndif.runtime.frames import FrameChannel
from ndif.runtime.messages import StartModule
from ndif.runtime.process.fork_server import OPTION, STATUS, UNTRUSTED
from ndif.tasks import end, within

logger = logging.getLogger(__name__)

_IDLE_S = 600.0
_PATIENCE_S = 5.0
"""Seconds within which a fork server reports the exit code of a child that has ended."""
_POLL_S = 0.1
"""Seconds between polls of a process on a kernel without `pidfd_open`."""


class ForkServerError(Exception):
    """A fork server cannot fork, or has ended."""


class FrozenError(OSError):
    """A fork server shows no sign of life; it may still fork the requested child."""


class Process:
    """A process of this host, with a part of the interface of `asyncio.subprocess.Process`.

    A descriptor of the process (pidfd) reports the end of the process. The pipes cannot: programs that a
    block has started may outlive the process and hold the pipes open.
    """

    def __init__(self, pid: int, stdout: asyncio.StreamReader | None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = stdout
        """Output of the process, from both streams; None if it is discarded."""
        self._ended = asyncio.create_task(self._watch(), name="process")

    async def wait(self) -> int:
        """Wait for the end; return the exit code, or the negated signal number."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """End the process now; raise `ProcessLookupError` if it has ended."""
        raise NotImplementedError

    async def _watch(self) -> int:
        """Record and return the exit code once the process has ended."""
        raise NotImplementedError


class ForkedProcess(Process):
    """A child of a fork server, which reports its exit code.

    A child ends with its server, and the server with this process.
    """

    def __init__(
        self, pid: int, descriptor: int, status: socket.socket, stdout: asyncio.StreamReader | None
    ) -> None:
        self._descriptor = descriptor
        self._status = status
        super().__init__(pid, stdout)

    def kill(self) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    async def _watch(self) -> int:
        try:
            await until_ready(self._descriptor)
            report = b""
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                loop = asyncio.get_running_loop()
                report = await within(loop.sock_recv(self._status, 64), _PATIENCE_S)
            # Without a report the server has ended, which kills its children.
            self.returncode = code = int(STATUS.unpack(report)[0] if report else -signal.SIGKILL)
            return code
        finally:
            os.close(self._descriptor)
            self._status.close()


class StartedProcess(Process):
    """A child of this process, started without a fork server."""

    def __init__(
        self, process: subprocess.Popen[bytes], stdout: asyncio.StreamReader | None
    ) -> None:
        self._process = process
        super().__init__(process.pid, stdout)

    def kill(self) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        self._process.kill()

    async def _watch(self) -> int:
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:  # before Linux 5.3
            while self._process.poll() is None:  # noqa: ASYNC110 - no event to wait for
                await asyncio.sleep(_POLL_S)
        else:
            try:
                await until_ready(descriptor)
            finally:
                os.close(descriptor)
        self.returncode = code = self._process.wait()
        return code


async def _reader(pipe: IO[bytes]) -> asyncio.StreamReader:
    """Return a reader of a pipe; it closes the pipe at the end of the file."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    return reader


class _ForkServer:
    """The fork server of one runtime and environment, usable from any event loop."""

    def __init__(
        self, runtime: Runtime, variables: Mapping[str, str], frozen_s: float, *, untrusted: bool
    ) -> None:
        """Start the server; raise an `OSError` if that fails."""
        self._frozen_s = frozen_s
        control, theirs = socket.socketpair()
        self._control = FrameChannel(control)
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
                    [
                        str(runtime.interpreter),
                        *("-m", "ndif.runtime", str(theirs.fileno()), OPTION, runtime.generation),
                        *([UNTRUSTED] if untrusted else ()),
                    ],
                    pass_fds=[theirs.fileno()],
                    env=dict(variables),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    # Ctrl-C is for the host, which decides when its processes end.
                    start_new_session=True,
                )
        except BaseException:
            control.close()
            raise
        self._has_forked = False
        self.requested = 0
        """Number of children requested and not yet forked."""
        self._children: set[ForkedProcess] = set()
        self.used_at = time.monotonic()

    @property
    def was_killed(self) -> bool:
        """Return True if the server has ended after a successful fork, so that a restart is worth a try."""
        return self._process.poll() is not None and self._has_forked

    @property
    def is_idle(self) -> bool:
        """Return True if no child of the server is alive or requested."""
        return not self.requested and all(child.returncode is not None for child in self._children)

    async def fork(
        self, module: str, channel: socket.socket, *, keep_output: bool
    ) -> ForkedProcess:
        """Fork a child that runs `module` and talks over `channel`, or raise a `ForkServerError`.

        After a `FrozenError` the server may still fork the child, so `channel` must not be used again.
        """
        with contextlib.ExitStack() as until_forked:
            status, theirs = socket.socketpair()
            until_forked.callback(status.close)
            if keep_output:
                reading, output = os.pipe()
                until_forked.callback(os.close, reading)
            else:
                output = os.open(os.devnull, os.O_WRONLY)
            try:
                fds = [theirs.fileno(), output, channel.fileno()]
                self._control.send(StartModule(module), fds=fds)
            except OSError as error:
                raise ForkServerError(str(error)) from error
            finally:
                theirs.close()
                os.close(output)
            status.setblocking(False)
            answered = asyncio.ensure_future(until_ready(status.fileno()))
            pid = self._process.pid
            frozen = asyncio.ensure_future(until_frozen(lambda: sign_of_life(pid), self._frozen_s))
            try:
                await asyncio.wait({answered, frozen}, return_when=asyncio.FIRST_COMPLETED)
                if not answered.done():
                    raise FrozenError(f"fork server {pid} shows no sign of life")
            finally:
                await end([answered, frozen])
            report, descriptors, _, _ = socket.recv_fds(status, STATUS.size, 1)
            if not report:
                raise ForkServerError("the fork server ended")
            until_forked.pop_all()
            stdout = None
            if keep_output:
                stdout = await _reader(os.fdopen(reading, "rb", buffering=0))
            child = ForkedProcess(STATUS.unpack(report)[0], descriptors[0], status, stdout)
            self._has_forked = True
            self._children = {other for other in self._children if other.returncode is None} | {
                child
            }
            return child

    def stop(self) -> None:
        """End the server and its remaining children."""
        self._control.socket.close()
        self._process.kill()
        self._process.wait()


_Key = tuple[Runtime, tuple[tuple[str, str], ...]]


class ForkServers:
    """The fork servers of one host, by runtime and environment.

    Processes for untrusted code have an environment without secrets, and therefore their own fork server.
    Servers of the runtime installed with ndif stay; other servers end after `idle_s` without a child.
    """

    def __init__(self, idle_s: float = _IDLE_S, frozen_s: float = FROZEN_S) -> None:
        self._frozen_s = frozen_s
        self.devices: str | None = None
        """The `CUDA_VISIBLE_DEVICES` of every process, once the GPUs of this machine are known."""
        self._idle_s = idle_s
        self._servers: dict[_Key, _ForkServer] = {}
        self._frozen: list[_ForkServer] = []
        """Frozen servers: they get no more requests, but their children may live."""

    def prepare(self, runtime: Runtime, *, untrusted: bool) -> None:
        """Start the fork server for these processes, unless it runs or has ended before its first fork."""
        key = self._key(runtime, untrusted=untrusted)
        if key in self._servers and not self._servers[key].was_killed:
            return
        try:
            self._servers[key] = _ForkServer(
                runtime, dict(key[1]), self._frozen_s, untrusted=untrusted
            )
        except OSError as error:
            logger.warning(
                "the fork server of nnsight %s did not start: %s", runtime.version, error
            )
            return
        self._retire_later(key)

    async def start(
        self,
        runtime: Runtime,
        module: str,
        channel: socket.socket,
        *,
        untrusted: bool,
        keep_output: bool = True,
    ) -> Process:
        """Start `python -m MODULE FD`, forked where a server was prepared; FD is `channel`.

        Raise an `OSError` if the process cannot be started.
        """
        key = self._key(runtime, untrusted=untrusted)
        if key in self._servers:
            if self._servers[key].was_killed:
                self.prepare(runtime, untrusted=untrusted)
            server = self._servers[key]
            server.requested, server.used_at = server.requested + 1, time.monotonic()
            try:
                return await server.fork(module, channel, keep_output=keep_output)
            except FrozenError as error:
                logger.error("%s; it gets no further requests", error)  # noqa: TRY400 - a sentence
                if self._servers.get(key) is server:
                    self._frozen.append(self._servers.pop(key))
                raise
            except ForkServerError as error:
                logger.warning("a process of nnsight %s is not forked: %s", runtime.version, error)
            finally:
                server.requested -= 1
                self._retire_later(key)
        # A new session: Ctrl-C is for the host, which decides when its processes end.
        process = subprocess.Popen(  # noqa: S603, ASYNC220 - our own interpreter
            [str(runtime.interpreter), "-m", module, str(channel.fileno())],
            pass_fds=[channel.fileno()],
            env=dict(key[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if keep_output else subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        pipe = process.stdout
        return StartedProcess(process, None if pipe is None else await _reader(pipe))

    def stop(self) -> None:
        """End every server and its remaining children."""
        for server in [*self._servers.values(), *self._frozen]:
            server.stop()
        self._servers.clear()
        self._frozen.clear()

    def _key(self, runtime: Runtime, *, untrusted: bool) -> _Key:
        variables = environment(runtime, self.devices)
        kept = for_untrusted(variables) if untrusted else variables
        return runtime, tuple(sorted(kept.items()))

    def _retire_later(self, key: _Key) -> None:
        if key[0].path:
            asyncio.get_running_loop().call_later(self._idle_s, self._retire, key)

    def _retire(self, key: _Key) -> None:
        server = self._servers.get(key)
        if server is None:
            return
        if not server.is_idle:
            self._retire_later(key)
        elif time.monotonic() - server.used_at >= self._idle_s:
            del self._servers[key]
            server.stop()
