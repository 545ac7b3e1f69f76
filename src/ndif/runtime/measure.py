"""`python -m ndif.runtime.measure FD`: work out what models take, without loading them.

Over the socket FD, a line of JSON asks of one model under a number, and a line answers. Questions come
many at a time, so that a hub that is slow over one holds up no other. Models are built one after the other,
because a model's own code may change the process while it is built. An architecture is built from its
config on the meta device, so no weights are fetched or read. The process stays for the next question.
"""

from __future__ import annotations

import json
import socket
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

from ndif.runtime.process import cuda
from ndif.runtime.process.zygote import end_with_parent
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import UserFacingError, sentence
from ndif.runtime.weights.fetch import explain_unavailable, model_info

_AT_ONCE = 8
_BUILDING = threading.Lock()
_WRITING = threading.Lock()
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating types that a model may be loaded in, by their names in safetensors."""
_LARGEST_HEADER = 100 << 20
_LONGEST = 4096


class UnknownError(UserFacingError):
    """The size of a model cannot be worked out."""


def main(fd: int) -> None:
    """Answer over the socket `fd` until nobody asks."""
    end_with_parent()
    with socket.socket(fileno=fd) as connection, ThreadPoolExecutor(_AT_ONCE) as threads:
        answers = connection.makefile("w")
        for line in connection.makefile("r"):
            question = json.loads(line)
            asked = threads.submit(
                answer, ModelSpec.of(question["spec"]), look_for_cuda=question["cuda"]
            )
            asked.add_done_callback(partial(tell, answers, question["number"]))


def answer(spec: ModelSpec, *, look_for_cuda: bool = False) -> dict[str, Any]:
    """Return the facts about a model, or the reason why there are none."""
    try:
        # Asking starts the driver, for which a model on a CPU need not wait.
        works = cuda.is_available() if look_for_cuda else None
        return {**evaluate(spec), "cuda": works}
    except Exception as error:
        traceback.print_exc()
        return {"failed": sentence(error)[:_LONGEST]}


def tell(answers: IO[str], number: int, asked: Future[dict[str, Any]]) -> None:
    """Write one answer."""
    line = json.dumps({"number": number, **asked.result()})
    with _WRITING:
        print(line, file=answers, flush=True)


def evaluate(spec: ModelSpec) -> dict[str, Any]:
    """Return the bytes of a model's parameters and buffers, and what a hub knows of it."""
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
    """Return the hub's description of the repository; None if no hub answers."""
    try:
        return model_info(spec)
    except Exception:  # the files may be in the cache
        return None


def _config(spec: ModelSpec) -> Any:
    try:
        return AutoConfig.from_pretrained(
            spec.checkpoint, revision=spec.revision, trust_remote_code=spec.trust_remote_code
        )
    except Exception as error:
        raise UnknownError(explain_unavailable(spec, error)) from error


def _build(spec: ModelSpec, config: Any, task: str | None, dtype: torch.dtype) -> Any:
    """Build the model as it would be loaded, on the meta device.

    Raises:
        UnknownError: if no class can build it.
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
        raise UnknownError(explain_unavailable(spec, error)) from error
    raise error


def _classes(spec: ModelSpec, config: Any, task: str | None) -> Iterator[Any]:
    """Yield the classes that loading would try, in order."""
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
    """Return the dtype in which the weights would be loaded."""
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

        # Quantized weights take less than the dtype in which they are computed.
        return _dtype_named(resolve_load_kwargs({"dtype": name}, quantize=False)["dtype"], spec)
    return _dtype_named(name, spec)


def _dtype_named(name: Any, spec: ModelSpec) -> torch.dtype:
    found = name if isinstance(name, torch.dtype) else getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise UnknownError(f"There is no dtype {spec.dtype!r} to load {spec.checkpoint!r} in.")
    return found


def _dtype_of_files(spec: ModelSpec) -> torch.dtype | None:
    """Return the dtype of a checkpoint's first tensor, for a config without one; None if unknown."""
    path = _file(spec, "model.safetensors")
    if path is None and (index := _file(spec, "model.safetensors.index.json")):
        with open(index) as file:  # noqa: PTH123
            names = sorted(set(json.load(file)["weight_map"].values()))
        path = _file(spec, names[0]) if names else None
    header = _header(path) if path else _header_from_hub(spec)
    found = (_DTYPES.get(entry) for entry in header)
    return next((dtype for dtype in found if dtype is not None), None)


def _header(path: str) -> list[str]:
    """Return the dtypes in a safetensors file's header, without reading further."""
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
    """Return the path of a file of the checkpoint; None if it is not on this machine."""
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
    """Yield the size and dtype of every loaded parameter and buffer, tied ones once."""
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
    main(int(sys.argv[1]))
