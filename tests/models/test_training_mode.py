"""Models of transformers as they are trained, with dropout: two stages against torch with the same masks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracles.drawn import drawn
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")

VOCAB, LENGTH, BATCH, RATE, STEPS = 96, 12, 2, 0.1, 4


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.m = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.m(input_ids=ids).logits
        return logits


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=3,
        n_head=2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    # Torch's own attention draws by itself; written out, it asks for the masks.
    config._attn_implementation = "eager"
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    config._attn_implementation = "eager"
    return transformers.BertForMaskedLM(config)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [gpt2, bert])
def test_training_with_dropout(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Logits(make()).train()
    batches = [
        (torch.randint(0, VOCAB, (BATCH, LENGTH)), torch.randint(0, VOCAB, (BATCH, LENGTH))) for _ in range(STEPS)
    ]
    model = ps.from_torch(module, (batches[0][0],))
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=RATE), seed=11)
    with ps.open(ps.compile(ps.plan(model, ps.Cluster.local(2), training, stages=2), tmp_path / "bundle")) as job:
        found = [job.step({"ids": ids.numpy(), "labels": labels.numpy()}) for ids, labels in batches]

    def losses(seed: int) -> list[float]:
        twin = Logits(make()).train().double()
        twin.load_state_dict(module.state_dict())
        said = []
        with drawn(seed) as draws:
            for number, (ids, labels) in enumerate(batches):
                draws.begin(number)
                twin.zero_grad()
                loss = F.cross_entropy(twin(ids).reshape(-1, VOCAB), labels.reshape(-1))
                loss.backward()
                said.append(float(loss.detach()))
                assert draws.use > 5
                with torch.no_grad():
                    for parameter in twin.parameters():
                        parameter -= RATE * parameter.grad
        return said

    assert found == pytest.approx(losses(11), rel=1e-5)
    assert found != pytest.approx(losses(12), rel=1e-4), "control: other masks give other losses"
