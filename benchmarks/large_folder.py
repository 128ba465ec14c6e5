"""A folder of Hugging Face that is larger than memory, compiled under a limit of the kernel.

    python benchmarks/large_folder.py --out DIR --json large_folder.json       4.4 GB of weights: minutes, 9 GB of disk
    python benchmarks/large_folder.py --out DIR --layers 2 --limit 400         in small

A Llama of float32 with random weights is written in shards, a tensor at a time. `penstock compile hf:FOLDER --generate`
runs in a memory cgroup of so many megabytes, for a device of a cluster file that has memory for the model: once with
the weights as they are, once with 4 bits, and as the control with a fifteenth of the limit, where it has to be refused,
or ended by the kernel. Exit code 1 where one of them ends otherwise. A bundle that was made then says three tokens,
without a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import load, markdown, processor, system, versions, write_json
from memory_group import CGROUPS, MemoryGroup, enter
from safetensors.torch import save_file

WIDTH, INSIDE, HEADS, KEY_HEADS, WORDS = 2048, 5632, 32, 4, 32000
CONTROL = 15


def write_folder(folder: Path, layers: int) -> int:
    """Write a folder of so many layers; return the bytes of its weights."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "vocab_size": WORDS,
        "intermediate_size": INSIDE, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "dtype": "float32", "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    inner = WIDTH // HEADS * KEY_HEADS
    shapes = {
        f"self_attn.{name}_proj.weight": (rows, WIDTH) for name, rows in (("q", WIDTH), ("k", inner), ("v", inner))
    }
    shapes |= {"self_attn.o_proj.weight": (WIDTH, WIDTH), "mlp.down_proj.weight": (WIDTH, INSIDE)}
    shapes |= {f"mlp.{name}_proj.weight": (INSIDE, WIDTH) for name in ("gate", "up")}
    shapes |= {f"{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
    shards = [{f"model.layers.{i}.{name}": shape for name, shape in shapes.items()} for i in range(layers)]
    shards += [
        {"model.embed_tokens.weight": (WORDS, WIDTH)},
        {"lm_head.weight": (WORDS, WIDTH), "model.norm.weight": (WIDTH,)},
    ]
    places, size = {}, 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        torch.manual_seed(number)
        tensors = {n: torch.ones(s) if len(s) == 1 else torch.randn(s) * s[1] ** -0.5 for n, s in shard.items()}
        save_file(tensors, folder / file)
        places |= dict.fromkeys(shard, file)
        size += sum(x.nbytes for x in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return size


def compiled(folder: Path, out: Path, weights: str, limit: int) -> dict[str, Any]:
    """Compile in a group with a limit. Return how it ended, and what it took."""
    group = MemoryGroup(out.name, limit)
    cluster = out.with_suffix(".toml")
    cluster.write_text('[[device]]\nname = "cpu:0"\nmemory = "64 GiB"\nthreads = 1\n')
    words = ["--cluster", str(cluster), "--generate", "--context", "256", "--sequences", "1", "--weights", weights]
    command = [sys.executable, __file__, "--group", str(group.path), "--command", *words]
    begun = time.monotonic()
    done = subprocess.run([*command, f"hf:{folder}", "-o", str(out)], capture_output=True, text=True, timeout=3600)
    said = (done.stderr.strip().splitlines() or [""])[-1]
    row = {
        "weights": weights,
        "limit": limit,
        "exit": done.returncode,
        "seconds": time.monotonic() - begun,
        "said": said,
    }
    row["kills"] = group.kills
    group.close()
    files = out.rglob("*") if done.returncode == 0 else ()
    return {**row, "bundle": sum(file.stat().st_size for file in files if file.is_file())}


def tokens_of(bundle: Path) -> list[int]:
    """Generate in a process of its own."""
    code = "import sys, penstock as ps; print(list(ps.load(sys.argv[1]).generate([1, 2, 3], tokens=3)))"
    done = subprocess.run([sys.executable, "-c", code, bundle], capture_output=True, text=True, check=True, timeout=600)
    tokens: list[int] = json.loads(done.stdout)
    return tokens


def table_of(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return the head and the lines of a table of all compiles."""
    lines = [
        [
            f"{row['folder'] / 1e9:.2f} GB",
            row["weights"],
            f"{row['limit'] / 1e9:.2f} GB",
            "ended by the kernel" if row["kills"] else f"exit code {row['exit']}",
            f"{row['seconds']:.0f}",
            f"{row['bundle'] / row['folder']:.3f}" if row["bundle"] else "-",
            ", ".join(map(str, row.get("tokens", []))) or "-",
        ]
        for row in rows
    ]
    return ("folder", "weights", "limit", "how it ended", "seconds", "bundle / folder", "tokens"), lines


def measure(out: Path, layers: int, limit: int) -> list[dict[str, Any]]:
    folder, rows = out / "folder", []
    size = write_folder(folder, layers)
    for name, weights, most in (("f32", "f32", limit), ("int4", "int4", limit), ("control", "f32", limit // CONTROL)):
        row = {"folder": size, **compiled(folder, out / name, weights, most)}
        if row["exit"] == 0:
            row["tokens"] = tokens_of(out / name)
        rows.append(row)
        shutil.rmtree(out / name, ignore_errors=True)
        print(f"{name}: exit {row['exit']} after {row['seconds']:.0f} s {row['said']}", file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder on the disk (default: one for temporary files)")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--limit", type=int, default=1500, metavar="MB", help="of the compile (default: 1500)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.group:
        from penstock.commands.parser import main as command

        enter(arguments.group)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        return command(["compile", *arguments.command])
    if not os.access(CGROUPS, os.W_OK):
        parser.error(f"{CGROUPS} is no place for memory cgroups of version 1")
    with tempfile.TemporaryDirectory(dir=arguments.out) as scratch:
        rows = measure(Path(scratch), arguments.layers, arguments.limit * 10**6)
    machine = [
        processor(sorted(os.sched_getaffinity(0))),
        system(),
        versions("torch", "transformers"),
        f"load {load()}",
    ]
    print("; ".join(machine))
    print(markdown(*table_of(rows)))
    write_json(arguments.json, {"machine": machine, "rows": rows})
    good = [row["exit"] == 0 and not row["kills"] for row in rows[:-1]]
    return int(not all(good) or rows[-1]["exit"] == 0)


if __name__ == "__main__":
    sys.exit(main())
