"""Names of tensors, as exporters write them."""

from __future__ import annotations

import pytest

from penstock.frontends.onnx.constants import names

BUFFERS = [
    "bn1.running_mean",
    "running_var",
    "model/bn/moving_variance:0",
    "embeddings.position_ids",
    "rotary.inv_freq",
    "stft.window",
    "hann_window",
    "mel_scale.fb",
    "mel_basis",
    "features.mel_filters",
    "model.22.anchors",
    "model.22.anchor_grid",
    "attn.causal_mask",
    "layers.0.attn_mask",
    "my_buffer",
    "norm.eps",
    "pixel_mean",
]
PARAMETERS = [
    "fc.weight",
    "bias",
    "block.0.norm.gamma",
    "dense/kernel:0",
    "dense_1/bias/read:0",
    "act.alpha",
    "layer/scale/ReadVariableOp:0",
    "weight_g",
    "w",
    "res.0.gate_scale",
    "logit_temperature",
]
MADE = [
    "onnx::MatMul_72",
    "33",
    "/gelu/Constant_output_0",
    "val_7",
    "Constant_12",
    "_to_copy_3",
    "ortshared_1_0_1_0_token_12",
    "const",
    "const_fold_opt__12",
]
OTHERS = [
    "mask_token",
    "window_attention.qkv.projection",
    "anchors_head.layer",
    "positions",
    "cls_token",
    "pos_embed",
    "unmasked",
    "epsilon_greedy.head",
]


@pytest.mark.parametrize("name", BUFFERS + PARAMETERS + MADE + OTHERS)
def test_what_a_name_says(name: str) -> None:
    said = (names.says_buffer(name), names.says_parameter(name), names.made_by_exporter(name))
    assert said == (name in BUFFERS, name in PARAMETERS, name in MADE)


@pytest.mark.parametrize("name", ["fc.weight", "0.weight", "encoder.layers.0.bias", "p"])
def test_paths_are_names_of_state_dicts(name: str) -> None:
    assert names.is_path(name)


@pytest.mark.parametrize("name", [*MADE, "dense/kernel:0", "a b", "scale-1", ""])
def test_other_names_are_not(name: str) -> None:
    assert not names.is_path(name)
