"""`python -m ndif.runtime.measure FD`: work out what models take, without loading them.

Over the socket FD, a line of JSON asks of one model under a number, and a line answers. Questions come
many at a time, so that a hub that is slow over one holds up no other. Models are built one after the other,
because a model's own code may change the process while it is built. An architecture is built from its
config on the meta device, so no weights are fetched or read. The process stays for the next question.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
import transformers
from huggingface_hub import HfApi, parse_local_safetensors_file_metadata
from transformers.core_model_loading import build_glob_alternation
from transformers.pipelines import check_task
from transformers.utils import cached_file

from ndif.runtime.process import cuda
from ndif.runtime.process.children import end_with_parent
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import UserFacingError, sentence
from ndif.runtime.weights.fetch import HUB_TIMEOUT_S, explain_unavailable, require_readable

_AT_ONCE = 8
_BUILDING = threading.Lock()
_WRITING = threading.Lock()
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating types that a model may be loaded in, by their names in safetensors."""
_LONGEST = 4096


class UnknownError(UserFacingError):
    """The size of a model cannot be worked out."""


def main(fd: int) -> None:
    """Answer over the socket `fd` until nobody asks."""
    end_with_parent()
    with socket.socket(fileno=fd) as connection, ThreadPoolExecutor(_AT_ONCE) as threads:
        answers = connection.makefile("w")
        for line in connection.makefile("r"):
            threads.submit(_answer, json.loads(line), answers)


def _answer(question: dict[str, Any], answers: IO[str]) -> None:
    """Write the facts about a model, or the reason why there are none."""
    try:
        # Asking starts the driver, for which a model on a CPU need not wait.
        works = cuda.is_available() if question["cuda"] else None
        facts = {**evaluate(ModelSpec.of(question["spec"])), "cuda": works}
    except Exception as error:
        traceback.print_exc()
        facts = {"failed": sentence(error)[:_LONGEST]}
    with _WRITING:
        print(json.dumps({"number": question["number"], **facts}), file=answers, flush=True)


def evaluate(spec: ModelSpec) -> dict[str, Any]:
    """Return the bytes of a model's parameters and buffers, and what a hub knows of it."""
    require_readable(spec)
    known = None
    if not spec.is_folder:
        with contextlib.suppress(Exception):  # no hub answers; the files may be in the cache
            known = HfApi().model_info(
                spec.checkpoint, revision=spec.revision, timeout=HUB_TIMEOUT_S
            )
    task = spec.task or getattr(known, "pipeline_tag", None)
    try:
        config = transformers.AutoConfig.from_pretrained(
            spec.checkpoint, revision=spec.revision, trust_remote_code=spec.trust_remote_code
        )
    except Exception as error:
        raise UnknownError(explain_unavailable(spec, error)) from error
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


def _build(spec: ModelSpec, config: Any, task: str | None, dtype: torch.dtype) -> Any:
    """Build the model as it would be loaded, on the meta device."""
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
    raise UnknownError(explain_unavailable(spec, error)) from error


def _classes(spec: ModelSpec, config: Any, task: str | None) -> Iterator[Any]:
    """Yield the classes that loading would try, in order."""
    if spec.generation != "0.8":
        if task not in (None, "text-generation"):
            raise UnknownError(
                f"nnsight {spec.generation} serves text generation only; nnsight 0.8 serves {task}."
            )
        yield transformers.AutoModelForCausalLM
        return
    if task is not None:
        try:
            yield from check_task(task)[1]["pt"]
        except KeyError as error:
            raise UnknownError(f"transformers has no task {task!r}.") from error
    own = (getattr(transformers, name, None) for name in config.architectures or ())
    yield from filter(None, own)
    if task is None:
        yield transformers.AutoModel


def _dtype(spec: ModelSpec, config: Any) -> torch.dtype:
    """Return the dtype in which the weights would be loaded."""
    name = spec.dtype if spec.dtype != "auto" else getattr(config, "dtype", None)
    if name is None:
        return _dtype_of_files(spec) or torch.float32
    found = _dtype_named(name)
    if found is None and spec.generation == "0.8":
        from nnsight.modeling.quantization import resolve_load_kwargs

        # Quantized weights take less than the dtype in which they are computed.
        found = _dtype_named(resolve_load_kwargs({"dtype": name}, quantize=False)["dtype"])
    if found is None:
        raise UnknownError(f"There is no dtype {spec.dtype!r} to load {spec.checkpoint!r} in.")
    return found


def _dtype_named(name: Any) -> torch.dtype | None:
    found = name if isinstance(name, torch.dtype) else getattr(torch, str(name), None)
    return found if isinstance(found, torch.dtype) else None


def _dtype_of_files(spec: ModelSpec) -> torch.dtype | None:
    """Return the dtype of a checkpoint's first tensor, for a config without one; None if unknown."""
    path = _file(spec, "model.safetensors")
    if path is None and (index := _file(spec, "model.safetensors.index.json")):
        shards = json.loads(Path(index).read_text())["weight_map"].values()
        path = _file(spec, min(shards))
    if path is not None:
        found = parse_local_safetensors_file_metadata(path)
    elif spec.is_folder:
        return None
    else:
        try:
            found = HfApi().parse_safetensors_file_metadata(
                spec.checkpoint, "model.safetensors", revision=spec.revision
            )
        except Exception:  # another format, or no hub
            return None
    dtypes = (_DTYPES.get(tensor.dtype) for _, tensor in sorted(found.tensors.items()))
    return next((dtype for dtype in dtypes if dtype is not None), None)


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
        found = pattern.search(name) if kept and name in parameters else None
        yield tensor.numel(), kept[by_group[found.lastgroup]] if found else tensor.dtype


if __name__ == "__main__":
    main(int(sys.argv[1]))
