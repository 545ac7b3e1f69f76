"""The environment variables of a model's processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ndif.host.gpus import BY_BUS, ORDER, VISIBLE
from ndif.host.runtimes import Runtime

_CREDENTIALS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")

_HARMLESS = (
    *("PATH", "HOME", "LANG", "LC_", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHON", "VIRTUAL_ENV"),
    "GLIBC_TUNABLES",
    *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_MODULES_CACHE", "XDG_CACHE_HOME"),
    *(
        "OMP_",
        "GOMP_",
        "KMP_",
        "MKL_",
        "OPENBLAS_",
        "TORCH",
        "PYTORCH_",
        "CUDA",
        "CUBLAS_",
        "NVIDIA_",
        "NCCL_",
    ),
)
"""How the names begin that a process keeps which runs strangers' code: paths and tuning, no secrets."""


def environment(runtime: Runtime, devices: str | None = None) -> dict[str, str]:
    """This process's, with the runtime's folders in front.

    `devices`: the `CUDA_VISIBLE_DEVICES` by which a process counts the GPUs as the books do; None leaves it
    as this process has it.
    """
    path = [str(folder) for folder in runtime.path]
    inherited = os.environ.get("PYTHONPATH")
    return {
        # By default torch's threads spin for some 10 ms after their last work, which is when those who
        # carry the result to its client need the cores. This is 0.5 ms, longer than between two layers.
        "GOMP_SPINCOUNT": "10000",
        # What a model allocates is in huge pages, of which a fork has 512 times fewer to copy the table of.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        **os.environ,
        # Else CUDA counts the fastest card first, and the driver, the books and operators by bus.
        ORDER: BY_BUS,
        **({} if devices is None else {VISIBLE: devices}),
        "PYTHONPATH": os.pathsep.join([*path, *([inherited] if inherited else [])]),
        # The tokenizer's own thread pool would not survive a fork.
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # What lies in the folder that the server was started from is no module of its processes.
        "PYTHONSAFEPATH": "1",
    }


def for_strangers(variables: Mapping[str, str]) -> dict[str, str]:
    """What is left of an environment where strangers' code will run: a fork's first words in memory."""
    kept = {name: value for name, value in variables.items() if name.startswith(_HARMLESS)}
    return {
        **kept,
        "TOKENIZERS_PARALLELISM": "false",
        # What it loads is in the cache.
        "HF_HUB_OFFLINE": "1",
        # A token in a file would be read even so.
        "HF_TOKEN_PATH": os.devnull,
    }


def without_credentials(variables: Mapping[str, str]) -> dict[str, str]:
    """For what reaches the hub as anybody might."""
    kept = {name: value for name, value in variables.items() if name not in _CREDENTIALS}
    return {
        **kept,
        "HF_TOKEN_PATH": os.devnull,
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
