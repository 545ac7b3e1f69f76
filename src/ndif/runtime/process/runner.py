"""A runner: a fork of the zygote that runs one request, or one after the other until its host hangs up."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import io
import os
import select
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

import torch
import zstandard

from ndif.runtime import memory
from ndif.runtime.driver import DeviceError, Driver
from ndif.runtime.frames import MAX_TEXT, Channel
from ndif.runtime.generations import BlockError, Conversation, Generation, PayloadError
from ndif.runtime.generations.port import Policy
from ndif.runtime.reset import SpentError
from ndif.runtime.results import STORE_LEVEL, Result, ResultTooLargeError
from ndif.runtime.tracebacks import explain
from ndif.runtime.warming import start_threads, warm_up

if TYPE_CHECKING:
    from ndif.runtime.proc_files import ProcFiles
    from ndif.runtime.reset import Reset
    from ndif.runtime.stranger import Stranger

_IDLE_S = 0.05
"""How long nothing must come before the runner tidies up, so that tidying delays nobody."""


_SIGNS_OF_A_LIMIT = (
    "MemoryError",
    "can't allocate memory",
    "Cannot allocate memory",
    "bad_alloc",
    "can't start new thread",
)
"""How Python, torch and the C library say that there is no more."""


class LogStream(io.TextIOBase):
    """Standard output of a block: each whole line becomes a message to its user."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._line = ""

    def writable(self) -> bool:
        """Text may be written."""
        return True

    def write(self, text: str) -> int:
        """Collect `text`; send every line that it ends."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._send(line)
        return len(text)

    def finish(self) -> None:
        """Send what no newline ended."""
        self._send(self._line)
        self._line = ""

    def _send(self, line: str) -> None:
        if not line.strip():
            return
        text = line.encode(errors="replace")
        for start in range(0, len(text), MAX_TEXT):
            self._channel.send({"kind": "log"}, text[start : start + MAX_TEXT])


def show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """A warning for the user, without the place on this machine that it comes from."""
    print(f"{category.__name__}: {message}", file=sys.stderr)


class Runner:
    """The loop that serves one channel."""

    def __init__(
        self,
        channel: Channel,
        generation: Generation,
        threads: int,
        driver: Driver | None,
        stranger: Stranger | None = None,
    ) -> None:
        """Start this process's threads.

        Args:
            driver: The driver of the devices that the weights are on, started; None on CPUs.
            stranger: Layers around untrusted code, entered; None for trusted code.
        """
        self._channel = channel
        self._generation = generation
        self._threads = start_threads(threads)
        self._driver = driver
        self._stranger = stranger
        self._peak: ProcFiles | None = None
        """Measures each of several requests of a confined process; None where there is one."""
        self._spilled = False
        """Whether a result was written into a file of the host's."""

    def warm_up(self) -> None:
        """Have ready what a first pass builds in each process."""
        warm_up(self._generation.model)

    def serve_once(self) -> None:
        """Run one request; the end of this process is what cleans up after it."""
        self._greet()
        with contextlib.suppress(EOFError, ConnectionError, DeviceError):
            header, payload, _ = self._channel.receive()
            self._run(header, bytes(payload))

    def serve_one_user(self, reset: Reset) -> None:
        """Run one user's requests, and after each be as before the first, or end."""
        self._peak = reset.proc_files
        warnings.showwarning = show_warning
        reset.begin()
        self._greet()
        with contextlib.suppress(EOFError, ConnectionError, DeviceError):
            while True:
                header, payload, _ = self._channel.receive()
                # What is set in a context goes with it.
                contextvars.copy_context().run(self._run, header, bytes(payload))
                spilled, payload = self._spilled, bytearray()
                try:
                    reset(spilled=spilled, header=header)
                except SpentError as error:
                    self._channel.send(
                        {"kind": "spent"}, str(error).encode(errors="replace")[:1000]
                    )
                    return
                self._channel.send({"kind": "idle"})

    def serve(self) -> None:
        """Run what comes until the host hangs up."""
        self._greet()
        while True:
            self._tidy_when_idle()
            try:
                header, payload, _ = self._channel.receive()
                self._run(header, bytes(payload))
            except (EOFError, ConnectionError, DeviceError):
                return
            del payload
            self._reset()

    def _greet(self) -> None:
        warnings.showwarning = show_warning
        self._channel.send({"kind": "idle"})

    def _run(self, header: Mapping[str, Any], payload: bytes) -> None:
        # An earlier block may have been left in the middle of a `no_grad`.
        torch.set_grad_enabled(True)
        self._channel.send({"kind": "running"})
        self._reset_peak()
        started = time.perf_counter()
        logs = LogStream(self._channel)

        def meta() -> dict[str, float | int]:
            return {
                "execution_time": round(time.perf_counter() - started, 6),
                "peak_memory": self._peak_bytes(),
            }

        try:
            try:
                content = (
                    _decompress(payload, header["max_payload"]) if header["compressed"] else payload
                )
                with redirect_stdout(logs), redirect_stderr(logs):
                    saves = self._generation.run(
                        content, header["env"], self._conversation(), self._policy()
                    )
                    # Work that the block did not wait for may yet fail.
                    self._synchronize()
            finally:
                logs.finish()
            cost = meta()
            result = Result(
                self._generation.export(saves), header["max_result"], header["max_inline"]
            )
            self._deliver(result, header, cost)
        except BlockError as error:
            self._fail(error.traceback + self._which_limit(error.traceback), meta())
        except (PayloadError, ResultTooLargeError, DeviceError) as error:
            self._fail(str(error), meta())
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            self._fail(
                "The block ran, but what it saved could not be sent: "
                + explain(error, None, "")
                + "\nSave tensors, numbers, text, or lists and dicts of them.",
                meta(),
            )

    def _synchronize(self) -> None:
        if self._driver is not None:
            self._driver.synchronize()

    def _reset_peak(self) -> None:
        if self._driver is not None:
            self._driver.reset_peak()
        elif self._stranger is None:
            memory.reset_peak()
        elif self._peak is not None:
            self._peak.reset_peak()

    def _peak_bytes(self) -> int:
        """Return the most memory that this request had: on devices where the model is there."""
        return memory.peak_bytes() if self._driver is None else self._driver.peak_bytes()

    def _policy(self) -> Policy | None:
        return None if self._stranger is None else self._stranger.policy

    def _deliver(self, result: Result, header: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Send the result in the frame, or into a file that the host hands over for it."""
        if result.content is not None:
            compress = header["compress_inline"]
            content = result.compressed() if compress else result.content
            self._channel.send({"kind": "result", "compressed": compress, "meta": meta}, content)
            return
        self._spilled = True
        self._channel.send({"kind": "spill", "size": result.size})
        _, _, fds = self._channel.receive()
        if self._stranger is not None:
            self._stranger.confinement.permit_file()
        try:
            if header["compress_stored"]:
                level = STORE_LEVEL if header["nearby"] else result.worthwhile_level()
                result.write_compressed(fds[0], level, self._threads)
            else:
                result.write(fds[0])
        finally:
            os.close(fds[0])
        self._channel.send({"kind": "spilled", "meta": meta})

    def _fail(self, text: str, meta: Mapping[str, Any]) -> None:
        """Tell the user of an error; where a device's state is lost, it is the end of this process.

        Raises:
            DeviceError: then.
        """
        lost: DeviceError | None = None
        try:
            self._synchronize()
        except DeviceError as error:
            lost = error
            if str(error) not in text:
                text += f"\n{error}"
            text += (
                "\nThe GPU's state in the process that ran your block is lost, and the process with it. "
                "Later requests have another."
            )
        said = text.encode(errors="replace")[:MAX_TEXT]
        self._channel.send({"kind": "error", "meta": meta, "ends": lost is not None}, said)
        if lost is not None:
            raise lost

    def _which_limit(self, text: str) -> str:
        """What a limit has to do with an error that says nothing of one."""
        if self._stranger is None or not any(sign in text for sign in _SIGNS_OF_A_LIMIT):
            return ""
        limits = self._stranger.confinement
        return (
            f"\nA request may take {limits.memory_bytes:,} bytes of memory on this server "
            f"(NDIF_RUNNER_MEMORY_BYTES), and start {limits.max_threads} threads, whose stacks count "
            "(NDIF_RUNNER_MAX_THREADS)."
        )

    def _conversation(self) -> Conversation:
        def receive() -> bytes:
            self._channel.send({"kind": "await upload"})
            _, body, _ = self._channel.receive()
            return bytes(body)

        return Conversation(
            send=lambda data: self._channel.send({"kind": "stream"}, data), receive=receive
        )

    def _reset(self) -> None:
        """Leave nothing of one request to the next."""
        self._generation.forget()
        for parameter in self._generation.model._module.parameters():
            parameter.grad = None

    def _tidy_when_idle(self) -> None:
        ready, _, _ = select.select([self._channel.socket], [], [], _IDLE_S)
        if not ready:
            gc.collect()
            if self._driver is not None:
                self._driver.release_memory()


def _decompress(payload: bytes, max_bytes: int) -> bytes:
    try:
        size = zstandard.get_frame_parameters(payload).content_size
        if size == zstandard.CONTENTSIZE_UNKNOWN:
            raise PayloadError(
                "The request is zstd data that does not say its size, which no nnsight client sends."
            )
        if size > max_bytes:
            raise PayloadError(
                f"The request is {size:,} bytes when decompressed; this server takes at most "
                f"{max_bytes:,} (NDIF_MAX_REQUEST_BYTES). Does the block refer to a large object?"
            )
        return zstandard.ZstdDecompressor().decompress(payload)
    except zstandard.ZstdError as error:
        raise PayloadError(
            f"The request is not whole zstd data ({error}): it was truncated or damaged on its way, "
            "or its sender says it is compressed when it is not."
        ) from error
