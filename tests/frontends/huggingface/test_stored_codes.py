"""Folders with weights of few bits, against transformers on the same elements in float32: logits within 1e-4."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from safetensors.numpy import save_file
from samples.huggingface.folders import WORDS, write_folder

from penstock.frontends.huggingface import DecoderSizes, import_folder, open_folder
from penstock.runtime.generation.generator import GenerationOptions
from penstock.support.errors import UnsupportedModel, UsageError

from .decoding import interpreted

SIZES = DecoderSizes(context=32, sequences=1, rungs=(1, 16), logits=True)
GROUP = 32


def packed(numbers: np.ndarray, axis: int, places: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Eight numbers of 4 bits in a word, that of column i at place `places[i]`."""
    parts = np.moveaxis(numbers, axis, -1).reshape(*np.moveaxis(numbers, axis, -1).shape[:-1], -1, 8)
    words = sum(parts[..., i].astype(np.uint32) << np.uint32(4 * place) for i, place in enumerate(places))
    return np.ascontiguousarray(np.moveaxis(words.view(np.int32), -1, axis))


def write_codes(path: Path, method: str, ordered: bool = False) -> object:
    """Write a folder whose projections have 4 bits. Return the model of the same elements."""
    model = write_folder(path, "llama", intermediate_size=64)
    rng, tensors = np.random.default_rng(3), {}
    for name, param in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            tensors[name] = param.numpy().copy()
            continue
        n, k = param.shape
        q, zeros = rng.integers(0, 16, (k, n)), rng.integers(1, 16, (k // GROUP, n))
        scales = rng.uniform(0.01, 0.03, zeros.shape).astype(np.float16)
        groups = rng.permutation(np.arange(k) // GROUP) if ordered else np.arange(k) // GROUP
        elements = (q - zeros[groups]) * scales.astype(np.float32)[groups]
        param.copy_(torch.from_numpy(elements.T.astype(np.float32)))
        base = name.removesuffix("weight")
        places = (0, 4, 1, 5, 2, 6, 3, 7)
        if method == "awq":
            tensors[f"{base}qweight"], tensors[f"{base}qzeros"] = packed(q, 1, places), packed(zeros, 1, places)
        else:
            tensors[f"{base}qweight"], tensors[f"{base}qzeros"] = packed(q, 0), packed(zeros - 1, 1)
            tensors[f"{base}g_idx"] = groups.astype(np.int32)
        tensors[f"{base}scales"] = scales
    save_file(tensors, path / "model.safetensors")
    configure(path, {"quant_method": method, "bits": 4, "group_size": GROUP})
    return model


def configure(path: Path, quantization: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def worst(path: Path, model: object) -> float:
    """The largest difference of the logits behind a prompt."""
    prompt = np.random.default_rng(5).integers(2, WORDS, 21).tolist()
    decoder = interpreted(path, SIZES, WORDS)
    list(decoder.generator.generate(prompt, GenerationOptions(1)))
    with torch.no_grad():
        expected = model(torch.tensor(prompt)[None]).logits[0, -1].numpy()
    kinds = [op.kind for op in decoder.imported[1].module.graphs["main"].ops]
    assert kinds.count("matmul_q") == 14, "seven projections of two layers"
    return float(np.abs(decoder.logits[-1][0] - expected).max())


@pytest.mark.parametrize(("method", "ordered"), [("gptq", False), ("gptq", True), ("awq", False)])
@torch.no_grad()
def test_logits_equal_those_of_the_same_elements(method: str, ordered: bool, tmp_path: Path):
    model = write_codes(tmp_path, method, ordered)
    assert worst(tmp_path, model) < 1e-4
    if method == "gptq":  # the control: zeros of the other version
        configure(tmp_path, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"})
        assert worst(tmp_path, model) > 1e-2


@torch.no_grad()
def test_what_is_not_read_is_refused_by_name(tmp_path: Path):
    write_codes(tmp_path, "gptq")
    for quantization, said in (
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"quant_method": "awq", "version": "gemv"}, "'gemv' of awq"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "'marlin' of gptq"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ("gptq", "expected an object"),
    ):
        configure(tmp_path, quantization)
        with pytest.raises((UnsupportedModel, UsageError), match=said):
            import_folder(open_folder(tmp_path), SIZES)
