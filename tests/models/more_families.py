"""Further families of transformers: each adds to FAMILIES when it is imported (family.py)."""

from __future__ import annotations

from typing import Any

import torch

from .family import (
    BATCH,
    SMALL,
    VOCAB,
    Outputs,
    family,
    sizes,
    text_model,
    tokens,
    vision_model,
)


@family("distilbert")
def _distilbert() -> Any:
    return text_model(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        fixed={},
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=64,
    )


@family("roberta")
def _roberta() -> Any:
    return text_model("RobertaForMaskedLM", "RobertaConfig", fixed={}, **SMALL)


@family("albert")
def _albert() -> Any:
    return text_model("AlbertForMaskedLM", "AlbertConfig", fixed={}, embedding_size=16, **SMALL)


@family("electra")
def _electra() -> Any:
    return text_model("ElectraForMaskedLM", "ElectraConfig", fixed={}, embedding_size=16, **SMALL)


@family("mpnet")
def _mpnet() -> Any:
    return text_model("MPNetForMaskedLM", "MPNetConfig", fixed={}, **SMALL)


@family("deberta_v2")
def _deberta() -> Any:
    extra = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "share_att_key": True}
    return text_model("DebertaV2ForMaskedLM", "DebertaV2Config", fixed={}, **extra, **SMALL)


@family("opt")
def _opt() -> Any:
    config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "ffn_dim": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    return text_model("OPTForCausalLM", "OPTConfig", word_embed_proj_dim=32, **config)


@family("gpt_neox")
def _gpt_neox() -> Any:
    return text_model("GPTNeoXForCausalLM", "GPTNeoXConfig", **SMALL)


@family("bloom")
def _bloom() -> Any:
    return text_model("BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=2, n_head=4)


@family("falcon")
def _falcon() -> Any:
    return text_model("FalconForCausalLM", "FalconConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4)


@family("qwen2")
def _qwen2() -> Any:
    return text_model("Qwen2ForCausalLM", "Qwen2Config", num_key_value_heads=2, **SMALL)


@family("gemma")
def _gemma() -> Any:
    return text_model("GemmaForCausalLM", "GemmaConfig", num_key_value_heads=2, head_dim=8, **SMALL)


@family("phi")
def _phi() -> Any:
    return text_model("PhiForCausalLM", "PhiConfig", **SMALL)


@family("bart")
def _bart() -> Any:
    import transformers

    sizes = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=VOCAB, d_model=32, max_position_embeddings=64, **sizes)
    )
    wrapped = Outputs(model, ("input_ids", "decoder_input_ids"), "logits", use_cache=False)
    return wrapped, {"input_ids": tokens(), "decoder_input_ids": tokens(8)}


@family("swin")
def _swin() -> Any:
    return vision_model(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    )


@family("regnet")
def _regnet() -> Any:
    return vision_model(
        "RegNetForImageClassification",
        "RegNetConfig",
        embedding_size=8,
        hidden_sizes=[16, 16, 32, 32],
        depths=[1, 1, 1, 1],
        groups_width=8,
    )


@family("segformer")
def _segformer() -> Any:
    sizes = {
        "hidden_sizes": [8, 16, 24, 32],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 2, 4],
        "decoder_hidden_size": 32,
    }
    return vision_model("SegformerForSemanticSegmentation", "SegformerConfig", 64, **sizes)


@family("wav2vec2")
def _wav2vec2() -> Any:
    import transformers

    config = transformers.Wav2Vec2Config(
        vocab_size=32, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4, apply_spec_augment=False, **sizes(),
    )  # fmt: skip
    return Outputs(transformers.Wav2Vec2ForCTC(config), ("input_values",), "logits"), {
        "input_values": torch.randn(BATCH, 400)
    }
