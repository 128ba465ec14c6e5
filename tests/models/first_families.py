"""Families that tests of models began with: each adds to FAMILIES when it is imported (family.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .family import (
    BATCH,
    SMALL,
    VOCAB,
    Outputs,
    family,
    image,
    sizes,
    text_model,
    tokens,
    vision_model,
)


@family("gpt2")
def _gpt2() -> Any:
    return text_model("GPT2LMHeadModel", "GPT2Config", n_positions=64, n_embd=32, n_layer=2, n_head=4)


@family("bert")
def _bert() -> Any:
    return text_model("BertForMaskedLM", "BertConfig", fixed={}, **SMALL)


@family("llama")
def _llama() -> Any:
    return text_model("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, **SMALL)


@family("mixtral")
def _mixtral() -> Any:
    model, inputs = text_model(
        "MixtralForCausalLM",
        "MixtralConfig",
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        **SMALL,
    )
    model.m.set_experts_implementation("batched_mm")
    return model, inputs


@family("t5")
def _t5() -> Any:
    import transformers

    config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    model = transformers.T5ForConditionalGeneration(config)
    wrapped = Outputs(model, ("input_ids", "decoder_input_ids"), "logits", use_cache=False)
    return wrapped, {"input_ids": tokens(), "decoder_input_ids": tokens(8)}


@family("vit")
def _vit() -> Any:
    return vision_model("ViTForImageClassification", "ViTConfig", image_size=32, patch_size=8, num_labels=10, **sizes())


@family("resnet")
def _resnet() -> Any:
    return vision_model(
        "ResNetForImageClassification",
        "ResNetConfig",
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
    )


@family("convnext")
def _convnext() -> Any:
    sizes = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]}
    return vision_model("ConvNextForImageClassification", "ConvNextConfig", 64, **sizes)


@family("mobilenetv2")
def _mobilenet() -> Any:
    return vision_model(
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        image_size=64,
        size=64,
        depth_multiplier=0.35,
        num_labels=10,
    )


@family("whisper")
def _whisper() -> Any:
    import transformers

    sizes = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        vocab_size=VOCAB,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        **sizes,
        **special,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    wrapped = Outputs(model, ("input_features", "decoder_input_ids"), "logits", use_cache=False)
    return wrapped, {"input_features": torch.randn(BATCH, 8, 32), "decoder_input_ids": tokens(8)}


@family("clip")
def _clip() -> Any:
    import transformers

    text = {"vocab_size": VOCAB, "eos_token_id": VOCAB - 1, **SMALL}
    vision = {"image_size": 32, "patch_size": 8, **sizes()}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    ids = tokens()
    ids[:, -1] = VOCAB - 1
    return Outputs(model, ("input_ids", "pixel_values"), "logits_per_image"), {
        "input_ids": ids,
        "pixel_values": image(),
    }


@family("mamba")
def _mamba() -> Any:
    return text_model("MambaForCausalLM", "MambaConfig", hidden_size=32, num_hidden_layers=2, state_size=4)


class Recommender(nn.Module):
    """DLRM: dense features and bags of categories, their pairwise products, and a small network on top."""

    def __init__(self, bags: bool) -> None:
        super().__init__()
        kind = (lambda n: nn.EmbeddingBag(n, 16, mode="sum")) if bags else (lambda n: nn.Embedding(n, 16))
        self.tables = nn.ModuleList(kind(n) for n in (50, 80))
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + 3, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, first: Tensor, second: Tensor) -> Tensor:
        looked = [table(ids) for table, ids in zip(self.tables, (first, second), strict=True)]
        found = [
            x if isinstance(table, nn.EmbeddingBag) else x.sum(1) for table, x in zip(self.tables, looked, strict=True)
        ]
        x = self.bottom(dense)
        vectors = torch.stack([x, *found], 1)
        rows, columns = torch.tril_indices(3, 3, -1)
        pairs = torch.bmm(vectors, vectors.transpose(1, 2))[:, rows, columns]
        result: Tensor = self.top(torch.cat([x, pairs], 1))
        return result


def _recommender(bags: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    ids = {name: torch.randint(0, n, (BATCH, 3)) for name, n in (("first", 50), ("second", 80))}
    return Recommender(bags), {"dense": torch.randn(BATCH, 13), **ids}


@family("dlrm")
def _dlrm() -> Any:
    return _recommender(True)


@family("dlrm_sum")
def _dlrm_sum() -> Any:
    return _recommender(False)


class GraphNet(nn.Module):
    """Messages along edges: one layer adds up, one takes weighted means by a softmax over each node's edges."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(8, 16), nn.Linear(24, 16)
        self.score, self.value, self.head = nn.Linear(32, 1), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        count = nodes.shape[0]
        gathered = torch.zeros(count, 16).index_add(0, target, self.message(nodes)[source])
        h = F.relu(self.update(torch.cat([nodes, gathered], 1)))
        score = F.leaky_relu(self.score(torch.cat([h[source], h[target]], 1)).squeeze(1))
        largest = torch.full((count,), -1e9).scatter_reduce(0, target, score.detach(), "amax", include_self=True)
        weight = (score - largest[target]).exp()
        total = torch.zeros(count).scatter_add(0, target, weight)
        weight = weight / (total[target] + 1e-9)
        mixed = torch.zeros(count, 16).index_add(0, target, self.value(h)[source] * weight[:, None])
        result: Tensor = self.head(F.elu(mixed) + h)
        return result


@family("gnn", microbatches=1)
def _gnn() -> Any:
    return GraphNet(), {"nodes": torch.randn(10, 8), "edges": torch.randint(0, 10, (2, 24))}


class Sequences(nn.Module):
    """A bidirectional LSTM of two layers over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.lstm = nn.LSTM(16, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.lstm(self.embed(ids))[0])
        return result


@family("lstm")
def _lstm() -> Any:
    return Sequences(), {"ids": tokens(6)}


class UNetBlock(nn.Module):
    """Down, across and up again, with the skip connection, time embedding and self-attention of diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.norm1, self.conv1 = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1)
        self.time = nn.Linear(8, 16)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.norm2, self.qkv, self.project = nn.GroupNorm(8, 32), nn.Conv2d(32, 96, 1), nn.Conv2d(32, 32, 1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.leave = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.enter(x)
        skip = x + self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        h = self.down(skip)
        batch, channels, height, width = h.shape
        q, k, v = (p.flatten(2).transpose(1, 2)[:, None] for p in self.qkv(self.norm2(h)).chunk(3, 1))
        seen = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(batch, channels, height, width)
        h = F.interpolate(h + self.project(seen), scale_factor=2.0, mode="nearest")
        h = self.up(F.avg_pool2d(h, 2))
        result: Tensor = self.leave(torch.cat([h, skip], 1))
        return result


@family("unet")
def _unet() -> Any:
    return UNetBlock(), {"x": image(16), "time": torch.randn(BATCH, 8)}
