"""Who may import whom, read off the source: packages import downwards only, and no two modules import each other."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("data_prep", "eagle31_train", "train")
# From the ground up, as the map in CONTRIBUTING.md shows it. Whatever is in none of these is a stage or a command.
LAYERS = [
    ["eagle31_train.common"],
    ["eagle31_train.earlier"],
    ["eagle31_train.config"],
    ["eagle31_train.precision", "eagle31_train.combinations"],
    ["eagle31_train.provenance", "eagle31_train.compose"],
    ["eagle31_train.rows"],
    ["eagle31_train.store"],
    ["eagle31_train.kernels"],
    ["eagle31_train.model"],
    ["eagle31_train.checkpoint"],
    ["eagle31_train.targets"],
    ["eagle31_train.evaluation"],
    ["eagle31_train.reporting", "eagle31_train.planning"],
]
STAGES = ["data_prep", "train", *(f"eagle31_train.{name}" for name in ("extract", "evaluate", "export", "compare"))]


def modules():
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] in ("__init__", "__main__") else parts), file


SOURCES = {f"{module}:{file.name}": (module, file.read_text()) for module, file in modules()}


def imports_of(source):
    """Modules that a source imports, lazily or for types too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name, package):
    return name == package or name.startswith(package + ".")


def layer_of(module):
    return next((at for at, layer in enumerate(LAYERS) if any(within(module, name) for name in layer)), len(LAYERS))


def stage_of(module):
    return next((stage for stage in STAGES if within(module, stage)), None)


def violations(module, source):
    for name in imports_of(source):
        if name.split(".")[0] in PACKAGES and layer_of(name) > layer_of(module):
            yield f"{module} imports {name}, which stands above it"
        if (stage := stage_of(name)) and stage != stage_of(module):
            yield f"{module} imports the stage {stage}"
        if within(module, "eagle31_train") and any(within(name, heavy) for heavy in ("accelerate", "deepspeed")):
            yield f"{module} imports {name}: optimising on many devices is train/'s business"


def test_imports_keep_to_the_directions():
    assert [problem for module, source in SOURCES.values() for problem in violations(module, source)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("eagle31_train.extract", "from eagle31_train.export import export"),
        ("eagle31_train.model.loss", "def f():\n    from train import loop"),
        ("eagle31_train.model.loss", "import accelerate"),
        ("eagle31_train.store.shard", "from eagle31_train.model import loss"),
        ("eagle31_train.config", "def f():\n    from eagle31_train.store.codec import Encoded"),
        ("train.loop", "from data_prep import sources"),
    ],
)
def test_the_check_sees_every_kind_of_violation(module, source):
    assert list(violations(module, source))


def circle(sources):
    """Modules that import each other; empty if none do."""
    # `from a import b` is of a.b where that is a module, and of a where it is not.
    graph = {
        name: {max((m for m in sources if within(i, m)), key=len, default=name) for i in imports_of(source)} - {name}
        for name, source in sources.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other():
    sources = dict(SOURCES.values())
    assert circle(sources) == []
    lazily = sources["eagle31_train.model.norm"] + "\ndef f():\n    from eagle31_train.model import drafter\n"
    assert "eagle31_train.model.norm" in circle({**sources, "eagle31_train.model.norm": lazily})
