"""Text for people: what others wrote is shown as it is, and does nothing to a terminal, a page or the text beside it.

Everything that prints, or writes a page or a card, sends text through `clean`; a UserError is a `line`.
"""

import re

LONGEST = 1500  # characters of a line; the end, which says what to do, stays

# What is not seen, but acts: controls (\x1b begins a terminal's commands), marks that turn the order of the letters
# (\u202e shows "gpj.exe" as "exe.jpg"), breaks other than \n, halves of surrogate pairs, invisible letters. The two
# joiners, \u200c and \u200d, stay: scripts and emoji are made of them.
_ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ufffe\uffff\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)


def clean(text: object) -> str:
    r"""Text in which such characters are spelt, \x1b as Python spells it; line breaks and tabs stay."""
    return _ACTING.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), str(text))


def line(text: object) -> str:
    """The same in one line, of which the middle is left out where it is too long to be read."""
    shown = clean(" ".join(str(text).splitlines()))
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST * 3 // 4]} … {shown[-LONGEST // 4 :]}"
