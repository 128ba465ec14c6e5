"""An ONNX decoder through the command line: text, checks of the bundle, and what the files beside it say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from oracles.caches.decoders import OnnxruntimeDecoder
from samples.decoders.grouped import CONTEXT, WORDS, DecoderForm, write_decoder, write_plain
from samples.decoders.written import WrittenForm, write_written
from samples.huggingface.folders import write_tokenizer

import penstock as ps
from penstock.commands.parser import main
from penstock.planning.decoding.onnx_file import load_onnx_decoder
from penstock.planning.options import GenerationSettings
from penstock.runtime.generation.facts import read_facts
from penstock.support.errors import UsageError

TOKENS = 10
WORDS_OF_COMMAND = ["--generate", "--context", "48", "--sequences", "2"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("decoder") / "model.onnx", DecoderForm(bits=4))


@pytest.mark.parametrize("backend", ["numpy", pytest.param("tvm", marks=pytest.mark.slow)])
@pytest.mark.parametrize("written", [False, True], ids=["operator", "written out"])
def test_a_bundle_generates_the_text_of_onnxruntime(file: Path, backend: str, written: bool, tmp_path: Path, capsys):
    out = tmp_path / "b"
    file = write_written(tmp_path / "model.onnx", WrittenForm(window=9)) if written else file
    assert main(["compile", str(file), "-o", str(out), "--backend", backend, *WORDS_OF_COMMAND]) == 0
    assert main(["verify", str(out)]) == 0
    assert "without a cache: ok" in capsys.readouterr().err
    model, judge = ps.load(out), OnnxruntimeDecoder(file)
    for length in (1, 20):
        prompt = np.random.default_rng(3).integers(0, WORDS, length).tolist()
        assert list(model.generate(prompt, tokens=TOKENS)) == judge.continued(prompt, TOKENS)[0]


# ------------------------------------------------------------------------------------------------ files beside it


def settings_beside(file: Path, tmp_path: Path, **files: object) -> Path:
    """The decoder with files of settings beside it."""
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "model.onnx").write_bytes(file.read_bytes())
    return tmp_path / "model.onnx"


def facts_for(path: Path, tmp_path: Path, **settings: int):
    models = load_onnx_decoder(str(path), GenerationSettings(generate=True, sequences=2, **settings))
    for name, data in models[1].imported.attachments.items():
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).write_bytes(data)
    return read_facts(tmp_path / "a")


GENAI = {
    "model": {"context_length": 40, "eos_token_id": [3, 5], "vocab_size": 999, "decoder": {"inputs": {}}},
    "search": {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "max_length": 99},
}


def test_settings_of_genai_count_more_than_those_of_transformers(file: Path, tmp_path: Path):
    path = settings_beside(
        file, tmp_path, genai_config=GENAI, generation_config={"eos_token_id": 8}, config={"eos_token_id": 9}
    )
    facts = facts_for(path, tmp_path)
    assert (facts.context, facts.words, facts.ends) == (40, WORDS, (3, 5))
    assert (facts.temperature, facts.top_k, facts.top_p) == (0.5, 7, 0.9)
    with pytest.raises(UsageError, match="made for 40"):
        facts_for(path, tmp_path, context=41)


def test_settings_of_transformers_are_read(file: Path, tmp_path: Path):
    path = settings_beside(
        file, tmp_path, generation_config={"eos_token_id": 8}, config={"eos_token_id": 9, "max_position_embeddings": 77}
    )
    facts = facts_for(path, tmp_path)
    assert (facts.context, facts.ends, facts.temperature) == (77, (8,), 0.0)


@pytest.mark.parametrize(
    ("draws", "named"),
    [(False, "repetition_penalty 1.3, num_beams 4"), (True, "repetition_penalty 1.3, min_p 0.1, num_beams 4")],
)
def test_settings_that_are_not_followed_are_named(file: Path, draws: bool, named: str, tmp_path: Path):
    """Those that change nothing are not, nor those of draws where none are made."""
    settings = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 0, "min_p": 0.1, "num_beams": 4, "typical_p": 1.0}
    path = settings_beside(file, tmp_path, generation_config={**settings, "do_sample": draws})
    models = load_onnx_decoder(str(path), GenerationSettings(generate=True, sequences=2))
    (line,) = [line for line in models[1].imported.report if "not followed" in line]
    assert line.endswith(f": {named}")
    path = settings_beside(file, tmp_path, generation_config={"repetition_penalty": 1.0, "do_sample": draws})
    models = load_onnx_decoder(str(path), GenerationSettings(generate=True, sequences=2))
    assert not [line for line in models[1].imported.report if "not followed" in line]


def test_without_settings_the_tables_give_the_context(file: Path, tmp_path: Path):
    facts = facts_for(settings_beside(file, tmp_path), tmp_path)
    assert (facts.context, facts.ends) == (CONTEXT, ())


def test_the_tokenizer_beside_a_file_travels(tmp_path: Path, capsys):
    pytest.importorskip("tokenizers")
    tokenizer = write_tokenizer(tmp_path)
    path = write_decoder(tmp_path / "model.onnx", DecoderForm(words=tokenizer.get_vocab_size()))
    out = tmp_path / "b"
    assert main(["compile", str(path), "-o", str(out), "--backend", "numpy", *WORDS_OF_COMMAND]) == 0
    prompt = "the quick brown"
    capsys.readouterr()
    assert main(["generate", str(out), "--prompt", prompt, "--tokens", str(TOKENS)]) == 0
    expected = OnnxruntimeDecoder(path).continued(tokenizer.encode(prompt).ids, TOKENS)[0]
    assert capsys.readouterr().out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"


def test_prompts_that_do_not_fit_the_context_are_one_error(tmp_path: Path, capsys):
    """Of the command, and of a job. A prompt that leaves one token is the control."""
    pytest.importorskip("tokenizers")
    tokenizer = write_tokenizer(tmp_path)
    path = write_decoder(tmp_path / "model.onnx", DecoderForm(words=tokenizer.get_vocab_size(), layers=1))
    out = tmp_path / "b"
    assert main(["compile", str(path), "-o", str(out), "--backend", "numpy", *WORDS_OF_COMMAND]) == 0
    capsys.readouterr()
    size = len(tokenizer.encode("fox " * 60).ids)
    assert main(["generate", str(out), "--prompt", "fox " * 60]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("penstock: error:") == 1
    assert f"prompt 1: has {size} tokens, which leaves none for its text" in said.err
    assert "context of 48 tokens" in said.err
    with ps.open(out) as job:
        with pytest.raises(UsageError, match="prompt 1: has 48 tokens, which leaves none for its text") as one:
            job.generate([7] * 48)
        with pytest.raises(UsageError) as several:
            job.generate_many([[7] * 50, [7] * 47, []], tokens=1)
        assert len(list(job.generate([7] * 47))) == 1
    assert one.value.exit_code == several.value.exit_code == 2
    assert "context of 48 tokens" in (one.value.hint or "")
    told = ("prompt 1: has 50", "prompt 2", "prompt 3: has no tokens")
    assert [words in several.value.what for words in told] == [True, False, True]


@pytest.mark.parametrize(
    ("genai", "said"),
    [
        ({"model": []}, "model is \\[\\], expected an object"),
        ({"model": {"eos_token_id": WORDS}}, f"eos_token_id {WORDS}"),
        ({"model": {"decoder": {"inputs": {"input_ids": "words"}}}}, "no input is called words"),
    ],
)
def test_settings_that_cannot_be_meant_end_the_compile(file: Path, tmp_path: Path, genai: object, said: str):
    with pytest.raises(ps.PenstockError, match=said):
        facts_for(settings_beside(file, tmp_path, genai_config=genai), tmp_path)


def test_sizes_are_those_of_generation(file: Path, tmp_path: Path, capsys):
    words = ["--dim", "batch=1", "--frozen", "x", "--generate"]
    assert main(["compile", str(file), "-o", str(tmp_path / "b"), *words]) == 2
    assert "leave out --dim, --frozen" in capsys.readouterr().err


def test_a_model_that_is_no_decoder_is_refused(tmp_path: Path, capsys):
    path = write_plain(tmp_path / "m.onnx")
    assert main(["compile", str(path), "-o", str(tmp_path / "b"), "--generate"]) == 3
    assert "no attention" in capsys.readouterr().err
