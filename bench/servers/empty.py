"""An empty FastAPI route that reads a request and answers at once, on the gateway's own stack.

Usage: python -m bench.servers.empty PORT
"""

from __future__ import annotations

import sys

import uvicorn
from fastapi import FastAPI, Request

app = FastAPI()


@app.post("/{path:path}")
async def answer(request: Request) -> dict[str, str]:
    """Read the request, and answer."""
    await request.body()
    return {}


if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        log_level="warning",
        access_log=False,
    )
