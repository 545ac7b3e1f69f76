"""Repositories that attack the loading process: `python -m tests.security.repositories FOLDER`.

Each is loaded by the code of a model process in a separate process: without layers, with each layer alone,
and with all. The gain is observed from outside, or in the loaded model.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ndif.runtime.spec import ModelSpec, UntrustedSettings
from tests.tiny_models import make_gpt2

SECRET = "tHe SeCrEt Of ThE mAcHiNe"
_KEY = "transformer.wte.weight"


@dataclass(frozen=True)
class Lab:
    """A private model and a private file of the machine, and the attack's folder."""

    folder: Path
    own: Path
    """A public model, from which attacks are made."""
    private: Path
    """A private model."""
    weight: torch.Tensor
    """The embeddings of the private model."""
    secret: Path
    marker: Path
    """A file that exists if the attacker's code wrote it."""
    port: int

    def repository(self) -> Path:
        """Return a copy of the harmless model, in the layout of the Hub's cache."""
        cached = self.folder / "models--test--own"
        (cached / "blobs").mkdir(parents=True)
        return shutil.copytree(self.own, cached / "snapshots" / ("0" * 40))


@dataclass(frozen=True)
class Attack:
    """One repository: how it is made, and the layers that stop it."""

    aim: str
    make: Callable[[Lab], Path]
    gains: Callable[[Lab, Any], bool]
    """Returns True if the attack reached its aim; takes the loaded model, if there is one."""
    by: tuple[str, ...]
    """Layers that each stop it: "checks" of its files, "kernel" for a thread, "process" for the process."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of its `ModelSpec`."""
    broken: bool = False
    """True to load pickles as if torch executed them."""


def has_private_weights(lab: Lab, model: Any) -> bool:
    return model is not None and torch.equal(model.get_input_embeddings().weight, lab.weight)


def wrote(lab: Lab, _: Any) -> bool:
    return lab.marker.exists()


def adapter_of_a_folder(lab: Lab) -> Path:
    folder = lab.folder / "adapter"
    folder.mkdir()
    given = {"base_model_name_or_path": str(lab.private), "peft_type": "LORA", "r": 1}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file({}, folder / "adapter_model.safetensors")
    return folder


def index_that_climbs(lab: Lab) -> Path:
    folder = lab.repository()
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    climbing = os.path.relpath(lab.private / "model.safetensors", folder)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, climbing)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def index_of_a_path(lab: Lab) -> Path:
    folder = lab.repository()
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(names, str(lab.private / "model.safetensors"))}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, **index}))
    return folder


def link_to_weights(lab: Lab) -> Path:
    folder = lab.repository()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(lab.private / "model.safetensors")
    return folder


class _Runs:
    """A pickle that runs a command."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return os.system, (self._command,)


class _Writes:
    """A pickle that writes a file."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return open, (self._path, "w")


def pickled(lab: Lab, with_value: Any = None) -> Path:
    folder = lab.repository()
    weights: dict[str, Any] = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if with_value is not None:
        weights["transformer.extra"] = with_value
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


CODE = """
import json, os, socket, subprocess
from transformers import GPT2LMHeadModel

def attempt(name, run):
    try:
        run()
    except BaseException:
        return
    GAINED.append(name)

GAINED = []
SECRET, MARKER, PORT, VICTIM = {secret!r}, {marker!r}, {port}, {victim}
attempt("reads a file", lambda: open(SECRET).read())
attempt("lists a folder", lambda: os.listdir(os.path.dirname(SECRET)))
attempt("writes a file", lambda: open(MARKER, "w").close())
attempt("connects", lambda: socket.create_connection(("127.0.0.1", PORT)))
attempt("sends a datagram", lambda: socket.socket(2, 2).sendto(b"x", ("127.0.0.1", PORT)))
attempt("runs a program", lambda: subprocess.run(["/bin/true"], check=True))
attempt("signals another process", lambda: os.kill(VICTIM, 0))
attempt("reads another's environment", lambda: open(f"/proc/{{VICTIM}}/environ").read())
attempt("reads another's memory", lambda: open(f"/proc/{{VICTIM}}/mem", "rb"))
attempt("changes a mode", lambda: (os.chmod(SECRET, 0o777), 1 / (os.stat(SECRET).st_mode & 0o100)))
attempt("links a file", lambda: os.link(SECRET, MARKER + ".link"))

class Own(GPT2LMHeadModel):
    def forward(self, *arguments, **options):
        attempt("reads a file as it computes", lambda: open(SECRET).read())
        return super().forward(*arguments, **options)
"""


