"""Training beside extraction, in a store that is never as large as its corpus: bounded, killed and gone on with."""

import json
import subprocess
import sys
import threading
from itertools import pairwise

import pytest
from launching import ROOT, environment
from pipeline import assert_equal, options, save_quietly, tiny_llama, write_data
from safetensors.torch import load_file

from eagle31_train.store import Store
from train import windows

# Long enough that the corpus is ten times the bound below, which holds the held-out split and two windows.
LENGTHS = {"train": [9 + 7 * i % 23 for i in range(170)], "heldout": [10, 14]}
WINDOW = 70
MORE = (
    f"train.window_tokens={WINDOW}",
    "train.epochs=1",
    "train.eval_every=10",
    "train.checkpoint_every=7",
    "store.aux_codec=int8",
    "store.patience=120",
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """folder/target, folder/run/data, and the offline order: extracted, then trained."""
    folder = tmp_path_factory.mktemp("corpus")
    prepare(folder)
    Process(folder, "extract").wait_well()  # with as many threads as the others: another number rounds otherwise
    Process(folder, "train").wait_well()
    return folder


class Process:
    """A stage in a process of its own."""

    def __init__(self, folder, stage, *more):
        self.output = folder / f"{stage}-{len(list(folder.glob('*.log')))}.log"
        words = ["train.py"] if stage == "train" else ["-m", "eagle31_train.extract"]
        words = [sys.executable, *words, *options(folder, *MORE, *more)]
        with self.output.open("w") as file:
            how = {"cwd": ROOT, "env": environment("one"), "stdout": file, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(words, **how)

    def wait_well(self):
        assert self.process.wait(timeout=300) == 0, self.output.read_text()

    def kill_when(self, condition):
        """SIGKILL as soon as it is so."""
        pause = threading.Event()
        while not condition():
            assert self.process.poll() is None, self.output.read_text()
            pause.wait(0.01)
        self.process.kill()
        self.process.wait()


def prepare(folder):
    """folder/target and folder/run/data, the same each time."""
    save_quietly(tiny_llama(), folder / "target")
    write_data(folder / "run", LENGTHS)
    return folder


def bound_of(corpus):
    """Held-out split and two windows, by the plan."""
    plan = Store(corpus / "run" / "store").plan
    kept = sum(shard.bytes for shard in plan.of("heldout"))
    cut = windows.cut(Store(corpus / "run" / "store").split("train"), WINDOW)
    sizes = [sum(shard.bytes for shard in window) for window in cut]
    return kept + max(map(sum, pairwise(sizes)))


def trained(folder):
    train = folder / "run" / "train"
    manifest = json.loads((train / "manifest.json").read_text())
    return (train / "metrics.jsonl").read_text(), load_file(train / manifest["checkpoint"] / "model.safetensors")


def assert_same_training(ours, theirs):
    rows, weights = trained(ours)
    wanted_rows, wanted = trained(theirs)
    assert rows == wanted_rows
    assert_equal(weights, wanted)


def steps_done(folder):
    metrics = folder / "run" / "train" / "metrics.jsonl"
    return metrics.read_text().count('"grad_norm"') if metrics.exists() else 0


def consumed(folder):
    file = folder / "run" / "store" / "consumed.json"
    return json.loads(file.read_text())["shards"] if file.exists() else []


@pytest.mark.slow
def test_either_side_is_killed_and_goes_on_and_no_sample_is_lost_or_seen_twice(corpus, tmp_path):
    bound = bound_of(corpus)
    folder = prepare(tmp_path)
    limit = f"store.max_bytes={bound}"
    writer = Process(folder, "extract", limit)
    reader = Process(folder, "train", "store.follow=true")
    writer.kill_when(lambda: len(consumed(folder)) > 5)
    reader.kill_when(lambda: steps_done(folder) > 2)
    reader = Process(folder, "train", "store.follow=true")
    writer = Process(folder, "extract", limit)
    reader.kill_when(lambda: len(consumed(folder)) > 25)
    Process(folder, "train", "store.follow=true").wait_well()
    writer.wait_well()
    assert_same_training(folder, corpus)
