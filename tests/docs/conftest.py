"""A hub with the model of the documents, and an environment for their blocks."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from ndif.gateway.hf_mirror import HfMirror, MirroredModel
from tests.serving import serving

MODEL = "openai-community/gpt2"
"""The model's name in the documents; in tests, a tiny model of the same architecture has this name."""


@pytest.fixture(scope="module")
def hub(tiny_gpt2: Path) -> Iterator[str]:
    """A hub on loopback with the model."""
    mirror = HfMirror(share_weights=True)
    mirror.serve(MirroredModel(MODEL, tiny_gpt2, None, "text-generation"))
    with serving(Starlette(routes=[Mount("/hub", routes=mirror.routes())])) as url:
        yield f"{url}/hub"


@pytest.fixture
def home(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder; the environment of commands names it, the hub and a free port."""
    for name in [*os.environ]:
        if name.startswith("NDIF_"):
            monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = tmp_path / "home"
    folder.mkdir()
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # The download folder is not in the home folder: servers of several pages share it.
    for name, value in {
        "HOME": str(folder),
        "HF_HOME": str(tmp_path.parent / "hf"),
        "HF_ENDPOINT": hub,
        "NDIF_API_PORT": str(port),
        "PATH": search,
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }.items():
        monkeypatch.setenv(name, value)
    return folder
