"""Decoders with GroupQueryAttention against onnxruntime, token by token with its own past, and at once without one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from oracles.caches.decoders import InterpretedDecoder, OnnxruntimeDecoder
from samples.decoders.grouped import CONTEXT, WORDS, DecoderForm, write_decoder

from penstock.frontends.decoder_sizes import DecoderSizes
from penstock.frontends.onnx import CannotImport
from penstock.frontends.onnx.decoding import DecoderNames, import_decoder, open_decoder
from penstock.runtime.generation.generator import GenerationOptions
from penstock.support.errors import UsageError

LENGTHS, TOKENS, NEAR = (1, 7, 21), 12, 1e-4
SIZES = DecoderSizes(context=64, sequences=3, rungs=(1, 4, 16), logits=True)
FORMS = {
    "packed": DecoderForm(),
    "separate": DecoderForm(packed=False, bias=True, positions=True),
    "interleaved": DecoderForm(attention={"rotary_interleaved": 1, "scale": 0.3}, capped_head=5.0),
    "window": DecoderForm(windows=(5, -1), attention={"softcap": 1.5}),
    "turned": DecoderForm(packed=False, positions=True, turned=True),
    "learned": DecoderForm(rotary=False, learned=True),
    "4 bits": DecoderForm(bits=4),
    "8 bits": DecoderForm(bits=8, rotary=False),
}


def interpreted(path: Path) -> InterpretedDecoder:
    decoder = open_decoder(path, DecoderNames())
    return InterpretedDecoder(import_decoder(decoder, SIZES), SIZES, decoder.words, str(path))


def prompts() -> list[list[int]]:
    draw = np.random.default_rng(5)
    return [draw.integers(0, WORDS, length).tolist() for length in LENGTHS]


def continued(decoder: InterpretedDecoder, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """The likeliest tokens behind a prompt, and the logits of each."""
    decoder.logits.clear()
    text = [piece.token for piece in decoder.generator.generate_many([prompt], GenerationOptions(TOKENS))]
    return text, np.stack([logits[0] for logits in decoder.logits[-TOKENS:]])


def largest_difference(decoder: InterpretedDecoder, judge: OnnxruntimeDecoder) -> float:
    """The largest difference of a logit, at all lengths. Texts are followed as long as they are the judge's."""
    worst = 0.0
    for prompt in prompts():
        text, logits = continued(decoder, prompt)
        expected, of_judge = judge.continued(prompt, TOKENS)
        same = next((i for i, (a, b) in enumerate(zip(text, expected, strict=True)) if a != b), TOKENS - 1)
        worst = max(worst, float(np.abs(logits - of_judge)[: same + 1].max()))
    return worst


@pytest.mark.parametrize("form", FORMS)
def test_logits_and_texts_equal_onnxruntime(form: str, tmp_path: Path):
    path = write_decoder(tmp_path / "d.onnx", FORMS[form])
    decoder, judge = interpreted(path), OnnxruntimeDecoder(path)
    texts: list[list[int]] = [[] for _ in LENGTHS]
    for piece in decoder.generator.generate_many(prompts(), GenerationOptions(TOKENS)):
        texts[piece.prompt].append(piece.token)
    for prompt, together in zip(prompts(), texts, strict=True):
        text, logits = continued(decoder, prompt)
        expected, of_judge = judge.continued(prompt, TOKENS)
        assert text == together == expected
        np.testing.assert_allclose(logits, of_judge, atol=NEAR, rtol=0)
        at_once = judge.logits(prompt + text, [len(prompt) + TOKENS])[len(prompt) - 1 : -1]
        np.testing.assert_allclose(logits, at_once, atol=NEAR, rtol=0)


def test_level_4_of_accuracy_rounds_in_onnxruntime_alone(tmp_path: Path):
    """onnxruntime multiplies bytes at level 4. Ours are the logits of level 0, so they are as far from those of level 4
    as onnxruntime's own are."""
    exact = write_decoder(tmp_path / "exact.onnx", DecoderForm(bits=4))
    rounded = write_decoder(tmp_path / "rounded.onnx", DecoderForm(bits=4, level=4))
    decoder, prompt = interpreted(rounded), prompts()[-1]
    _, logits = continued(decoder, prompt)
    of_exact, of_rounded = (OnnxruntimeDecoder(path).logits(prompt, [len(prompt)])[-1] for path in (exact, rounded))
    own = np.abs(of_exact - of_rounded).max()
    assert np.abs(logits[0] - of_exact).max() < NEAR
    assert 10 * NEAR < own < 0.05 * np.ptp(of_exact)
    assert np.abs(logits[0] - of_rounded).max() < own + NEAR


# ------------------------------------------------------------------------------------------------ controls


