"""From a folder to text through the command line: the text of transformers, and one clear error for all that is wrong."""

from __future__ import annotations

import io
import json
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import torch
from oracles.limits import ANSWERED, each
from samples.huggingface.folders import FAMILIES, write_folder, write_tokenizer

import penstock as ps
from penstock.commands.parser import main
from penstock.commands.running.generate import GenerateOptions, generate
from penstock.runtime.generation.batcher import Batcher
from penstock.runtime.generation.generator import TextPiece
from penstock.support.errors import UsageError

TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("folder")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer = write_tokenizer(path, template=template)
    words = tokenizer.get_vocab_size()
    model = write_folder(path, "llama", vocab_size=words, eos_token_id=words - 1, max_position_embeddings=96)
    return path, tokenizer, model


@pytest.fixture(scope="module")
def bundle(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("bundle") / "b"
    words = ["--generate", "--context", "64", "--sequences", "3", "--backend", "numpy"]
    assert main(["compile", f"hf:{folder[0]}", "-o", str(out), *words]) == 0
    return out


def text_of(folder, prompt: str) -> str:
    """What transformers generates, decoded at once."""
    _, tokenizer, model = folder
    ids = tokenizer.encode(prompt).ids
    with torch.no_grad():
        result = model.generate(torch.tensor(ids)[None], max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    return tokenizer.decode(result[0, len(ids) :].tolist(), skip_special_tokens=True)


def test_text_on_stdout_equals_transformers(folder, bundle, capsys):
    assert main(["generate", str(bundle), "--prompt", "the quick brown", "--tokens", str(TOKENS)]) == 0
    captured = capsys.readouterr()
    assert captured.out == text_of(folder, "the quick brown") + "\n"
    assert "tokens/s" in captured.err


def test_a_file_of_prompts_as_json(folder, bundle, tmp_path, capsys):
    prompts = ["the", "lazy dog jumps over", "你好", "two  spaces\nand", "fox"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts) + "\n")
    assert main(["generate", str(bundle), "--prompts", str(file), "--tokens", str(TOKENS), "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["text"] for answer in answers] == [text_of(folder, prompt) for prompt in prompts]
    assert [answer["prompt"] for answer in answers] == list(range(len(prompts)))


def test_a_drawn_text_depends_on_its_seed_and_not_on_its_company(bundle):
    model = ps.load(bundle)
    how = {"tokens": TOKENS, "temperature": 1.0}
    alone = "".join(model.generate("the quick", **how, seed=4))
    together = {0: "", 1: "", 2: "", 3: ""}
    for piece in model.generate_many(["fox", "the quick", "a", "over the lazy dog"], **how, seed=4):
        together[piece.prompt] += piece.text
    assert together[1] == alone
    assert "".join(model.generate("the quick", **how, seed=5)) != alone
    with ps.open(bundle) as job:
        assert "".join(job.generate("the quick", **how, seed=4)) == alone
    with pytest.raises(UsageError, match="closed"):
        job.generate("the quick")


def test_a_token_is_a_whole_number(bundle):
    with pytest.raises(TypeError, match="float"):
        ps.load(bundle).generate([1.5], tokens=1)


def test_settings_of_a_text_are_numbers_that_can_be_meant(bundle):
    model = ps.load(bundle)
    for strange in ({"tokens": 2.5}, {"tokens": 2, "top_k": 1.5}, {"tokens": 2, "seed": 0.5}):
        with pytest.raises(UsageError, match="whole number"):
            model.generate([1], **strange)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hot, hotter = (list(model.generate([1, 2], tokens=6, temperature=t, seed=3)) for t in (1e30, 1e300))
        cold = list(model.generate([1, 2], tokens=6, temperature=1e-300, seed=3))
    assert hot == hotter != cold == list(model.generate([1, 2], tokens=6))


def test_caches_of_16_bits_take_half_the_memory(folder, bundle, tmp_path, capsys):
    words = ["--generate", "--context", "64", "--sequences", "3", "--backend", "numpy", "--cache", "bf16"]
    halved = tmp_path / "h"
    assert main(["compile", f"hf:{folder[0]}", "-o", str(halved), *words]) == 0
    shown = []
    for path, dtype in ((bundle, "f32"), (halved, "bf16")):
        module = (path / "module.ir").read_text()
        assert set(re.findall(r"var @\S+ : (\w+)\[[^]]*\].* cache", module)) == {dtype}
        capsys.readouterr()
        assert main(["inspect", str(path), "--memory"]) == 0
        shown.append(re.search(r"a token takes (\S+) (\S+)", capsys.readouterr().out).groups())
    (full, unit), (half, same) = shown
    assert (unit, float(full)) == (same, 2 * float(half))
    assert main(["verify", str(halved)]) == 0


def test_a_prompt_with_its_text_has_as_many_tokens_as_the_context(bundle):
    model = ps.load(bundle)
    for length in (40, 63):
        pieces = list(model.generate_many([[7] * length], tokens=100))
        assert pieces[-1].ended == "length"
        assert length + len(pieces) == 64
    with pytest.raises(UsageError, match="leaves none"):
        model.generate([7] * 64)


def test_stdout_of_ascii_gets_escapes(monkeypatch):
    """The control: the characters themselves cannot be written there."""
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", written)
    pieces = [TextPiece(0, "你", 1), TextPiece(0, "🙂!", 2, "length")]
    answering = SimpleNamespace(generate_many=lambda prompts, how: iter(pieces))
    for as_json in (False, True):
        generate(answering, ["x"], GenerateOptions("b", "x", json=as_json))
    plain, line, _ = written.buffer.getvalue().decode("ascii").split("\n")
    assert plain == "\\u4f60\\U0001f642!"
    assert json.loads(line)["text"] == "你🙂!"
    with pytest.raises(UnicodeEncodeError):
        written.write("你")


def test_a_tokenizer_that_cannot_be_read_ends_the_compile(tmp_path, capsys):
    write_folder(tmp_path / "m", "llama", num_hidden_layers=1)
    words = ["compile", f"hf:{tmp_path / 'm'}", "-o", str(tmp_path / "b"), "--generate", "--backend", "numpy"]
    words += ["--context", "4", "--sequences", "1"]
    (tmp_path / "m" / "tokenizer.json").write_text("{")
    refused(words, capsys, 2, "tokenizer cannot be read")
    assert not (tmp_path / "b").exists()
    write_tokenizer(tmp_path / "m")
    assert main(words) == 0
    assert "the tokenizer knows" in capsys.readouterr().err


def test_iterators_that_take_turns(bundle):
    """The control: without computing again, an iterator reads the caches of another one."""
    model = ps.load(bundle)
    prompts = [[5, 9, 100, 7] * 4, [8, 20, 33] * 6]
    alone = [list(model.generate(prompt, tokens=20)) for prompt in prompts]

    def turns() -> list[list[int]]:
        open_ = [model.generate(prompt, tokens=20) for prompt in prompts]
        return [list(tokens) for tokens in zip(*zip_longest(*open_), strict=True)]

    assert turns() == [[*tokens, *[None] * (max(map(len, alone)) - len(tokens))] for tokens in alone]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda prompt: list(model.generate(prompt, tokens=20)), prompts)) == alone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batcher, "rewind", lambda batcher: None)
        assert turns() != alone


