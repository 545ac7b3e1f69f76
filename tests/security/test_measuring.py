"""A table of repositories that attack the measuring of models, measured by real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from starlette.applications import Starlette
from starlette.routing import Mount

from ndif.gateway.hf_mirror import HfMirror, MirroredModel
from ndif.host.evaluation import EvaluationError, Evaluator
from ndif.host.fork_server import ForkServers, Process
from ndif.host.measurement_slots import MeasurementSlots
from ndif.host.runtimes import Runtime
from ndif.runtime.measure import _confine
from ndif.runtime.process.children import fork
from ndif.schema.deployment import DeploymentConfig
from tests.on_loop import on_loop
from tests.processes import children
from tests.runtime.replica import (
    HERE,
)
from tests.serving import serving
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.process

MIB = 1 << 20
LAYERS = {"n_layer": 10**6}
"""Changes of a config whose model takes hours to build."""


def changed(folder: Path, name: str = "config.json", **changes: Any) -> None:
    """Change a JSON file of a checkpoint."""
    file = folder / name
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **changes}))


def weights(folder: Path, **shapes: list[int]) -> None:
    """Replace the weights by a file that declares these tensors and holds four bytes."""
    tensors = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}
        for name, shape in shapes.items()
    }
    header = json.dumps(tensors).encode()
    file = folder / "model.safetensors"
    file.unlink(missing_ok=True)
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


def sharded(folder: Path, shard: str) -> None:
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"transformer.wte.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def nested(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' + "[" * 200_000 + "]" * 200_000 + "}")


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def link(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/etc/passwd")


ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a config of a billion layers, as many as a list": (
        lambda folder: changed(
            folder, model_type="granitemoehybrid", num_hidden_layers=10**9, layer_types=None
        ),
        "takes more than 1GiB of memory",
    ),
    "a header of 100,000 names": (
        lambda folder: weights(
            folder, **{"n" * 30 + str(number): [1] for number in range(100_000)}
        ),
        "describes more data than the file has",
    ),
    "a vocabulary that its weights do not have": (
        lambda folder: changed(folder, vocab_size=10**12),
        "does not belong to its weights: transformer.wte.weight",
    ),
    "layers that its weights do not have": (
        lambda folder: changed(folder, n_layer=200),
        "does not belong to its weights: it describes",
    ),
    "weights that are larger than their file": (
        lambda folder: weights(folder, **{"transformer.wte.weight": [10**9]}),
        "describes more data than the file has",
    ),
    "weights by an absolute path": (
        lambda folder: changed(folder, transformers_weights="/data/private.safetensors"),
        "names '/data/private.safetensors' as 'transformers_weights'",
    ),
    "a shard in another folder": (
        lambda folder: sharded(folder, "../private/model.safetensors"),
        r"names '../private/model.safetensors' as 'weight_map'",
    ),
    "a config in another folder": (
        lambda folder: changed(folder, configuration_files=["config.4/../../private/x.json"]),
        "as 'configuration_files'",
    ),
    "a link out of the folder": (link, "is a link to /etc/passwd"),
    "pickled weights, which are not allowed": (
        pickled,
        r"weights are pickled .*NDIF_ALLOW_PICKLED_WEIGHTS",
    ),
    "a config of 20 MB": (
        lambda folder: changed(folder, padding="x" * 20_000_000),
        r"Its config\.json has .*; such a file may have 16MiB",
    ),
    "a config nested 200,000 deep": (nested, "nested too deeply"),
    "a config that is a list": (
        lambda folder: (folder / "config.json").write_text("[]") and None,
        "",
    ),
    "code of its own": (
        lambda folder: changed(
            folder, model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModel": "own.Model"}
        ),
        "deploy it with trust_remote_code",
    ),
}


class CountingServers(ForkServers):
    """Fork servers that record the modules of started processes."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []

    async def start(
        self, runtime: Runtime, module: str, channel: socket.socket, **options: bool
    ) -> Process:
        self.started.append(module)
        return await super().start(runtime, module, channel, **options)  # type: ignore[arg-type]


class Site:
    """A hub on loopback, and the processes of a server that measures the hub's models."""

    def __init__(self, hub: HfMirror, servers: CountingServers, model: Path, scratch: Path) -> None:
        self.servers = servers
        self._hub = hub
        self._model = model
        self._scratch = scratch

    def folder(self, name: str) -> Path:
        """Return a new copy of an honest model."""
        return shutil.copytree(self._model, self._scratch / name)

    def publish(self, name: str, folder: Path) -> str:
        self._hub.serve(MirroredModel(name, folder, None, "text-generation"))
        return name

    def downloaded(self, kind: str) -> list[Path]:
        """Return the files of the Hub's cache whose names match a pattern."""
        return list((self._scratch / "home").rglob(kind))

    def measuring(self) -> list[int]:
        """Return the running measuring processes."""
        pids = []
        for server in children(os.getpid()):
            for pid in [server, *children(server)]:
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes()
                    if b"ndif.runtime.measure" in command:
                        pids.append(pid)
        return pids

    def readers(self) -> int:
        return self.servers.started.count("ndif.runtime.measure")


