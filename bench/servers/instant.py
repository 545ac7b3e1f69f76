"""The instant server: it answers every request at once with a stored result.

A client's time with this server is the client's own share. The rest of its time with a real server is the
server's share.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

import socketio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from ndif.config.settings import Settings
from ndif.schema import wires

READY = Path(sys.argv[1])
INLINE_BYTES: int = Settings.model_fields["max_inline_result_bytes"].default
"""Largest result that a real server sends on the live channel."""


class _File(FileResponse):
    chunk_size = 1 << 20


class Instant:
    """A server for both wires; its result is the file that `/use/{name}` selected last."""

    def __init__(self) -> None:
        self._sockets: dict[str, WebSocket] = {}
        self._name = ""
        self._content = b""
        self._io = socketio.AsyncServer(async_mode="asgi", cors_allowed_origins="*")
        self.app = Starlette(
            routes=[
                Route("/use/{name}", self.use),
                Route("/request", self.request, methods=["POST"]),
                Route("/results/{name}", self.result),
                WebSocketRoute("/subscribe", self.subscribe),
                Mount("/ws", app=socketio.ASGIApp(self._io, socketio_path="/ws/socket.io")),
            ]
        )

    async def use(self, http: Request) -> Response:
        self._name = http.path_params["name"]
        path = READY / self._name
        self._content = path.read_bytes() if path.stat().st_size <= INLINE_BYTES else b""
        return JSONResponse({})

    async def request(self, http: Request) -> Response:
        body = await http.body()
        identity = str(uuid.uuid4())
        received = {"id": identity, "status": "RECEIVED", "description": ""}
        if session := http.headers.get("ndif-session_id"):
            task = self._io.emit("blocking_response", self._frame_older(http, identity), to=session)
        else:
            session = json.loads(body[body.index(b"{") : body.index(b"}\r\n") + 1])["session_id"]
            task = self._sockets[session].send(self._frame(http, identity))
        asyncio.get_running_loop().create_task(task)
        return JSONResponse(received)

    def _fields(self, identity: str) -> dict[str, Any]:
        return {"id": identity, "status": "COMPLETED", "description": ""}

    def _frame(self, http: Request, identity: str) -> dict[str, Any]:
        fields = self._fields(identity)
        if self._content:
            frame = wires.torch_bytes_with(fields, "data", self._content, load=False)
            return {"type": "websocket.send", "bytes": frame}
        fields["data"] = f"{http.base_url}results/{self._name}"
        return {"type": "websocket.send", "text": json.dumps(fields)}

    def _frame_older(self, http: Request, identity: str) -> bytes:
        fields = self._fields(identity)
        if self._content:
            return wires.torch_bytes_with(fields, "data", self._content, load=True)
        url = f"{http.base_url}results/{self._name}"
        size = (READY / self._name).stat().st_size
        return wires.torch_bytes({**fields, "data": (url, size)})

    async def result(self, http: Request) -> Response:
        return _File(READY / http.path_params["name"])

    async def subscribe(self, websocket: WebSocket) -> None:
        await websocket.accept()
        session = uuid.uuid4().hex
        self._sockets[session] = websocket
        await websocket.send_text(json.dumps({"session_id": session}))
        try:
            while True:
                await websocket.receive_text()
        except WebSocketDisconnect:
            del self._sockets[session]


def main() -> None:
    """Print the address and serve until killed."""
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    config = uvicorn.Config(Instant().app, log_level="warning", ws_per_message_deflate=False)
    uvicorn.Server(config).run([listening])


main()
