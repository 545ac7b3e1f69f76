"""The devices of GPU scenarios: a GPU, and the CPU with an owner and a zygote as on a GPU."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from nnsight import TransformersModel

from ndif.config.settings import Settings
from tests.gpu.devices import GIB, where
from tests.runtime.replica import Served, a_replica
from tests.waiting import PATIENCE_S

T = TypeVar("T")

needs_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(scope="session")
def server_environment(hub_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A server's environment without older nnsight generations, which need a package registry."""
    return {
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(tmp_path_factory.mktemp("server-hf")),
        "NDIF_RUNTIMES_DIR": str(tmp_path_factory.mktemp("runtimes")),
        "NDIF_SESSION_ROOT": str(tmp_path_factory.mktemp("session")),
    }


@dataclass
class Place:
    """A replica that lasts for a test module, and its event loop."""

    device: str
    timeout_s: float
    served: Served
    loop: asyncio.AbstractEventLoop

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """End requests after `timeout_s`, as `NDIF_EXECUTION_TIMEOUT_SECONDS` does."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(self.served.actor, "timeout_s", self.timeout_s)
            yield

    def run(self, scene: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        return self.loop.run_until_complete(asyncio.wait_for(scene, PATIENCE_S))


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=needs_a_gpu)])
def place(
    request: pytest.FixtureRequest, tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """A replica that also serves untrusted requests."""
    folder = tmp_path_factory.mktemp("place")
    timeout_s = 5 if request.param == "cuda" else 3
    settings = Settings(protector="off", session_root=folder / "session")
    runtime, devices = where(request.param, folder, 2 * GIB)
    loop = asyncio.new_event_loop()
    served = a_replica(tiny_gpt2, runtime, settings, devices=devices)
    place = Place(request.param, timeout_s, served, loop)
    place.run(served.start())
    try:
        yield place
    finally:
        place.run(served.actor.stop())
        loop.close()


@pytest.fixture(scope="module")
def model(tiny_gpt2: Path) -> TransformersModel:
    """The client's model."""
    return TransformersModel(str(tiny_gpt2), task="text-generation")