@pytest.fixture(scope="module")
def site(tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    hub = HfMirror(share_weights=True)
    servers = CountingServers()
    app = Starlette(routes=[Mount("/hub", routes=hub.routes())])
    scratch = tmp_path_factory.mktemp("repositories")
    with pytest.MonkeyPatch.context() as patched, serving(app) as url:
        patched.delenv("PYTEST_CURRENT_TEST", raising=False)
        patched.setenv("HF_HOME", str(scratch / "home"))
        patched.setenv("HF_ENDPOINT", f"{url}/hub")
        asyncio.run(prepared(servers))
        yield Site(hub, servers, tiny_gpt2, scratch)
        servers.stop()


async def prepared(servers: ForkServers) -> None:
    """Start the fork server, and wait until it can fork."""
    servers.prepare(HERE, untrusted=True)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        first = await servers.start(
            HERE, "ndif.runtime.measure", theirs, untrusted=True, keep_output=False
        )
    await first.wait()


@pytest.fixture(autouse=True)
def same_environment() -> None:
    """Remove pytest's variable, which would give every test another environment and fork server."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)


@contextlib.asynccontextmanager
async def an_evaluator(
    site: Site, patience_s: float = PATIENCE_S, **given: Any
) -> AsyncIterator[Evaluator]:
    evaluator = Evaluator(
        fork_servers=site.servers, sandbox="require", patience_s=patience_s, **given
    )
    try:
        yield evaluator
    finally:
        await evaluator.stop()
        await eventually(lambda: site.measuring() == [])


def a_config(checkpoint: Path | str, **given: Any) -> DeploymentConfig:
    return DeploymentConfig("test/model", str(checkpoint), **{"padding_factor": 0.0, **given})


@on_loop
async def test_attacks_are_refused_while_honest_models_are_measured(
    site: Site,
) -> None:
    honest = site.folder("honest")
    async with an_evaluator(site) as evaluate:
        size = (await evaluate(a_config(honest), HERE)).size_bytes
        peak = 0

        async def watch() -> None:
            nonlocal peak
            while True:
                peak = max([peak, *(private_bytes(pid) for pid in site.measuring())])
                await asyncio.sleep(0.02)

        watching = asyncio.create_task(watch())

        async def attack(number: int, prepare: Callable[[Path], None]) -> str:
            folder = site.folder(f"attack-{number}")
            prepare(folder)
            with pytest.raises(EvaluationError) as refused:
                await evaluate(a_config(folder), HERE)
            return str(refused.value)

        attacking = [
            asyncio.create_task(attack(number, prepare))
            for number, (prepare, _) in enumerate(ATTACKS.values())
        ]
        # Another user's model, while the attacks run.
        started = time.monotonic()
        beside = await evaluate(a_config(honest, dtype="bfloat16"), HERE)
        assert beside.size_bytes < size
        assert time.monotonic() - started < 60
        reasons = await asyncio.gather(*attacking)
        watching.cancel()
    for (name, (_, sentence)), reason in zip(ATTACKS.items(), reasons, strict=True):
        assert re.search(sentence, reason), (name, reason)
        assert "Traceback" not in reason
    assert peak < 1300 * MIB


def private_bytes(pid: int) -> int:
    """Return the private memory of a process."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Private_Dirty:"):
                return int(line.split()[1]) << 10
    return 0


@on_loop
async def test_concurrent_measurements_are_limited_and_do_not_block_other_owners(
    site: Site,
) -> None:
    slow = site.folder("slow")
    changed(slow, **LAYERS)
    honest = site.publish("good/model", site.folder("good"))
    async with an_evaluator(site, _reading=MeasurementSlots(4, 0.5)) as evaluate:
        attacks = []
        for number in range(12):
            copy = shutil.copytree(slow, slow.with_name(f"slow-{number}"), copy_function=os.link)
            attacks.append(asyncio.create_task(evaluate(a_config(copy), HERE)))
        await eventually(lambda: len(site.measuring()) == 4)
        most = 0

        async def count() -> None:
            nonlocal most
            while True:
                most = max(most, len(site.measuring()))
                await asyncio.sleep(0.02)

        counting = asyncio.create_task(count())
        assert (await evaluate(a_config(honest), HERE)).size_bytes > 0
        assert not any(attack.done() for attack in attacks)
        counting.cancel()
        assert most == 4


