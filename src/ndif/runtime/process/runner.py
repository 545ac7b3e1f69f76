"""A runner: a fork of the zygote that runs one request or several in sequence."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import io
import os
import random
import secrets
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, ClassVar

import numpy
import torch
import zstandard

from ndif.runtime.frames import MAX_TEXT, FrameChannel
from ndif.runtime.generations import BlockError, ClientStream, Generation, PayloadError, Saves
from ndif.runtime.messages import (
    Error,
    InlineAnswer,
    Returned,
    Run,
    RunReport,
    RunStep,
    SharedRunOrder,
    SharedRunResults,
    Signal,
    Spill,
    Spilled,
)
from ndif.runtime.process import procfs
from ndif.runtime.process.cuda import Cuda, DeviceError
from ndif.runtime.process.model_state import ResetError
from ndif.runtime.process.process_settings import forget_warnings
from ndif.runtime.process.warmup_request import start_threads
from ndif.runtime.results import Result, ResultNotStoredError, ResultTooLargeError, trusted
from ndif.runtime.tracebacks import explain, walk
from ndif.sizes import format_size

if TYPE_CHECKING:
    from ndif.runtime.process.isolation import Isolation
    from ndif.runtime.process.model_reset import ModelReset
    from ndif.runtime.process.reset import Reset

_STEPS = ("prepare", "execute", "pack")
_now, _clock = time.time, time.monotonic  # bound here because a block may patch the module
_RESTED_S = 5.0
"""Idle seconds before a request after which free memory is worth returning; regaining it takes 2 ms."""
_IDLE_S = 0.05
"""Idle seconds after which the runner collects garbage, so that the collection delays no request."""

_MEMORY_MESSAGES = (
    "MemoryError",
    "can't allocate memory",
    "Cannot allocate memory",
    "bad_alloc",
    "out of memory",
)
"""Error messages of Python, torch and the C library when memory runs out."""
_LIMIT_MESSAGES = (*_MEMORY_MESSAGES, "can't start new thread")


class _LogStream(io.TextIOBase):
    """The standard output of a block: each complete line becomes a log message to its user.

    A progress bar redraws its line after carriage returns. As on a terminal, only the latest state of such
    a line is sent, at intervals.
    """

    _REDRAWN_S = 1.0
    """Least seconds between two messages of a redrawn line."""

    def __init__(self, channel: FrameChannel) -> None:
        self._channel = channel
        self._line = ""
        self._redrawn = -self._REDRAWN_S
        self._last = ""
        """The last message of a redrawn line."""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._send(line)
        if "\r" in self._line:
            self._line = "\r" + _visible_part(self._line)
            now = time.monotonic()
            if now - self._redrawn >= self._REDRAWN_S and self._line.strip():
                self._redrawn = now
                self._send(self._line)
                self._last = self._line
        return len(text)

    def finish(self) -> None:
        """Send the last line, which has no newline."""
        self._send(self._line)
        self._line = ""

    def _send(self, line: str) -> None:
        if "\r" in line:
            line = _visible_part(line)
            if line == _visible_part(self._last):
                return
        if not line.strip():
            return
        text = line.encode(errors="replace")
        for start in range(0, len(text), MAX_TEXT):
            self._channel.send(Signal.LOG, text[start : start + MAX_TEXT])


def _visible_part(line: str) -> str:
    """Return the part of a line with carriage returns that a terminal shows: the last part with text."""
    return next(filter(str.strip, reversed(line.split("\r"))), "")


def _show_warning(
    message: Warning | str, category: type[Warning], *_: object, **__: object
) -> None:
    """Print a warning for the user, without the server's path of the file that raised it."""
    print(f"{category.__name__}: {message}", file=sys.stderr)


def _seed(*, devices: bool) -> None:
    """Reseed all random generators: every fork inherits the state of its zygote's."""
    random.seed()
    seed = secrets.randbits(64)
    if devices:
        torch.manual_seed(seed)
    else:
        # `torch.manual_seed` would queue the seed for absent devices, and format the stack for that.
        torch.default_generator.manual_seed(seed)
    numpy.random.seed(secrets.randbits(32))


class InterruptedBlock(BaseException):
    """The error that ends a block at its current line when the host sends SIGUSR1."""

    __module__ = "builtins"  # hides this module's name from the block's author


