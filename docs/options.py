"""Write docs/options.md, the table of every option: `python docs/options.py`."""

import dataclasses
from itertools import groupby
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eagle31_train.common.locations import CONFIGS
from eagle31_train.compose import ANY, OPTIONS

PAGE = Path(__file__).with_suffix(".md")
COLUMNS = ["| option | default | `any` | what it is |", "| --- | --- | --- | --- |"]
ABSENT = "???"
HEAD = """# Every option

`key=value` sets an option, for every stage alike; `--cfg` prints all values in use. A recipe (`+experiment=NAME`)
changes some of the defaults. Without a recipe [`any`](targets.md#without-a-recipe) holds: its changes have a column of
their own. `null`: not set; the last column says what then holds.
"""


def page() -> str:
    """The page as it should stand in the repository."""
    recipe = OmegaConf.load(CONFIGS / "experiment" / f"{ANY.partition('=')[2]}.yaml")
    lines = [HEAD]
    for section, names in groupby(sorted(OPTIONS, key=lambda name: "." in name), lambda name: name.rpartition(".")[0]):
        lines += [f"## {section or 'Of the run'}\n", *COLUMNS]
        lines += [_row(name, OmegaConf.select(recipe, name, default=ABSENT)) for name in names]
        lines.append("")
    return "\n".join(lines)


def _row(name: str, in_any: Any) -> str:
    field = OPTIONS[name][1]
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    shown = "the target's" if name == "name" else "required" if default == "???" else _value(default)
    other = "" if in_any in (ABSENT, default) else _value(in_any)
    text = field.metadata["help"].replace("|", "\\|")
    return f"| `{name}` | {shown} | {other} | {text} |"


def _value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`" if value not in ("", {}, []) else "empty"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
