"""Measurements of the GPU path, each with a limit or a peer of the same run.

Usage: python -m bench.gpu [--device cpu] [--json PATH] [--seconds N]. On the CPU the same code runs with
tiny sizes; these figures do not apply to a GPU. Figures are written after each step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from nnsight import TransformersModel
from rich.console import Console
from tests.gpu.blocks import generating
from tests.gpu.devices import GIB, where
from tests.gpu.probe import absence
from tests.gpu.recording import write_json
from tests.runtime.replica import HERE, PROMPT, Sent, Served, a_replica, fork_servers, reading
from tests.tiny_models import make_empty_llama, make_gpt2

from bench.figures import MB, Figure, table
from ndif.config.settings import Settings
from ndif.runtime.weights.checksum import WeightChecksum
from ndif.schema.status import Status
from ndif.stores.objects.files import FileStore

ROOT = Path(__file__).parent.parent
STEP_S = 75.0
"""Seconds after which a step is abandoned and the next step begins."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measured work."""

    tensors: int
    rounds: int
    pause_s: float
    """Seconds that the server needs to replace a runner."""
    checksum_bytes: int
    width: int
    result_bytes: int
    tokens: int
    replicas: int


CARD = Sizes(256, 6, 1.5, 1 << 30, 4096, 256 * MB, 64, 20)
TINY = Sizes(4, 1, 0.0, 1 << 20, 64, MB, 4, 1)


def synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds that `run` takes, including the work that it queues on the GPU."""
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


async def seconds_of(run: Awaitable[object]) -> float:
    """Return the seconds that the awaitable takes."""
    began = time.perf_counter()
    await run
    return time.perf_counter() - began


@dataclass
class Bench:
    """The shared state of steps: the model, in this process and as a client's, and running replicas."""

    device: str
    sizes: Sizes
    folder: Path
    ready_s: dict[bool, float] = field(default_factory=dict)
    """Seconds from start to ready, by whether the replica is trusted."""
    _served: dict[bool, Served] = field(default_factory=dict)
    _stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    def __post_init__(self) -> None:
        self.tiny = make_gpt2(self.folder / "tiny")
        self.client = TransformersModel(str(self.tiny), task="text-generation")

    def local(self) -> Any:
        """Return the tiny model with its weights, in this process."""
        return TransformersModel(
            str(self.tiny), task="text-generation", dispatch=True, device_map=self.device
        )

    async def replica(
        self, checkpoint: Path, *, trusted: bool, memory: int = 2 * GIB, **settings: Any
    ) -> Served:
        """Return a replica that is not started; as on a server, its imports are already done."""
        scratch = Path(tempfile.mkdtemp(dir=self.folder))
        runtime, devices = where(self.device, scratch, memory)
        servers = await fork_servers(untrusted=not trusted) if runtime is HERE else None
        untrusted = None if trusted else Settings(session_root=scratch, **settings)
        objects = FileStore(scratch / "objects", ttl_s=3600)
        return a_replica(
            checkpoint, runtime, untrusted, objects, fork_servers=servers, devices=devices
        )

    async def up(self, served: Served) -> float:
        """Start a replica, which `close` stops; return the seconds until it is ready."""
        self._stack.push_async_callback(served.actor.stop)
        return await seconds_of(served.start())

    async def served(self, *, trusted: bool) -> Served:
        """Return the replica of the tiny model; the first call starts it."""
        if trusted not in self._served:
            served = await self.replica(self.tiny, trusted=trusted)
            self.ready_s[trusted] = await self.up(served)
            self._served[trusted] = served
        return self._served[trusted]

    async def run(self, payload: bytes, *, trusted: bool) -> None:
        """Run a block on the replica of the tiny model.

        Raises:
            RuntimeError: If the block fails.
        """
        await run(await self.served(trusted=trusted), payload, trusted=trusted)

    async def close(self) -> None:
        """End all replicas."""
        await self._stack.aclose()


