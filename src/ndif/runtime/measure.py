"""`python -m ndif.runtime.evaluate`: what models take; a JSON line asks, with a number, and a line answers.

Many are asked for at a time: where a hub takes its time over one, the others do not wait for it. They are
built one after the other, because what a model's own code does to the process is not to meet another's.
The architecture is built from its config without memory for it, so nothing of the weights is fetched or
read. Importing torch and transformers takes longer than that, so this process stays for the next.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import IO, Any

import torch
from huggingface_hub import HfApi
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import build_glob_alternation
from transformers.pipelines import check_task
from transformers.utils import cached_file

from ndif.runtime import cuda, hub
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import SaidError, sentence
from ndif.runtime.zygote import end_with_parent

_AT_ONCE = 8
_BUILDING = threading.Lock()
_WRITING = threading.Lock()
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The floating types of a checkpoint that a model may be loaded in, as safetensors names them."""
_LARGEST_HEADER = 100 << 20
_LONGEST = 4096


class UnknownError(SaidError):
    """What the model takes cannot be known."""


def main() -> None:
    """Answer until there is nobody who asks."""
    end_with_parent()
    # What a library prints is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for line in sys.stdin:
            question = json.loads(line)
            asked = threads.submit(
                answer, ModelSpec.of(question["spec"]), look_for_cuda=question["cuda"]
            )
            asked.add_done_callback(partial(tell, answers, question["number"]))


def answer(spec: ModelSpec, *, look_for_cuda: bool = False) -> dict[str, Any]:
    """What is found of a model, or why nothing is."""
    try:
        # To look starts the driver here, which a model that is to be on a CPU need not wait for.
        works = cuda.is_available() if look_for_cuda else None
        return {**evaluate(spec), "cuda": works}
    except Exception as error:
        traceback.print_exc()
        return {"failed": sentence(error)[:_LONGEST]}


def tell(answers: IO[str], number: int, asked: Future[dict[str, Any]]) -> None:
    """Write one answer whole."""
    line = json.dumps({"number": number, **asked.result()})
    with _WRITING:
        print(line, file=answers, flush=True)


def evaluate(spec: ModelSpec) -> dict[str, Any]:
    """Bytes and number of its parameters, bytes of its buffers, and what a hub knows of it."""
    known = None if spec.is_folder else _ask_hub(spec)
    task = spec.task or getattr(known, "pipeline_tag", None)
    config = _config(spec)
    dtype = _dtype(spec, config)
    with _BUILDING:
        model = _build(spec, config, task, dtype)
        tensors = list(_tensors(model))
    return {
        "bytes": sum(count * dtype.itemsize for count, dtype in tensors),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "task": task,
        "repo_id": getattr(known, "id", None),
        "config": _file(spec, "config.json"),
    }


def _ask_hub(spec: ModelSpec) -> Any:
    """What a hub says of the repository; None where there is none to be reached."""
    try:
        return hub.ask(spec)
    except Exception:  # what matters is whether its files are here
        return None


def _config(spec: ModelSpec) -> Any:
    try:
        return AutoConfig.from_pretrained(
            spec.checkpoint, revision=spec.revision, trust_remote_code=spec.trust_remote_code
        )
    except Exception as error:
        raise UnknownError(hub.why(spec, error)) from error


def _build(spec: ModelSpec, config: Any, task: str | None, dtype: torch.dtype) -> Any:
    """The model as it would be loaded, on no device.

    Raises:
        UnknownError: if no class has such a model.
    """
    error: Exception | None = None
    for kind in _classes(spec, config, task):
        try:
            with torch.device("meta"):
                if hasattr(kind, "_model_mapping"):  # one of the Auto classes
                    return kind.from_config(
                        config, dtype=dtype, trust_remote_code=spec.trust_remote_code
                    )
                return kind._from_config(config, dtype=dtype)
        except Exception as failed:
            error = error or failed
    if error is None:
        raise UnknownError(f"{spec.checkpoint!r} does not say what architecture it has.")
    if not spec.trust_remote_code and "trust_remote_code" in str(error):
        raise UnknownError(hub.why(spec, error)) from error
    raise error


