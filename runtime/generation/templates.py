"""Chat templates: messages as one prompt, by a template that comes with the model.

A template is a program of a stranger's. It runs in jinja2's sandbox, which refuses attributes that lead out of it and
changes of what it is given. Products and texts that grow without bound are refused as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.support.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Template

_SETTINGS, _TEMPLATE, _OLDER = "tokenizer_config.json", "chat_template.jinja", "chat_template.json"
# Special tokens that a template may name.
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LONGEST = 1 << 22


class ChatTemplate:
    """A template, and the special tokens that it may name."""

    def __init__(self, text: str, special: Mapping[str, str], where: str) -> None:
        self._special, self._where = special, where
        self._template = self._compiled(text)

    def prompt(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> str:
        """Return messages as a prompt; by default it ends where the answer begins."""
        from jinja2 import TemplateError  # lazy: heavy

        values = {**self._special, "messages": messages, "tools": None, "documents": None}
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(**values, add_generation_prompt=answer):
                pieces.append(piece)
                length += len(piece)
                if length > _LONGEST:
                    raise UsageError(f"the chat template gives more than {_LONGEST} characters", where=self._where)
        except TemplateError as error:
            raise UsageError(f"the chat template refuses: {error}", where=self._where) from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            raise UsageError(f"the chat template fails: {error}", where=self._where) from error
        return "".join(pieces)

    def _compiled(self, text: str) -> Template:
        try:
            from jinja2 import TemplateError  # lazy: heavy
            from jinja2.exceptions import TemplateRuntimeError  # lazy: heavy
            from jinja2.ext import Extension, loopcontrols  # lazy: heavy
            from jinja2.sandbox import ImmutableSandboxedEnvironment  # lazy: heavy
        except ImportError as error:
            raise UsageError(
                "chat templates need the package jinja2", where=self._where, hint="pip install 'penstock[generate]'"
            ) from error

        class AnswerBlocks(Extension):
            """The blocks {% generation %} that mark answers, which are text as any other one here."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        class Sandbox(ImmutableSandboxedEnvironment):
            """jinja2's sandbox, with bounded products."""

            intercepted_binops = frozenset(("*", "**", "%"))

            def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
                numbers = isinstance(left, int | float) and isinstance(right, int | float)
                if operator == "**" and (not numbers or abs(left) > 2**16 or abs(right) > 64):
                    raise TemplateRuntimeError("a power of that size is refused")
                if operator == "*" and not numbers:
                    count, of = (left, right) if isinstance(left, int) else (right, left)
                    if not isinstance(count, int) or count * len(of) > _LONGEST:
                        raise TemplateRuntimeError("a repetition of that size is refused")
                if operator == "%" and not numbers:
                    raise TemplateRuntimeError("formatting with % is refused")
                return super().call_binop(context, operator, left, right)

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[AnswerBlocks, loopcontrols])
        sandbox.filters["tojson"] = _as_json
        sandbox.globals["raise_exception"] = refuse
        sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return sandbox.from_string(text)
        except (TemplateError, RecursionError) as error:
            raise UsageError(f"the chat template cannot be read: {error}", where=self._where) from error


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without escapes for HTML, which jinja2's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def read_template(folder: Path) -> ChatTemplate | None:
    """Read the chat template of a bundle, None where it has none."""
    settings = _object(folder / _SETTINGS)
    path = folder / _TEMPLATE
    text: Any = path.read_text(encoding="utf-8") if path.is_file() else None
    if text is None:
        text = _object(folder / _OLDER).get("chat_template", settings.get("chat_template"))
    if isinstance(text, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in text if isinstance(entry, dict)}
        text = named.get("default")
    if not isinstance(text, str):
        return None
    special = {name: token for name in _SPECIAL if (token := _spelled(settings.get(name))) is not None}
    return ChatTemplate(text, special, str(folder))


def _spelled(token: Any) -> str | None:
    """Return a special token as its text; settings have it alone or with its properties."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not readable as JSON: {error}", where=str(path)) from error
    return settings if isinstance(settings, dict) else {}
