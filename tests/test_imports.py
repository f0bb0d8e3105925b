"""Who may import whom, read off the source: stages meet through files, and no two modules import each other."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAGES = {"data_prep", "eagle31_train.extract", "train", "eagle31_train.evaluate", "eagle31_train.export"}
PACKAGES = ("data_prep", "eagle31_train", "train")


def modules():
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


def imports_of(source, lazy=True, types=True):
    """Modules that a source imports; without `lazy`, only those imported when it is; without `types`, at run time."""
    body = ast.parse(source).body
    everything = body if types else top_level(body)
    nodes = [node for part in everything for node in ast.walk(part)] if lazy else top_level(body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_level(body):
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node


def within(name, room):
    return name == room or name.startswith(room + ".")


def stage_of(module):
    return next((stage for stage in STAGES if within(module, stage)), None)


def violations(module, source):
    """What the house rules say against a module's imports."""
    found = []
    for name in imports_of(source):
        other = stage_of(name)
        if other and other != stage_of(module):
            found.append(f"{module} imports the stage {other}")
        if within(module, "eagle31_train") and any(within(name, heavy) for heavy in ("accelerate", "deepspeed")):
            found.append(f"{module} imports {name}: optimising on many devices is train/'s business")
        if within(module, "data_prep") and within(name, "torch"):
            found.append(f"{module} imports torch")
    for name in imports_of(source, types=False):
        if module == "eagle31_train.schema" and within(name, "eagle31_train"):
            found.append("the schema imports nothing of the project, but for types")
    for name in imports_of(source, lazy=False):
        if within(module, "data_prep") and within(name, "eagle31_train.targets"):
            found.append(f"{module} loads a target before one is needed")
    return found


@pytest.mark.parametrize(("module", "file"), list(modules()), ids=lambda v: v if isinstance(v, str) else "")
def test_imports_keep_to_the_directions(module, file):
    assert violations(module, file.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("eagle31_train.extract", "from eagle31_train.export import export"),
        ("eagle31_train.extract", "from eagle31_train import evaluate"),
        ("eagle31_train.loss", "def f():\n    from train import loop"),
        ("eagle31_train.loss", "import accelerate"),
        ("data_prep.sources", "import torch"),
        ("data_prep.sources", "from torch import nn"),
        ("data_prep.sources", "from eagle31_train.targets import generate"),
        ("train.loop", "from data_prep import sources"),
        ("eagle31_train.schema", "from eagle31_train import vocab"),
        ("eagle31_train.schema", "def f():\n    from eagle31_train.codec import Encoded"),
    ],
)
def test_the_check_sees_every_kind_of_violation(module, source):
    assert violations(module, source)


def circle(sources):
    """Modules that import each other, lazily or for types too; empty if none do."""
    # `from a import b` is of a.b where that is a module, and of a where it is not.
    found = {name: {max((m for m in sources if within(i, m)), key=len, default=name) for i in imports_of(source)}
             for name, source in sources.items()}  # fmt: skip
    try:
        TopologicalSorter({name: others - {name} for name, others in found.items()}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other():
    sources = {module: file.read_text() for module, file in modules()}
    assert circle(sources) == []
    lazily = sources["eagle31_train.targets.engine"] + "\ndef f():\n    from eagle31_train.targets import make\n"
    assert {"eagle31_train.targets.engine", "eagle31_train.targets.make"} <= set(
        circle({**sources, "eagle31_train.targets.engine": lazily})
    )
