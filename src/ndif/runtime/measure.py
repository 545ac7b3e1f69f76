"""Measure a model without loading it: `python -m ndif.runtime.measure FD`.

The socket FD carries one line of JSON with the model's folder, and one line with the answer. The process
confines itself to that folder, with a memory limit, before it reads any file there; its host limits its
time. The architecture is built from the config on the meta device, so no weights are read. The config must
agree with the headers of the weights.

The result is the size of the loaded model: its parameters and buffers in their dtypes. If the files hold
more than twice as much, the surplus counts too: unused weights stay mapped beside used ones.
"""

from __future__ import annotations

import gc
import importlib
import math
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import parse_local_safetensors_file_metadata
from huggingface_hub.errors import SafetensorsParsingError
from transformers.core_model_loading import build_glob_alternation
from transformers.pipelines import check_task

from ndif.runtime.process import cuda
from ndif.runtime.process.children import end_with_parent
from ndif.runtime.sizing import Failure, ModelSize, SizeQuestion
from ndif.runtime.spec import ModelSpec
from ndif.runtime.structure import structure_or_none
from ndif.runtime.tracebacks import UserFacingError, sentence
from ndif.runtime.typed_json import from_json, to_json
from ndif.runtime.weights.fetch import explain_unavailable, require_readable
from ndif.runtime.weights.repository import Weights, is_pickled, require_harmless, weights
from ndif.sandbox.confinement.confinement import Confinement, Mode, checkpoint_paths
from ndif.sandbox.confinement.limits import limit_memory
from ndif.sizes import format_size

MEMORY_BYTES = 1 << 30
"""Memory that a process may take for one model, on top of the memory that it inherits by the fork."""
_MAX_THREADS = 64
_TIMEOUT_S = 120
"""Seconds after which the process ends itself, in case the host, which limits its time, has ended."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating types of loaded models, by their names in safetensors."""
_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL"), 1),
}
_LENGTH_BYTES = 8
"""Bytes of the length field before a safetensors header."""
_MIN_ITEM_BYTES = 0.5
"""Lower bound for the bytes of an element of any other dtype."""
_PACKED = ("U8", "I8", "I16", "I32", "I64")
_PARAMETERS_PER_BYTE = 4
"""Most parameters in a byte of a packed tensor."""
_HEAD_PARAMETERS = 1 << 20
"""Allowance, in parameters, for a new head, which the files of a small model lack."""
_MAX_ANSWER = 4096


class UnknownError(UserFacingError):
    """A model cannot be measured; the message is the reason."""


def main(fd: int) -> None:
    """Answer one `SizeQuestion` from the socket `fd`."""
    end_with_parent()
    signal.alarm(_TIMEOUT_S)
    connection = socket.socket(fileno=fd)
    line = connection.makefile("r").readline()
    if not line:  # the host has closed the socket
        return
    question = from_json(SizeQuestion, line)
    spec, folder = question.spec, Path(question.folder)
    answer: ModelSize | Failure | None = None
    try:
        # The check starts the driver, which a model on CPUs does not need.
        has_cuda = cuda.is_available() if question.cuda else None
        if spec.generation == "0.8":
            # Imported before confinement: nnsight reads the user's home folder on import.
            importlib.import_module("nnsight.modeling.quantization")
        connection = _confine(connection, folder, question.sandbox)
        answer = replace(evaluate(spec, folder), cuda=has_cuda)
    except MemoryError:
        pass
    except Exception as error:
        traceback.print_exc()
        # The user knows the repository, not the folder of the cache or of an outline.
        answer = Failure(sentence(error).replace(str(folder), spec.checkpoint)[:_MAX_ANSWER])
    if answer is None:
        gc.collect()
        answer = Failure(
            f"Working out the size of {spec.checkpoint!r} takes more than "
            f"{format_size(MEMORY_BYTES)} of memory: its config or its weights have too many parts."
        )
    connection.sendall(to_json(answer) + b"\n")