def _interrupt(*_: object) -> None:
    if Runner.runs_block:
        Runner.runs_block = False
        raise InterruptedBlock("the block was here when its time was over")


class Runner:
    """The process that runs the requests of one channel.

    Reports the log, result, error and cost of each request, and owns the process's threads. The zygote
    confines the process and starts the driver before it creates the runner.
    """

    runs_block: ClassVar[bool] = False
    """True while this process's runner runs a block, which may be interrupted."""

    def __init__(
        self,
        channel: FrameChannel,
        generation: Generation,
        threads: int,
        driver: Cuda | None,
        isolation: Isolation | None = None,
    ) -> None:
        """Start this process's threads; `driver` (None on CPUs) and `isolation` are already in effect."""
        self._channel = channel
        self._generation = generation
        self._threads = start_threads(threads)
        self._driver = driver
        self._isolation = isolation
        self._proc_files: procfs.ProcFiles | None = None
        """For the memory peak of a confined process that runs several requests; else None."""
        self._model_reset: ModelReset | None = None
        """The reset of a trusted runner; None for confined runners."""
        signal.signal(signal.SIGUSR1, _interrupt)
        warnings.showwarning = _show_warning
        torch.set_warn_always(True)  # by default torch shows many warnings only once per process

    def serve_once(self) -> None:
        """Run one request; the process must end after it."""
        self._report_ready()
        with contextlib.suppress(EOFError, ConnectionError, DeviceError):
            run, payload, _ = self._channel.expect(Run)
            self._run(run, bytes(payload))

    def serve_one_user(self, reset: Reset) -> None:
        """Run one user's requests and reset the process after each; return when the reset fails."""
        self._proc_files = reset.proc_files
        reset.begin()
        self._report_ready()
        with contextlib.suppress(EOFError, ConnectionError, DeviceError):
            since = -_RESTED_S  # a new user may also pause after the first request
            while True:
                reset.decode_ahead()
                run, payload, _ = self._channel.expect(Run)
                rested = _clock() - since > _RESTED_S
                # Context variables that the request sets vanish with the copied context.
                contextvars.copy_context().run(self._run, run, bytes(payload))
                payload = bytearray()
                since = _clock()  # the reset may take a while
                if not self._reset(functools.partial(reset, {"env": run.env}, rested=rested)):
                    return

    def serve(self, reset: ModelReset) -> None:
        """Run trusted requests and reset model and settings after each; return when the reset fails."""
        self._model_reset = reset
        reset.begin()
        self._report_ready()
        with contextlib.suppress(EOFError, ConnectionError, DeviceError):
            while True:
                self._collect_garbage_when_idle()
                order, payload, _ = self._channel.receive()
                if isinstance(order, SharedRunOrder):
                    self._run_together(order.runs, bytes(payload))
                elif isinstance(order, Run):
                    self._run(order, bytes(payload))
                payload = bytearray()
                if not self._reset(reset):
                    return

    def _reset(self, reset: Callable[[], None]) -> bool:
        """Call `reset` and report that this runner is idle, or report a failed reset and return False."""
        try:
            reset()
        except ResetError as error:
            reason = str(error).encode(errors="replace")[:1000]
            self._channel.send(Signal.SPENT, reason)
            return False
        self._report_ready()
        return True

    def _report_ready(self) -> None:
        self._channel.send(Signal.IDLE)

    def _run(self, run: Run, payload: bytes) -> None:
        self._begin()
        moments = [_now()]
        logs = _LogStream(self._channel)

        try:
            try:
                if run.compressed:
                    payload = _decompress(payload, run.max_payload)
                policy = None if self._isolation is None else self._isolation.policy
                stream = ClientStream(self._send_to_client, self._receive_from_client)
                with redirect_stdout(logs), redirect_stderr(logs):
                    self._prepare(run.env)
                    moments.append(_now())
                    Runner.runs_block = True
                    saves = self._generation.run(payload, stream, policy)
                    # The block's asynchronous work on a device may still fail.
                    self._synchronize()
            finally:
                Runner.runs_block = False
                logs.finish()
            peak = self._peak_bytes()
            moments.append(_now())
            values = self._generation.export(saves)
            result = Result(values, run.max_result, run.max_inline, policy or trusted)
            self._deliver(result, run, lambda: _report(peak, moments))
        except BlockError as error:
            hint = self._limit_hint(error.traceback) + _memory_hint(error)
            self._fail(error.traceback + hint, moments)
        except (PayloadError, ResultTooLargeError, ResultNotStoredError, DeviceError) as error:
            self._fail(str(error), moments)
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            reason = explain(error, None, "")
            self._fail(
                f"The block ran, but its saved values could not be sent: {reason}\n"
                "Save tensors, numbers, text, or lists and dicts of them.",
                moments,
            )

    def _run_together(self, runs: Sequence[Run], payloads: bytes) -> None:
        """Run several requests in one forward pass; a None answer means the request must be rerun."""
        self._begin()
        moments = [_now()]
        answers: list[tuple[InlineAnswer | None, bytes]] = [(None, b"")] * len(runs)
        printed = io.StringIO()
        saves: list[Saves | None] = []
        try:
            with redirect_stdout(printed), redirect_stderr(printed):
                self._prepare(runs[0].env)  # only requests with equal env share a pass
                parts = list(_split(payloads, runs))
                moments.append(_now())
                if not printed.getvalue():
                    saves = self._generation.run_together(parts)
                    self._synchronize()
            moments.append(_now())
            # Printed text cannot be attributed to one of the requests.
            if not printed.getvalue():
                answers = [self._answer(saved, run) for saved, run in zip(saves, runs, strict=True)]
        except DeviceError:
            raise
        except Exception:
            answers = [(None, b"")] * len(
                runs
            )  # each request, rerun individually, reports its own error
        report = _report(self._peak_bytes(), moments)
        self._channel.send(
            SharedRunResults(tuple(answer for answer, _ in answers), report),
            b"".join(content for _, content in answers),
        )

    def _answer(self, saves: Saves | None, run: Run) -> tuple[InlineAnswer | None, bytes]:
        """Return the place and content of a result; None and b"" if it must be rerun individually."""
        if saves is None:
            return None, b""
        try:
            result = Result(self._generation.export(saves), run.max_result, run.max_inline)
        except Exception:  # too large, or a value that cannot be sent
            return None, b""
        if result.content is None:
            return None, b""
        content = result.compressed() if run.compress_inline else result.content
        return InlineAnswer(len(content), run.compress_inline), content

    def _begin(self) -> None:
        """Begin a request with fresh random numbers, warnings and memory peak."""
        torch.set_grad_enabled(True)
        _seed(devices=self._driver is not None)
        forget_warnings()
        self._channel.send(Signal.RUNNING)
        self._reset_peak()

    def _prepare(self, env: Mapping[str, Any]) -> None:
        if self._generation.prepare(env) and self._model_reset is not None:
            # An adapter stays, with its weights, until a request has another env.
            self._model_reset.begin()

    def _peak_bytes(self) -> int:
        # With the model on devices, the peak of their memory counts.
        return procfs.peak_bytes() if self._driver is None else self._driver.peak_bytes()

    def _synchronize(self) -> None:
        if self._driver is not None:
            self._driver.synchronize()

    def _reset_peak(self) -> None:
        if self._driver is not None:
            self._driver.reset_peak()
        elif self._isolation is None:
            procfs.reset_peak()
        elif self._proc_files is not None:
            self._proc_files.reset_peak()

    def _deliver(self, result: Result, run: Run, report: Callable[[], RunReport]) -> None:
        """Send a small result in a frame, a large one in a file from the host; `report` is called last."""
        if result.content is not None:
            content = result.compressed() if run.compress_inline else result.content
            self._channel.send(Returned(run.compress_inline, report()), content)
            return
        self._channel.send(Spill(result.size))
        _, _, fds = self._channel.receive()
        isolation = self._isolation
        try:
            with (
                isolation.confinement.result_file_allowed()
                if isolation is not None
                else contextlib.nullcontext()
            ):
                self._write(result, fds[0], run)
        finally:
            os.close(fds[0])
        self._channel.send(Spilled(report()))

    def _write(self, result: Result, fd: int, run: Run) -> None:
        """Write a result in its client's form; compress it if it shrinks well and the client is far."""
        if not run.compressed:
            result.write(fd)
        elif run.nearby or not result.compresses():
            result.write_frame(fd)
        else:
            result.write_compressed(fd, self._threads)

    def _fail(self, text: str, moments: Sequence[float]) -> None:
        """Report an error to the user; raise DeviceError if a device has lost this process's state."""
        report = _report(self._peak_bytes(), moments)
        lost: DeviceError | None = None
        try:
            self._synchronize()
        except DeviceError as error:
            lost = error
            if str(error) not in text:
                text += f"\n{error}"
            text += (
                "\nThe GPU's state in the process that ran your block is lost, and the process ends. Later "
                "requests run in a new process."
            )
        body = text.encode(errors="replace")[:MAX_TEXT]
        self._channel.send(Error(report, lost is not None), body)
        if lost is not None:
            raise lost

    def _limit_hint(self, text: str) -> str:
        """Return a sentence on the request's limits if one of them may have caused the error, else ""."""
        if self._isolation is None or not any(message in text for message in _LIMIT_MESSAGES):
            return ""
        limits = self._isolation.confinement
        return (
            f"\nA request may take {format_size(limits.memory_bytes)} of memory on this server "
            f"(NDIF_RUNNER_MEMORY_BYTES), and start {limits.max_threads} threads, whose stacks count "
            "(NDIF_RUNNER_MAX_THREADS)."
        )

    def _send_to_client(self, data: bytes) -> None:
        self._channel.send(Signal.STREAM, data)

    def _receive_from_client(self) -> bytes:
        self._channel.send(Signal.AWAIT_UPLOAD)
        _, body, _ = self._channel.receive()
        return bytes(body)

    def _collect_garbage_when_idle(self) -> None:
        if not select.select([self._channel.socket], [], [], _IDLE_S)[0]:
            gc.collect()
            if self._driver is not None:
                self._driver.release_memory()


