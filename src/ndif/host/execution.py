"""One request on one runner: what it is told, what it says meanwhile, and where its result goes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ndif.config import Settings
from ndif.host.dialogue import Dialogue, Limits, meta_of
from ndif.host.port import Respond
from ndif.host.runner import Runner
from ndif.schema.request import Request, Wire
from ndif.schema.response import InlineResult, Response, StoredResult
from ndif.schema.status import Status
from ndif.stores.broker import Broker
from ndif.stores.objects import ObjectStore, Upload

EXIT_PATIENCE_S = 1.0
SLACK = 1 << 20
"""What a frame and a file may hold beyond the largest result: what holds it together."""

_DONE = "Your job has been completed."


class Execution:
    """Runs requests on runners that are given to it."""

    def __init__(self, settings: Settings, broker: Broker, objects: ObjectStore) -> None:
        self._settings = settings
        self._broker = broker
        self._objects = objects
        self._limits = Limits(
            settings.max_log_bytes,
            settings.max_log_lines_per_s,
            settings.max_streamed_bytes,
            # A hybrid job may send its client as much as that may send back.
            max(settings.max_inline_result_bytes, settings.socketio_max_http_buffer_size) + SLACK,
        )

    async def run(self, request: Request, runner: Runner, respond: Respond) -> Response | None:
        """Run `request` on `runner`; None if that ends before it has an answer.

        Raises:
            ProtocolError, LimitError, UnheardError: if it says what it may not, too much, or to nobody.
        """
        upload: Upload | None = None
        dialogue = Dialogue(
            self._limits,
            converses=request.wire is Wire.HEADERS,
            listens=request.session is not None,
        )
        try:
            payload = await self._broker.payload(request)
            with contextlib.suppress(OSError):  # a runner that died idle: its frames end at once
                await runner.send(self._instructions(request), payload)
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
                            await runner.exit_code(EXIT_PATIENCE_S)
                        return await self._stored(request, header, upload)
                    case "error":
                        if header.get("ends") is True:
                            runner.kill()  # no other request shall find it before it is gone
                        text = body.decode(errors="replace")
                        return Response(request.id, Status.ERROR, text, meta=meta_of(header))
            return None
        finally:
            if upload is not None:
                upload.discard()

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
        """A result that its runner wrote into the store."""
        key = f"results/{request.id}.pt"
        size = await upload.commit(key)
        # A live client fetches its result once; a polled one may be asked for as often as one likes.
        url = self._objects.url(key, request.base_url, once=request.session is not None)
        return Response(
            request.id, Status.COMPLETED, _DONE, StoredResult(url, size), meta_of(header)
        )
