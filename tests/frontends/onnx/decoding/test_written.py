"""Decoders whose attention is written out, as torch exports them, against onnxruntime token by token with its own past."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from oracles.caches.decoders import InterpretedDecoder, OnnxruntimeDecoder
from samples.decoders.written import CONTEXT, WORDS, WrittenForm, write_written

from penstock.frontends.decoder_sizes import DecoderSizes
from penstock.frontends.onnx import CannotImport
from penstock.frontends.onnx.decoding import DecoderNames, import_decoder, open_decoder
from penstock.runtime.generation.generator import GenerationOptions

LENGTHS, TOKENS, NEAR = (1, 7, 21), 12, 1e-4
SIZES = DecoderSizes(context=64, sequences=3, rungs=(1, 4, 16), logits=True)
FORMS = {
    "grouped": WrittenForm(),
    "learned positions": WrittenForm(key_heads=4, rotary=False, added=True),
    "window and cap": WrittenForm(window=6, cap=3.0),
    "a window as long as no sample": WrittenForm(layers=1, window=50),
    "a scale at both": WrittenForm(shared_scale=True),
    "heads in front": WrittenForm(merged=True, key_heads=1),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("decoders")
    return {name: write_written(folder / f"{name}.onnx", form) for name, form in FORMS.items()}


def interpreted(path: Path, sizes: DecoderSizes = SIZES) -> InterpretedDecoder:
    decoder = open_decoder(path, DecoderNames())
    return InterpretedDecoder(import_decoder(decoder, sizes), sizes, decoder.words, str(path))


def largest_difference(decoder: InterpretedDecoder, judge: OnnxruntimeDecoder, lengths=LENGTHS) -> float:
    """The largest difference of a logit of texts, which are followed as long as they are the judge's."""
    draw, worst = np.random.default_rng(5), 0.0
    prompts = [draw.integers(0, WORDS, length).tolist() for length in lengths]
    for prompt in prompts:
        decoder.logits.clear()
        text = [piece.token for piece in decoder.generator.generate_many([prompt], GenerationOptions(TOKENS))]
        logits = np.stack([logits[0] for logits in decoder.logits[-TOKENS:]])
        expected, of_judge = judge.continued(prompt, TOKENS)
        same = next((i for i, (a, b) in enumerate(zip(text, expected, strict=True)) if a != b), TOKENS - 1)
        worst = max(worst, float(np.abs(logits - of_judge)[: same + 1].max()))
    return worst


@pytest.mark.parametrize("name", FORMS)
def test_logits_and_texts_equal_onnxruntime(name: str, paths):
    lengths = (*LENGTHS, 52) if FORMS[name].window == 50 else LENGTHS
    assert largest_difference(interpreted(paths[name]), OnnxruntimeDecoder(paths[name]), lengths) < NEAR


def test_the_numbers_of_attention_are_read(paths):
    read = {
        name: next(iter(open_decoder(path, DecoderNames()).decoding.attentions.values()))
        for name, path in paths.items()
    }
    assert [round(a.scale, 6) for a in read.values()] == [0.25] * 4 + [0.5, 0.25]
    assert [(a.heads, a.key_heads) for a in read.values()] == [(4, 2), (4, 4), (4, 2), (4, 2), (4, 2), (4, 1)]
    assert [(a.window, a.cap) for a in read.values()] == [(0, 0), (0, 0), (6, 3.0), *[(0, 0)] * 3]


# ------------------------------------------------------------------------------------------------ controls


@pytest.mark.parametrize(
    "other", [WrittenForm(window=7, cap=3.0), WrittenForm(window=6, cap=3.2), WrittenForm(window=6, cap=3.0, heads=4)]
)
def test_another_window_or_cap_is_noticed(other: WrittenForm, paths, tmp_path: Path):
    same = other == FORMS["window and cap"]
    judge = OnnxruntimeDecoder(write_written(tmp_path / "other.onnx", other))
    assert (largest_difference(interpreted(paths["window and cap"]), judge) < NEAR) == same


def test_a_window_is_looked_for_at_the_context(paths):
    """The control: a context of fewer positions has no window, and a text of more is another one."""
    path = paths["a window as long as no sample"]
    decoder = open_decoder(path, DecoderNames())
    for context, window in ((48, 0), (64, 50)):
        module = import_decoder(decoder, replace(SIZES, context=context))[16].module
        assert {op.attrs["window"] for op in module.graphs["main"].ops if op.kind == "attend"} == {window}


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (WrittenForm(distances=True), "scores are no multiple of the products of queries and keys"),
        (WrittenForm(ahead=1), "rows see other keys than those up to their own"),
        (WrittenForm(turned_late=True), "scores are no multiple of the products of queries and keys"),
        (WrittenForm(squared=True), "its result is no sum of values by shares of their keys that add up to 1"),
    ],
    ids=["distances", "ahead", "turned late", "squared"],
)
def test_what_is_no_attention_over_caches_is_refused(form: WrittenForm, said: str, tmp_path: Path):
    with pytest.raises(CannotImport) as error:
        open_decoder(write_written(tmp_path / "d.onnx", form), DecoderNames())
    assert said in str(error.value)
    assert "2 nodes" in str(error.value) or str(error.value).count(said) == 2, "one error names both layers"
    assert error.value.exit_code == 3


@pytest.mark.parametrize("form", [WrittenForm(pieces=48), WrittenForm(stretched=True)], ids=["pieces", "stretched"])
def test_attention_that_is_another_one_for_long_texts_is_refused(form: WrittenForm, tmp_path: Path):
    """The control: for a context of fewer positions it is attention."""
    decoder = open_decoder(write_written(tmp_path / "d.onnx", form), DecoderNames())
    import_decoder(decoder, replace(SIZES, context=40))
    for context in (56, 64, 96):
        with pytest.raises(CannotImport, match=r"for \d+ keys it sees other ones, or scales otherwise, than for few"):
            import_decoder(decoder, replace(SIZES, context=context))


def test_past_keys_that_nothing_takes_are_named(paths, tmp_path: Path):
    model = onnx.load(paths["grouped"])
    extra = model.graph.input.add()
    extra.CopyFrom(next(value for value in model.graph.input if value.name == "past_key_values.0.key"))
    extra.name = "past_key_values.9.key"
    onnx.save(model, tmp_path / "more.onnx")
    with pytest.raises(CannotImport, match=r"input past_key_values\.9\.key"):
        open_decoder(tmp_path / "more.onnx", DecoderNames())


def test_the_context_is_that_of_learned_positions(paths):
    assert open_decoder(paths["learned positions"], DecoderNames()).longest == CONTEXT