def _classes(spec: ModelSpec, config: Any, task: str | None) -> Iterator[Any]:
    """The classes that loading would try, in that order."""
    import transformers

    if spec.generation != "0.8":
        if task not in (None, "text-generation"):
            raise UnknownError(
                f"nnsight {spec.generation} serves text generation only; nnsight 0.8 serves {task}."
            )
        yield AutoModelForCausalLM
        return
    own = [getattr(transformers, name, None) for name in config.architectures or ()]
    if task is not None:
        try:
            yield from check_task(task)[1]["pt"]
        except KeyError as error:
            raise UnknownError(f"transformers has no task {task!r}.") from error
    yield from (kind for kind in own if kind is not None)
    if task is None:
        yield transformers.AutoModel


def _dtype(spec: ModelSpec, config: Any) -> torch.dtype:
    """What the weights would be loaded in."""
    name = spec.dtype if spec.dtype != "auto" else getattr(config, "dtype", None)
    if name is None:
        return _dtype_of_files(spec) or torch.float32
    if isinstance(name, torch.dtype):
        return name
    found = getattr(torch, name, None)
    if isinstance(found, torch.dtype):
        return found
    if spec.generation == "0.8":
        from nnsight.modeling.quantization import resolve_load_kwargs

        # What is quantized takes less than what it computes in, and never more.
        return _dtype_named(resolve_load_kwargs({"dtype": name}, quantize=False)["dtype"], spec)
    return _dtype_named(name, spec)


def _dtype_named(name: Any, spec: ModelSpec) -> torch.dtype:
    found = name if isinstance(name, torch.dtype) else getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise UnknownError(f"There is no dtype {spec.dtype!r} to load {spec.checkpoint!r} in.")
    return found


def _dtype_of_files(spec: ModelSpec) -> torch.dtype | None:
    """The dtype of the first tensor of a checkpoint whose config names none, if its header is near."""
    path = _file(spec, "model.safetensors")
    if path is None and (index := _file(spec, "model.safetensors.index.json")):
        with open(index) as file:  # noqa: PTH123
            names = sorted(set(json.load(file)["weight_map"].values()))
        path = _file(spec, names[0]) if names else None
    header = _header(path) if path else _header_from_hub(spec)
    found = (_DTYPES.get(entry) for entry in header)
    return next((dtype for dtype in found if dtype is not None), None)


def _header(path: str) -> list[str]:
    """The dtypes in a safetensors file's header, which is all of it that is read."""
    with open(path, "rb") as file:  # noqa: PTH123
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(size, _LARGEST_HEADER)))
    return [entry["dtype"] for name, entry in sorted(header.items()) if name != "__metadata__"]


def _header_from_hub(spec: ModelSpec) -> list[str]:
    if spec.is_folder:
        return []
    try:
        found = HfApi().parse_safetensors_file_metadata(
            spec.checkpoint, "model.safetensors", revision=spec.revision
        )
    except Exception:  # another format, or no hub
        return []
    return [tensor.dtype for _, tensor in sorted(found.tensors.items())]


def _file(spec: ModelSpec, name: str) -> str | None:
    """Where a file of the checkpoint lies; None if it is not here. None is fetched."""
    found: str | None = cached_file(
        spec.checkpoint,
        name,
        revision=spec.revision,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return found


def _tensors(model: Any) -> Iterator[tuple[int, torch.dtype]]:
    """Numbers and dtype of every parameter and buffer once it is loaded; a tied one once."""
    kept = model._get_dtype_plan(model.dtype) if hasattr(model, "_get_dtype_plan") else {}
    if kept:
        pattern, by_group, _ = build_glob_alternation(list(kept))
    parameters = dict(model.named_parameters())
    for name, tensor in [*parameters.items(), *model.named_buffers()]:
        dtype = tensor.dtype
        found = pattern.search(name) if kept and name in parameters else None
        if found is not None:
            dtype = kept[by_group[found.lastgroup]]
        yield tensor.numel(), dtype


if __name__ == "__main__":
    main()
