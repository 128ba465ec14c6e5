"""Text generation beside llama.cpp, ctranslate2, onnxruntime-genai and transformers: rates of prompts and of decoding.

    python benchmarks/generation.py --json generation.json             all models, 1 and 2 threads
    python benchmarks/generation.py --models llama --threads 1         one of them
    python benchmarks/generation.py --tiny                             in small: what the tests run

    gpt2     GPT-2 small: 12 layers of 768, 12 heads, 50257 words
    llama    28 layers of 1024, 16 heads over 4 of the cache, 2816 inside, 32000 words: 0.49 B

Weights are random. Each contender is a process that holds one model; all of one model and number of threads take turns,
the first one changing. A turn is a prompt and tokens that are decoded behind it, one sequence alone. Rates are medians
over the rounds, by wall time. `share` is the bytes of weights that a token reads, divided by the time of a token and by
the rate at which torch adds up numbers of a large tensor with as many threads, measured between the turns.

A contender that is not installed, or cannot have a model, is left out with its reason. Results go into the JSON file
after each model, and what is in the file is not measured again. Peers: pip install llama-cpp-python gguf ctranslate2
onnxruntime-genai transformers tokenizers (llama-cpp-python builds llama.cpp from its sources, which takes cmake and a
compiler).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from machine import load, markdown, processor, system, versions, write_json
from turns import in_turn

HERE = Path(__file__).resolve().parent
SEED = 0
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "n_positions": 1024},
    "llama": {
        "family": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 1024,
    },
}
_LITTLE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = {
    "llama": {"family": "llama", "vocab_size": 256, "max_position_embeddings": 96, "num_key_value_heads": 2, **_LITTLE}
}
# Contenders, and the bits of a weight with its scales.
CONTENDERS = {
    "penstock f32": 32.0,
    "penstock int8": 8.5,
    "penstock int4": 4.5,
    "transformers f32": 32.0,
    "ctranslate2 f32": 32.0,
    "ctranslate2 int8": 8.0,
    "llama.cpp f32": 32.0,
    "llama.cpp Q8_0": 8.5,
    "llama.cpp Q4_0": 4.5,
    "onnxruntime-genai int4": 4.5,
}


@dataclass
class Contender:
    """A process that holds a model. It answers each order with the seconds of the prompt and of decoding."""

    name: str
    process: subprocess.Popen[str]

    @property
    def output(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def order(self, prompt: int, tokens: int) -> dict[str, Any]:
        """Run a turn."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        return answer_of(self.output)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def answer_of(output: IO[str]) -> dict[str, Any]:
    """Return the next answer of a contender."""
    line = output.readline()
    answer: dict[str, Any] = json.loads(line) if line else {"missing": "ended without an answer"}
    return answer


def started(name: str, folder: Path, threads: int, sizes: tuple[int, int]) -> Contender | str:
    """Start a contender and wait until it holds its model; the reason where it cannot."""
    command = [
        sys.executable,
        str(HERE / "generation_contenders.py"),
        name,
        str(folder),
        str(threads),
        *map(str, sizes),
    ]
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(names, str(threads)), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    contender = Contender(name, process)
    ready = answer_of(contender.output)
    if "missing" in ready:
        process.wait(timeout=60)
        return str(ready["missing"])
    return contender


def reading_rate(threads: int) -> float:
    """Return the bytes per second at which torch adds up numbers."""
    import torch

    torch.set_num_threads(threads)
    numbers = torch.zeros(1 << 27)
    numbers.sum()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - begin)
    return numbers.nbytes / min(times)


def write_model(folder: Path, settings: dict[str, Any]) -> int:
    """Write the folder of a model of random weights; return the weights that a token reads."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    plain = {name: value for name, value in settings.items() if name != "family"}
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(settings["family"], **plain, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, "w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", bos_token="w0", eos_token="w0").save_pretrained(
        folder
    )
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    looked_up = 0 if tied else model.get_input_embeddings().weight.numel()
    return sum(parameter.numel() for parameter in model.parameters()) - looked_up


def measured(
    model: str, folder: Path, weights: int, threads: int, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Return the rates of all contenders for a model and a number of threads, or why they are missing."""
    rows: dict[str, dict[str, Any]] = {}
    contenders = []
    for name in CONTENDERS:
        if options.contenders and name not in options.contenders:
            continue
        contender = started(name, folder, threads, (options.prompt, options.tokens))
        if isinstance(contender, str):
            rows[name] = {"missing": contender}
        else:
            contenders.append(contender)
    turns: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in contenders}
    reads = []
    for _, contender in in_turn(contenders, options.rounds):
        turns[contender.name].append(contender.order(options.prompt, options.tokens))
        if contender is contenders[0]:
            reads.append(reading_rate(threads))
    for contender in contenders:
        contender.end()
        prompt, decode = (
            statistics.median(turn[what] for turn in turns[contender.name]) for what in ("prompt", "decode")
        )
        token = decode / options.tokens
        moved = weights * CONTENDERS[contender.name] / 8
        rows[contender.name] = {
            "prompt tokens/s": options.prompt / prompt,
            "tokens/s": 1 / token,
            "share": moved / token / statistics.median(reads),
            "read GB/s": statistics.median(reads) / 1e9,
            "turns": turns[contender.name],
        }
    return {f"{model} {threads} {name}": row for name, row in rows.items()}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the results as a table."""
    heads = ("model", "threads", "contender", "prompt tokens/s", "tokens/s", "share")
    lines = []
    for key, row in results.items():
        model, threads, name = key.split(" ", 2)
        if "missing" in row:
            lines.append([model, threads, name, f"not here: {row['missing']}"[:100], "", ""])
        else:
            rates = (f"{row['prompt tokens/s']:.1f}", f"{row['tokens/s']:.1f}", f"{row['share']:.2f}")
            lines.append([model, threads, name, *rates])
    return markdown(heads, lines)


def main() -> int:
    """Measure what is not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS))
    parser.add_argument("--contenders", nargs="*", choices=tuple(CONTENDERS))
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that are decoded behind it (default: 64)")
    parser.add_argument("--json", type=Path, help="results; what is there is not measured again")
    parser.add_argument("--folder", type=Path, help="keep models and what contenders make of them here")
    parser.add_argument("--tiny", action="store_true", help="a small model, our own contender and transformers")
    options = parser.parse_args()
    chosen = TINY if options.tiny else {name: MODELS[name] for name in options.models or MODELS}
    if options.tiny:
        options.prompt, options.tokens = 16, 8
        options.contenders = options.contenders or ["penstock f32", "transformers f32"]
    done = json.loads(options.json.read_text())["results"] if options.json and options.json.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for model, settings in chosen.items():
            folder = (options.folder or Path(scratch)) / model
            weights = write_model(folder / "folder", settings)
            for threads in options.threads:
                if not any(key.startswith(f"{model} {threads} ") for key in done):
                    done |= measured(model, folder, weights, threads, options)
                    about = {"system": system(), "load": load(), "versions": versions("torch", "transformers")}
                    write_json(options.json, {"about": about, "results": done})
    print(processor(sorted(os.sched_getaffinity(0))))
    print(table(done))
    return 0 if any("tokens/s" in row for row in done.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