def test_tokens_in_tokens_out(folder, bundle):
    _, tokenizer, model = folder
    prompt = tokenizer.encode("over the").ids
    tokens = list(ps.load(bundle).generate(prompt, tokens=TOKENS))
    with torch.no_grad():
        expected = model.generate(torch.tensor(prompt)[None], max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    assert tokens == [token for token in expected[0, len(prompt) :].tolist() if token != model.config.eos_token_id]


def test_a_chat_is_written_by_the_template(folder, bundle, tmp_path, capsys):
    assert main(["generate", str(bundle), "--prompt", "hi", "--chat", "--tokens", str(TOKENS)]) == 0
    assert capsys.readouterr().out == text_of(folder, "<user>hi") + "\n"
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}))
    assert main(["generate", str(bundle), "--prompts", str(file), "--tokens", str(TOKENS)]) == 0
    assert capsys.readouterr().out == text_of(folder, "<system>x<user>y") + "\n"


def test_a_chat_begins_once(folder, tmp_path, capsys, monkeypatch):
    """Both the template and the tokenizer write a first token here, as those of many models do."""
    from penstock.runtime.generation.generator import TextGenerator

    write_folder(tmp_path / "m", "llama", vocab_size=folder[1].get_vocab_size(), max_position_embeddings=96)
    tokenizer = write_tokenizer(tmp_path / "m", template="<s>{% for m in messages %}{{ m.content }}{% endfor %}")
    content = json.loads(tokenizer.to_str())
    parts = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    first = tokenizer.token_to_id("<s>")
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": [*parts, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [first], "tokens": ["<s>"]}},
    }
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(content))
    words = ["--generate", "--context", "32", "--sequences", "1", "--backend", "numpy"]
    assert main(["compile", f"hf:{tmp_path / 'm'}", "-o", str(tmp_path / "b"), *words]) == 0
    seen: list[list[int]] = []
    texts = TextGenerator._texts
    monkeypatch.setattr(
        TextGenerator, "_texts", lambda self, prompts, *how: seen.extend(prompts) or texts(self, prompts, *how)
    )
    for more in ([], ["--chat"]):
        assert main(["generate", str(tmp_path / "b"), "--prompt", "the fox", "--tokens", "2", *more]) == 0
    assert seen == [[first, *tokenizer.encode("the fox").ids]] * 2


def test_lines_of_prompts_end_where_json_lines_end(bundle, tmp_path, capsys):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\r\n', encoding="utf-8", newline="")
    assert main(["generate", str(bundle), "--prompts", str(file), "--tokens", "2"]) == 0
    file.write_bytes(b'{"prompt": "\xff"}')
    refused(["generate", str(bundle), "--prompts", str(file)], capsys, 2, "UTF-8", "byte 12")
    refused(["generate", str(bundle), "--prompt", "a\udc80"], capsys, 2, "lone surrogate")


