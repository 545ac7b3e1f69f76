"""One request asks the hub whether a repository exists, before anything is started for it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ndif.runtime.spec import ModelSpec
from ndif.runtime.weights.fetch import unavailable
from tests.serving import serving

ASKED: list[str] = []


async def describe_repository(request: Request) -> JSONResponse:
    """Answer as the Hugging Face Hub does, for four repositories."""
    name, revision = request.path_params["name"], request.path_params.get("revision")
    ASKED.append(name)
    if name == "nothing":
        return JSONResponse(
            {"error": "Repository not found"}, 404, headers={"X-Error-Code": "RepoNotFound"}
        )
    if revision == "v9":
        return JSONResponse({}, 404, headers={"X-Error-Code": "RevisionNotFound"})
    if name == "broken":
        return JSONResponse({"error": "An internal error"}, 500)
    files = ["README.md"] if name == "dataset" else ["config.json", "model.safetensors"]
    return JSONResponse({"id": f"a/{name}", "siblings": [{"rfilename": file} for file in files]})


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    routes = [
        Route("/api/models/a/{name}", describe_repository),
        Route("/api/models/a/{name}/revision/{revision}", describe_repository),
    ]
    with serving(Starlette(routes=routes)) as url:
        yield url


@pytest.mark.parametrize(
    ("name", "revision", "reason"),
    [
        ("model", None, None),
        ("model", "main", None),
        ("nothing", None, "There is no repository 'a/nothing' on {} that this server may read."),
        ("model", "v9", "'a/model' has no revision 'v9' on {}."),
        (
            "dataset",
            None,
            "'a/dataset' has no config.json on {}: it is no model that transformers can load.",
        ),
    ],
)
def test_a_refusal_names_the_repository_the_hub_and_the_reason(
    hub: str, monkeypatch: pytest.MonkeyPatch, name: str, revision: str | None, reason: str | None
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub)
    ASKED.clear()
    explanation = unavailable(ModelSpec(f"a/{name}", "0.8", revision=revision))
    assert explanation == (None if reason is None else reason.format(urlsplit(hub).netloc))
    assert [name] == ASKED


def test_model_is_not_refused_if_hub_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", f"http://{host}/")
        # The files may be in the cache of the loading process.
        assert unavailable(ModelSpec("a/model", "0.8")) is None


def test_hub_error_is_reported(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub)
    explanation = unavailable(ModelSpec("a/broken", "0.8"))
    assert explanation is not None
    assert "500" in explanation
    assert "huggingface.co" not in explanation


def test_hub_is_not_asked_if_offline_or_for_local_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert unavailable(ModelSpec("a/nothing", "0.8")) is None
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert unavailable(ModelSpec(str(tmp_path), "0.8")) is None
