"""One user's requests in one confined process: none sees a trace of another; some end the process."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import nnsight
import psutil
import pytest
import torch
from nnsight import TransformersModel

from ndif.config.settings import Settings
from ndif.schema.response import InlineResult, StoredResult
from ndif.schema.status import Status
from ndif.stores.objects import FileStore
from tests.processes import children
from tests.runtime.process.settings_left import SETTINGS
from tests.runtime.replica import (
    PROMPT,
    Sent,
    Served,
    alive,
    expected,
    reading,
    serve,
)
from tests.waiting import PATIENCE_S, time_passes, until

pytestmark = pytest.mark.process

T = TypeVar("T")
PID = "import os; said = os.getpid()"


def executing(client: TransformersModel, code: str) -> bytes:
    """Return a block that runs `code` and returns the value of `said`."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        space = {"model": client, "__name__": "users"}
        exec(code, space)
        said = nnsight.save([space.get("said")])  # noqa: F841 - the result
    return sent.payload


class Site:
    """A replica that serves on a separate event loop."""

    def __init__(self, folder: Path, client: TransformersModel, settings: Settings) -> None:
        self.client = client
        self.objects = FileStore(settings.session_root / "results", 3600)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._context = serve(folder, settings=settings, objects=self.objects)
        self.served: Served = self.wait(self._context.__aenter__())

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def says(self, code: str, key: str, **env: str) -> Any:
        """Return the value of `said` in a user's block."""
        content = self.result(code, key, **env)
        return torch.load(io.BytesIO(content), weights_only=False)["said"][0]

    def result(self, code: str, key: str, **env: str) -> bytes:
        """Return a user's result, from its frame or its file."""
        payload = executing(self.client, code)
        response = self.wait(self.served.run(payload, trusted=False, key=key, env=env))
        assert response.status is Status.COMPLETED, response.description
        if isinstance(response.data, InlineResult):
            return response.data.content
        assert isinstance(response.data, StoredResult)
        [path] = (self.objects.root / "results").iterdir()
        content = path.read_bytes()
        path.unlink()
        return content

    def stays(self) -> bool:
        """Return True if the last request's process waits for its user's next request."""
        return self.wait(self.served.actor.runners.wait_until_reset(trusted=False))

    def close(self) -> None:
        self.wait(self._context.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def client(tiny_gpt2: Path) -> TransformersModel:
    return TransformersModel(str(tiny_gpt2), task="text-generation")


@pytest.fixture(scope="module")
def site(
    tiny_gpt2: Path, client: TransformersModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A replica that confines users with the kernel alone. It keeps the process of one key."""
    folder = tmp_path_factory.mktemp("session")
    settings = Settings(session_root=folder, sandbox="require", protector="off", runner_users=1)
    started = Site(tiny_gpt2, client, settings)
    yield started
    started.close()


def test_each_request_gets_requested_attention(site: Site) -> None:
    tells = "said = model._module.config._attn_implementation"
    eager = {"attn_implementation": "eager"}
    values = [site.says(tells, "one", **env) for env in (eager, eager, {}, eager, {}, {})]
    assert values == ["eager", "eager", "sdpa", "eager", "sdpa", "sdpa"]
    assert site.stays()


def test_protected_process_frees_memory_and_stays(
    tiny_gpt2: Path, client: TransformersModel, tmp_path: Path
) -> None:
    """The first request frees little memory; a request that needed much frees much."""
    site = Site(tiny_gpt2, client, Settings(session_root=tmp_path, sandbox="require"))
    many = "import torch; said = sum(float(part[0]) for part in [torch.ones(1 << 16)] * 2)"
    held = "import torch; held = [torch.ones(1 << 16) for _ in range(200)]; said = len(held)"
    for code, value in ((many, 2.0), (held, 200), (many, 2.0)):
        assert site.says(code, "ada") == value
        assert site.stays()
    site.close()


RESTED_S = 5.0


def test_idle_process_releases_memory(site: Site) -> None:
    """A request that follows immediately still finds the memory of the previous one."""

    def held_mb() -> int:
        """Return the memory of the process after a request that needs 14 MB temporarily."""
        pid = site.says(f"import torch; torch.ones(14 << 18); {PID}", "thinks")
        assert site.stays()
        return psutil.Process(pid).memory_info().rss >> 20

    first, second = held_mb(), held_mb()
    assert second > first + 4
    time_passes(RESTED_S + 0.5)
    assert held_mb() < second - 4


@dataclass(frozen=True)
class Left:
    """A change that one request leaves, and code with which the next request looks for it."""

    leaves: str
    looks: str
    stays: bool
    """True if the reset undoes the change; otherwise the process ends."""


LEFT = {
    "nothing": Left("", "said = 1", True),
    # The model
    "attribute of the model": Left(
        "model._module.note = 1", "said = hasattr(model._module, 'note')", True
    ),
    "hook": Left(
        "model._module.lm_head.register_forward_hook(lambda *_: None)",
        "said = len(model._module.lm_head._forward_hooks)",
        True,
    ),
    "replaced module": Left(
        "import torch; model._module.lm_head = torch.nn.Identity()",
        "said = type(model._module.lm_head).__name__",
        True,
    ),
    "training": Left("model._module.train()", "said = model._module.training", True),
    "gradients": Left(
        "model._module.lm_head.weight.sum().backward()",
        "said = model._module.lm_head.weight.grad is None",
        True,
    ),
    "frozen parameters": Left(
        "model._module.requires_grad_(False)",
        "said = model._module.lm_head.weight.requires_grad",
        True,
    ),
    "buffer": Left(
        "import torch; model._module.register_buffer('note', torch.ones(3))",
        "said = 'note' in dict(model._module.named_buffers())",
        True,
    ),
    "configuration": Left(
        "model._module.config.note = 'x'", "said = hasattr(model._module.config, 'note')", True
    ),
    "generation settings": Left(
        "model._module.generation_config.max_new_tokens = 77",
        "said = model._module.generation_config.max_new_tokens",
        True,
    ),
    "weights through .data": Left(
        "model._module.transformer.h[0].mlp.c_fc.weight.data[0, 0] += 1",
        "said = model._module.transformer.h[0].mlp.c_fc.weight[0, 0].item()",
        False,
    ),
    "weights through numpy": Left(
        "model._module.lm_head.weight.detach().numpy()[-1, -1] = 7",
        "said = model._module.lm_head.weight[-1, -1].item()",
        False,
    ),
    "a small weight": Left(
        "model._module.transformer.ln_f.bias.data[3] = 5",
        "said = model._module.transformer.ln_f.bias[3].item()",
        False,
    ),
    "a replaced weight": Left(
        "import torch\nweight = model._module.lm_head.weight\nweight.data = torch.zeros_like(weight)",
        "said = model._module.lm_head.weight.sum().item()",
        False,
    ),
    "a weight's attributes": Left(
        "model._module.lm_head.weight.__dict__ = {'note': 1}",
        "said = hasattr(model._module.lm_head.weight, 'note')",
        False,
    ),
    "a transposed weight": Left(
        "model._module.transformer.h[0].attn.c_proj.weight.detach_().t_()",
        "said = model._module.transformer.h[0].attn.c_proj.weight.stride()",
        False,
    ),
    "a weight of another class": Left(
        "import torch\n"
        "model._module.lm_head.weight.__class__ = type('Own', (torch.nn.Parameter,), {})",
        "said = type(model._module.lm_head.weight).__name__",
        False,
    ),
    "tokens": Left("model.tokenizer.add_tokens(['xyzzy'])", "said = len(model.tokenizer)", False),
    "side of the padding": Left(
        "model.tokenizer.padding_side = 'left' if model.tokenizer.padding_side == 'right' else 'right'",
        "said = model.tokenizer.padding_side",
        True,
    ),
    **{name: Left(leaves, looks, True) for name, (leaves, looks) in SETTINGS.items()},
    "inference mode": Left(
        "import builtins, torch\nbuiltins.mode = torch.inference_mode(); mode.__enter__()",
        "import torch; said = torch.is_inference_mode_enabled()",
        False,
    ),
    "builtins": Left(
        "import builtins; builtins.note = 1",
        "import builtins; said = hasattr(builtins, 'note')",
        False,
    ),
    "a patched function": Left(
        "import torch; torch.relu = abs", "import torch; said = torch.relu.__name__", False
    ),
    "a patched method": Left(
        "import torch; torch.nn.Linear.forward = abs",
        "import torch; said = torch.nn.Linear.forward.__name__",
        False,
    ),
    "an attribute of a class": Left(
        "import torch; torch.Tensor.note = 1",
        "import torch; said = hasattr(torch.Tensor, 'note')",
        False,
    ),
    "patched code": Left(
        "import textwrap\ndef other(*_): return 'patched'\ntextwrap.indent.__code__ = other.__code__",
        "import textwrap; said = textwrap.indent('', '')",
        False,
    ),
    "patched defaults": Left(
        "import textwrap; textwrap.indent.__defaults__ = (lambda _: True,)",
        "import textwrap; said = textwrap.indent('\\n', ' ')",
        False,
    ),
    "a module of the user's": Left(
        "import sys, types; sys.modules['mine'] = types.ModuleType('mine')",
        "import sys; said = 'mine' in sys.modules",
        True,
    ),
    "a module that is gone": Left(
        "import sys; del sys.modules['json']", "import sys; said = 'json' in sys.modules", True
    ),
    "a library that was loaded": Left(
        "import wave", "import sys; said = 'wave' in sys.modules", False
    ),
    "an importer": Left(
        "import sys; sys.meta_path.append(object())", "import sys; said = len(sys.meta_path)", False
    ),
    "a codec": Left(
        "import codecs; codecs.register(lambda name: None)",
        "import encodings, gc\n"
        "said = [len(l) for l in gc.get_referrers(encodings.search_function) if type(l) is list]",
        False,
    ),
    "an error handler": Left(
        "import codecs; codecs.register_error('mine', codecs.strict_errors)",
        "import codecs\ntry: said = bool(codecs.lookup_error('mine'))\nexcept LookupError: said = False",
        False,
    ),
    "copyreg": Left(
        "import copyreg; copyreg.pickle(complex, str)",
        "import copyreg; said = copyreg.dispatch_table[complex].__name__",
        False,
    ),
    "an exit function": Left(
        "import atexit; atexit.register(print)", "import atexit; said = atexit._ncallbacks()", False
    ),
    "an audit hook": Left(
        "import sys\nclass Seen(list): pass\nseen = Seen()\nsys.addaudithook(lambda *each: seen.append(1))",
        "import gc; said = [1 for each in gc.get_objects() if type(each).__name__ == 'Seen']",
        False,
    ),
    "a hard limit": Left(
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))",
        "import resource; said = resource.getrlimit(resource.RLIMIT_NOFILE)",
        False,
    ),
    "stdout": Left(
        "import io, sys; sys.__stdout__ = io.StringIO()",
        "import io, sys; said = isinstance(sys.__stdout__, io.StringIO)",
        False,
    ),
    "a thread": Left(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "import threading; said = threading.active_count()",
        False,
    ),
    "a thread that ends soon": Left(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(0.1,), daemon=True).start()",
        "import threading; said = threading.active_count()",
        True,
    ),
    "a thread of the C library's that ends soon": Left(
        "import ctypes\nlibc = ctypes.CDLL(None)\nthread = ctypes.c_ulong()\n"
        "libc.pthread_create(ctypes.byref(thread), None, libc.usleep, ctypes.c_void_p(100_000))",
        "said = 1",
        True,
    ),
    "a thread of the C library's": Left(
        "import ctypes\nlibc = ctypes.CDLL(None)\nthread = ctypes.c_ulong()\n"
        "libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)",
        "import os; said = 1",
        False,
    ),
    "a descriptor": Left(
        "import os; os.dup2(os.open('/dev/null', 0), 199)",
        "import os\ntry: said = bool(os.fstat(199))\nexcept OSError: said = False",
        False,
    ),
    "memory": Left(
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.malloc.restype = ctypes.c_size_t\n"
        "ctypes.memset(libc.malloc(ctypes.c_size_t(300 << 20)), 1, 300 << 20)",
        "said = 1",
        False,
    ),
    "an attribute of a function": Left(
        "import textwrap; textwrap.indent.note = 1",
        "import textwrap; said = hasattr(textwrap.indent, 'note')",
        False,
    ),
    "an object in a cache": Left(
        "import textwrap, functools\nclass Mine: pass\n"
        "import re; re.compile('x').__class__\nimport linecache\n"
        "import fnmatch; fnmatch._compile_pattern.cache_clear()\n"
        "import threading; threading.local\nimport typing; typing.List[Mine]",
        "import gc; said = [1 for each in gc.get_objects() if getattr(each, '__name__', '') == 'Mine']",
        False,
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_next_request_sees_no_trace_of_previous_one(
    site: Site, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "ndif.host.runner_pool")
    left = LEFT[name]
    # A new user gets a new process.
    new = site.says(left.looks, f"{name} (new)")
    first = site.says(f"{left.leaves}\nimport os; said = os.getpid()", name)
    stays = site.stays()
    assert stays is left.stays, caplog.text
    assert site.says(left.looks, name) == new
    again = site.says(PID, name)
    assert (again == first) is stays or not stays
    assert site.says(PID, f"{name} (another)") not in (first, again)
    assert not alive(first)


# The assignment of processes to keys.


def waiting(served: Served, number: int = 1) -> list[int]:
    """Return the stopped processes that wait for their user, once there are `number` of them."""

    def is_stopped(pid: int) -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def stopped() -> list[int]:
        stopped_pids = [pid for pid in children(served.zygote) if is_stopped(pid)]
        return stopped_pids if len(stopped_pids) >= number else []

    return until(stopped)


def ends(pid: int) -> None:
    """Wait until a process has ended."""
    until(lambda: not alive(pid))


def test_one_process_serves_one_key(site: Site) -> None:
    ada = [site.says(PID, "ada") for _ in range(5)]
    assert len(set(ada)) == 1
    assert site.stays()
    assert waiting(site.served) == ada[:1]
    bob = [site.says(PID, "bob") for _ in range(2)]
    assert len(set(bob)) == 1
    assert not alive(ada[0])
    # A returning user gets a new process.
    assert site.says(PID, "ada") not in (ada[0], bob[0])


def test_processes_of_several_keys_are_kept_up_to_runner_users(
    tiny_gpt2: Path, client: TransformersModel, tmp_path: Path
) -> None:
    settings = Settings(session_root=tmp_path, protector="off", runner_users=2)
    site = Site(tiny_gpt2, client, settings)
    ada, bob = site.says(PID, "ada"), site.says(PID, "bob")
    assert site.stays()
    assert {*waiting(site.served, 2)} == {ada, bob}
    assert (site.says(PID, "ada"), site.says(PID, "bob")) == (ada, bob)
    # A third key ends the process that was idle longest, and then starts.
    eve = site.says(PID, "eve")
    assert not alive(ada)
    assert (site.says(PID, "bob"), site.says(PID, "eve")) == (bob, eve)
    assert site.says(PID, "ada") not in (ada, bob, eve)
    assert site.says(PID, "") not in (ada, bob, eve)
    site.close()


def test_keyless_requests_each_get_new_process(site: Site) -> None:
    assert len({site.says(PID, "") for _ in range(4)}) == 4
    assert not site.stays()


def test_block_sees_only_expected_descriptors(site: Site) -> None:
    """The descriptors are the channel, the null streams, and files on the process's own memory."""
    looks = (
        "import os\nsaid = []\nfor fd in range(256):\n"
        "    try: said.append((fd, oct(os.fstat(fd).st_mode)))\n    except OSError: pass"
    )
    descriptors = dict(site.says(looks, "ada"))
    character, sock, file, folder = (
        "0o20666",
        "0o140777",
        ("0o100400", "0o100200", "0o100444"),
        "0o40555",
    )
    assert [descriptors.pop(fd) for fd in (0, 1, 2)] == [character] * 3
    assert descriptors.pop(3) == sock
    assert sorted(descriptors.values()) == sorted((*file, folder))


def test_page_map_hides_physical_addresses(site: Site) -> None:
    looks = (
        "import ctypes, os\nnote = ctypes.create_string_buffer(1 << 20)\nnote[0] = b'x'\n"
        "at = ctypes.addressof(note) // 4096 + 1\nctypes.memset(at * 4096, 1, 4096)\nsaid = []\n"
        "for fd in range(4, 256):\n"
        "    try: said.append(int.from_bytes(os.pread(fd, 8, at * 8), 'little'))\n    except OSError: pass"
    )
    entries = [entry for entry in site.says(looks, "ada") if entry >> 63]
    assert len(entries) == 1
    assert entries[0] & ((1 << 55) - 1) == 0


def test_a_stopped_server_leaves_no_stopped_process(
    tiny_gpt2: Path, client: TransformersModel, tmp_path: Path
) -> None:
    settings = Settings(session_root=tmp_path, protector="off", runner_scope="user")
    site = Site(tiny_gpt2, client, settings)
    pid = site.says(PID, "ada")
    assert site.stays()
    site.close()
    ends(pid)


@pytest.fixture(scope="module")
def short(
    tiny_gpt2: Path, client: TransformersModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A replica whose runners serve at most three requests, with little memory."""
    settings = Settings(
        session_root=tmp_path_factory.mktemp("session"),
        sandbox="require",
        protector="off",
        runner_scope="user",
        runner_max_requests=3,
        runner_memory_bytes=400 << 20,
    )
    started = Site(tiny_gpt2, client, settings)
    yield started
    started.close()


def test_runner_ends_after_runner_max_requests(short: Site) -> None:
    pids = [short.says(PID, "ada") for _ in range(7)]
    assert [pids.index(pid) for pid in pids] == [0, 0, 0, 3, 3, 3, 6]


def test_idle_runner_ends(tiny_gpt2: Path, client: TransformersModel, tmp_path: Path) -> None:
    settings = Settings(session_root=tmp_path, sandbox="require", protector="off", runner_idle_s=2)
    site = Site(tiny_gpt2, client, settings)
    pid = site.says(PID, "idler")
    assert site.stays()
    ends(pid)
    assert site.says(PID, "idler") != pid
    site.close()


LARGE = "import os, resource, torch\nfrom resource import RLIMIT_FSIZE as most\n"
LARGE += "said = (torch.arange(4 << 20), os.getpid(), resource.getrlimit(most)[0])"
FORGES = """
import mmap, os, socket, time
from ndif.runtime.frames import FrameChannel
from ndif.runtime.messages import RunReport, Spill, Spilled
channel = FrameChannel(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=3))
channel.send(Spill(4))
_, _, [file] = channel.receive()
own = os.getpid()
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
os.write(file, own.to_bytes(4096, "little"))
"""
SAYS_SO = """
channel.send(Spilled(RunReport(1, ())))
time.sleep(3600)
"""
KEEPS = {
    "the file": "",
    "a copy of its descriptor": "os.dup(file); os.close(file)",
    "its pages": "pages = mmap.mmap(file, 4096); os.close(file)",
}


def test_process_stays_after_large_result(site: Site) -> None:
    values, pid, limit = site.says(LARGE, "large")
    assert torch.equal(values, torch.arange(4 << 20))
    assert site.stays()
    assert limit == 0
    # The next request has the same limits as the first.
    assert site.says(LARGE, "large")[1:] == (pid, 0)
    assert site.says(PID, "large") == pid


@pytest.mark.parametrize("keeps", KEEPS.values(), ids=KEEPS)
def test_process_that_keeps_result_file_ends_before_delivery(site: Site, keeps: str) -> None:
    """A result file must be the same for each download."""
    content = site.result(FORGES + keeps + SAYS_SO, "forger")
    pid = int.from_bytes(content, "little")
    assert not alive(pid)
    assert not site.stays()


TAKES = "import os, torch\nblock = torch.ones({size} << 18)\nsaid = (os.getpid(), len(block))\ndel block"


def test_each_request_gets_same_memory_limit(short: Site) -> None:
    first, second = [short.says(TAKES.format(size=320), "large") for _ in range(2)]
    assert first == second
    with pytest.raises(AssertionError, match="NDIF_RUNNER_MEMORY_BYTES"):
        short.says(TAKES.format(size=440), "large")


def test_peak_memory_is_per_request(short: Site) -> None:
    def peak(code: str) -> float:
        payload = executing(short.client, code)
        response = short.wait(short.served.run(payload, trusted=False, key="peaks"))
        assert response.meta is not None
        return response.meta["peak_memory"]

    small, large, again = peak("said = 1"), peak(TAKES.format(size=300)), peak("said = 1")
    assert large - small > 250 << 20
    assert again - small < 50 << 20


def test_protected_runner_is_reused_for_same_key(
    tiny_gpt2: Path, client: TransformersModel, tmp_path: Path
) -> None:
    site = Site(tiny_gpt2, client, Settings(session_root=tmp_path, runner_scope="user"))
    truth = expected(tiny_gpt2)
    pids = []
    for _ in range(3):
        logits = site.wait(site.served.logits(reading(client), trusted=False, key="ada"))
        assert torch.equal(logits, truth)
        assert site.stays()
        pids += waiting(site.served)
    assert len(pids) == 3
    assert len(set(pids)) == 1
    site.close()


def test_request_scope_gives_each_request_new_process(
    tiny_gpt2: Path, client: TransformersModel, tmp_path: Path
) -> None:
    settings = Settings(session_root=tmp_path, protector="off", runner_scope="request")
    site = Site(tiny_gpt2, client, settings)
    assert len({site.says(PID, "ada") for _ in range(3)}) == 3
    site.close()
