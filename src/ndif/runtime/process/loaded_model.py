"""Facts about a loaded model that its host may publish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ndif.runtime.spec import ModelSpec


def describe(model: Any, spec: ModelSpec) -> dict[str, Any]:
    """Return the facts about the loaded model that its host may publish."""
    from transformers.utils import cached_file

    config = cached_file(spec.checkpoint, "config.json", revision=spec.revision)
    module = model._module
    return {
        "class": type(module).__name__,
        "parameters": sum(p.numel() for p in module.parameters()),
        "dtype": str(module.dtype).removeprefix("torch."),
        "device": str(module.device),
        "task": getattr(model, "task", None),
        "folder": str(Path(config).parent),
        "repo_id": canonical_name(model, spec),
    }


def canonical_name(model: Any, spec: ModelSpec) -> str | None:
    """Return the name of the model in clients' keys: a hub knows "gpt2" as "openai-community/gpt2".

    None for a folder, which the operator names, and where no hub answers.
    """
    if spec.is_folder:
        return None
    try:
        name: str = json.loads(model._remoteable_model_key())["repo_id"]
    except Exception:
        return None
    return name
