"""One small GPT, compiled once, with its dumps: what the tests of `penstock inspect` look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.commands.parser import main
from penstock.inspection.subject import Subject, open_subject
from penstock.models import write_gpt


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model, bundle (two stages, 2bw) and dumps."""
    folder = tmp_path_factory.mktemp("inspection")
    write_gpt(folder / "gpt.onnx", layers=2, width=16, heads=2, vocab=20, positions=6)
    words = f"compile {folder}/gpt.onnx -o {folder}/bundle --devices 2 --dim batch=2 --loss cross_entropy --optimizer adamw --lr 0.01"
    more = [
        "--microbatches",
        "3",
        "--schedule",
        "2bw",
        "--backend",
        "numpy",
        "--split-at",
        "h.1.attn.residual",
        "--dump-ir",
        f"{folder}/dumps",
    ]
    assert main([*words.split(), *more]) == 0
    return folder


@pytest.fixture(scope="session")
def bundle(built: Path) -> Subject:
    return open_subject(built / "bundle")


@pytest.fixture(scope="session")
def dumps(built: Path) -> Subject:
    return open_subject(built / "dumps")
