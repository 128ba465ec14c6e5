"""Text from a model that is trained here: a folder of Hugging Face, a bundle that generates, and a text that rhymes.

A small Llama of characters learns a text that repeats. It is saved as a folder, compiled, and continues a line that it
has seen. Checked: the text is that of transformers, token by token, and it is the text that was learned.

Needs transformers and tokenizers (`pip install -e '.[huggingface]'`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import penstock as ps

try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
except ImportError:
    print("needs transformers and tokenizers: pip install -e '.[huggingface]'", file=sys.stderr)
    sys.exit(77)

TEXT = """\
Water comes down from the hill in the night,
turns the old wheel at the first grey light,
runs through the gate, and along the wall,
and nobody hears it at all, at all.
"""
CONTEXT, WINDOW = 160, 96


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of single characters."""
    letters = sorted(set(TEXT))
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(["<end>", *letters])}, "<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def train(tokens: list[int], words: int, steps: int) -> LlamaForCausalLM:
    """Train a model on windows of the text, which goes round."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    circle = torch.tensor(tokens * 3)
    for step in range(steps):
        starts = torch.randint(len(tokens), (8,))
        batch = torch.stack([circle[start : start + WINDOW] for start in starts])
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}", file=sys.stderr)
    return model.eval()


def main() -> int:
    """Train, save, compile, generate, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="updates of the training (default: 200)")
    parser.add_argument("--backend", default="tvm", choices=("tvm", "numpy"), help="code generator (default: tvm)")
    parser.add_argument("--out", type=Path, help="keep the folder and the bundle here")
    arguments = parser.parse_args()
    kept = nullcontext(str(arguments.out)) if arguments.out else tempfile.TemporaryDirectory()
    with kept as place:
        folder, bundle = Path(place) / "model", Path(place) / "bundle"
        tokenizer = make_tokenizer()
        model = train(tokenizer.encode(TEXT), len(tokenizer), arguments.steps)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        compiling = ["compile", f"hf:{folder}", "-o", str(bundle), "--generate", "--context", str(CONTEXT)]
        compiling += ["--sequences", "2", "--backend", arguments.backend]
        subprocess.run([sys.executable, "-m", "penstock", *compiling], check=True, stdout=sys.stderr)

        prompt, most = "Water comes", 100
        loaded = ps.load(bundle)
        pieces = []
        for piece in loaded.generate(prompt, tokens=most):
            print(piece, end="", flush=True)
            pieces.append(piece)
        print()
        print(loaded.generator.rates.lines(), file=sys.stderr)

        ids = torch.tensor(tokenizer.encode(prompt))[None]
        expected = model.generate(ids, max_new_tokens=most, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        same = "".join(pieces) == tokenizer.decode(expected)
        learned = prompt + "".join(pieces) == TEXT[: len(prompt) + most]
        print(f"the text of transformers: {same}; the text that was learned: {learned}")
        return 0 if same and learned else 1


if __name__ == "__main__":
    sys.exit(main())
