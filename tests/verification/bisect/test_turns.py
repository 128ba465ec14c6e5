"""Looking into a bundle that generates text: its turns are drawn, and each size, cache and weight of few bits judged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples.decoders.grouped import DecoderForm, write_decoder

from penstock.backends.bundle.format import open_bundle
from penstock.backends.tvm.compile import pool
from penstock.backends.tvm.kernels.tools import body
from penstock.commands.parser import main
from penstock.ir.graph import Module, Op
from penstock.runtime.data.samples import SyntheticSamples
from penstock.verification.bisect.sources import _Renamed

from .breaking import in_graph, swapped
from .seeded_bugs import in_pass


def compiled(folder: Path, form: DecoderForm) -> Path:
    file = write_decoder(folder / "model.onnx", form)
    # One thread, as all tests here: code for another number of threads would run in a process without what is patched.
    cluster = folder / "cluster.toml"
    cluster.write_text('[[device]]\nname = "cpu:0"\nthreads = 1\n', encoding="utf-8")
    words = ["--generate", "--context", "20", "--sequences", "2", "--cluster", str(cluster)]
    assert main(["compile", str(file), "-o", str(folder / "b"), *words]) == 0
    return folder / "b"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("turns"), DecoderForm(bits=4))


def bisected(bundle: Path) -> int:
    return main(["verify", str(bundle), "--bisect", "--repro", "none"])


def test_synthetic_turns_are_what_a_decoder_can_be_asked_for(bundle: Path) -> None:
    module = open_bundle(bundle).module
    continued = 0
    for seed in range(40):
        samples = SyntheticSamples(module, seed)
        turn = {value.name: samples.microbatch(0, value.name) for value in module.data_inputs}
        places = turn["turn.places"]
        rows = places[places >= 0]
        assert len(set(rows.tolist())) == len(rows) == turn["turn.starts"][-1] > 0
        sizes = np.diff(turn["turn.starts"])
        live = turn["turn.lengths"] > 0
        assert (sizes[~live] == 0).all()
        assert (sizes[live] > 0).all()
        assert (turn["turn.lengths"] >= sizes).all()
        assert turn["turn.lengths"].max() <= 32
        assert turn["turn.positions"].max() < turn["turn.lengths"].max()
        continued += int((turn["turn.lengths"] > sizes).any())
    assert continued > 5


def test_each_size_is_compared_with_the_interpreter(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bisected(bundle) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("tokens=")] == ["tokens=1", "tokens=4", "tokens=16"]
    assert "of 3 smaller sizes" in lines[-1]


def test_code_of_one_size_that_is_wrong_is_told(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = _Renamed.call

    def wrong(code: _Renamed, graph: str, args: list[torch.Tensor]) -> list[torch.Tensor]:
        results = call(code, graph, args)
        return [x + 1 for x in results] if code.names.get(graph) == "s0.F.4" else results

    monkeypatch.setattr(_Renamed, "call", wrong)
    assert bisected(bundle) == 5
    assert "first wrong at tokens=4: the graph @s0.F" in capsys.readouterr().out


def test_a_kernel_of_one_size_that_the_compiler_makes_wrong_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code in the bundle is wrong for turns of 4 tokens: one difference of the rotation of keys is doubled."""
    right, value = body.element, "layers.0.attn/out.sub.1"

    def doubled(functions: Any, op: Op, *more: Any) -> tuple[Any, ...]:
        results = right(functions, op, *more)
        wrong = op.kind == "sub" and op.outs[0].type.dims == (4, 2, 8)
        return tuple(2 * x for x in results) if wrong else results

    with monkeypatch.context() as patch:
        # In this process, and into a cache that no right compiler reads.
        patch.setattr(pool, "usable_cores", lambda: 1)
        patch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
        patch.setattr(body, "element", doubled)
        broken = compiled(tmp_path, DecoderForm(bits=4, layers=1))
        assert bisected(broken) == 5
        said = capsys.readouterr()
        first = said.out[said.out.index("first wrong") :]
        assert re.match(rf"first wrong at tokens=4: s0\.F/k\d+ \(.*sub\)\n(?s:.*)\n  tensor +%{value}\n", first)
        assert [line.split()[-1] for line in said.out.splitlines() if line.startswith("tokens=1 ")] == ["ok"]
        assert f"%{value} of stage 0 at tokens=4 is not what the interpreter gives" in said.err
    # The compiler is right again, the code in the bundle is not: the first wrong result in the order of operations.
    assert bisected(broken) == 5
    out = capsys.readouterr().out
    first = out[out.index("first wrong") :]
    assert re.match(
        r"first wrong at tokens=4: the graph @s0\.F\n(?s:.*) = put\((?s:.*)\n  tensor +@layers\.0\.keys\n", first
    )
    assert "each kernel of it, compiled now by itself, is right: its code is older" in first


