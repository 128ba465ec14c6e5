"""The rules of docs/layout.md about the words of docstrings and comments in the product.

A docstring of a function begins with a verb, that of a class with a noun, and a sentence has at most 30 words. Tables,
formulas and text in backticks are no sentences. Every rule has a control: a made-up source that breaks it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

import pytest

from .source_tree import Sources, made_up, product

MOST_WORDS = 30
# First words of docstrings that name a thing instead of saying what the function does.
_NOUN = re.compile(
    r"(?:The|An?|One|All|Every|Each|Any|Some|First|Last|None|True|False|Once|Our|Its|Only|Whatever|For|From|At|After"
    r"|Before|Between|Memory|Result|(?:Type|Value|Usage|Verify)Error|(?:Byte|Column|Device|Gradient|Kernel|Line|Message"
    r"|Name|Number|Operation|Option|Problem|Result|Row|Rule|Score|Second|Share|Stage|Time|Type|Value|Variable|Version"
    r"|Word)s)\b"
)

# First words of docstrings that begin with a field or a verb instead of saying what the class is.
_NO_NOUN = re.compile(
    r"`|Something\b|(?:Build|Check|Choose|Collect|Compute|Cut|Emit|Follow|Hand|Hold|Keep|Make|Print|Read|Rewrite|Run|Start"
    r"|Tell|Write)s\b"
)

# The begin of an item, and a gap between columns of a table.
_ITEM, _GAP = re.compile(r"\s*(?:[*-]|\d+\.)\s"), re.compile(r"\S\s{2,}\S")


def nouns_first(sources: Sources) -> list[str]:
    """List functions, properties aside, with docstrings that do not begin with a verb."""
    lines = []
    for source in sources.values():
        for function in source.functions():
            text = ast.get_docstring(function) or ""
            is_property = any("property" in ast.unparse(decorator) for decorator in function.decorator_list)
            if not is_property and _NOUN.match(text):
                lines.append(f"{source.name}:{function.lineno} begins with {text.split()[0]}")
    return lines


def verbs_first(sources: Sources) -> list[str]:
    """List classes with docstrings that do not begin with a noun for the class."""
    return [
        f"{source.name}:{node.lineno} {node.name} begins with {text.split()[0]}"
        for source in sources.values()
        for node in source.classes()
        if _NO_NOUN.match(text := ast.get_docstring(node) or "")
    ]


def _sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text without its tables and formulas, which are indented or have gaps."""
    paragraphs: list[list[str]] = [[]]
    for line in re.sub(r"`[^`]*`", "code", text).split("\n"):
        table = line.startswith("    ") or _GAP.search(line) is not None
        if table or not line.strip() or _ITEM.match(line):
            paragraphs.append([])
        if not table:
            paragraphs[-1].append(line)
    for paragraph in paragraphs:
        yield from re.split(r"(?<=[.!?:;])[)\"]*\s+", " ".join(paragraph).strip())


def long_sentences(sources: Sources) -> list[str]:
    return [
        f"{source.name}:{line} has {len(sentence.split())} words: {sentence[:60]}..."
        for source in sources.values()
        for line, text in (*source.docstrings(), *source.comments())
        for sentence in _sentences(text)
        if len(sentence.split()) > MOST_WORDS
    ]


LONG = "word " * MOST_WORDS + "end."
RULES: dict[str, tuple[Callable[[Sources], list[str]], str]] = {
    "article": (nouns_first, 'def f():\n    """The sum of two numbers."""'),
    "noun": (nouns_first, 'def f():\n    """Seconds of a run."""'),
    "field of a class": (verbs_first, 'class C:\n    """`size` is a number."""'),
    "verb of a class": (verbs_first, 'class C:\n    """Emits a product."""'),
    "docstring": (long_sentences, f'"""A module. {LONG}"""'),
    "item": (long_sentences, f'"""A list:\n\n* short\n* {LONG}\n"""'),
    "comment": (long_sentences, f"# {LONG[:80]}\n# {LONG[80:]}\nx = 1"),
    "comment of a line": (long_sentences, f"x = 1  # {LONG}"),
}
FINE = {
    "property": (nouns_first, 'class C:\n    @property\n    def f(self):\n        """The sum of two numbers."""'),
    "class": (verbs_first, 'class C:\n    """A product. `size` is a number."""'),
    "formula": (long_sentences, f'"""A sum:\n\n    {LONG}\n\nNo more."""'),
    "code": (long_sentences, f'"""A command: `{LONG}`."""'),
}


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _ in RULES.values()), ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Callable[[Sources], list[str]]) -> None:
    problems = rule(product())
    assert not problems, "\n".join(["docs/layout.md has the rules", *problems])


@pytest.mark.parametrize("name", RULES)
def test_rule_notices(name: str) -> None:
    """The controls."""
    rule, text = RULES[name]
    assert rule(made_up(ir__graph=text))


@pytest.mark.parametrize("name", FINE)
def test_rule_leaves_alone(name: str) -> None:
    rule, text = FINE[name]
    assert not rule(made_up(ir__graph=text))
