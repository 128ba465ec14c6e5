"""Folders of Hugging Face with small models of random weights, and tokenizers made here.

`write_folder` needs transformers, `write_tokenizer` needs tokenizers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = 128
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 160,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_PLAIN = {name: _SMALL[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
# Sizes of each family; a window is smaller than the texts of the tests.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {**_SMALL, "head_dim": 8, "sliding_window": 8},
    "gemma3_text": {
        **_SMALL,
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4": {**_SMALL, "head_dim": 8},
    "gpt2": {**_PLAIN, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 160},
    "gpt_neox": {**_SMALL, "rotary_pct": 0.5},
    "granite": {**_SMALL, "residual_multiplier": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "llama": {**_SMALL, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "mistral": {**_SMALL, "sliding_window": 8},
    "olmo2": dict(_SMALL),
    "opt": {
        **_PLAIN,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 160,
        "word_embed_proj_dim": 32,
        "pad_token_id": 1,
    },
    "phi3": dict(_SMALL),
    "qwen2": {**_SMALL, "tie_word_embeddings": True},
    "qwen3": {**_SMALL, "head_dim": 8},
    "starcoder2": dict(_SMALL),
}


def write_folder(path: Path, family: str, *, seed: int = 0, shards: str = "50GB", **changes: Any) -> Any:
    """Write the folder of a model of random weights, and return the model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**FAMILIES.get(family, _SMALL), **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * noise + (1.0 if parameter.ndim == 1 and parameter.mean() > 0.5 else 0.0))
    model.save_pretrained(path, max_shard_size=shards)
    return model


def write_tokenizer(path: Path, kind: str = "bytes", template: str | None = None) -> Any:
    """Write tokenizer files, and return the tokenizer: of byte-level merges, or of pieces with bytes to fall back on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    corpus = [
        "the quick brown fox jumps over the lazy dog",
        "él está aquí, 你好 world 🙂",
        "  two  spaces\nand lines",
    ] * 3
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
            show_progress=False,
        )
    tokenizer.train_from_iterator(corpus, trainer)
    if kind != "bytes":  # tokens of single bytes are no special ones
        content = json.loads(tokenizer.to_str())
        content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
        tokenizer = Tokenizer.from_str(json.dumps(content))
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    if template is not None:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return tokenizer
