"""`penstock generate`: text from a bundle, as it comes.

In: one prompt, or a file with one JSON object per line: {"prompt": TEXT} or {"messages": [...]}. Out: text on stdout,
or one JSON object per prompt; rates on stderr. The text of several prompts comes prompt by prompt, in their order.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.commands.arguments import add_settings, settings_from
from penstock.support.errors import UsageError
from penstock.support.settings import POSITIVE, SEED, WHOLE, setting
from penstock.support.terminal import say

if TYPE_CHECKING:
    from penstock.runtime.generation.generator import Prompt, TextGenerator
    from penstock.runtime.generation.templates import ChatTemplate


@dataclass(frozen=True)
class GenerateOptions:
    """Settings of a text. What is None is the model's own."""

    bundle: str
    prompt: str | None = setting(None, "the text to continue", shown="TEXT")
    prompts: str | None = setting(
        None, 'one JSON object per line: {"prompt": TEXT} or {"messages": [...]}', shown="FILE.jsonl"
    )
    tokens: int = setting(256, "the most tokens of a text (default: 256)", check=POSITIVE, shown="N")
    temperature: float | None = setting(
        None, "0 takes the likeliest token; else tokens are drawn (default: the model's own)", read=float, shown="T"
    )
    top_k: int | None = setting(None, "draw from the K likeliest tokens; 0: all", check=WHOLE, shown="K")
    top_p: float | None = setting(
        None, "draw from the likeliest tokens that have this share together", read=float, shown="P"
    )
    seed: int = setting(0, "of the draws (default: 0)", check=SEED, shown="N")
    chat: bool = setting(False, "take the prompt for a message, and write it as the model's chat template says")
    json: bool = setting(False, "print one JSON object per prompt")

    def check(self) -> None:
        """Raise UsageError unless there is one source of prompts."""
        if (self.prompt is None) == (self.prompts is None):
            raise UsageError("give --prompt TEXT or --prompts FILE.jsonl", where="generate")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the bundle, and settings."""
    parser.add_argument("bundle", metavar="BUNDLE")
    add_settings(parser, GenerateOptions)


def run(arguments: Namespace) -> None:
    """Generate, and report the rates."""
    from penstock.runtime.job.rungs import load  # lazy: heavy

    options = settings_from(GenerateOptions, arguments, bundle=arguments.bundle)
    options.check()
    requests = _requests(options)
    generator = load(options.bundle).generator
    generate(generator, _prompts(options, requests, generator), options)
    say(generator.rates.lines())


def generate(generator: TextGenerator, prompts: list[Prompt], options: GenerateOptions) -> None:
    """Generate all texts, and print them prompt by prompt: that of the first one as it comes, others when it is their
    turn."""
    from penstock.runtime.generation.generator import GenerationOptions  # lazy: heavy

    how = GenerationOptions(options.tokens, options.temperature, options.top_k, options.top_p, options.seed)
    texts, ended = [""] * len(prompts), [""] * len(prompts)
    counts = [0] * len(prompts)
    shown = said = 0
    for piece in generator.generate_many(prompts, how):
        texts[piece.prompt] += piece.text
        counts[piece.prompt] += piece.ended != "stop"
        ended[piece.prompt] = piece.ended
        while shown < len(prompts):
            if not options.json:
                sys.stdout.write(_writable(texts[shown][said:]))
                said = len(texts[shown])
            if not ended[shown]:
                break
            if options.json:
                answer = _answer(shown, texts, counts, ended)
                line = json.dumps(answer, ensure_ascii=False)
                sys.stdout.write(line if _writable(line) == line else json.dumps(answer))
            sys.stdout.write("\n")
            shown, said = shown + 1, 0
        sys.stdout.flush()


def _writable(text: str) -> str:
    """Return a text with escapes in place of the characters that the encoding of stdout does not have."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _answer(number: int, texts: list[str], counts: list[int], ended: list[str]) -> dict[str, Any]:
    return {"prompt": number, "text": texts[number], "tokens": counts[number], "ended": ended[number]}


# ------------------------------------------------------------------------------------------------ prompts


def _requests(options: GenerateOptions) -> list[dict[str, Any]]:
    """Read the prompts. One error names all lines that are none."""
    if options.prompts is None:
        return [{"prompt": options.prompt}]
    requests, problems = [], []
    try:
        lines = Path(options.prompts).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"is not text in UTF-8: {error.reason} at byte {error.start}", where=options.prompts
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number}: {error}")
            continue
        if _is_request(request):
            requests.append(request)
        else:
            problems.append(f'line {number}: expected {{"prompt": TEXT}} or {{"messages": [{{"role": ...}}]}}')
    if problems or not requests:
        raise UsageError("; ".join(problems[:8]) or "holds no prompts", where=options.prompts)
    return requests


def _is_request(request: Any) -> bool:
    if not isinstance(request, dict) or len(request) != 1:
        return False
    messages = request.get("messages")
    if messages is None:
        return isinstance(request.get("prompt"), str)
    return isinstance(messages, list) and bool(messages) and all(isinstance(message, dict) for message in messages)


def _prompts(options: GenerateOptions, requests: list[dict[str, Any]], generator: TextGenerator) -> list[Prompt]:
    """Return the prompts: texts, and messages as the tokens of what the template of the bundle writes.

    A template writes the special tokens itself, so that the tokenizer adds none.
    """
    template: ChatTemplate | None = None
    if options.chat or any("messages" in request for request in requests):
        from penstock.runtime.generation.facts import FOLDER  # lazy: heavy
        from penstock.runtime.generation.templates import read_template  # lazy: heavy

        template = read_template(Path(options.bundle) / FOLDER)
        if template is None:
            raise UsageError("the model has no chat template", where=options.bundle, hint="leave out --chat")
        if generator.codec is None:
            raise UsageError("the bundle has no tokenizer", where=options.bundle)
    prompts: list[Prompt] = []
    for request in requests:
        messages = request.get("messages")
        if messages is None and options.chat:
            messages = [{"role": "user", "content": request["prompt"]}]
        if template is None or generator.codec is None or messages is None:
            prompts.append(request["prompt"])
        else:
            prompts.append(generator.codec.encode(template.prompt(messages), special=False))
    return prompts
