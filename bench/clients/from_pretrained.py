"""A program that loads a checkpoint with transformers alone.

Usage: from_pretrained.py FOLDER; prints one JSON list: the seconds of the load, without the imports, and
the seconds of the first forward pass, which reads the weights.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

# Otherwise `from_pretrained` imports it.
for architecture in json.loads(Path(sys.argv[1], "config.json").read_text())["architectures"]:
    getattr(transformers, architecture)

began = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
loaded = time.perf_counter()
with torch.inference_mode():
    model(torch.tensor([[0, 1, 2, 3]]))
ended = time.perf_counter()
assert model.dtype is torch.bfloat16, model.dtype
print(json.dumps([loaded - began, ended - loaded]))