async def run(served: Served, payload: bytes, *, trusted: bool, key: str = "") -> None:
    """Run a block.

    Raises:
        RuntimeError: If the block fails.
    """
    response = await served.run(payload, trusted=trusted, key=key)
    if response.status is not Status.COMPLETED:
        raise RuntimeError(response.description)


# Steps.


async def sharing(bench: Bench) -> list[Figure]:
    """Measure CUDA's start, its context's memory, and the mapping of another process's tensors."""
    path = bench.folder / "sharing.json"
    command = [sys.executable, "-m", "tests.gpu.probe", "--json", str(path), "--only", "nothing"]
    command += ["--tensors", str(bench.sizes.tensors)]
    command += ["--pretend"] if bench.device == "cpu" else []
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.DEVNULL
    )
    await process.wait()
    rows = json.loads(path.read_text())["rows"]
    plain, events = rows["nothing, without events"], rows["nothing, with events"]
    for row in (plain, events):
        if not isinstance(row, dict):
            raise RuntimeError(row)
    return [
        Figure("CUDA start of a process", plain["start_s"], None, "s"),
        Figure(
            "CUDA context",
            plain["taken_mib"],
            Settings().gpu_context_bytes / (1 << 20),
            "MiB",
            how="with one product of matrices; the limit is what placement reserves",
        ),
        Figure(
            f"{bench.sizes.tensors} tensors of another process",
            plain["map_s"] * 1e3,
            None,
            "ms",
            how=f"handles with events: {events['map_s'] * 1e3:.0f} ms",
        ),
    ]


async def starts(bench: Bench) -> list[Figure]:
    """Measure the time from start to ready."""
    alone = seconds(bench.local)
    for trusted in (True, False):
        await bench.served(trusted=trusted)
    return [
        Figure(
            f"start to ready, {'trusted' if trusted else 'sandboxed'}",
            bench.ready_s[trusted],
            None,
            "s",
            how=f"loading in this process: {alone:.1f} s",
        )
        for trusted in (True, False)
    ]


async def beside_local(
    bench: Bench, name: str, payload: bytes, run_here: Callable[[], object], limit_ms: float | None
) -> list[Figure]:
    """Return the seconds of a block: trusted, sandboxed, and in this process."""
    times: dict[str, list[float]] = {"here": [], "trusted": [], "sandboxed": []}
    run_here()
    for _ in range(bench.sizes.rounds):
        await asyncio.sleep(bench.sizes.pause_s)
        times["here"].append(seconds(run_here))
        for trusted, kind in ((True, "trusted"), (False, "sandboxed")):
            # Alternate, so that a slow minute affects all equally. Pause before each, so that a runner
            # waits and the GPU's clocks have dropped equally.
            await asyncio.sleep(bench.sizes.pause_s)
            times[kind].append(await seconds_of(bench.run(payload, trusted=trusted)))
    ms = {kind: statistics.median(took) * 1e3 for kind, took in times.items()}
    how = f"in this process {ms['here']:.1f}, trusted {ms['trusted']:.1f} ms"
    return [
        Figure(f"{name}: trusted - here", ms["trusted"] - ms["here"], limit_ms, "ms", how=how),
        Figure(
            f"{name}: sandboxed - trusted", ms["sandboxed"] - ms["trusted"], limit_ms, "ms", how=how
        ),
    ]


async def small_trace(bench: Bench) -> list[Figure]:
    """Measure a trace of five tokens."""
    model = bench.local()

    def here() -> None:
        with model.trace(PROMPT):
            logits = model.lm_head.output.save()
        logits.cpu()

    return await beside_local(bench, "small trace", reading(bench.client), here, 10)


async def generation(bench: Bench) -> list[Figure]:
    """Measure a generation of many tokens."""
    model, tokens = bench.local(), bench.sizes.tokens

    def here() -> None:
        with model.generate(PROMPT, max_new_tokens=tokens, do_sample=False) as tracer:
            ids = tracer.result.save()
        ids.cpu()

    payload = generating(bench.client, tokens)
    return await beside_local(bench, f"generate {tokens} tokens", payload, here, None)


