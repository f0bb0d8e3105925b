"""A tiny extracted run, made once, and a way to train on copies of it within this process."""

import json
import os
import shutil
from functools import cache
from pathlib import Path
from unittest.mock import patch

import guarding
import pytest
import several
from accelerate.state import AcceleratorState
from pipeline import tiny_config
from safetensors.torch import load_file

from eagle31_train.common.errors import Stopped
from eagle31_train.store import storage_of
from eagle31_train.store.sealed import seal
from train import checkpoint
from train.loop import train


class Fitted:
    """A run folder; `fit` trains in it, the rest reads what it left."""

    def __init__(self, extracted: Path, folder: Path) -> None:
        self.extracted, self.folder = extracted, folder
        shutil.copytree(extracted / "run", folder / "run")
        self.train = folder / "run" / "train"
        self.checkpoints = self.train / "checkpoints"

    def config(self, *more):
        return tiny_config(self.folder, f"target.path={self.extracted / 'target'}", *more)

    def fit(self, *more):
        """Train as a new process would, on the CPU; returns self."""
        AcceleratorState._reset_state(True)
        with patch.dict(os.environ, ACCELERATE_USE_CPU="true"):
            train(self.config(*more))
        return self

    def unfinish(self, *options):
        """As if its store, of bounded size, were still being written; returns the store's storage."""
        storage = storage_of(self.config(*options))
        storage.remove("manifest.json")
        storage.write("stream.json", seal({"max_bytes": 10**6}))
        return storage

    def stopped(self, step, *more):
        """Train until it is told to stop after a step, and saves; returns self."""
        with pytest.MonkeyPatch.context() as patches:
            several.disturb(patches, step)
            with pytest.raises(Stopped):
                self.fit(*more)
        return self

    def rows(self):
        lines = (self.train / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line, parse_constant=pytest.fail) for line in lines]  # NaN, Infinity

    def losses(self):
        return [row["loss"] for row in self.rows() if "loss" in row]

    def manifest(self):
        return json.loads((self.train / "manifest.json").read_text())

    def saved(self):
        """The steps of its checkpoints."""
        return [checkpoint.step_of(path) for path in checkpoint.in_order(self.checkpoints)]

    def recorded(self):
        """What the run says that it is made from."""
        return json.loads((self.train / "inputs.json").read_text())["inputs"]

    def newest(self):
        return self.train / self.manifest()["checkpoint"]

    def weights(self):
        return load_file(self.newest() / "model.safetensors")

    def at(self, step):
        """Weights and moments of a checkpoint."""
        folder = self.checkpoints / checkpoint.name_of(step)
        return [load_file(folder / f"{name}.safetensors") for name in ("model", "optimizer")]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """One process on the CPU, whatever the machine and whoever runs the tests."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="session")
def copy_of(extracted):
    """A function that copies the extracted run, or another one, into a folder."""
    return lambda folder, source=extracted: Fitted(source, folder)


@pytest.fixture(scope="session")
def by_one(copy_of, tmp_path_factory):
    """A function that trains by one process that nobody stops, once with the same options; not to be changed."""
    return cache(lambda *options: copy_of(tmp_path_factory.mktemp("by_one")).fit(*options))


@pytest.fixture(scope="session")
def absent(copy_of, tmp_path_factory):
    """One process's run, in whose schedule two steps are not."""
    run = copy_of(tmp_path_factory.mktemp("absent"))
    assert guarding.fit(run, *guarding.RECIPE, harm=["absent", [3, 6]]) is None
    return run


@pytest.fixture
def new_run(copy_of, tmp_path):
    """A function that makes another copy of the extracted run."""
    count = iter(range(100))
    return lambda: copy_of(tmp_path / f"copy{next(count)}")
