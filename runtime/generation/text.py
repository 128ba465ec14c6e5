"""Text as tokens and back: the tokenizer of a bundle, and text that comes in pieces.

Pieces never hold half a character, and joined they are what decoding all tokens at once gives. Characters may be spread
over tokens in two ways, and both are held back until they are whole: bytes of a token that end inside of a character
(decoders write U+FFFD for them), and tokens for single bytes, such as `<0xE4>`, of which a run is decoded together.

Limit: a decoder that changes text which it gave before (WordPiece joins "do" and "n't") may give pieces that do not
join to the same text. Decoders of the families that can be imported do not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.support.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
_HALF = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")
# The tokens that are decoded again with each new one: at most so many, of which at least so many were given.
_WINDOW, _OVERLAP = 96, 32


class TextCodec:
    """The tokenizer of a bundle."""

    def __init__(self, data: bytes, where: str) -> None:
        try:
            from tokenizers import Tokenizer  # lazy: heavy
        except ImportError as error:
            raise UsageError(
                "text needs the package tokenizers", where=where, hint="pip install 'penstock[generate]'"
            ) from error
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_str(data.decode())
        except Exception as error:  # tokenizers raises bare exceptions
            raise UsageError(f"the tokenizer cannot be read: {error}", where=where) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a text, by default with those that the tokenizer puts around it."""
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UsageError("a prompt holds a lone surrogate, which is no character", where="generate")
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def is_byte(self, token: int) -> bool:
        """Return whether a token stands for a single byte."""
        spelled = self._tokenizer.id_to_token(token)
        return spelled is not None and _BYTE.match(spelled) is not None

    @property
    def words(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))


class TextStream:
    """A text that grows by tokens."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        # The last tokens; the first `_given` of them are decoded into text that was given, but for `_ahead` characters
        # of the text behind them that were given, too.
        self._tokens: list[int] = []
        self._given = self._ahead = 0

    def put(self, token: int) -> str:
        """Take a token. Return the text that is whole now."""
        self._tokens.append(token)
        if self._waits(token):
            return ""
        return self._piece(hold=True)

    def end(self) -> str:
        """Return the text that was held back."""
        return self._piece(hold=False)

    def _piece(self, hold: bool) -> str:
        before = len(self._codec.decode(self._tokens[: self._given])) + self._ahead
        text = self._codec.decode(self._tokens)
        end = len(text.rstrip(_HALF)) if hold else len(text)
        piece = text[before:end]
        if end == len(text):
            self._given, self._ahead = len(self._tokens), 0
            self._forget()
        else:
            self._ahead += len(piece)
        return piece

    def _forget(self) -> None:
        """Drop tokens whose text was given, but for some in front of the next one."""
        if len(self._tokens) < _WINDOW:
            return
        cut = len(self._tokens) - _OVERLAP
        # Not in front of a half character, and not inside of a run of bytes.
        while cut > 0 and (self._waits(self._tokens[cut]) or self._starts_half(cut)):
            cut -= 1
        del self._tokens[:cut]
        self._given -= cut

    def _waits(self, token: int) -> bool:
        """Return whether a run of bytes may go on behind a token: it is one, or it has no text."""
        return self._codec.is_byte(token) or not self._codec.decode([token])

    def _starts_half(self, cut: int) -> bool:
        return self._codec.decode(self._tokens[cut:]).startswith(_HALF)


def read_codec(folder: Path) -> TextCodec | None:
    """Read the tokenizer of a bundle, None where it has none."""
    path = folder / TOKENIZER
    return TextCodec(path.read_bytes(), str(path)) if path.is_file() else None