# Keys reach the caches, queries nothing but the choice of tokens: by a turn of one token only behind earlier ones.
@pytest.mark.parametrize(("size", "value"), [(4, "layers.0.attn/out.sub.1"), (1, "layers.0.attn/out.sub")])
def test_a_program_of_one_size_that_a_pass_makes_wrong_is_told(
    size: int, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its code computes what it says, so that only the model tells. The pass exchanges what a rotation subtracts."""
    exchanging = in_graph("s0.F", swapped(value))

    def of_one_size(module: Module) -> Module:
        return exchanging(module) if any(bound.size == size for bound in module.bounds) else module

    with monkeypatch.context() as patch:
        in_pass("split", of_one_size)(patch)
        broken = compiled(tmp_path, DecoderForm(bits=4, layers=1))
    assert bisected(broken) == 5
    said = capsys.readouterr()
    first = said.out[said.out.index("first wrong") :]
    assert re.match(rf"first wrong at tokens={size}: its program\n(?s:.*) = sub\((?s:.*)\n  tensor +%{value}\n", first)
    assert f"the program of tokens={size} computes something else than reference.ir" in said.err


def test_rows_that_do_not_reach_the_cache_are_told(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokens alone do not tell: they were chosen from the right caches."""
    call = _Renamed.call

    def forgetful(code: _Renamed, graph: str, args: list[torch.Tensor]) -> list[torch.Tensor]:
        before = [x.clone() for x in args]
        results = [x.clone() for x in call(code, graph, args)]
        for x, old in zip(args, before, strict=True):
            x.copy_(old)
        return results

    monkeypatch.setattr(_Renamed, "call", forgetful)
    assert bisected(bundle) == 5
    assert "@layers.0.keys" in capsys.readouterr().out


def test_views_show_turns(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle), "--json"]) == 0
    rungs = json.loads(capsys.readouterr().out)["rungs"]
    assert [rung["sizes"] for rung in rungs] == ["tokens=1", "tokens=4", "tokens=16", "tokens=20"]
    assert 0 < rungs[0]["seconds"] < rungs[-1]["seconds"]
    # Two layers have two heads of keys and of values with 16 floats each: 512 bytes for a position. Texts of 20 tokens
    # have two blocks of 16 positions each.
    rows, sequences = (1, 4, 16, 20), (1, 2, 2, 2)
    expected = [(n, s, 512 * n, 2 * s, 512 * 16 * 2 * s) for n, s in zip(rows, sequences, strict=True)]
    assert [tuple(rung["turn"].values()) for rung in rungs] == expected
    assert main(["inspect", str(bundle)]) == 0
    out = capsys.readouterr().out
    assert "4 sizes with code, of which the tables show the largest:\n  tokens=1: " in out
    writes = "2 sequences at most; writes 2.0 KiB to caches, reads at most 32.0 KiB in 4 blocks"
    assert re.search(rf"^  tokens=4: \S+ ms, {writes}$", out, re.MULTILINE)
    assert main(["inspect", str(bundle), "--memory", "--json"]) == 0
    room = json.loads(capsys.readouterr().out)[0]["caches"]
    page = tmp_path / "r.html"
    assert main(["inspect", str(bundle), "--html", str(page)]) == 0
    held = [room["blocks"], 16, room["bytes"], room["bytes_per_position"]]
    assert f'"caches":{json.dumps(held, separators=(",", ":"))}' in page.read_text()
    turns = [[rung["sizes"], rung["seconds"], list(turn)] for rung, turn in zip(rungs, expected, strict=True)]
    assert f'"rungs":{json.dumps(turns, separators=(",", ":"))}' in page.read_text()


def test_what_such_a_bundle_is_not_asked(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = (
        (
            ["verify", str(bundle), "--dim", "tokens=3", "--steps", "2"],
            "--dim, --steps of a bundle that generates text",
        ),
        (["infer", str(bundle), "--data", "synthetic"], "use `penstock generate`"),
        (["export", str(bundle), "--onnx", str(tmp_path / "x.onnx")], "holds no ONNX model"),
    )
    for words, said in cases:
        assert main(words) == 2
        assert said in capsys.readouterr().err