@pytest.mark.parametrize("window", [4, 6])
def test_another_window_is_noticed(window: int, tmp_path: Path):
    form = DecoderForm(windows=(5, -1))
    decoder = interpreted(write_decoder(tmp_path / "d.onnx", form))
    other = write_decoder(tmp_path / "o.onnx", replace(form, windows=(window, -1)))
    assert largest_difference(decoder, OnnxruntimeDecoder(tmp_path / "d.onnx")) < NEAR
    assert largest_difference(decoder, OnnxruntimeDecoder(other)) > 100 * NEAR


def test_a_position_off_by_one_is_noticed(tmp_path: Path):
    """Positions behind the fifth are one too large; that of all would be none, as rotations are relative."""
    path = write_decoder(tmp_path / "d.onnx", DecoderForm())
    decoder, judge = interpreted(path), OnnxruntimeDecoder(path)
    assert largest_difference(decoder, judge) < NEAR
    decoder.change = lambda turn: {**turn, "turn.positions": turn["turn.positions"] + (turn["turn.positions"] > 5)}
    assert largest_difference(decoder, judge) > 100 * NEAR


def test_positions_that_are_all_off_by_one_are_noticed_where_they_are_learned(tmp_path: Path):
    path = write_decoder(tmp_path / "d.onnx", FORMS["learned"])
    decoder, judge = interpreted(path), OnnxruntimeDecoder(path)
    decoder.change = lambda turn: {**turn, "turn.positions": turn["turn.positions"] + 1}
    assert largest_difference(decoder, judge) > 100 * NEAR


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (DecoderForm(late=2), "operand 5, seqlens_k, is [24] for 19 past and 7 new tokens"),
        (DecoderForm(attention={"smooth_softmax": 1}), "attribute smooth_softmax=1"),
        (DecoderForm(key_heads=3), "4 heads of queries do not divide into 3"),
    ],
)
def test_attention_that_is_none_over_caches_is_refused(form: DecoderForm, said: str, tmp_path: Path):
    with pytest.raises(CannotImport) as error:
        open_decoder(write_decoder(tmp_path / "d.onnx", form), DecoderNames())
    assert said in str(error.value)
    assert "2 nodes" in str(error.value), "one error names both layers"
    assert error.value.exit_code == 3


def changed(path: Path, change: object) -> Path:
    model = onnx.load(path)
    change(model.graph)
    onnx.save(model, path)
    return path


def between(kind: str, **attrs: object) -> object:
    """Put a node between the embedding and the rest."""

    def change(graph: onnx.GraphProto) -> None:
        numbers = np.arange(2, dtype=np.float32).reshape(1, 2, 1) if kind == "Add" else np.array(1)
        graph.initializer.append(numpy_helper.from_array(numbers, "numbers"))
        made = helper.make_node(kind, ["embedded", "numbers"], ["between"], "strange", **attrs)
        at = [node.output[0] for node in graph.node].index("embedded")
        for node in graph.node:
            node.input[:] = ["between" if name == "embedded" else name for name in node.input]
        graph.node.insert(at + 1, made)

    return change


def late_mask(graph: onnx.GraphProto) -> None:
    """Add the length of all keys to the embedding."""
    graph.node.append(helper.make_node("Cast", ["mask/total"], ["floats"], "floats", to=TensorProto.FLOAT))
    graph.node.append(helper.make_node("Add", ["embedded", "floats"], ["added"], "strange"))
    for node in list(graph.node)[:-1]:
        node.input[:] = ["added" if name == "embedded" else name for name in node.input]


def more_words(graph: onnx.GraphProto) -> None:
    embed = next(tensor for tensor in graph.initializer if tensor.name == "embed")
    embed.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(embed)[:-1], "embed"))


def another_input(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info("beams", TensorProto.INT64, [1]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (between("CumSum"), "strange: takes the tokens of a turn together"),
        (late_mask, "strange (ai.onnx Add): takes floats, which depends on the length of the past"),
        (more_words, f"{WORDS} logits, but a table has rows for {WORDS - 1} tokens"),
        (another_input, "input beams: neither tokens"),
    ],
    ids=["sums", "lengths", "words", "inputs"],
)
def test_what_depends_on_other_rows_or_lengths_is_refused(change: object, said: str, tmp_path: Path):
    path = changed(write_decoder(tmp_path / "d.onnx", DecoderForm()), change)
    with pytest.raises(CannotImport) as error:
        open_decoder(path, DecoderNames())
    assert said in str(error.value)


def test_the_context_is_that_of_the_tables(tmp_path: Path):
    decoder = open_decoder(write_decoder(tmp_path / "d.onnx", DecoderForm()), DecoderNames())
    assert (decoder.longest, decoder.words) == (CONTEXT, WORDS)
    with pytest.raises(UsageError, match=f"made for {CONTEXT}"):
        import_decoder(decoder, replace(SIZES, context=CONTEXT + 1))
    learned = open_decoder(write_decoder(tmp_path / "l.onnx", FORMS["learned"]), DecoderNames())
    assert learned.longest == CONTEXT - 10
