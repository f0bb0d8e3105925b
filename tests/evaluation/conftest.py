"""A tiny random target, drafters of it that are right now and then, and run folders as the stages before leave them."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from configured import configured
from conftest import make_mla_shape, make_objective, make_shape
from datasets import Dataset, DatasetDict
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle31_train import artifacts, cli, compare
from eagle31_train.evaluation.decoding import Limits, decode_plain
from eagle31_train.evaluation.measuring import Candidate
from eagle31_train.evaluation.prompts import Prompt
from eagle31_train.evaluation.unrolled import Trajectory, steps
from eagle31_train.evaluation.workloads import Workload
from eagle31_train.model import vocab
from eagle31_train.reporting import evaluation_page
from eagle31_train.store.sealed import seal
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

    def write_data(self, kept):
        generator = np.random.default_rng(0)
        rows = [generator.integers(0, 50, size=length).tolist() for length in (12, 9, 14, 11)]
        # The last conversation asks what the first did, and got another answer.
        rows[3] = rows[0][:5] + rows[3][5:]
        data = self.folder / "data"
        columns = {
            "id": [f"c{i}" for i in range(len(rows))],
            "source": ["made"] * len(rows),
            "input_ids": rows,
            "loss_mask": [[position >= 5 for position in range(len(row))] for row in rows],
        }
        some = Dataset.from_dict({**columns, "id": [f"t{i}" for i in range(len(rows))]})
        DatasetDict({"train": some, "heldout": Dataset.from_dict(columns)}).save_to_disk(str(data / "dataset"))
        vocab.write(data / "vocab.safetensors", kept)
        files = artifacts.list_files(data, [f for f in data.rglob("*") if f.is_file() and f != data / "manifest.json"])
        splits = {split: {"conversations": len(rows), "by_source": {}} for split in ("train", "heldout")}
        manifest = {
            "fingerprint": "d" * 16,
            "dataset_fingerprint": "c" * 16,
            "end_ids": [49],
            "splits": splits,
            "files": files,
        }
        artifacts.write_json(data / "manifest.json", manifest)

    def finish_training(self, **more):
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
            **more,
        }
        artifacts.write_json(folder / "manifest.json", manifest)

    def config(self, *more):
        own = (f"run_dir={self.folder}", f"target.path={self.target}", "target.device=cpu")
        return configured(*own, "evaluate.max_new_tokens=20", *more)

    @property
    def manifest(self):
        return artifacts.read_json(self.folder / "evaluate" / "manifest.json", "the test")


@pytest.fixture
def run(tmp_path, model):
    return TinyRun(tmp_path, model)


# ---------------------------------------------------------------- drafters to compare

# One of one token; of several lengths, so that a batch of them is ragged; of two sources.
HELDOUT = [np.random.default_rng(0).integers(0, 50, size=12).tolist()[:5]]
PROMPTS = [[7, 3, 41, 20, 11, 5], [9], [30, 2, 2, 17, 40, 8, 8, 1, 25], [12, 44, 6], [3, 19, 28, 33]]


def workload_of(prompts=PROMPTS, temperature=0.0, top_p=1.0, name="made"):
    made = [Prompt(f"p{i}", "ab"[i % 2], ids) for i, ids in enumerate(prompts)]
    return Workload(name, name, None, made, temperature, top_p)


@torch.no_grad()
def fit(drafter, target_ids, model, prompts):
    """Give a drafter the head, by ridge regression on its own states, that drafts most of what the target says."""
    target, index = CachedTarget(model, drafter.shape.aux_layers), {int(t): i for i, t in enumerate(target_ids)}
    decoded = decode_plain(target, prompts, Limits(20, []), beyond=7, states=True)
    for _ in range(5):  # other drafts make other states
        states, wanted = [], []
        for prompt, one in zip(prompts, decoded, strict=True):
            trajectory, told = Trajectory(prompt, one.tokens, one.beyond, one.aux), [*one.tokens, *one.beyond]
            if trajectory.slots == 0:
                continue
            for k, step in enumerate(steps(drafter, target_ids, trajectory, 4, drift=False)):
                known = [slot for slot in range(trajectory.slots) if told[slot + 1 + k] in index]
                states.append(step.written[known])
                wanted += [index[told[slot + 1 + k]] for slot in known]
        z, y = torch.cat(states), torch.nn.functional.one_hot(torch.tensor(wanted), len(index)).float()
        head = torch.linalg.solve(z.T @ z + 0.1 * torch.eye(z.shape[1]), z.T @ y)
        drafter.lm_head.weight.data = head.T.contiguous()


@pytest.fixture(scope="session")
def candidates(model):
    """Three drafters of one target, of different kinds, vocabularies and auxiliary layers."""
    shapes = {
        "llama": tiny_shape(draft_vocab_size=50),
        "mla": make_mla_shape(**{**TINY, "aux_layers": [1, 3, 4]}, draft_vocab_size=40),
        "other": tiny_shape(aux_layers=[2, 3], draft_vocab_size=50, fc_norm=False, norm_output=False),
    }
    found = []
    for seed, (name, shape) in enumerate(shapes.items()):
        objective = make_objective(shape, torch.float32, seed=seed)
        drafter, ids = objective.drafter.requires_grad_(False), objective.teacher.target_ids
        drafter.shared_embedding = model.get_input_embeddings().weight.data
        fit(drafter, ids, model, PROMPTS)
        found.append(Candidate(name, f"{name}-weights", drafter, ids))
    return found


@pytest.fixture
def trained(run):
    """`run`, with the configuration that training keeps."""
    save_config(run)
    return run


@pytest.fixture
def another(trained, model):
    """A function that makes one more training on the data of `trained`; a good one has learnt the held-out prompts."""

    def make(name, seed=0, good=False, **changes):
        one = TinyRun.__new__(TinyRun)
        one.folder, one.target = trained.folder.with_name(name), trained.target
        shutil.copytree(trained.folder, one.folder, ignore=shutil.ignore_patterns("evaluate"))
        objective = make_objective(tiny_shape(**changes), torch.float32)
        drafter, ids = objective.drafter.requires_grad_(False), objective.teacher.target_ids
        if seed:
            generator = torch.Generator().manual_seed(seed)
            drafter.lm_head.weight.data = torch.randn(drafter.lm_head.weight.shape, generator=generator)
        if good:
            drafter.shared_embedding = model.get_input_embeddings().weight.data
            fit(drafter, ids, model, HELDOUT)
        one.weights = next(one.folder.rglob("model.safetensors"))
        save_file(dict(drafter.state_dict()), one.weights)
        artifacts.write_json(one.weights.parent / "drafter.json", asdict(objective.drafter.shape))
        one.finish_training()
        save_config(one)
        return one

    return make


def save_config(run):
    (run.folder / "train" / "config.yaml").write_text(cli.to_yaml(run.config()), encoding="utf-8")


# ---------------------------------------------------------------- as a user compares

SHAPE = ["drafter.num_attention_heads=4", "drafter.num_key_value_heads=2", "drafter.head_dim=4",
         "drafter.intermediate_size=24", "drafter.rope_theta=100.0",
         "drafter.max_position_embeddings=128"]  # fmt: skip


def of_another_target(run):
    """Give a run the store of another target."""
    (run / "store").mkdir(exist_ok=True)
    identity = {"name": "some/target", "revision": None, "weights": "0" * 16, "dtype": "bfloat16"}
    manifest = {"fingerprint": "f" * 16, "inputs": {"target": identity}}
    (run / "store" / "manifest.json").write_bytes(seal(manifest))


@pytest.fixture
def no_page(monkeypatch):
    """Pages and their pictures have tests of their own, and take most of the time."""
    monkeypatch.setattr(evaluation_page, "write", lambda folder, result: [])


@pytest.fixture
def out(tmp_path):
    return tmp_path / "compared"


@pytest.fixture
def call(out, capsys):
    """A function that compares and gives the result, or else the status and the one line of the error."""

    def called(*words, default=True):
        options = (
            [f"compare.out={out}", "evaluate.max_new_tokens=12", "evaluate.max_speculative_tokens=4"] if default else []
        )
        try:
            compare.main([*map(str, words), *options])
        except SystemExit as stopped:
            error = capsys.readouterr().err
            lines = [line for line in error.splitlines() if line.startswith("error: ")]
            assert len(lines) == 1, error
            return stopped.code, lines[0]
        return json.loads((out / "result.json").read_text()) if default else {}

    return called
