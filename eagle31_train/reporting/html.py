"""HTML that stands alone: no other file, no network, no script."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from struct import unpack

from tqdm import tqdm

from eagle31_train import artifacts
from eagle31_train.reporting.figures import Picture

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # nothing may ask a network for anything

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --muted: #656d76; --line: #e1e4e8; --box: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181f; --ink: #e6edf3; --muted: #8d96a0; --line: #2d343f; --box: #1b212a; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 74rem; padding: 1.25rem clamp(.75rem, 3vw, 2rem) 3rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.2rem 0 .6rem; font-size: 1.15rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem; }
p { margin: .3rem 0; }
.muted, figcaption { color: var(--muted); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .6rem; margin: 1.2rem 0 0; }
.facts div { background: var(--box); border-radius: .5rem; padding: .55rem .8rem; }
.facts dt { color: var(--muted); font-size: .82rem; }
.facts dd { margin: 0; font-size: 1.15rem; font-weight: 600; overflow-wrap: anywhere; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.4rem 2rem;
  margin-bottom: 1.2rem; }
figure { margin: 0; max-width: 40rem; }
img { display: block; width: 100%; height: auto; }
figcaption { font-size: .88rem; line-height: 1.4; margin-top: .2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 0 0 1.4rem; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .3rem .5rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--muted); font-weight: 500; min-width: 4rem; vertical-align: bottom; }
details { margin: .6rem 0; border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .9rem; }
summary { cursor: pointer; font-weight: 500; }
pre { overflow-x: auto; font-size: .82rem; line-height: 1.45; margin: .6rem 0 .2rem; }
@media print { details { display: none; } }
"""


def draw(folder: Path, pictures: Sequence[Picture], earlier: Sequence[Path] = ()) -> tuple[list[Path], dict[str, str]]:
    """Write every picture on light paper as a PNG file, whole or not at all.

    Args:
        earlier: files of an earlier result, which go if this one does not have them.

    Returns:
        The files; and by section its pictures, on light and dark paper, as HTML.
    """
    files, sections = [], dict[str, list[str]]()
    folder.mkdir(parents=True, exist_ok=True)
    for picture in tqdm(pictures, desc="report", unit="picture", disable=None):
        light, dark = picture.png("light"), picture.png("dark")
        files.append(folder / f"{picture.name}.png")
        artifacts.write_bytes(files[-1], light)
        sections.setdefault(picture.section, []).append(_figure(picture, light, dark))
    for file in set(earlier) - set(files):
        file.unlink(missing_ok=True)
    return files, {name: '<div class="pictures">\n' + "\n".join(shown) + "\n</div>" for name, shown in sections.items()}


def _figure(picture: Picture, light: bytes, dark: bytes) -> str:
    width, height = unpack(">II", light[16:24])  # a PNG's header
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{_data(dark)}">'
        f'<img src="{_data(light)}" width="{width}" height="{height}" '
        f'alt="{escape(picture.title)}: {escape(picture.section)}"></picture>'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _data(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


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


def facts(values: Mapping[str, str]) -> str:
    """Boxes with what is looked for first."""
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in values.items())
    return f'<dl class="facts">{cells}</dl>'


def heading(text: str) -> str:
    """The heading of a section."""
    return f"<h2>{escape(text)}</h2>"


def muted(*texts: str) -> str:
    """A paragraph of remarks; nothing of none."""
    return f'<p class="muted">{escape(" · ".join(texts))}</p>' if texts else ""


def paragraph(text: str) -> str:
    """A paragraph; nothing of no text."""
    return f"<p>{escape(text)}</p>" if text else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def folded(title: str, content: str) -> str:
    """HTML that opens on a click; nothing of none."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""


def code(text: str) -> str:
    """Text as it is; nothing of none."""
    return f"<pre>{escape(text)}</pre>" if text else ""
