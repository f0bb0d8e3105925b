"""Markdown of text that others wrote: it is shown literally, without folders of this machine."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle31_train.common import locations, shown

# An absolute path in a text. 3/4 and https://… have none, but file:///… does.
_PATH = re.compile(r"(?:(?<=\bfile://)|(?<![\w./~\\-]))/(?!/)[^\s'\",;|<>(){}\[\]=]+")


def public(path: str) -> str:
    """Return an absolute path as others may see it: relative to the checkout, or only its last part."""
    if path.startswith("file://"):
        return "file://" + public(path.removeprefix("file://"))
    if not Path(path).is_absolute():
        return path
    inside = Path(path).is_relative_to(locations.ROOT)
    return str(Path(path).relative_to(locations.ROOT)) if inside else f"/path/to/{Path(path).name}"


def scrubbed(text: str) -> str:
    """Return a text with its absolute paths as others may see them. `</b` is a closing tag, which may be in a name."""

    def shown_to_others(match: re.Match[str]) -> str:
        ends_tag = text[: match.start()].endswith("<") and match[0].count("/") == 1
        return match[0] if ends_tag else public(match[0])

    return _PATH.sub(shown_to_others, text)


def plain(value: Any) -> str:
    """Return text that Markdown shows literally, also inside a table, with absolute paths as others may see them."""
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
