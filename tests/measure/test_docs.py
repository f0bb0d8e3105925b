"""The commands of docs/evaluation.md compose, and the page names every suite and perturbation."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from eagle31_train.cli import CONFIGS, load_config
from eagle31_train.measure.perturb import KNOWN, find
from eagle31_train.measure.sets import suite_of

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
COMMANDS = [line for line in TEXT.splitlines() if line.startswith("python -m eagle31_train.evaluate ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_composes(command):
    config = load_config(shlex.split(command)[3:])
    for name, given in config.evaluate.suites.items():
        suite_of(name, given)
    for name in config.evaluate.perturbations:
        find(name)


def test_every_suite_and_every_perturbation_is_named():
    named = set(re.findall(r"`([\w.]+)`", TEXT))
    assert {file.stem for file in (CONFIGS / "suite").glob("*.yaml")} <= named
    assert set(KNOWN) <= named
    assert len(COMMANDS) >= 3


def test_the_example_of_a_suite_has_every_option_that_it_tells_of():
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    (given,) = yaml.safe_load(block)["evaluate"]["suites"].values()
    assert suite_of("exams", given).columns == {"question", "A", "B"}
