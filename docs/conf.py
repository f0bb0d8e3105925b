"""The documentation site: README.md and the pages beside this file, as they stand on GitHub (`make docs`).

Sphinx reads the whole checkout, so links between pages, to code and to results are the same here and there.
"""

import shutil
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "examples/README.md", "docs/*.md"]
# Title of each part of the navigation → its pages. A page that stands in none of them is an error.
NAVIGATION = {
    "Use": {
        "Start": "self",
        "Your target": "docs/targets",
        "Data": "docs/data",
        "Hidden states": "docs/store",
        "Training": "docs/launch",
        "Schedulers": "examples/README",
        "Evaluation": "docs/evaluation",
        "Serving": "docs/serving",
        "Kimi K2.6": "docs/kimi",
        "Python API": "docs/api",
        "Every option": "docs/options",
        "Glossary": "docs/glossary",
    },
    "Studies": {
        "EAGLE 3.1 against 3": "docs/study-eagle31",
        "The speedrun": "docs/speedrun",
        "Results of benchmarks": "docs/benchmarks",
        "How to run the benchmarks": "benchmarks/README",
        "Log": "docs/log",
    },
    "Understand": {
        "The recurrence": "docs/recurrence",
        "Contributing": "CONTRIBUTING",
        "Security": "SECURITY",
        "Dependencies": "docs/dependencies",
    },
}

project = "eagle31"
root_doc = "README"
include_patterns = PAGES
# Not even walked: environments and runs hold many files.
exclude_patterns = [p.name for p in ROOT.iterdir() if p.is_dir() and p.name not in ("docs", "benchmarks", "examples")]
extensions = ["myst_parser"]
myst_heading_anchors = 4  # headings are link targets, by GitHub's names for them
nitpicky = True
highlight_language = "none"  # of blocks without a language

html_theme = "furo"  # brings its own style and scripts, and asks for no font
html_title = "eagle31"
html_extra_path = ["site"]  # index.html, which leads to README.html
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False


def setup(app: Sphinx) -> None:
    """Give the start page the navigation, which GitHub would show as code, and pages their pictures."""
    app.connect("source-read", _navigate)
    app.connect("build-finished", _copy_pictures)


def _copy_pictures(app: Sphinx, error: Exception | None) -> None:
    """Copy the pictures of `<picture>`, which is raw HTML to Sphinx."""
    if error is None:
        shutil.copytree(ROOT / "docs" / "pictures", Path(app.outdir) / "docs" / "pictures", dirs_exist_ok=True)


def _navigate(_app: Sphinx, page: str, source: list[str]) -> None:
    if page != root_doc:
        return
    for caption, pages in NAVIGATION.items():
        entries = "\n".join(f"{title} <{name}>" for title, name in pages.items())
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"