def _confine(connection: socket.socket, folder: Path, mode: Mode) -> socket.socket:
    """Confine this process; return the connection, whose descriptor changes."""
    if mode == "off":
        limit_memory(MEMORY_BYTES)
        return connection
    confinement = Confinement.prepare(
        mode,
        readable=checkpoint_paths(folder),
        memory_bytes=MEMORY_BYTES,
        result_bytes=0,
        max_threads=_MAX_THREADS,
    )
    kept = socket.socket(fileno=confinement.detach(connection.detach()))
    # A server that runs as root may measure the files of another user.
    confinement.apply(keeps_reading=True)
    return kept


def evaluate(spec: ModelSpec, folder: Path) -> ModelSize:
    """Return the size and structure of the model in `folder`, or raise UserFacingError for bad files."""
    require_readable(spec)
    require_harmless(folder, remote_code=spec.trust_remote_code, pickled=spec.pickled)
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(folder), trust_remote_code=spec.trust_remote_code
        )
    except MemoryError:
        raise
    except Exception as error:
        raise UnknownError(explain_unavailable(spec, error)) from error
    files = Files.read(weights(folder))
    dtype = _dtype(spec, config, files)
    model = _build(spec, config, dtype)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = sum(count * dtype.itemsize for count, dtype in _tensors(model))
    structure = structure_or_none(model, folder)
    if structure is not None:
        structure["bytes"] = size  # some parts may be loaded in another dtype
    if files.are_there:
        # Packed weights differ in size from the unpacked parameters.
        is_packed = _is_quantized(config.to_dict())
        require_agreement(spec, parameters, {} if is_packed else _sizes(model), files)
        if not is_packed:
            size += max(0, files.elements - 2 * parameters - _HEAD_PARAMETERS) * dtype.itemsize
    return ModelSize(size, parameters, structure)


def _is_quantized(config: Mapping[str, Any]) -> bool:
    """Return True if the config of the model, or of a part of it, has a quantization config."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return any(part.get("quantization_config") for part in parts)


@dataclass(frozen=True, slots=True)
class Files:
    """The weights of a checkpoint, as the headers of their files describe them."""

    tensors: Mapping[str, tuple[str, int]]
    """The dtype and the number of elements of each tensor, except pickled ones."""
    pickled_bytes: int
    are_there: bool
    """False if the folder has no weights."""
    named_dtype: str | None
    """The dtype that the index of the files names; used if the config names none."""

    @classmethod
    def read(cls, checkpoint: Weights) -> Files:
        """Read the headers of a checkpoint's files, or raise an UnknownError."""
        present = [file for file in checkpoint.files if file.is_file()]
        tensors: dict[str, tuple[str, int]] = {}
        pickled = 0
        for file in present:
            if is_pickled(file):
                pickled += file.stat().st_size
            else:
                tensors.update(_header(file))
        return cls(tensors, pickled, bool(present), checkpoint.dtype)

    @property
    def elements(self) -> int:
        """Return the number of elements of all tensors, except pickled ones."""
        return sum(count for _, count in self.tensors.values())

    @property
    def most_parameters(self) -> int:
        """Return an upper bound for the parameters that the files hold, packed or pickled ones included."""
        counts = (
            count * (_PARAMETERS_PER_BYTE * _ITEM_BYTES[dtype] if dtype in _PACKED else 1)
            for dtype, count in self.tensors.values()
        )
        return int(sum(counts)) + self.pickled_bytes

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype for loading if the config names none; None if unknown."""
        if self.named_dtype is not None:
            return _dtype_named(self.named_dtype)
        dtypes = (_DTYPES.get(dtype) for _, (dtype, _) in sorted(self.tensors.items()))
        return next((dtype for dtype in dtypes if dtype is not None), None)


def _header(file: Path) -> dict[str, tuple[str, int]]:
    """Return the dtype and size of each tensor; raise UnknownError where safetensors would fail."""
    try:
        metadata = parse_local_safetensors_file_metadata(file)
    except SafetensorsParsingError as error:
        raise UnknownError(f"Its {file.name} is not a safetensors file.") from error
    tensors: dict[str, tuple[str, int]] = {}
    with file.open("rb") as opened:
        left = (
            file.stat().st_size
            - _LENGTH_BYTES
            - int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        )
    for name, tensor in metadata.tensors.items():
        start, stop = tensor.data_offsets
        count = math.prod(tensor.shape)
        left -= stop - start
        if (
            not 0 <= count * _ITEM_BYTES.get(tensor.dtype, _MIN_ITEM_BYTES) <= stop - start
            or left < 0
        ):
            raise UnknownError(
                f"The header of its {file.name} describes more data than the file has."
            )
        tensors[name] = (tensor.dtype, count)
    return tensors


def require_agreement(
    spec: ModelSpec, parameters: int, expected: Mapping[str, int], files: Files
) -> None:
    """Raise an UnknownError if a config and its files describe different models.

    A base model without its head, tied weights, and unused parts of the files are permitted.
    """
    for name, (_, count) in files.tensors.items():
        if expected.get(name, count) != count:
            raise UnknownError(
                f"The config of {spec.checkpoint!r} does not belong to its weights: {name} has "
                f"{expected[name]:,} elements by the config, and {count:,} in the files."
            )
    most = files.most_parameters
    if parameters > 2 * most + _HEAD_PARAMETERS:
        raise UnknownError(
            f"The config of {spec.checkpoint!r} does not belong to its weights: it describes "
            f"{parameters:,} parameters, and the files hold {most:,}."
        )


def _sizes(model: Any) -> dict[str, int]:
    """Return the number of elements of each tensor, by every name that it may have in a checkpoint."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    own = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    without = {name.removeprefix(prefix): count for name, count in own.items()}
    return {**{f"{prefix}{name}": count for name, count in own.items()}, **without, **own}


