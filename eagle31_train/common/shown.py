"""Text for people: what others wrote is shown as it is, and cannot affect a terminal, a page or the text beside it.

Everything that prints, or writes a page or a card, passes text through `clean`; a UserError's text is a `line`.
"""

import re

LONGEST = 1500  # characters of a line; its end stays, as it says what to do

# Characters that are invisible, but have effects: controls (\x1b begins a terminal's commands), marks that change the
# direction of text (\u202e shows "gpj.exe" as "exe.jpg"), line breaks other than \n, lone surrogates, invisible
# letters. The joiners \u200c and \u200d stay: scripts and emoji need them.
_ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ufffe\uffff\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)


def clean(text: object) -> str:
    r"""Return text with such characters escaped, as in Python's \x1b. Line breaks and tabs stay."""
    return _ACTING.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), str(text))


def line(text: object) -> str:
    """Return clean text on one line, without its middle if it is longer than LONGEST."""
    shown = clean(" ".join(str(text).splitlines()))
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST * 3 // 4]} … {shown[-LONGEST // 4 :]}"