async def second_request(bench: Bench) -> list[Figure]:
    """Measure a user's second request, sent at once after the first."""
    payload = reading(bench.client)
    # Without a key, each request has its own process.
    of_a_user = await bench.replica(bench.tiny, trusted=False, runner_scope="user")
    await bench.up(of_a_user)
    replicas = {"": await bench.served(trusted=False), "one": of_a_user}
    took = []
    for key, served in replicas.items():
        await run(served, payload, trusted=False, key=key)
        many = [
            await seconds_of(run(served, payload, trusted=False, key=key))
            for _ in range(bench.sizes.rounds)
        ]
        took.append(statistics.median(many) * 1e3)
    how = f"a process a request: {took[0]:.0f} ms"
    return [Figure("a user's next request, at once", took[-1], None, "ms", how=how)]


async def checksum(bench: Bench) -> list[Figure]:
    """Measure the checksum of the weights."""
    size = bench.sizes.checksum_bytes
    tensors = {
        str(n): torch.randn(size // 32, dtype=torch.float32, device=bench.device) for n in range(8)
    }
    words = [tensor.view(torch.int32) for tensor in tensors.values()]
    checksum_s = seconds(lambda: WeightChecksum.of(tensors))
    expected = WeightChecksum.of(tensors)
    changed: list[str] = []
    verified = seconds(lambda: changed.extend(expected.find_changed(tensors)))
    if changed:
        raise RuntimeError(f"the checksum reports changes of {changed}, and nothing has changed")
    read = min(seconds(lambda: [int(w.sum()) for w in words]) for _ in range(3))
    per_gb = 1e9 / size
    how = f"reading the same bytes once: {read * per_gb:.4f} s"
    return [
        Figure("checksum a GB", checksum_s * per_gb, None, "s", how=how),
        Figure("verify a GB", verified * per_gb, None, "s", how=how),
    ]


async def warm(bench: Bench) -> list[Figure]:
    """Measure the move of a 2 GB model to CPU memory and back."""
    size = make_empty_llama(bench.folder / "large", bench.sizes.width)
    served = await bench.replica(bench.folder / "large", trusted=True, memory=2 * size + GIB)
    cold = await bench.up(served)
    memory = {} if bench.device == "cpu" else {0: 2 * size + GIB}
    away = await seconds_of(served.actor.to_cache())
    back = await seconds_of(served.actor.from_cache(memory))
    await served.actor.stop()
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=bench.device != "cpu")
    other = torch.empty(size, dtype=torch.uint8, device=bench.device)
    down = min(seconds(lambda: pinned.copy_(other)) for _ in range(3))
    up = min(seconds(lambda: other.copy_(pinned)) for _ in range(3))
    rate = size / 1e9
    return [
        Figure(
            "HOT to WARM", away, None, "s", how=f"pinned copy {down:.2f} s; {rate / away:.2f} GB/s"
        ),
        Figure(
            "WARM to HOT",
            back,
            None,
            "s",
            how=f"pinned copy {up:.2f} s; {rate / back:.2f} GB/s; from disk {cold:.1f} s",
        ),
    ]