def _report(peak_bytes: int, moments: Sequence[float]) -> RunReport:
    """Return the cost of a run whose steps began at these moments; the last step ends now."""
    spans = zip(_STEPS, moments, [*moments[1:], _now()], strict=False)
    return RunReport(peak_bytes, tuple(RunStep(*span) for span in spans))


def _split(payloads: bytes, runs: Iterable[Run]) -> Iterator[bytes]:
    """Yield the decompressed payload of each run; b"" for an invalid one."""
    start = 0
    for run in runs:
        payload = payloads[start : start + run.size]
        start += run.size
        try:
            yield _decompress(payload, run.max_payload) if run.compressed else payload
        except PayloadError:
            yield b""


def _memory_hint(error: BlockError) -> str:
    """Return a sentence on how to save memory if a block ran out of it, else ""."""
    if not any(message in error.traceback for message in _MEMORY_MESSAGES):
        return ""
    advice = "A smaller batch and shorter prompts take less memory."
    cause = error.__cause__
    if cause is not None and _has_gradients(cause):
        return (
            "\nGradients were on, and the values for them were kept in memory. If you need no gradients, "
            f"write `with torch.no_grad():` around the trace's work. {advice}"
        )
    return f"\n{advice}"


def _has_gradients(error: BaseException) -> bool:
    """Return True if a frame of the error holds a tensor that was computed with gradients on."""
    return any(
        isinstance(value, torch.Tensor) and value.grad_fn is not None
        for frame, _ in walk(error.__traceback__)
        for value in frame.f_locals.values()
    )


def _decompress(payload: bytes, max_bytes: int) -> bytes:
    try:
        size = zstandard.get_frame_parameters(payload).content_size
        if size == zstandard.CONTENTSIZE_UNKNOWN:
            raise PayloadError(
                "The request is zstd data that does not state its size, but every nnsight client states it."
            )
        if size > max_bytes:
            raise PayloadError(
                f"The request is {format_size(size)} when decompressed; this server takes at most "
                f"{format_size(max_bytes)} (NDIF_MAX_REQUEST_BYTES). Does the block refer to a large "
                "object?"
            )
        return zstandard.ZstdDecompressor().decompress(payload)
    except zstandard.ZstdError as error:
        raise PayloadError(
            f"The request is not whole zstd data ({error}): it was truncated or damaged on its way, "
            "or its sender marked uncompressed data as compressed."
        ) from error
