"""Markdown of text that others wrote: it is shown as it is, and tells no folder of this machine."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle31_train.common import locations, shown

# An absolute path in a text, which neither 3/4 nor https://… has, but file:///… does.
_PATH = re.compile(r"(?:(?<=\bfile://)|(?<![\w./~\\-]))/(?!/)[^\s'\",;|<>(){}\[\]=]+")


def public(path: str) -> str:
    """An absolute path as others may see it: from the checkout, or its last part alone."""
    if path.startswith("file://"):
        return "file://" + public(path.removeprefix("file://"))
    if not Path(path).is_absolute():
        return path
    inside = Path(path).is_relative_to(locations.ROOT)
    return str(Path(path).relative_to(locations.ROOT)) if inside else f"/path/to/{Path(path).name}"


def scrubbed(text: str) -> str:
    """A text whose absolute paths are as others may see them; `</b` is what ends a tag, and may be in a name."""

    def shown_to_others(match: re.Match[str]) -> str:
        ends_tag = text[: match.start()].endswith("<") and match[0].count("/") == 1
        return match[0] if ends_tag else public(match[0])

    return _PATH.sub(shown_to_others, text)


def plain(value: Any) -> str:
    """Text that Markdown shows as it is, also inside a table; absolute paths lose all that is nobody's business."""
    line = shown.clean(" ".join(str(value).split()))
    line = Path(line).name if line.startswith("/") else scrubbed(line)
    return re.sub(r"([\\`*_\[\]|<>#&~$!])", r"\\\1", line)


def code(text: str) -> str:
    text = shown.clean(text)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}sh\n{text}\n{fence}"


def grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(map(plain, header)), ["---"] * len(header), *(list(map(plain, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
