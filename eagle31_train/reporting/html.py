"""Pages of HTML that stand alone: no other file, no network, no script."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape as escaped
from pathlib import Path

from jinja2 import Environment

from eagle31_train.common import artifacts, shown
from eagle31_train.common.console import Progress
from eagle31_train.reporting.figures import Picture
from eagle31_train.reporting.tables import Section

Marked = tuple[str, list[tuple[str, bool]]]  # a heading, and the pieces of a text, each marked or not
Images = dict[str, list[tuple[str, str]]]  # by section: what a picture shows, and its data: URL


def escape(text: str) -> str:
    return escaped(shown.clean(text))


def draw(folder: Path, pictures: Sequence[Picture]) -> tuple[list[Path], Images]:
    """Write every picture as a PNG file, atomically. Return the files, and the pictures as the page shows them."""
    files, images = [], Images()
    for picture in Progress(pictures, desc="report", unit="picture", leave=False):
        png = picture.png()
        files.append(folder / f"{picture.name}.png")
        artifacts.write_bytes(files[-1], png)
        source = "data:image/png;base64," + base64.b64encode(png).decode()
        images.setdefault(picture.section, []).append((f"{picture.title}: {picture.section}", source))
    return files, images


def page(
    title: str,
    sections: Iterable[Section],
    images: Images,
    texts: Mapping[str, str],
    glossary: bool = False,
    marked: Iterable[Marked] = (),
) -> str:
    """Return a page: each section's remarks, pictures, first table, and other tables folded; then the `marked` texts.
    texts: shown literally, folded, at the end. glossary: explain the words of evaluation."""
    environment = Environment(autoescape=True, finalize=shown.clean, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("page.jinja").read_text(encoding="utf-8"))
    return template.render(title=title, sections=sections, images=images, texts=texts, glossary=glossary, marked=marked)