def code_of_its_own(lab: Lab) -> Path:
    folder = lab.repository()
    given = {
        "secret": str(lab.secret),
        "marker": str(lab.marker),
        "port": lab.port,
        "victim": os.getppid(),
    }
    (folder / "own.py").write_text(CODE.format(**given))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def gained(lab: Lab, model: Any) -> bool:
    if model is None or type(model).__name__ != "Own":
        return False
    gains: list[str] = sys.modules[type(model).__module__].GAINED  # type: ignore[attr-defined]
    print(f"code of its own: {gains}", file=sys.stderr)
    return bool(gains)


def ran_code(_: Lab, model: Any) -> bool:
    return type(model).__name__ == "Own"


def without_a_class(lab: Lab) -> Path:
    folder = code_of_its_own(lab)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "own"
    config["auto_map"]["AutoConfig"] = "own.Own"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def layer_without_weights(lab: Lab) -> Path:
    """Write a config of a 100 GB model, and a file with 500 kB of its weights."""
    folder = lab.repository()
    config = json.loads((folder / "config.json").read_text())
    config.update(n_layer=5, n_inner=400_000_000)
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if ".mlp." not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


KERNEL = ("kernel", "process")
EVERY = ("checks", *KERNEL)
PICKLED = {"pickled": True}
TRUSTED_CODE = {"trust_remote_code": True}

ATTACKS = {
    "adapter": Attack(
        "an adapter_config.json that names a folder of the machine as the model to load",
        adapter_of_a_folder,
        has_private_weights,
        EVERY,
    ),
    "index that climbs": Attack(
        "an index whose weight_map climbs out of the folder",
        index_that_climbs,
        has_private_weights,
        EVERY,
    ),
    "index of a path": Attack(
        "an index whose weight_map names a path of the machine",
        index_of_a_path,
        has_private_weights,
        EVERY,
    ),
    "link": Attack(
        "weights that are a link to another model's",
        link_to_weights,
        has_private_weights,
        EVERY,
    ),
    "pickle that runs a program": Attack(
        "pickled weights that run a program, read by a torch that would let them",
        lambda lab: pickled(lab, _Runs(f"touch {lab.marker}")),
        wrote,
        KERNEL,
        PICKLED,
        broken=True,
    ),
    "pickle that writes": Attack(
        "pickled weights that write a file, read by a torch that would let them",
        lambda lab: pickled(lab, _Writes(lab.marker)),
        wrote,
        KERNEL,
        PICKLED,
        broken=True,
    ),
    "pickle that is refused": Attack(
        "pickled weights where they are not allowed",
        lambda lab: pickled(lab, _Writes(lab.marker)),
        wrote,
        EVERY,
        broken=True,
    ),
    "trusted code": Attack(
        "code that the operator trusts, which looks for secrets, also while the model runs",
        code_of_its_own,
        gained,
        ("process",),
        TRUSTED_CODE,
    ),
}

CELLS = ("none", "checks", "kernel", "process", "all")


