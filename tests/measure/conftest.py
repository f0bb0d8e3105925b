"""Drafters that are right now and then, for the tiny target of tests/evaluate, and runs that hold them."""

import json
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
from conftest import make_mla_shape, make_objective
from safetensors.torch import save_file

from eagle31_train import artifacts, cli, compare
from eagle31_train.measure.decoding import Limits, decode_plain
from eagle31_train.measure.drafters import Candidate
from eagle31_train.measure.prompts import Prompt
from eagle31_train.measure.results import Trajectory
from eagle31_train.measure.suites import Workload
from eagle31_train.measure.unrolled import steps
from eagle31_train.targets.cached import CachedTarget
from tests.evaluate.conftest import TINY, TinyRun, model, run, tiny_shape  # noqa: F401 (fixtures)

# One of one token; of several lengths, so that a batch of them is ragged; of two sources.
HELDOUT = [np.random.default_rng(0).integers(0, 50, size=12).tolist()[:5]]
PROMPTS = [[7, 3, 41, 20, 11, 5], [9], [30, 2, 2, 17, 40, 8, 8, 1, 25], [12, 44, 6], [3, 19, 28, 33]]


def workload_of(prompts=PROMPTS, temperature=0.0, top_p=1.0, name="made"):
    made = [Prompt(f"p{i}", "ab"[i % 2], ids) for i, ids in enumerate(prompts)]
    return Workload(name, name, None, made, temperature, top_p)


@torch.no_grad()
def fit(drafter, target_ids, model, prompts):  # noqa: F811
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
def candidates(model):  # noqa: F811
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
def trained(run):  # noqa: F811
    """`run`, with the configuration that training keeps."""
    save_config(run)
    return run


@pytest.fixture
def another(trained, model):  # noqa: F811
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


def save_config(run):  # noqa: F811
    (run.folder / "train" / "config.yaml").write_text(cli.to_yaml(run.config()), encoding="utf-8")


# ---------------------------------------------------------------- as a user compares

SHAPE = [
    f"drafter.{option}"
    for option in (
        "num_attention_heads=4",
        "num_key_value_heads=2",
        "head_dim=4",
        "intermediate_size=24",
        "rope_theta=100.0",
        "max_position_embeddings=128",
    )
]


@pytest.fixture
def no_page(monkeypatch):
    """Pages and their pictures have tests of their own."""
    monkeypatch.setattr(compare.page, "write", lambda folder, result: [])


@pytest.fixture
def out(tmp_path):
    return tmp_path / "compared"


@pytest.fixture
def call(out, capsys):
    """A function that compares and gives the result, or else the status and the one line of the error."""

    def called(*words, default=True):
        options = [f"compare.out={out}", "evaluate.max_new_tokens=12", "evaluate.depths=4"] if default else []
        try:
            compare.main([*map(str, words), *options])
        except SystemExit as stopped:
            error = capsys.readouterr().err
            lines = [line for line in error.splitlines() if line.startswith("error: ")]
            assert len(lines) == 1, error
            return stopped.code, lines[0]
        return json.loads((out / "result.json").read_text()) if default else {}

    return called
