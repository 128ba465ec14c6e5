"""Sixty families of models of other libraries, in small configurations: data alone, for write_exports.py.

A row has the name of a model or class in its library, its settings, and its inputs by name: a kind and a shape. Kinds
of inputs are in write_exports.py. Nothing is imported here, as the Python that exports has no Penstock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 96
IMAGE = {"x": ("image", (1, 3, 64, 64))}
SMALL_IMAGE = {"x": ("image", (1, 3, 32, 32))}
PIXELS = {"pixel_values": ("image", (1, 3, 32, 32))}
LARGER_PIXELS = {"pixel_values": ("image", (1, 3, 64, 64))}
TOKENS = {"input_ids": ("tokens", (2, 12))}
MASKED = {"input_ids": ("tokens", (2, 12)), "attention_mask": ("mask", (2, 12))}
PAIR = {"input_ids": ("tokens", (2, 12)), "decoder_input_ids": ("tokens", (2, 8))}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0, **SIZES}
BLOCKS = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
BOTH = {
    f"{side}_{what}": number
    for side in ("encoder", "decoder")
    for what, number in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}
PAIRED = {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 64, **BOTH}
ONE_EACH = (1, 1, 1, 1)


@dataclass(frozen=True)
class Export:
    """A model to export. `output` is the field of a result that the file gives, where it has several; `fixed` are
    arguments of the call that are no tensors. Of transformers `config` is the class of the settings."""

    library: str
    model: str
    inputs: dict[str, tuple[str, tuple[int, ...]]]
    settings: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    output: str = ""
    fixed: dict[str, Any] = field(default_factory=dict)


def _timm(model: str, inputs: dict[str, tuple[str, tuple[int, ...]]] = IMAGE, **settings: Any) -> Export:
    return Export("timm", model, inputs, {"num_classes": 10, **settings})


def _vision(model: str, inputs: dict[str, tuple[str, tuple[int, ...]]] = IMAGE, **settings: Any) -> Export:
    return Export("torchvision", model, inputs, settings)


def _text(stem: str, head: str, inputs: dict[str, tuple[str, tuple[int, ...]]], **settings: Any) -> Export:
    fixed = {"use_cache": False} if head in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration") else {}
    return Export("transformers", stem + head, inputs, settings, f"{stem}Config", "logits", fixed)


def _images(stem: str, inputs: dict[str, tuple[str, tuple[int, ...]]] = PIXELS, **settings: Any) -> Export:
    return Export("transformers", f"{stem}ForImageClassification", inputs, settings, f"{stem}Config", "logits")


def _features(stem: str, inputs: dict[str, tuple[str, tuple[int, ...]]], **settings: Any) -> Export:
    return Export("transformers", f"{stem}Model", inputs, settings, f"{stem}Config", "last_hidden_state")


EXPORTS: dict[str, Export] = {
    # ------------------------------------------------------------------------------------------------ timm
    "resnetv2": _timm("resnetv2_50", layers=ONE_EACH, channels=(32, 48, 64, 96), stem_chs=16),
    "sknet": _timm("skresnet18", layers=ONE_EACH, channels=(16, 32, 48, 64)),
    "resnest": _timm("resnest14d", SMALL_IMAGE),
    "res2net": _timm("res2net50_26w_4s", SMALL_IMAGE, layers=ONE_EACH),
    "densenet": _timm("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    "regnety": _timm("regnety_002"),
    "ghostnet": _timm("ghostnet_050"),
    "mobileone": _timm("mobileone_s0", SMALL_IMAGE),
    "edgenext": _timm("edgenext_xx_small"),
    "mobilevit": _timm("mobilevit_xxs"),
    "convnextv2": _timm("convnextv2_atto", depths=ONE_EACH, dims=(8, 16, 24, 32)),
    "resmlp": _timm("resmlp_12_224", SMALL_IMAGE, img_size=32),
    "gmlp": _timm("gmlp_ti16_224", SMALL_IMAGE, img_size=32),
    "poolformer": _timm("poolformerv2_s12", SMALL_IMAGE),
    "pvt": _timm("pvt_v2_b0", depths=ONE_EACH, embed_dims=(16, 32, 40, 64), num_heads=(1, 2, 2, 4)),
    "cait": _timm("cait_xxs24_224", SMALL_IMAGE, img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=2),
    "swinv2": _timm(
        "swinv2_tiny_window8_256",
        SMALL_IMAGE,
        img_size=32,
        window_size=4,
        depths=(2, 2),
        num_heads=(2, 4),
        embed_dim=24,
    ),
    "xcit": _timm("xcit_nano_12_p8_224", SMALL_IMAGE, img_size=32, depth=2, embed_dim=48, num_heads=2),
    "beit": _timm("beit_base_patch16_224", SMALL_IMAGE, img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=2),
    "eva02": _timm("eva02_tiny_patch14_224", SMALL_IMAGE, img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=2),
    "efficientvit": _timm("efficientvit_b0"),
    "focalnet": _timm("models.focalnet.FocalNet", depths=ONE_EACH, embed_dim=16),
    "sequencer": _timm(
        "sequencer2d_s", layers=ONE_EACH, embed_dims=(16, 24, 24, 24), hidden_sizes=(8, 8, 8, 8), img_size=64
    ),
    "nfnet": _timm("nf_regnet_b0", SMALL_IMAGE),
    "inception_next": _timm("inception_next_atto", depths=ONE_EACH),
    "mambaout": _timm("mambaout_femto", depths=ONE_EACH, dims=(16, 24, 32, 48)),
    "volo": _timm(
        "models.volo.VOLO",
        IMAGE,
        img_size=64,
        layers=ONE_EACH,
        embed_dims=(24, 32, 32, 32),
        num_heads=(2, 4, 4, 4),
    ),
    # ------------------------------------------------------------------------------------------------ torchvision
    "shufflenet": _vision("models.shufflenet_v2_x0_5", num_classes=10),
    "swin": _vision(
        "models.SwinTransformer",
        SMALL_IMAGE,
        patch_size=[4, 4],
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        stochastic_depth_prob=0.0,
        num_classes=10,
    ),
    "squeezenet": _vision("models.squeezenet1_1", num_classes=10),
    "mnasnet": _vision("models.mnasnet0_5", num_classes=10),
    "googlenet": _vision("models.googlenet", num_classes=10, aux_logits=False, init_weights=True),
    "mobilenet_v3": _vision("models.mobilenet_v3_small", num_classes=10, width_mult=0.5),
    "resnext": _vision(
        "models.ResNet", SMALL_IMAGE, block="models.resnet.Bottleneck", layers=ONE_EACH, groups=4, width_per_group=4
    ),
    "maxvit": _vision(
        "models.MaxVit",
        input_size=(64, 64),
        stem_channels=16,
        partition_size=4,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.0,
        num_classes=10,
    ),
    "lraspp": Export(
        "torchvision", "models.segmentation.lraspp_mobilenet_v3_large", IMAGE,
        {"weights": None, "weights_backbone": None, "num_classes": 5}, output="out",
    ),
    "deeplab": Export(
        "torchvision", "models.segmentation.deeplabv3_mobilenet_v3_large", IMAGE,
        {"weights": None, "weights_backbone": None, "num_classes": 5}, output="out",
    ),
    "video_resnet": _vision(
        "models.video.resnet.VideoResNet",
        {"x": ("image", (1, 3, 4, 32, 32))},
        block="models.video.resnet.BasicBlock",
        conv_makers=["models.video.resnet.Conv2Plus1D"] * 4,
        layers=ONE_EACH,
        stem="models.video.resnet.R2Plus1dStem",
        num_classes=10,
    ),
    # ------------------------------------------------------------------------------------------------ transformers
    "gpt_neo": _text(
        "GPTNeo", "ForCausalLM", TOKENS, vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4,
        attention_types=[[["global", "local"], 1]], window_size=4, max_position_embeddings=64,
    ),
    "gptj": _text("GPTJ", "ForCausalLM", TOKENS, rotary_dim=4, **BLOCKS),
    "codegen": _text("CodeGen", "ForCausalLM", TOKENS, rotary_dim=4, **BLOCKS),
    "xlnet": _text("XLNet", "LMHeadModel", TOKENS, vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=64),
    "squeezebert": _text("SqueezeBert", "ForMaskedLM", MASKED, embedding_size=32, **TEXT),
    "convbert": _text("ConvBert", "ForMaskedLM", MASKED, embedding_size=16, conv_kernel_size=3, **TEXT),
    "granite": _text("Granite", "ForCausalLM", MASKED, num_key_value_heads=2, **TEXT),
    "mobilebert": _text(
        "MobileBert", "ForMaskedLM", MASKED, embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16, **TEXT
    ),
    "rembert": _text("RemBert", "ForMaskedLM", MASKED, input_embedding_size=16, output_embedding_size=24, **TEXT),
    "layoutlm": _text(
        "LayoutLM", "ForMaskedLM", {**TOKENS, "bbox": ("boxes", (2, 12, 4))}, max_2d_position_embeddings=128, **TEXT
    ),
    "olmo": _text("Olmo", "ForCausalLM", TOKENS, **TEXT),
    "starcoder2": _text("Starcoder2", "ForCausalLM", TOKENS, num_key_value_heads=2, **TEXT),
    "stablelm": _text("StableLm", "ForCausalLM", TOKENS, num_key_value_heads=2, **TEXT),
    "cohere": _text("Cohere", "ForCausalLM", TOKENS, num_key_value_heads=2, **TEXT),
    "qwen3": _text("Qwen3", "ForCausalLM", MASKED, num_key_value_heads=2, head_dim=8, **TEXT),
    "gemma2": _text("Gemma2", "ForCausalLM", TOKENS, num_key_value_heads=2, head_dim=8, **TEXT),
    "pegasus": _text("Pegasus", "ForConditionalGeneration", PAIR, **PAIRED),
    "fsmt": _text(
        "FSMT", "ForConditionalGeneration", PAIR, src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY, d_model=32,
        max_position_embeddings=64, **BOTH,
    ),
    "hubert": Export(
        "transformers", "HubertForCTC", {"input_values": ("wave", (2, 400))},
        {
            "vocab_size": 32, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
            "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
            "apply_spec_augment": False, **SIZES,
        },
        "HubertConfig", "logits",
    ),
    "dinov2": _images("Dinov2", image_size=32, patch_size=8, mlp_ratio=2, **SIZES),
    "levit": _images(
        "Levit", LARGER_PIXELS, image_size=64, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1], key_dim=[8, 8, 8],
    ),
    "patchtst": Export(
        "transformers", "PatchTSTForPrediction", {"past_values": ("wave", (2, 32, 3))},
        {
            "num_input_channels": 3, "context_length": 32, "prediction_length": 8, "patch_length": 8, "patch_stride": 8,
            "d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32,
        },
        "PatchTSTConfig", "prediction_outputs",
    ),
}  # fmt: skip