def load(lab: Lab, attack: Attack, cell: str) -> dict[str, Any]:
    """Load a repository with these layers; return the outcome."""
    from ndif.runtime.generations import create_generation
    from ndif.runtime.weights import loading

    spec = ModelSpec(
        str(attack.make(lab)), "0.8", task="text-generation", device="cpu", **attack.options
    )
    whole = cell in ("process", "all")
    mode = "require" if cell in ("kernel", "process", "all") else "off"
    untrusted = UntrustedSettings(
        mode, False, None, 1 << 30, 1 << 20, 64, str(lab.folder / "adapters"), every_request=whole
    )
    spec = replace(spec, untrusted=untrusted)
    if cell not in ("checks", "all"):
        loading.require_harmless = lambda *_, **__: None
        loading._without_adapter = contextlib.nullcontext
    if attack.broken:
        from transformers import modeling_utils

        given = modeling_utils.load_state_dict
        modeling_utils.load_state_dict = lambda file, **options: given(
            file, **{**options, "weights_only": False}
        )
    generation = create_generation("0.8")
    error, model = "", None
    try:
        loading.read_confined(spec, lambda: generation.load(spec), whole=whole)
        model = generation.model._module
        with torch.no_grad():
            model(input_ids=torch.zeros((1, 2), dtype=torch.long))
    except Exception as failed:
        from ndif.runtime.weights.fetch import explain_unavailable

        error = explain_unavailable(spec, failed)
    return {"gained": attack.gains(lab, model), "error": error, "loaded": model is not None}


def import_of_the_operator(lab: Lab) -> dict[str, Any]:
    """Load a model confined, and import the operator's module from a folder that is not a library."""
    from ndif.runtime.weights import loading

    folder, confined = lab.folder / "modules", threading.Event()
    folder.mkdir()
    (folder / "labtools.py").write_text("ANSWER = 42")
    (folder / "private.py").write_text("")
    (lab.folder / "whitelist.yaml").write_text("modules: [{name: labtools}]")
    sys.path.append(str(folder))

    def change() -> None:
        confined.wait()
        (folder / "notes").touch()

    # An unconfined thread changes the folder while the model is loaded.
    changing = threading.Thread(target=change)
    changing.start()
    adapters, whitelist = str(lab.folder / "adapters"), str(lab.folder / "whitelist.yaml")
    untrusted = UntrustedSettings("require", True, whitelist, 1 << 30, 1 << 20, 64, adapters)
    loading.read_confined(ModelSpec(str(lab.own), "0.8", untrusted=untrusted), int, whole=True)
    confined.set()
    changing.join()
    answer = importlib.import_module("labtools").ANSWER
    with contextlib.suppress(ImportError, OSError):
        importlib.import_module("private")
        return {"answer": None}
    return {"answer": answer}


def in_a_fork(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            os.write(writing, json.dumps(run()).encode())
        except BaseException as error:
            os.write(writing, json.dumps({"broken": repr(error)}).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        content = pipe.read()
    _, status = os.waitpid(pid, 0)
    outcome: dict[str, Any] = json.loads(content or f'{{"broken": "it ended: {status}"}}')
    return outcome


@contextlib.contextmanager
def a_lab(folder: Path) -> Iterator[Callable[[str], Lab]]:
    own = make_gpt2(folder / "own")
    private = make_gpt2(folder / "private", seed=7)
    weight = load_file(private / "model.safetensors")[_KEY]
    secret = folder / "secret.txt"
    secret.write_text(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def lab(name: str) -> Lab:
            place = folder / name
            place.mkdir()
            secret.chmod(0o600)
            return Lab(place, own, private, weight, secret, place / "marker", port)

        yield lab


def main() -> None:
    folder = Path(sys.argv[1])
    import ndif.runtime.generations.v08
    import ndif.runtime.weights.loading  # noqa: F401

    torch.set_num_threads(1)
    outcomes: dict[str, dict[str, Any]] = {}
    with a_lab(folder) as lab:
        for name, attack in ATTACKS.items():
            cells = ["none", *attack.by, "all"]
            for cell in cells:
                place = lab(f"{name} {cell}".replace(" ", "-"))
                outcomes.setdefault(name, {})[cell] = in_a_fork(
                    lambda place=place, attack=attack, cell=cell: load(place, attack, cell)  # type: ignore[misc]
                )
        place = lab("modules")
        outcomes["modules"] = {"all": in_a_fork(lambda: import_of_the_operator(place))}
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