@on_loop
async def test_refusal_is_remembered_only_for_its_commit(site: Site) -> None:
    folder = site.folder("stubborn")
    changed(folder, **LAYERS)
    name = site.publish("evil/stubborn", folder)
    async with an_evaluator(site, patience_s=2) as evaluate:
        with pytest.raises(EvaluationError, match="was not known after 2s") as first:
            await evaluate(a_config(name), HERE)
        readers = site.readers()
        with pytest.raises(EvaluationError, match="was not known after 2s") as second:
            await evaluate(a_config(name), HERE)
        assert str(first.value) == str(second.value)
        assert site.readers() == readers
        # Another commit is measured again.
        evaluate.patience_s = PATIENCE_S
        changed(folder, n_layer=4)
        site.publish(name, folder)
        assert (await evaluate(a_config(name), HERE)).size_bytes > 0


@on_loop
async def test_pickled_hub_weights_are_refused_before_download(
    site: Site,
) -> None:
    folder = site.folder("pickled")
    pickled(folder)
    name = site.publish("evil/pickled", folder)
    async with an_evaluator(site) as evaluate:
        with pytest.raises(EvaluationError, match=r"only as pickles .*NDIF_ALLOW_PICKLED_WEIGHTS"):
            await evaluate(a_config(name), HERE)
    async with an_evaluator(site, pickled=True) as evaluate:
        assert (await evaluate(a_config(name), HERE)).size_bytes > 0
    assert site.downloaded("pytorch_model.bin") == []


@on_loop
async def test_unreachable_hub_is_not_remembered_as_refusal(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = site.publish("good/later", site.folder("later"))
    async with an_evaluator(site) as evaluate:
        with monkeypatch.context() as patched, socket.create_server(("127.0.0.1", 0)) as closed:
            patched.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
            closed.close()
            with pytest.raises(EvaluationError, match=r"127\.0\.0\.1:\d+ cannot be reached"):
                await evaluate(a_config(name), HERE)
        assert (await evaluate(a_config(name), HERE)).size_bytes > 0


@on_loop
async def test_repository_without_weights_is_refused(site: Site) -> None:
    folder = site.folder("empty")
    (folder / "model.safetensors").unlink()
    async with an_evaluator(site) as evaluate:
        with pytest.raises(EvaluationError, match="has no weights that transformers can load"):
            await evaluate(a_config(site.publish("evil/empty", folder)), HERE)


@on_loop
async def test_long_header_is_read_without_downloading_weights(site: Site) -> None:
    folder = site.folder("long")
    file = folder / "model.safetensors"
    # The names take more bytes than the first request reads.
    names = {f"left.out.{'n' * 60}.{number}": torch.zeros(1) for number in range(2000)}
    save_file({**load_file(file), **names}, file, {"format": "pt"})
    async with an_evaluator(site) as evaluate:
        evaluation = await evaluate(a_config(site.publish("good/long", folder)), HERE)
        assert evaluation == replace(await evaluate(a_config(folder), HERE), repo_id="good/long")
    assert site.downloaded("*.safetensors") == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
@on_loop
async def test_server_of_root_measures_models_of_other_users(site: Site) -> None:
    folder = site.folder("private")
    for file in [folder, *folder.iterdir()]:
        os.chown(file, 65534, 65534)
        file.chmod(0o700)
    async with an_evaluator(site) as evaluate:
        assert (await evaluate(a_config(folder), HERE)).size_bytes > 0


def attempt(act: Callable[[], object]) -> str:
    """Return the error of an attempt, or "done"."""
    try:
        act()
    except Exception as error:
        return type(error).__name__
    return "done"


def test_measuring_process_can_access_only_its_folder(tiny_gpt2: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    ours, theirs = socket.socketpair()

    def read() -> None:
        kept = _confine(theirs, tiny_gpt2, "require")
        order = {
            "own": attempt((tiny_gpt2 / "config.json").read_text),
            "another": attempt(secret.read_text),
            "the system's": attempt(Path("/etc/passwd").read_text),
            "write": attempt(lambda: (tiny_gpt2 / "new").write_text("")),
            "connect": attempt(socket.socket),
            "run": attempt(lambda: os.execv("/bin/true", ["true"])),
            "fork": attempt(os.fork),
            "memory": attempt(lambda: bytearray(3 << 29)),
            "environment": len(os.environ),
        }
        kept.sendall(json.dumps(order).encode())

    pid = fork(read)
    theirs.close()
    with ours:
        answer = json.loads(ours.makefile().read())
    os.waitpid(pid, 0)
    refused = "PermissionError"
    assert answer == {
        "own": "done",
        **dict.fromkeys(("another", "the system's", "write", "connect", "run", "fork"), refused),
        "memory": "MemoryError",
        "environment": 0,
    }
