"""A GGUF file of a folder with random weights, for llama.cpp: in f32, Q8_0 or Q4_0. Needs the package gguf.

Rows of query and key weights are not put into llama.cpp's order: a rate does not depend on it, texts would.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

_LLAMA = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GPT2 = {
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.ln_f.weight": "output_norm.weight",
    "transformer.ln_f.bias": "output_norm.bias",
}


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Write the file. Matrices have the wanted type, vectors and positions f32."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(str(path), family)
    _settings(writer, config, family)
    wanted = {"f32": "F32", "Q8_0": "Q8_0", "Q4_0": "Q4_0"}[kind]
    for name, array in load_file(folder / "model.safetensors").items():
        theirs, turned = _named(name, family)
        array = np.ascontiguousarray(array.T if turned else array, dtype=np.float32)
        plain = array.ndim < 2 or theirs.startswith("position_embd") or wanted == "F32"
        quantised = gguf.GGMLQuantizationType.F32 if plain else gguf.GGMLQuantizationType[wanted]
        data = array if plain else gguf.quants.quantize(array, quantised)
        writer.add_tensor(theirs, data, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _named(name: str, family: str) -> tuple[str, bool]:
    """Return llama.cpp's name of a tensor, and whether it has rows for columns."""
    if name in _OUTER:
        return _OUTER[name], False
    parts = name.split(".")
    inner, end = ".".join(parts[3:-1]), parts[-1]
    turned = family == "gpt2" and end == "weight" and not inner.startswith("ln_")
    return f"blk.{parts[2]}.{(_GPT2 if family == 'gpt2' else _LLAMA)[inner]}.{end}", turned


def _settings(writer: Any, config: dict[str, Any], family: str) -> None:
    gpt2 = family == "gpt2"
    width = config["n_embd"] if gpt2 else config["hidden_size"]
    heads = config["n_head"] if gpt2 else config["num_attention_heads"]
    writer.add_context_length(config["n_positions"] if gpt2 else config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(config["n_layer"] if gpt2 else config["num_hidden_layers"])
    writer.add_feed_forward_length(4 * width if gpt2 else config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads if gpt2 else config["num_key_value_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    if gpt2:
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_dimension_count(width // heads)
