"""The commands of docs/data.md compose: every option is there, and no shell's quoting is in its way."""

import re
import shlex
from pathlib import Path

from data_prep.sources import named
from eagle31_train.cli import load_config

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for kind, block in re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL)
    if not kind
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("python -m")
]


def test_the_commands_compose():
    assert len(COMMANDS) == 6
    for command in COMMANDS:
        python, _, module, *options = shlex.split(command)
        assert (python, module.split(".")[0] in ("data_prep", "eagle31_train")) == ("python", True)
        config = load_config(options)
        assert all(isinstance(value, dict) for value in named(config.data).values()), "a source that is read as text"
