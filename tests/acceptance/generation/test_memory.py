"""A process that generates text takes the memory of its weights, of the blocks of its caches and of its libraries: from
the first to the last moment, loading included, at most 1.1 times the first two and 250 MB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from samples.decoders.grouped import DecoderForm, write_decoder

from penstock.commands.parser import main

pytestmark = pytest.mark.slow

LIBRARIES = 250e6
FORM = DecoderForm(words=20000, heads=16, key_heads=16, size=64, layers=12, windows=(-1,) * 12, context=1024)
GENERATE = """
import json, sys
import penstock as ps
from penstock.ir.ops import table_of
from penstock.backends.tvm.run import forms
from penstock.runtime.job import in_process
from penstock.runtime.state import held
from penstock.runtime.telemetry.resident import peak_bytes

if sys.argv[2] == "twice":
    # The control: all weights are there before any of them is packed, and memory that was given back is kept.
    forms.give_back = lambda: None
    in_process.unread_weights = lambda program, graphs: set()
if sys.argv[2] == "table":
    # The control: variables that are looked up stay as they are.
    unread = in_process.unread_weights
    def looked_up(graphs):
        read = {op.outs[0]: op.var for graph in graphs for op in graph.ops if op.kind == "read"}
        lookups = [op for graph in graphs for op in graph.ops if op.kind in ("gather", "gather_q")]
        return {read[value] for op in lookups for value in table_of(op) if value in read}
    kept = lambda program, graphs: unread(program, graphs) - looked_up(graphs)
    held.unread_weights = in_process.unread_weights = kept
model = ps.load(sys.argv[1])
list(model.generate_many([list(range(1, 700)), [1, 2, 3]], tokens=20))
caches = sum(var.type.nbytes for var in model.bundle.module.vars.values() if var.role == "cache")
print(json.dumps([peak_bytes(), caches]))
"""


def peak_of(bundle: Path, way: str) -> tuple[float, float]:
    """The peak of a process that generates, and what it may be."""
    command = [sys.executable, "-c", GENERATE, str(bundle), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    peak, caches = json.loads(done.stdout)
    weights = sum(file.stat().st_size for file in (bundle / "weights").iterdir())
    assert min(weights, caches) > 5e7
    return peak, 1.1 * (weights + caches) + LIBRARIES


# GPT-2 small, whose table is a third of it, and a model that is little but its table.
SIZES = {"a third": {}, "most": {"vocab_size": 60000, "n_embd": 1024, "n_layer": 4, "n_head": 16}}


@pytest.mark.parametrize(("share", "weights"), [("a third", "f32"), ("a third", "int8"), ("most", "f32")])
def test_a_tied_table_is_there_once(share: str, weights: str, tmp_path: Path) -> None:
    """The table that words are looked up in is the head's, too."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(**SIZES[share])
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    words = ["--generate", "--context", "1024", "--sequences", "4", "--jobs", "2"]
    words += [] if weights == "f32" else ["--weights", weights]
    assert main(["compile", f"hf:{tmp_path / 'model'}", "-o", str(tmp_path / "b"), *words]) == 0
    peak, most = peak_of(tmp_path / "b", "once")
    assert peak <= most
    assert peak_of(tmp_path / "b", "table")[0] > most


@pytest.mark.parametrize("weights", ["f32", "int4"])
def test_weights_are_there_once(weights: str, tmp_path: Path) -> None:
    file = write_decoder(tmp_path / "model.onnx", FORM)
    words = ["--generate", "--context", "1024", "--sequences", "4", "--jobs", "2"]
    words += [] if weights == "f32" else ["--weights", weights]
    assert main(["compile", str(file), "-o", str(tmp_path / "b"), *words]) == 0
    peak, most = peak_of(tmp_path / "b", "once")
    assert peak <= most
    if weights == "f32":
        assert peak_of(tmp_path / "b", "twice")[0] > most
