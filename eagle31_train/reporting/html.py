"""HTML that stands alone: no other file, no network, no script."""

import base64
from collections.abc import Mapping, Sequence
from html import escape as escaped
from pathlib import Path

from eagle31_train import artifacts, shown
from eagle31_train.console import Progress
from eagle31_train.reporting.figures import Picture

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # nothing may ask a network for anything

STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 74rem; padding: 1.25rem; font: 1rem/1.5 system-ui, sans-serif; }
h1, p, dd, summary { overflow-wrap: anywhere; }
h2 { margin-top: 2.2rem; border-bottom: 1px solid #8884; }
p { margin: .3rem 0; color: #777; }
dt { font-weight: 600; }
dd { margin: 0 0 .4rem 1rem; }
.pictures { display: flex; flex-wrap: wrap; gap: 1.2rem; margin: 1rem 0; }
img { width: 100%; max-width: 36rem; }
.scroll, pre { overflow-x: auto; }
.scroll { background: /* a shadow where there is more to scroll to */
  linear-gradient(90deg, Canvas, transparent) 0 / 2rem 100% no-repeat local,
  linear-gradient(-90deg, Canvas, transparent) 100% / 2rem 100% no-repeat local,
  linear-gradient(90deg, #8886, transparent) 0 / .6rem 100% no-repeat,
  linear-gradient(-90deg, #8886, transparent) 100% / .6rem 100% no-repeat; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .5rem; border-bottom: 1px solid #8884; }
td:not(:first-child) { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
"""


def escape(text: str) -> str:
    """Text as HTML shows it."""
    return escaped(shown.clean(text))


def draw(folder: Path, pictures: Sequence[Picture], earlier: Sequence[Path] = ()) -> tuple[list[Path], dict[str, str]]:
    """Write every picture as a PNG file, whole or not at all.

    Args:
        earlier: files of an earlier result, which go if this one does not have them.

    Returns:
        The files; and by section its pictures as HTML.
    """
    files, sections = [], dict[str, str]()
    folder.mkdir(parents=True, exist_ok=True)
    for picture in Progress(pictures, desc="report", unit="picture", leave=False):
        png = picture.png()
        files.append(folder / f"{picture.name}.png")
        artifacts.write_bytes(files[-1], png)
        source = "data:image/png;base64," + base64.b64encode(png).decode()
        image = f'<img src="{source}" alt="{escape(picture.title)}: {escape(picture.section)}">\n'
        sections[picture.section] = sections.get(picture.section, "") + image
    for file in set(earlier) - set(files):
        file.unlink(missing_ok=True)
    return files, {name: f'<div class="pictures">\n{images}</div>' for name, images in sections.items()}


def document(title: str, parts: Sequence[str]) -> str:
    """A page of some parts; empty ones are left out.

    Args:
        title: as text; everything else is HTML already.
    """
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1>",
        *parts,
        "</html>",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def heading(text: str) -> str:
    """The heading of a section."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """A paragraph of remarks; nothing of none."""
    return f"<p>{escape(text)}</p>" if text else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def definitions(terms: Mapping[str, str]) -> str:
    """Words and what they mean."""
    return "<dl>" + "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in terms.items()) + "</dl>"


def folded(title: str, content: str) -> str:
    """HTML that opens on a click; nothing of none."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""


def code(text: str) -> str:
    """Text as it is; nothing of none."""
    return f"<pre>{escape(text)}</pre>" if text else ""
