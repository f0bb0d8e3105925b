"""The examples for schedulers: scripts that bash reads, YAML that parses, commands as their programs take them."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from test_docs import check

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted([*EXAMPLES.rglob("*.sbatch"), *EXAMPLES.rglob("*.sh")])
PROGRAM = re.compile(r"\b(?:eagle31|accelerate launch)\b.*?(?=$|'| && | \|\| )")


def scripts_in(value):
    """All texts of a YAML document that a shell runs."""
    if isinstance(value, dict):
        return [text for entry in value.values() for text in scripts_in(entry)]
    if isinstance(value, list):
        return [text for entry in value for text in scripts_in(entry)]
    return [value] if isinstance(value, str) else []


def command_lines(text):
    """What a script asks of our programs, with the variables that its settings hold."""
    text = re.sub(r"^\s*#.*\n", "", text.replace("\\\n", " "), flags=re.M)
    values = {"OPTIONS": "+experiment=llama31_8b run_dir=x", "TARGET": "HUB-ID", "NAME": "x"}
    for name, value in values.items():
        text = re.sub(rf"\$\{{?{name}\}}?", value, text)
    return [line for line in PROGRAM.findall(re.sub(r"[ \t]+", " ", text)) if "eagle31_train" in line or "=" in line]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_a_script(script):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_commands_of_the_examples_are_taken_by_their_programs():
    texts = [path.read_text() for path in SCRIPTS]
    for path in EXAMPLES.rglob("*.yaml"):
        texts += [text for document in yaml.safe_load_all(path.read_text()) for text in scripts_in(document)]
    lines = [line for text in texts for line in command_lines(text)]
    assert len(lines) >= 6, lines
    for line in lines:
        check(line)
