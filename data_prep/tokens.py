"""Map places in a rendered text to its tokens, for fast tokenizers and for those that report no offsets."""

from bisect import bisect_left

from eagle31_train.common.errors import Refused
from eagle31_train.targets.chat import ChatTemplate

INSIDE = "a boundary inside a token"


class Tokens:
    """Rendered text, its tokens, and the map from characters to tokens; Refused if the ids decode to another text.

    Fast tokenizers report where each token is. With others, added tokens (turn markers and the like) are in the text as
    they are spelt, the tokens between two of them are decoded as one piece, and the pieces must add up to the text. A
    place inside a piece is found by encoding that piece up to it.
    """

    def __init__(self, template: ChatTemplate, text: str) -> None:
        self.template, self.text = template, text
        self.offsets: list[tuple[int, int]] | None = None
        if template.tokenizer.is_fast:
            encoding = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            self.ids: list[int] = template.with_rows(list(encoding["input_ids"]))
            self.offsets = list(encoding["offset_mapping"])
        else:
            self.ids = template.encode(text)
            self.pieces = self._pieces()

    def _pieces(self) -> dict[int, int]:
        """Map first token to first character, for every added token and every stretch between two of them."""
        added, pieces, char, token = self.template.added, {}, 0, 0
        while token < len(self.ids):
            end = token + 1
            if self.ids[token] in added:
                spelling = added[self.ids[token]]
            else:
                while end < len(self.ids) and self.ids[end] not in added:
                    end += 1
                spelling = self.template.decode(self.ids[token:end])
            if not self.text.startswith(spelling, char):
                break
            pieces[token] = char
            char, token = char + len(spelling), end
        if char != len(self.text) or token != len(self.ids):
            raise Refused("the tokenizer does not reproduce the text")
        return pieces

    def boundary(self, char: int) -> int:
        """Return how many tokens lie before character `char`; Refused if one lies across it."""
        if char >= len(self.text):
            return len(self.ids)
        if self.offsets is not None:
            count = bisect_left(self.offsets, (char, 0))
            if count and self.offsets[count - 1][1] > char:
                raise Refused(INSIDE)
            return count
        token, start = max(entry for entry in self.pieces.items() if entry[1] <= char)
        if start == char:
            return token
        before = self.template.encode(self.text[start:char])
        if self.ids[token : token + len(before)] != before or self.ids[token] in self.template.added:
            raise Refused(INSIDE)
        return token + len(before)

    def text_between(self, first: int, last: int) -> str:
        """Return what tokens [first, last) add to the text before them."""
        # Decode from the added token before them: some tokenizers spell a token differently at the start of a text.
        start = self._marker_before(first)
        before = self.template.decode(self.ids[start:first])
        whole = self.template.decode(self.ids[start:last])
        if not whole.startswith(before):
            raise Refused(INSIDE)
        return whole[len(before) :]

    def is_prompt(self, first: int, char: int) -> bool:
        """Return whether tokens [0, first) are those of the first `char` characters alone, as in serving."""
        start = self._marker_before(first)
        begin = self.pieces[start] if self.offsets is None else self.offsets[start][0]
        return self.template.encode(self.text[begin:char]) == self.ids[start:first]

    def _marker_before(self, token: int) -> int:
        """Return the index of the last added token before `token`; 0 if there is none."""
        return next((i for i in range(token - 1, 0, -1) if self.ids[i] in self.template.added), 0)