def _build(spec: ModelSpec, config: Any, dtype: torch.dtype) -> Any:
    """Build the model on the meta device, with the class that loading would use."""
    error: Exception | None = None
    for kind in _classes(spec, config):
        try:
            with torch.device("meta"):
                if hasattr(kind, "_model_mapping"):  # one of the Auto classes
                    return kind.from_config(
                        config, dtype=dtype, trust_remote_code=spec.trust_remote_code
                    )
                return kind._from_config(config, dtype=dtype)
        except MemoryError:
            raise
        except Exception as failed:
            error = error or failed
    if error is None:
        raise UnknownError(f"{spec.checkpoint!r} does not name its architecture.")
    raise UnknownError(explain_unavailable(spec, error)) from error


def _classes(spec: ModelSpec, config: Any) -> Iterator[Any]:
    """Yield the classes that loading would try, in order."""
    task = spec.task
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


def _dtype(spec: ModelSpec, config: Any, files: Files) -> torch.dtype:
    """Return the dtype in which the weights would be loaded."""
    name = spec.dtype if spec.dtype != "auto" else getattr(config, "dtype", None)
    if name is None:
        return files.dtype or torch.float32
    dtype = _dtype_named(name)
    if dtype is None and spec.generation == "0.8":
        from nnsight.modeling.quantization import resolve_load_kwargs

        # The compute dtype of a quantization gives an upper bound: quantized weights take less memory.
        dtype = _dtype_named(resolve_load_kwargs({"dtype": name}, quantize=False)["dtype"])
    if dtype is None:
        raise UnknownError(f"There is no dtype {spec.dtype!r} to load {spec.checkpoint!r} in.")
    return dtype


def _dtype_named(name: Any) -> torch.dtype | None:
    dtype = name if isinstance(name, torch.dtype) else getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _tensors(model: Any) -> Iterator[tuple[int, torch.dtype]]:
    """Yield the number of elements and dtype of every loaded parameter and buffer, tied ones once."""
    dtype_plan = model._get_dtype_plan(model.dtype) if hasattr(model, "_get_dtype_plan") else {}
    if dtype_plan:
        pattern, by_group, _ = build_glob_alternation(list(dtype_plan))
    parameters = dict(model.named_parameters())
    for name, tensor in [*parameters.items(), *model.named_buffers()]:
        match = pattern.search(name) if dtype_plan and name in parameters else None
        yield tensor.numel(), dtype_plan[by_group[match.lastgroup]] if match else tensor.dtype


if __name__ == "__main__":
    main(int(sys.argv[1]))
