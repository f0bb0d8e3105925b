"""A run folder as the stages before export leave it, made by hand for a tiny drafter."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import sample_results
import torch
from conftest import make_mla_shape, make_shape
from pipeline import LAST, finish_training
from safetensors.torch import load_file, save_file
from sample_results import CONDITIONS, sheet
from spelling import random_tensors

from eagle31_train import export
from eagle31_train.checkpoint import run_folder
from eagle31_train.common import artifacts
from eagle31_train.compose import load_config
from eagle31_train.config import Config, DrafterShape
from eagle31_train.model import vocab
from eagle31_train.reporting.evaluation_page import pictures

SIZES = {"aux_layers": [1, 2], "vocab_size": 40, "draft_vocab_size": 12}
TINY = make_shape(**SIZES, head_dim=6, rope_theta=5000.0)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# MLA of widths that all differ, and of heads that do not divide hidden_size.
SHARPENED = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
TINY_MLA = make_mla_shape(**SIZES, num_attention_heads=3, kv_lora_rank=12, qk_rope_head_dim=4, rope_scaling=SHARPENED)
TINY_IDS = np.array([0, 1, 2, 5, 8, 13, 21, 25, 30, 33, 36, 39], dtype=np.int64)


class FakeRun:
    """A finished run up to training; its parts can be replaced before the export."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = folder / "train" / LAST
        self.checkpoint.mkdir(parents=True)
        data = {"fingerprint": "d" * 16, "dataset_fingerprint": "c" * 16, "files": {}}
        artifacts.write_json(folder / "data" / "manifest.json", data)
        self.set_vocab(vocab.DraftVocab(TINY_IDS, 40))
        self.set_shape(TINY)
        self.set_tensors(random_tensors(TINY))

    def set_vocab(self, kept: vocab.DraftVocab) -> None:
        vocab.write(self.folder / "data" / "vocab.safetensors", kept)

    def set_shape(self, shape: DrafterShape) -> None:
        self.shape = shape
        artifacts.write_json(self.checkpoint / "drafter.json", asdict(shape))

    def set_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Finishes the training."""
        save_file(tensors, self.checkpoint / "model.safetensors")
        finish_training(self.folder)

    def change_tensors(self, **change: torch.Tensor | None) -> None:
        """Replace, add, or (with None) remove tensors; dots of a name written as `__`."""
        tensors = load_file(self.checkpoint / "model.safetensors")
        tensors |= {name.replace("__", "."): tensor for name, tensor in change.items()}
        self.set_tensors({name: tensor for name, tensor in tensors.items() if tensor is not None})

    @property
    def identity(self) -> str:
        return run_folder.identity(artifacts.read_json(self.folder / "train" / "manifest.json", "the test"))

    def evaluate(self, rate: float = 0.5, **target: str) -> None:
        """An evaluation of the checkpoint with intervals, a perturbation and pictures."""
        folder, told = self.folder / "evaluate", self.result(rate, "ours")
        inputs = {"train": "e" * 16, "checkpoint": self.identity, **({"target": target} if target else {})}
        manifest = {"fingerprint": "a" * 16, "inputs": inputs, "identical": True, "result": told}
        artifacts.write_json(folder / "manifest.json", {**manifest, "files": self.draw(folder, told)})

    def result(self, rate: float, *names: str) -> dict:
        """What was measured of drafters that get each token right at this rate."""
        rates = dict.fromkeys(names, rate)
        sheets = [sheet(name, rates, drift=False) for name in ("heldout", "heldout · no_template")]
        return sample_results.result(*sheets, title=" against ".join(names), **CONDITIONS)

    def draw(self, folder: Path, result: dict) -> dict[str, dict]:
        """A file for every picture, which says whose it is; the manifest's entry of them."""
        files = [folder / f"{picture.name}.png" for picture in pictures(result)]
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            file.write_bytes(f"{folder.name} {file.stem} {artifacts.fingerprint(result)}".encode())
        return artifacts.list_files(folder, files)

    def config(self, *more: str) -> Config:
        """What is left open is as it was trained."""
        own = [f"run_dir={self.folder}", "target.path=someone/a-target", "target.aux_layers=[1,2]"]
        own += [f"drafter.{name}={getattr(self.shape, name)}" for name in ("architecture", "fc_norm")]
        return load_config(["+experiment=any", "name=run", *own, *more])

    def exported(self) -> tuple[dict, dict[str, torch.Tensor], str]:
        """config.json, tensors and card of the export."""
        out = self.folder / "export"
        config = json.loads((out / "config.json").read_text())
        return config, load_file(out / "model.safetensors"), (out / "README.md").read_text()


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "run")


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FakeRun]:
    """By architecture: a run, exported in float32; not to be changed."""
    runs = {name: FakeRun(tmp_path_factory.mktemp(name) / "run") for name in ("llama", "mla")}
    runs["mla"].set_shape(TINY_MLA)
    runs["mla"].set_tensors(random_tensors(TINY_MLA))
    for run in runs.values():
        export.export(run.config("target.dtype=float32"))
    return runs
