"""Real models that are small enough to make in a test: random weights, and their own tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_TEXT = "The Eiffel Tower is in the city of Paris. Madison Square Garden is in New York."
_END = "<|endoftext|>"
_CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def make_gpt2(folder: Path, seed: int = 0, width: int = 64) -> Path:
    """Write a GPT-2 and its tokenizer to `folder`; return it."""
    tokenizer = _tokenizer()
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=width,
        n_layer=4,
        n_head=4,
        n_positions=256,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return _save(transformers.GPT2LMHeadModel(config), tokenizer, folder)


def make_adapter(folder: Path, base: Path) -> Path:
    """Write an adapter for the GPT-2 in `base` to `folder`; return it."""
    import peft

    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel.from_pretrained(base)
    # An untrained adapter is the identity.
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
    )
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


def make_llama(folder: Path, seed: int = 0) -> Path:
    """Write a Llama (grouped heads, gated MLP) and its tokenizer to `folder`; return it."""
    tokenizer = _tokenizer()
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _save(transformers.LlamaForCausalLM(config), tokenizer, folder)


def make_gemma2(folder: Path, seed: int = 0) -> Path:
    """Write a Gemma 2, for which transformers does not use `sdpa`, and its tokenizer; return `folder`."""
    tokenizer = _tokenizer()
    torch.manual_seed(seed)
    config = transformers.Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return _save(transformers.Gemma2ForCausalLM(config), tokenizer, folder)


def make_rwkv(folder: Path, seed: int = 0) -> Path:
    """Write an RWKV, whose attention has a part called `output`, and its tokenizer; return `folder`."""
    tokenizer = _tokenizer()
    torch.manual_seed(seed)
    config = transformers.RwkvConfig(
        vocab_size=len(tokenizer),
        context_length=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        rescale_every=0,  # otherwise the model changes its weights
        bos_token_id=0,
        eos_token_id=0,
    )
    return _save(transformers.RwkvForCausalLM(config), tokenizer, folder)


def make_empty_llama(folder: Path, width: int = 4096, layers: int = 5) -> int:
    """Write a Llama of zeros, 2 GB by default, and a tokenizer; return the bytes of its weights."""
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=32,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.zero_()
    _save(model, _tokenizer(), folder)
    return sum(parameter.nbytes for parameter in model.parameters())


def make_bert(folder: Path, seed: int = 0) -> Path:
    """Write a BERT that fills masks, and its tokenizer, to `folder`; return it."""
    tokenizer = _tokenizer()
    tokenizer.add_special_tokens({"mask_token": "[MASK]", "pad_token": "[PAD]"})
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    return _save(transformers.BertForMaskedLM(config), tokenizer, folder)


def make_t5(folder: Path, seed: int = 0, width: int = 32) -> Path:
    """Write an encoder and decoder without a head, and their tokenizer, to `folder`; return it."""
    tokenizer = _tokenizer()
    torch.manual_seed(seed)
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return _save(transformers.T5Model(config), tokenizer, folder)


def _save(
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerFast,
    folder: Path,
) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of all bytes, with a few merges so that words are not spelled out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 20, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_END,
        eos_token=_END,
        model_max_length=256,
        chat_template=_CHAT,
    )
