"""The variables of Hugging Face's hub, which its library reads once, at import."""

from __future__ import annotations

import importlib
import os
import sys

_LIBRARIES = ("huggingface_hub", "transformers", "accelerate")
_MODULES = "HF_MODULES_CACHE"
"""The one variable that transformers reads, and copies between its modules."""


def read_again() -> None:
    """Make imported libraries read the variables again."""
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is None:
        return
    before = dict(vars(constants))
    importlib.reload(constants)
    now = {name: value for name, value in vars(constants).items() if value != before.get(name)}
    now[_MODULES] = os.environ.get(_MODULES, str(vars(constants)["HF_HOME"]) + "/modules")
    if hf_api := sys.modules.get("huggingface_hub.hf_api"):
        # The instance whose methods are the library's functions.
        vars(hf_api)["api"].endpoint = vars(constants)["ENDPOINT"]
    for module in [*sys.modules.values()]:
        if getattr(module, "__name__", "").startswith(_LIBRARIES):
            for name in now.keys() & vars(module).keys():
                setattr(module, name, now[name])
