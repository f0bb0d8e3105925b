"""A tiny random target, a random drafter for it, and a run folder as the stages before leave it."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_mla_shape, make_objective, make_shape
from datasets import Dataset, DatasetDict
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle31_train import artifacts, vocab
from eagle31_train.cli import load_config
from eagle31_train.targets.cached import CachedTarget

WORDS = ["<unk>", "system", "user", "assistant", "brief", "hello", "world", "again"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


# Auxiliary layer 4 of 4 is the input of the final norm, which transformers' own output cannot give.
TINY = {"hidden_size": 32, "target_hidden_size": 32, "aux_layers": [1, 2, 4]}


def tiny_shape(**changes):
    return make_shape(**{**TINY, **changes})


@pytest.fixture(scope="session")
def model():
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,  # wide enough for outputs that wander
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    torch.manual_seed(3)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture
def target(model):
    return CachedTarget(model, [1, 2, 4])


@pytest.fixture
def make_drafter(target):
    """A drafter with random weights, and the target's id of each of its tokens."""

    def make(kind="llama"):
        shape = make_mla_shape(**TINY) if kind == "mla" else tiny_shape()
        objective = make_objective(shape, torch.float32)
        objective.drafter.shared_embedding = target.embedding.weight.data
        return objective.drafter, objective.teacher.target_ids

    return make


class TinyRun:
    """data/ and train/ of a run whose target is `model`, saved beside it."""

    def __init__(self, folder: Path, model) -> None:
        self.folder = folder / "run"
        self.target = folder / "target"
        model.to(torch.float32).save_pretrained(self.target)
        words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(self.target)

        objective = make_objective(tiny_shape(), torch.float32)
        kept = vocab.DraftVocab(objective.teacher.target_ids.numpy(), 50)
        self.write_data(kept)
        checkpoint = self.folder / "train" / "checkpoints" / "step-000007"
        checkpoint.mkdir(parents=True)
        self.weights = checkpoint / "model.safetensors"
        save_file(dict(objective.drafter.state_dict()), self.weights)
        artifacts.write_json(checkpoint / "drafter.json", asdict(objective.drafter.shape))
        self.finish_training()

    def write_data(self, kept, heldout=4, sources=("made",) * 4, trained=()):
        generator = np.random.default_rng(0)
        rows = [generator.integers(0, 50, size=length).tolist() for length in (12, 9, 14, 11)][:heldout]
        # The last conversation asks what the first did, and got another answer.
        if heldout == 4:
            rows[3] = rows[0][:5] + rows[3][5:]
        data = self.folder / "data"
        columns = {
            "id": [f"c{i}" for i in range(len(rows))],
            "source": list(sources[: len(rows)]),
            "input_ids": rows,
            "loss_mask": [[position >= 5 for position in range(len(row))] for row in rows],
        }
        some = Dataset.from_dict({**columns, "id": [f"t{i}" for i in range(len(rows))]})
        DatasetDict({"train": some, "heldout": Dataset.from_dict(columns)}).save_to_disk(str(data / "dataset"))
        vocab.write(data / "vocab.safetensors", kept)
        files = artifacts.list_files(data, [f for f in data.rglob("*") if f.is_file() and f != data / "manifest.json"])
        splits = {split: {"conversations": len(rows), "by_source": {}} for split in ("train", "heldout")}
        splits["train"]["by_source"] = {source: {"conversations": 1} for source in trained}
        manifest = {
            "fingerprint": "d" * 16,
            "dataset_fingerprint": "c" * 16,
            "end_ids": [49],
            "splits": splits,
            "files": files,
        }
        artifacts.write_json(data / "manifest.json", manifest)

    def finish_training(self):
        folder = self.folder / "train"
        manifest = {
            "fingerprint": "e" * 16,
            "inputs": {
                "store": "f" * 16,
                "data": "c" * 16,
                "vocab": artifacts.file_sha256(self.folder / "data" / "vocab.safetensors")[:16],
            },
            "checkpoint": "checkpoints/step-000007",
            "files": artifacts.list_files(folder, self.weights.parent.iterdir()),
        }
        artifacts.write_json(folder / "manifest.json", manifest)

    def config(self, *more):
        return load_config(
            [
                "+experiment=smollm2",
                f"run_dir={self.folder}",
                f"target.path={self.target}",
                "target.device=cpu",
                "evaluate.max_new_tokens=20",
                *more,
            ]
        )

    @property
    def manifest(self):
        return artifacts.read_json(self.folder / "evaluate" / "manifest.json", "the test")


@pytest.fixture
def run(tmp_path, model):
    return TinyRun(tmp_path, model)
