"""The contenders of generation.py, each a process: NAME FOLDER THREADS PROMPT TOKENS.

FOLDER/folder is a folder of Hugging Face; what a contender makes of it lies beside it, and is made once. A contender
that holds its model writes {} as one line of JSON, or {"missing": REASON}. It answers each order {"prompt": N,
"tokens": N} with {"prompt": SECONDS, "decode": SECONDS}. All its other output goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Takes tokens, of a prompt or one; gives the next one.
Step = Callable[[list[int]], int]
# Begins anew, and returns the step.
Begin = Callable[[], Step]


class Missing(Exception):
    """An exception that says why a contender does not take part."""


def penstock(folder: Path, kind: str, threads: int, positions: int) -> Begin:
    """Return turns of a bundle that generates, by the inputs of a decoder, as `penstock generate` makes them."""
    import numpy as np

    import penstock as ps

    bundle = folder / f"penstock-{kind}-{threads}-{positions}"
    if not bundle.exists():
        words = ["compile", f"hf:{folder / 'folder'}", "-o", str(bundle), "--generate", "--context", str(positions)]
        cluster = folder / f"cluster-{threads}.toml"
        cluster.write_text(ps.Cluster.local(1, threads=[threads]).to_toml())
        words += ["--sequences", "1", "--cluster", str(cluster), *([] if kind == "f32" else ["--weights", kind])]
        done = subprocess.run([sys.executable, "-m", "penstock", *words], stdout=sys.stderr, check=False)
        if done.returncode:
            raise Missing(f"compile ended with {done.returncode}")
    model = ps.load(bundle)

    from penstock.runtime.generation.turn import Draw, Share, TokenTurn

    facts = model.generator.facts
    rungs, each = sorted(facts.rungs), facts.limits.blocks_each

    def begin() -> Step:
        known: list[int] = []

        def step(tokens: list[int]) -> int:
            picked = 0
            while tokens:
                fitting = [rung for rung in rungs if rung <= len(tokens)] or rungs[:1]
                now, tokens = tokens[: fitting[-1]], tokens[fitting[-1] :]
                share = Share(0, tuple(now), len(known), tuple(range(each)), Draw(), not tokens)
                turn = TokenTurn(fitting[-1], (share,))
                known.extend(now)
                picked = int(np.asarray(model.generator.decode(turn.rung, turn.arrays(1, each)))[0])
            return picked

        return step

    return begin


def transformers(folder: Path, kind: str, threads: int, positions: int) -> Begin:
    """Return steps of eager torch with transformers' cache."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder / "folder", dtype=torch.float32).eval()

    def begin() -> Step:
        cache = DynamicCache(config=model.config)

        @torch.inference_mode()
        def step(tokens: list[int]) -> int:
            logits = model(torch.tensor(tokens)[None], past_key_values=cache, logits_to_keep=1).logits
            return int(logits[0, -1].argmax())

        return step

    return begin


def llama_cpp(folder: Path, kind: str, threads: int, positions: int) -> Begin:
    """Return steps of llama.cpp over a GGUF file that is written here."""
    from generation_gguf import write_gguf
    from llama_cpp import Llama

    path = folder / f"{kind}.gguf"
    if not path.exists():
        write_gguf(folder / "folder", path, kind)
    model = Llama(
        str(path),
        n_ctx=positions,
        n_threads=threads,
        n_threads_batch=threads,
        n_batch=512,
        verbose=False,
        n_gpu_layers=0,
    )

    def begin() -> Step:
        model.reset()

        def step(tokens: list[int]) -> int:
            model.eval(tokens)
            return int(model.sample(temp=0.0))

        return step

    return begin


def genai(folder: Path, kind: str, threads: int, positions: int) -> Begin:
    """Return steps of onnxruntime-genai over a model that its builder makes."""
    import onnxruntime_genai as og
    from onnxruntime_genai.models.builder import create_model, parse_extra_options

    out = folder / "genai"
    config = out / "genai_config.json"
    if not config.exists():
        asked = ("", str(folder / "folder"), str(out), kind, "cpu", str(folder / "cache"))
        create_model(*asked, **parse_extra_options(*asked, []))
    settings = json.loads(config.read_text())
    settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    config.write_text(json.dumps(settings))
    model = og.Model(str(out))

    def begin() -> Step:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=positions, do_sample=False)
        generator = og.Generator(model, params)

        def step(tokens: list[int]) -> int:
            if len(tokens) > 1:
                generator.append_tokens(tokens)
            generator.generate_next_token()
            return int(generator.get_next_tokens()[0])

        return step

    return begin


def ctranslate2(folder: Path, kind: str, threads: int, positions: int) -> Callable[[int, int], dict[str, float]]:
    """Return whole turns of ctranslate2, which has no steps: decoding is what a longer text takes more."""
    import ctranslate2 as ct

    out = folder / f"ctranslate2-{kind}"
    if not out.exists():
        converter = ct.converters.TransformersConverter(str(folder / "folder"))
        converter.convert(str(out), quantization="float32" if kind == "f32" else kind)
    generator = ct.Generator(str(out), device="cpu", compute_type="default", inter_threads=1, intra_threads=threads)

    def run(prompt: int, tokens: int) -> float:
        words = [[f"w{1 + number % 200}" for number in range(prompt)]]
        begin = time.perf_counter()
        generator.generate_batch(
            words,
            max_length=tokens,
            min_length=tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=[],
        )
        return time.perf_counter() - begin

    def turn(prompt: int, tokens: int) -> dict[str, float]:
        first = run(prompt, 1)
        return {"prompt": first, "decode": max(run(prompt, 1 + tokens) - first, 1e-9)}

    return turn


def stepwise(begin: Begin) -> Callable[[int, int], dict[str, float]]:
    """Return turns of a contender that has steps."""

    def turn(prompt: int, tokens: int) -> dict[str, float]:
        step = begin()
        start = time.perf_counter()
        token = step([1 + number % 200 for number in range(prompt)])
        middle = time.perf_counter()
        for _ in range(tokens):
            token = step([token])
        return {"prompt": middle - start, "decode": time.perf_counter() - middle}

    return turn


MAKERS: dict[str, Callable[..., Any]] = {
    "penstock": penstock,
    "transformers": transformers,
    "llama.cpp": llama_cpp,
    "onnxruntime-genai": genai,
}


def main() -> None:
    """Make the contender, warm it up, and answer orders."""
    name, folder, threads, prompt, tokens = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    maker, kind = name.split(" ")
    positions = -(-(prompt + tokens + 2) // 16) * 16

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        if maker == "ctranslate2":
            turn = ctranslate2(folder, kind, threads, positions)
        else:
            turn = stepwise(MAKERS[maker](folder, kind, threads, positions))
        turn(prompt, 2)
    except Exception as error:  # whatever keeps a peer from taking part is its reason
        answer({"missing": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})
        return
    answer({})
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin:
            answer(turn(**json.loads(line)))


if __name__ == "__main__":
    main()