def holding(client: TransformersModel, size: int) -> bytes:
    """Return a block that saves `size` bytes of the device."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        values = torch.ones(size // 2, dtype=torch.bfloat16, device=client.lm_head.weight.device)
        logits = values.save()  # noqa: F841
    return sent.payload


async def result(bench: Bench) -> list[Figure]:
    """Measure a large result from the device."""
    size = bench.sizes.result_bytes
    payload = holding(bench.client, size)
    values = torch.ones(size // 2, dtype=torch.bfloat16, device=bench.device)
    local_s = min(seconds(lambda: torch.save(values.cpu(), io.BytesIO())) for _ in range(3))
    how = f"to the CPU and serialized, in this process: {local_s:.2f} s"
    figures = []
    for trusted, kind in ((True, "trusted"), (False, "sandboxed")):
        took = await seconds_of(bench.run(payload, trusted=trusted))
        figures.append(Figure(f"a result of {size // MB} MB, {kind}", took, None, "s", how=how))
    return figures


async def many_replicas(bench: Bench) -> list[Figure]:
    """Measure many tiny replicas on one GPU."""
    count, payload = bench.sizes.replicas, reading(bench.client)
    before = torch.cuda.mem_get_info()[0] if bench.device != "cpu" else 0
    replicas = [await bench.replica(bench.tiny, trusted=True, memory=GIB) for _ in range(count)]
    took = await seconds_of(asyncio.gather(*(bench.up(served) for served in replicas)))
    await asyncio.gather(*(run(served, payload, trusted=True) for served in replicas))
    after = torch.cuda.mem_get_info()[0] if bench.device != "cpu" else 0
    await asyncio.gather(*(served.actor.stop() for served in replicas))
    taken = (before - after) / count / MB
    return [
        Figure(
            f"{count} replicas to ready", took, None, "s", how=f"one: {bench.ready_s[True]:.1f} s"
        ),
        Figure(
            "a tiny replica takes", taken, None, "MiB", how="contexts of an owner and two runners"
        ),
    ]


STEPS: tuple[Callable[[Bench], Awaitable[list[Figure]]], ...] = (
    sharing,
    starts,
    small_trace,
    second_request,
    checksum,
    warm,
    result,
    generation,
    many_replicas,
)


async def measure(
    bench: Bench, ends: float, on_step: Callable[[list[Figure], dict[str, str]], None]
) -> tuple[list[Figure], dict[str, str]]:
    """Run the steps until the time is over; after each, call `on_step` with the figures and problems."""
    figures: list[Figure] = []
    problems: dict[str, str] = {}
    for step in STEPS:
        left_s = min(STEP_S, ends - time.monotonic())
        try:
            if left_s <= 0:
                problems[step.__name__] = "no time was left for this step"
            else:
                measured = await asyncio.wait_for(step(bench), left_s)
                # Limits apply to a GPU.
                figures += (
                    [replace(f, limit=None) for f in measured]
                    if bench.device == "cpu"
                    else measured
                )
        except Exception as error:
            traceback.print_exc()
            problems[step.__name__] = f"{type(error).__name__}: {error}".splitlines()[0]
        on_step(figures, problems)
    await bench.close()
    return figures, problems


def as_json(figures: list[Figure], problems: dict[str, str]) -> dict[str, Any]:
    """Return a JSON-serialisable dict; each row of its table has a name, a value and a detail."""
    rows = [
        (
            name,
            "failed" if verdict == "does not hold" else value,
            " ".join([value, limit, verdict, how]),
        )
        for name, value, limit, verdict, how in (figure.row() for figure in figures)
    ]
    return {
        "figures": [{**asdict(figure), "holds": figure.holds} for figure in figures],
        "problems": problems,
        "table": [*rows, *((name, "failed", why) for name, why in problems.items())],
    }


def main() -> None:
    """Measure, print a table and write JSON; exit 1 if a step fails or a limit does not hold."""
    parser = argparse.ArgumentParser(description="Measure the GPU path.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    arguments = parser.parse_args()
    ends = time.monotonic() + arguments.seconds - 10

    def write(figures: list[Figure], problems: dict[str, str]) -> None:
        if arguments.json:
            write_json(arguments.json, as_json(figures, problems))

    if arguments.device == "cuda" and (absent := absence()):
        if arguments.json:
            write_json(arguments.json, {"absent": absent})
        print(absent)
        return
    sizes = CARD if arguments.device == "cuda" else TINY
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.device, sizes, Path(folder))
        figures, problems = asyncio.run(measure(bench, ends, write))
    Console(width=160).print(table("GPU", figures))
    if problems or not all(figure.holds for figure in figures):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
