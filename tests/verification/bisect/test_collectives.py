"""Tests of bisecting programs whose ranks meet: the compiled graphs are called alone, with the collectives' results."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.commands.parser import main
from penstock.models import write_cnn
from penstock.verification.bisect.kernels import PlayedExchange


def bisected(folder: Path, preset: str) -> int:
    model = write_cnn(folder / "cnn.onnx", batch=8)
    mesh = ["--devices", "2", "--mesh", "tp=2", "--shard", f"preset:{preset}", "--loss", "cross_entropy"]
    return main(["verify", str(model), "--bisect", "--repro", "none", "--steps", "1", *mesh])


@pytest.mark.parametrize("preset", ["batch", "spatial"])
def test_graphs_with_collectives_are_right_with_drawn_weights_and_with_the_models(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compared twice, and each time collectives have the results of that run."""
    met = set[str]()
    begin = PlayedExchange.begin

    def watched(exchange, call, x, out):
        met.add(call.op.kind)
        begin(exchange, call, x, out)

    monkeypatch.setattr(PlayedExchange, "begin", watched)
    assert bisected(tmp_path, preset) == 0
    assert "graphs of 1 stage compiled by tvm" in capsys.readouterr().out
    assert met >= ({"all_reduce", "all_gather"} if preset == "batch" else {"shift", "all_gather"})


def test_control_results_of_collectives_that_are_off_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = PlayedExchange.begin

    def wrong(exchange, call, x, out):
        begin(exchange, call, x, out)
        out.add_(1)

    monkeypatch.setattr(PlayedExchange, "begin", wrong)
    assert bisected(tmp_path, "batch") == 5
    assert "s0.F" in capsys.readouterr().out
