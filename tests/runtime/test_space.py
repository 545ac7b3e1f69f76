"""A model that has no room on the disk is refused before any of it is downloaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from ndif.gateway.hub import Hub, HubModel
from ndif.host.download import DownloadError, download
from ndif.runtime.spec import ModelSpec
from tests.on_loop import on_loop
from tests.runtime.replica import HERE
from tests.serving import serving

LARGE = "test-org/large"


@on_loop
async def test_a_model_larger_than_the_disk(
    tiny_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_gpt2, tmp_path / "large")
    weights = folder / "model.safetensors"
    os.truncate(weights, 8 << 40)  # a hole, which takes no space here
    hub = Hub(share_weights=True)
    hub.serve(HubModel(LARGE, folder, None, "text-generation"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with serving(Starlette(routes=[Mount("/hub", routes=hub.routes())])) as url:
        monkeypatch.setenv("HF_ENDPOINT", f"{url}/hub")
        with pytest.raises(
            DownloadError, match=r"^8,796\.1 GB of it are .* free some, or set HF_HOME"
        ):
            await download(ModelSpec(LARGE, "0.8"), HERE, lambda done, total: None)
    assert not list((tmp_path / "home").rglob("*.safetensors"))
