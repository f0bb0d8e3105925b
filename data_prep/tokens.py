"""Rendered text, its tokens, and the way from characters to tokens."""

import unicodedata
from bisect import bisect_right
from typing import Any, Protocol

import numpy as np


class Spelling(Protocol):
    """How a target spells text.

    tokenizer: transformers' own. added: text of every added token, by its id.
    """

    tokenizer: Any

    @property
    def added(self) -> dict[int, str]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class RefusedError(Exception):
    """Why no exact loss mask can be made for a conversation; the text is the same for like cases."""


class RewrittenError(RefusedError):
    """The template writes a turn otherwise than the target did; turn by turn there may still be an exact mask."""


class Tokens:
    """Rendered text, its tokens, and the way from characters to tokens.

    Fast tokenizers report where each token stands. For the others it is recovered from the ids: added tokens
    (turn markers and the like) stand in the text as they are spelt, what lies between two of them is decoded as
    one piece, and the pieces must add up to the text. A place inside a piece is found by encoding that piece up
    to it, so the work grows with the text, not with its square, as long as turns lie between markers.
    """

    def __init__(self, spelling: Spelling, text: str) -> None:
        """Raises: RefusedError, where decoding the ids gives another text."""
        self.spelling = spelling
        self.text = text
        self.offsets: list[tuple[int, int]] | None = None
        if spelling.tokenizer.is_fast:
            encoding = spelling.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            self.ids: list[int] = list(encoding["input_ids"])
            self.offsets = [(start, end) for start, end in encoding["offset_mapping"]]
            self.starts = np.asarray([start for start, _ in self.offsets], dtype=np.int64)
        else:
            self.ids = spelling.encode(text)
            self.pieces = self._pieces()

    def _pieces(self) -> list[tuple[int, int]]:
        """(first character, first token) of every added token and of every stretch between them."""
        added, pieces, char, token = self.spelling.added, [], 0, 0
        while token < len(self.ids):
            end = token + 1
            if self.ids[token] in added:
                spelt = added[self.ids[token]]
            else:
                while end < len(self.ids) and self.ids[end] not in added:
                    end += 1
                spelt = self.spelling.decode(self.ids[token:end])
            if not self.text.startswith(spelt, char):
                raise RefusedError("the tokenizer does not give back the text that it was given")
            pieces.append((char, token))
            char, token = char + len(spelt), end
        if char != len(self.text):
            raise RefusedError("the tokenizer does not give back the text that it was given")
        return pieces

    def boundary(self, char: int) -> int:
        """How many tokens lie before character `char`; RefusedError where one lies across it."""
        if char >= len(self.text):
            return len(self.ids)
        if self.offsets is None:
            return self._boundary_in_piece(char)
        count = int(np.searchsorted(self.starts, char))
        if count and self.offsets[count - 1][1] > char:
            raise RefusedError("a boundary inside a token")
        return count

    def _boundary_in_piece(self, char: int) -> int:
        start, token = self.pieces[bisect_right(self.pieces, (char, len(self.ids))) - 1]
        if start == char:
            return token
        before = self.spelling.encode(self.text[start:char])
        if self.ids[token : token + len(before)] != before or self.ids[token] in self.spelling.added:
            raise RefusedError("a boundary inside a token")
        return token + len(before)

    def text_between(self, first: int, last: int) -> str:
        """What tokens [first, last) add to the text before them.

        Some tokenizers spell a token differently at the start of a text, so decoding begins at the
        added token before them.
        """
        start = self._marker_before(first)
        before = self.spelling.decode(self.ids[start:first])
        whole = self.spelling.decode(self.ids[start:last])
        if not whole.startswith(before):
            raise RefusedError("a boundary inside a token")
        return whole[len(before) :]

    def is_prompt(self, first: int, char: int) -> bool:
        """Whether tokens [0, first) are those of the first `char` characters by themselves, as serving has them."""
        start = self._marker_before(first)
        if self.offsets is not None:
            begin = self.offsets[start][0]
        else:
            begin = self.pieces[bisect_right(self.pieces, start, key=lambda piece: piece[1]) - 1][0]
        return self.spelling.encode(self.text[begin:char]) == self.ids[start:first]

    def _marker_before(self, token: int) -> int:
        """The last added token before `token`; 0 if there is none."""
        while token > 0:
            token -= 1
            if self.ids[token] in self.spelling.added:
                break
        return token


def same(left: str, right: str) -> bool:
    """Whether two texts have the same tokens as far as can be told from outside."""
    # Tokenizers may normalise to NFC; nothing else is forgiven.
    return unicodedata.normalize("NFC", left) == unicodedata.normalize("NFC", right)
