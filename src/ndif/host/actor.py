"""ModelActor: one replica of a model, from its process to its answers (specification, section 6)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ndif.config import Settings
from ndif.host.adapters import AdapterError, Adapters
from ndif.host.channel import ProtocolError
from ndif.host.dialogue import Dialogue, LimitError, Limits, meta_of
from ndif.host.pool import Fresh, Kept, Runners
from ndif.host.process import ModelProcess, ModelProcessError, describe_exit
from ndif.host.runner import Runner, RunnerError
from ndif.host.runtimes import Runtime
from ndif.host.watch import Watch
from ndif.host.weights import Weights
from ndif.runtime.spec import ModelSpec, Untrusted
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.request import Request, Wire
from ndif.schema.response import InlineResult, Response, StoredResult
from ndif.schema.status import Status
from ndif.stores.broker import Broker
from ndif.stores.objects import ObjectStore, Upload

logger = logging.getLogger(__name__)

Respond = Callable[[Response], Awaitable[None]]

_DONE = "Your job has been completed."
_EXIT_PATIENCE_S = 1.0
_SLACK = 1 << 20
"""What a frame and a file may hold beyond the largest result: what holds it together."""


class ReplicaLostError(Exception):
    """The replica can run nothing more; what it was running may run elsewhere."""


class ModelActor:
    """Runs requests one at a time: trusted ones on a *kept* runner, others each on a *fresh* one."""

    def __init__(
        self,
        config: DeploymentConfig,
        runtime: Runtime,
        settings: Settings,
        broker: Broker,
        objects: ObjectStore,
        weights: Weights,
        *,
        untrusted: bool,
    ) -> None:
        """`untrusted`: whether requests may come that are not trusted."""
        spec = ModelSpec(
            checkpoint=config.checkpoint,
            generation=runtime.generation,
            revision=config.revision,
            task=config.task,
            dtype=config.dtype,
            device=config.device,
            threads=config.threads,
            untrusted=_untrusted(settings) if untrusted else None,
        )
        self.process = ModelProcess(spec, runtime, weights)
        self._settings = settings
        self._timeout_s = config.execution_timeout_s or settings.execution_timeout_seconds
        self._broker = broker
        self._objects = objects
        self._kept = Kept(lambda: self.process.fork(fresh=False))
        self._fresh = Fresh(lambda: self.process.fork(fresh=True), settings.runner_pool)
        self._first: Runners = self._fresh if untrusted else self._kept
        self._limits = Limits(
            settings.max_log_bytes,
            settings.max_log_lines_per_s,
            settings.max_streamed_bytes,
            # A hybrid job may send its client as much as that may send back.
            max(settings.max_inline_result_bytes, settings.socketio_max_http_buffer_size) + _SLACK,
        )
        self._adapters = Adapters(
            runtime,
            settings.adapters,
            settings.max_adapter_bytes,
            settings.adapter_cache_bytes,
        )
        self._watch = Watch(settings.runner_memory_bytes, settings.runner_max_threads)
        self._runner: Runner | None = None
        self._verifying: asyncio.Task[None] | None = None
        self._cancelled = ""

    async def start(self, progress: Callable[[int, int], None]) -> None:
        """Load the model and have runners ready.

        Raises:
            ModelProcessError: if the model cannot be loaded, or untrusted code cannot be confined.
        """
        await self.process.start(self._settings.model_start_timeout_s, progress)
        try:
            await self._first.start()
        except RunnerError as error:
            await self.process.stop()
            raise ModelProcessError(str(error)) from error

    async def stop(self) -> None:
        """End the model process."""
        await self.process.stop()

    async def __call__(self, request: Request, respond: Respond) -> Response:
        """Run one request; every update but the last goes to `respond`, the last is returned.

        Raises:
            ReplicaLostError: if the model process ended.
        """
        self._cancelled = ""
        runners: Runners = self._kept if request.trusted else self._fresh
        try:
            await self._pristine()
            runner = self._runner = await runners.take()
        except (ModelProcessError, RunnerError) as error:
            raise ReplicaLostError(str(error)) from error
        watching = None
        if not request.trusted and runner.pid is not None:
            watching = asyncio.create_task(self._watch.over(runner.pid, self.cancel))
        timer = asyncio.get_running_loop().call_later(
            self._timeout_s,
            self.cancel,
            f"The job ran longer than {self._timeout_s:g} seconds, the most that this server allows "
            "(NDIF_EXECUTION_TIMEOUT_SECONDS), and was ended.",
        )
        try:
            if not request.trusted:
                await self._adapters.fetch(request.env)
            if self._cancelled:  # while there was nothing to end
                return Response(request.id, Status.ERROR, self._cancelled)
            return await self._run(request, runner, respond)
        except ProtocolError as error:
            runner.kill()
            return Response(
                request.id, Status.ERROR, f"The runner broke its protocol and was ended: {error}."
            )
        except (AdapterError, LimitError) as error:
            runner.kill()
            return Response(request.id, Status.ERROR, str(error))
        finally:
            timer.cancel()
            if watching is not None:
                watching.cancel()
            self._runner = None
            runners.give_back(runner)
            if self.process.exposes_weights and not request.trusted:
                self._verifying = asyncio.create_task(self._verify(runner), name="weights")

    async def _verify(self, runner: Runner) -> None:
        """See that this one left the weights that it shared as they were."""
        # Until it is gone, it may still write.
        await runner.exit_code(_EXIT_PATIENCE_S)
        if restored := await self.process.verify():
            logger.warning("a request had changed %d of the weights; they are restored", restored)

    async def _pristine(self) -> None:
        """Return once no request can find what another did to the weights."""
        verifying, self._verifying = self._verifying, None
        if verifying is not None:
            await verifying

    async def _run(self, request: Request, runner: Runner, respond: Respond) -> Response:
        upload: Upload | None = None
        dialogue = Dialogue(self._limits, converses=request.wire is Wire.HEADERS)
        try:
            with contextlib.suppress(OSError):  # a runner that died idle: its frames end at once
                await runner.send(self._instructions(request), request.payload)
            async for header, body in runner.frames(dialogue.room):
                match dialogue.hear(header, body):
                    case "running":
                        await respond(
                            Response(request.id, Status.RUNNING, "Your job has started running.")
                        )
                    case "log":
                        await respond(
                            Response(request.id, Status.LOG, body.decode(errors="replace"))
                        )
                    case "stream":
                        await respond(Response(request.id, Status.STREAM, data=body))
                    case "await upload":
                        content = await runner.unless_ended(self._broker.uploaded(request))
                        if content is None:
                            break
                        with contextlib.suppress(OSError):  # its frames end at once
                            await runner.send({"kind": "upload"}, content)
                    case "spill":
                        upload = self._objects.create()
                        with contextlib.suppress(OSError):
                            await runner.send({"kind": "file"}, fds=[upload.fileno()])
                    case "result":
                        return await self._inline(request, header, body)
                    case "spilled" if upload is not None:
                        if not request.trusted:
                            # What it can still write to must not be what its user gets.
                            runner.kill()
                            await runner.exit_code(_EXIT_PATIENCE_S)
                        return await self._stored(request, header, upload)
                    case "error":
                        text = body.decode(errors="replace")
                        return Response(request.id, Status.ERROR, text, meta=meta_of(header))
            return await self._ended(request, runner)
        finally:
            if upload is not None:
                upload.discard()

    def cancel(self, reason: str) -> None:
        """End what is running now; its request becomes an ERROR with `reason`."""
        self._cancelled = reason
        if self._runner is not None:
            self._runner.kill()

    def _instructions(self, request: Request) -> dict[str, Any]:
        # What is loaded straight out of a frame is not decompressed on that wire.
        loaded_from_frame = request.session is not None and request.wire is Wire.HEADERS
        return {
            "kind": "run",
            "compressed": request.compress,
            "env": dict(request.env),
            "max_payload": self._settings.max_request_bytes,
            "max_result": self._settings.max_result_bytes,
            "max_inline": self._settings.max_inline_result_bytes,
            "compress_inline": request.compress and not loaded_from_frame,
            "compress_stored": request.compress,
            "nearby": request.nearby,
        }

    async def _inline(self, request: Request, header: Mapping[str, Any], body: bytes) -> Response:
        """A result that came in the frame: it goes on in one, or into the store if it is polled."""
        if request.session is not None:
            result = InlineResult(body, header.get("compressed") is True)
            return Response(request.id, Status.COMPLETED, _DONE, result, meta_of(header))
        key = f"results/{request.id}.pt"
        await self._objects.put(key, body)
        stored = StoredResult(self._objects.url(key, request.base_url), len(body))
        return Response(request.id, Status.COMPLETED, _DONE, stored, meta_of(header))

    async def _stored(
        self, request: Request, header: Mapping[str, Any], upload: Upload
    ) -> Response:
        key = f"results/{request.id}.pt"
        size = await upload.commit(key)
        # A live client fetches its result once; a polled one may be asked for as often as one likes.
        url = self._objects.url(key, request.base_url, once=request.session is not None)
        stored = StoredResult(url, size)
        return Response(request.id, Status.COMPLETED, _DONE, stored, meta_of(header))

    async def _ended(self, request: Request, runner: Runner) -> Response:
        """What to tell the user of a request whose runner is gone."""
        code = await runner.exit_code(_EXIT_PATIENCE_S)
        if self._cancelled:
            return Response(request.id, Status.ERROR, self._cancelled)
        if self.process.ended.is_set():
            raise ReplicaLostError("the model process ended")
        logger.warning("request %s: its runner ended (%s)", request.id, describe_exit(code))
        return Response(request.id, Status.ERROR, _crash(code))


def _untrusted(settings: Settings) -> Untrusted:
    # zstd of what it cannot squeeze is a little larger than that.
    largest = settings.max_result_bytes + settings.max_result_bytes // 1000 + _SLACK
    return Untrusted(
        sandbox=settings.sandbox,
        protector=settings.protector == "on",
        whitelist=str(settings.whitelist.absolute()) if settings.whitelist else None,
        memory_bytes=settings.runner_memory_bytes,
        result_bytes=largest,
        max_threads=settings.runner_max_threads,
        adapters=str(settings.adapters),
    )


def _crash(code: int | None) -> str:
    how = describe_exit(code)
    if code is not None and code >= 0:
        return (
            f"The process that ran your block exited ({how}) before the block was done: something in "
            "it ends the process (os._exit, an abort in native code). Nothing was returned."
        )
    hint = {
        -9: "The system ended it, most often because it ran out of memory: save or compute less.",
        -11: "Native code touched memory it may not: a wrong pointer, or a bug in a library.",
        -6: "Native code gave up on an internal check.",
    }.get(code or 0, "Nothing more is known.")
    return f"The process that ran your block ended ({how}) before the block was done. {hint}"