def refused(words: list[str], capsys: pytest.CaptureFixture[str], code: int, *parts: str) -> None:
    assert main(words) == code
    said = capsys.readouterr().err
    assert all(part in said for part in parts), said
    assert said.count("penstock: error") == 1


def test_what_does_not_fit_is_one_error(folder, bundle, tmp_path, capsys):
    path = folder[0]
    compiling = ["compile", f"hf:{path}", "-o", str(tmp_path / "b"), "--backend", "numpy"]
    refused([*compiling, "--generate", "--context", "97"], capsys, 2, "made for 96", "--context 96")
    refused(compiling, capsys, 2, "--generate")
    refused([*compiling, "--generate", "--devices", "2"], capsys, 2, "one device")
    refused(["compile", f"hf:{tmp_path / 'no'}", "-o", str(tmp_path / "b"), "--generate"], capsys, 2, "is no folder")
    generating = ["generate", str(bundle)]
    refused(generating, capsys, 2, "--prompt TEXT or --prompts")
    refused([*generating, "--prompt", "fox " * 80], capsys, 2, "prompt 1: has", "context of 64")
    refused([*generating, "--prompt", ""], capsys, 2, "has no tokens")
    refused([*generating, "--prompt", "x", "--temperature", "-1", "--top-p", "2"], capsys, 2, "temperature", "top_p")
    (tmp_path / "p.jsonl").write_text('{"prompt": 1}\n{"text": "x"}\n')
    refused([*generating, "--prompts", str(tmp_path / "p.jsonl")], capsys, 2, "line 1", "line 2")
    refused([*generating, "--prompts", str(tmp_path / "none")], capsys, 2, "No such file")


def test_a_family_that_cannot_be_read(tmp_path, capsys):
    write_folder(tmp_path / "m", "bloom", hidden_size=32, n_layer=1, n_head=4, vocab_size=64)
    words = ["compile", f"hf:{tmp_path / 'm'}", "-o", str(tmp_path / "b"), "--generate"]
    refused(words, capsys, 3, "'bloom'", "ALiBi")


def test_a_bundle_that_generates_no_text(tmp_path, capsys):
    from penstock.models import write_mlp

    path = write_mlp(tmp_path / "m.onnx", (4, 4), 2)
    out = ps.compile(ps.plan(ps.from_onnx(path), ps.Cluster.local(1)), tmp_path / "b", backend="numpy")
    refused(["generate", str(out), "--prompt", "x"], capsys, 2, "does not generate text", "hf:FOLDER")


def test_verify_compares_with_whole_sequences_without_a_cache(bundle, tmp_path, capsys, monkeypatch):
    from penstock.runtime.generation.turn import TokenTurn

    write_folder(tmp_path / "m", "gemma2")
    windowed = tmp_path / "w"
    words = ["--generate", "--context", "48", "--sequences", "2", "--backend", "numpy"]
    assert main(["compile", f"hf:{tmp_path / 'm'}", "-o", str(windowed), *words]) == 0
    for path in (bundle, windowed):
        assert main(["verify", str(path)]) == 0
        assert "against whole sequences without a cache: ok" in capsys.readouterr().err
    # The control: neighbours in a block are swapped.
    arrays = TokenTurn.arrays

    def swapped(turn, sequences, each):
        result = arrays(turn, sequences, each)
        places = result["turn.places"]
        return {**result, "turn.places": np.where(places >= 0, places ^ 1, places)}

    monkeypatch.setattr(TokenTurn, "arrays", swapped)
    assert main(["verify", str(bundle)]) == 5
    assert "FAILED" in capsys.readouterr().err


def _compiled(words: list[str]) -> str:
    return str(main(words))


@pytest.mark.slow
def test_a_folder_larger_than_memory_is_compiled(tmp_path):
    """The control: with room for a part of the largest tensor alone, there is not enough."""
    sizes = {**FAMILIES["llama"], "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    write_folder(tmp_path / "m", "llama", **{**sizes, "num_attention_heads": 8}, shards="100MB")
    weights = sum(file.stat().st_size for file in (tmp_path / "m").glob("*.safetensors"))
    assert weights > 400_000_000
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 3
    options = ["--generate", "--context", "16", "--sequences", "1", "--backend", "numpy"]
    words = ["compile", f"hf:{tmp_path / 'm'}", "-o", str(tmp_path / "b"), *options]
    # What every compile takes besides weights: the same with a small model, so that libraries are loaded.
    write_folder(tmp_path / "small", "llama")
    assert main(["compile", f"hf:{tmp_path / 'small'}", "-o", str(tmp_path / "s"), *options]) == 0
    ((_, outcome),) = each(_compiled, [words], seconds=300, growth=weights // 2)
    assert (outcome.ended, outcome.text) == (ANSWERED, "0"), outcome
    ((_, outcome),) = each(_compiled, [words], seconds=300, growth=4 << 20)
    assert (outcome.ended, outcome.text) != (ANSWERED, "0")
    stored = ps.load(tmp_path / "b")
    tokens = list(stored.generate([1, 2, 3], tokens=2))
    assert np.all(np.asarray(tokens) < 128)
