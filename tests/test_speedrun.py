"""The speedrun's harness: its clock, what peers are given to learn, when a level is reached, and all of it at once."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_document, make_shape
from pipeline import END, VOCAB, make_run, options
from talking import whole_words

from benchmarks.speedrun import __main__ as speedrun
from benchmarks.speedrun import job as jobs
from benchmarks.speedrun import measure, peer_store, worker
from benchmarks.speedrun.job import Clock, EnoughError, Job
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.compose import load_config
from eagle31_train.evaluation.intervals import Estimate
from eagle31_train.extract import extract


def job_of(folder, **changes):
    fields = {"contender": "ours", "options": [], "recipe": [], "data": "", "store": "", "target": "", "shape": {}}
    return Job(**{**fields, "out": str(folder), "seed": 0, "steps": 4, **changes})


def test_a_draft_is_left_when_it_is_due_and_saving_costs_no_time(tmp_path, monkeypatch):
    now = itertools.count()  # a second passes whenever the clock is read
    monkeypatch.setattr(jobs.time, "perf_counter", lambda: float(next(now)))
    clock = Clock(job_of(tmp_path, marks=[2.0, 2.5]))

    def save(folder):
        (folder / "draft").touch()
        for _ in range(50):
            next(now)

    clock.begin(save)
    clock.run()
    for step in range(1, 5):
        clock.step(step, 10 * step, save)
    # A step takes one second; both marks are passed by steps 2 and 3, and the last step leaves a draft in any case.
    assert clock.seconds == [0, 1, 2, 3, 4]
    assert [(p["step"], p["seconds"], p["tokens"]) for p in clock.points] == [(s, s, 10 * s) for s in (0, 2, 3, 4)]
    assert sorted(p.parent.name for p in tmp_path.rglob("draft")) == [p["draft"] for p in clock.points]
    short = Clock(job_of(tmp_path, seconds=0.0))
    short.run()
    with pytest.raises(EnoughError):
        short.step(1, 10, save)


@pytest.mark.parametrize(("lag", "mask_of"), [(0, peer_store.taught_mask), (1, peer_store.specforge_mask)])
def test_peers_learn_only_where_their_mask_and_our_states_agree(lag, mask_of):
    """By the definitions of benchmarks/README.md: at j the peer counts where token j - lag is the assistant's, and the
    store has the state where token j+1 is."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        document = make_document(make_shape(), 12, generator)
        assistant, stored = document.loss_mask.tolist(), set(document.supervised.tolist())
        wanted = {j for j in range(1, 12) if j - lag >= 0 and assistant[j - lag] and j in stored}
        # speculators' row for the state at j is j (its loader shifts), SpecForge's mask stands at token j-1
        assert {i + lag for i in mask_of(document.loss_mask).nonzero()[:, 0].tolist()} == wanted


def test_specforge_is_given_the_normed_state_that_teaches():
    document = make_document(make_shape(), 12, torch.Generator().manual_seed(6))
    made = peer_store.specforge_sample(document, lambda states: 2 * states)
    mask = made["loss_mask"]
    assert mask.any()
    for i in mask.nonzero()[:, 0].tolist():
        state = document.all_last[i + 1]
        torch.testing.assert_close(made["hidden_state"][0, i + 1], (2 * state.float()).bfloat16())
    aux = made["aux_hidden_state"][0, : document.attended]
    torch.testing.assert_close(aux, document.all_aux[: document.attended].flatten(1).bfloat16())


def training_of(name, minutes):
    points = [{"step": i, "seconds": 60 * m, "cpu_seconds": 60 * m, "tokens": 100 * i} for i, m in enumerate(minutes)]
    contender, *options = name.split("-")
    job = job_of(f"/somewhere/{name}", contender=contender, options=options)
    return measure.Training(job, {"points": points, "steps": 2, "memory_bytes": 1, "machine": {"cpu": "some"}}, 5.0)


def test_the_result_says_who_was_first_and_chooses_by_prompts_of_the_trained_kinds():
    costs, curves = [0, 10, 30], np.array([[1.0, 1.5, 2.0], [1.0, 1.7, 1.6], [1.0, 1.2, 1.5], [1.6, 1.6, 1.6]])
    assert measure.reached(costs, curves, 1.6).tolist() == pytest.approx([14.0, 60 / 7, np.inf, 0.0])  # on the line
    names = "ours", "speculators", "speculators-lr=1"
    trainings = [training_of(name, (0, 5, 10) if name == "ours" else (0, 10, 20)) for name in names]
    other = np.array([1.0, 1.4, 1.8, 1.0, 1.2, 1.6, 1.0, 1.1, 1.5])
    trained = np.array([1.0, 1.5, 2.0, 1.0, 1.3, 1.7, 1.0, 1.2, 1.9])
    spread = np.linspace(-0.05, 0.05, 11)[:, None]
    found = {
        kind: Estimate(values, values + spread, np.full(9, 40))
        for kind, values in ((measure.OTHER, other), (measure.TRAINED, trained))
    }
    result = measure.summarise(trainings, found, [1.4, 1.6, 3.0], 3)
    ours, default, tuned = result["trainings"]
    assert ours["reached"]["other"]["1.4"]["minutes"][0] == pytest.approx(5)
    low, high = ours["reached"]["other"]["1.4"]["minutes"][1:]
    assert low < 5 < high
    assert ours["reached"]["other"]["3"]["minutes"] == [None, None, None]
    # The tuned one is behind on other prompts, and ahead on those it is chosen by.
    assert result["best"] == {"ours": "ours", "speculators": tuned["name"]}
    assert default["acceptance"]["other"][-1][0] > tuned["acceptance"]["other"][-1][0]
    assert result["times_ours"]["speculators"]["other"]["1.4"][0] == pytest.approx(15 / 5)
    assert result["times_ours"][tuned["name"]]["other"]["1.6"] == [None, None, None]
    assert "| 5.0 [4.4, 5.6], 0.00M, 5e-13 |" in measure.tables(result)  # minutes, tokens, FLOPs


@pytest.fixture
def tiny(tmp_path):
    """Data and store of a tiny target with a tokenizer, and prompts of another kind; arguments for all commands."""
    make_run(tmp_path)
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer = whole_words([f"w{i}" for i in range(VOCAB)], eos_token=f"w{END}", chat_template=template)
    tokenizer.save_pretrained(tmp_path / "target")
    manifest = tmp_path / "run" / "data" / "manifest.json"
    splits = {split: {"conversations": size} for split, size in (("train", 12), ("heldout", 4))}
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "splits": splits}))
    extract(load_config(options(tmp_path, "extract.trajectories=0")))
    prompts = tmp_path / "others.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w7 w{i} w{2 * i}"}) + "\n" for i in range(5, 10)))
    own = [word for word in options(tmp_path) if not word.startswith(("name=", "run_dir="))]
    folders = [f"--{name}={tmp_path / 'run' / name}" for name in ("data", "store")]
    common = ["--experiment", "any", f"--out={tmp_path / 'out'}", *folders, f"--prompts=others={prompts}"]
    # In eight steps a frozen lm_head teaches nothing that is seen.
    return SimpleNamespace(out=tmp_path / "out", arguments=[*common, *own, "drafter.train_lm_head=true"])


def in_this_process(_python, job, _more=None):
    job.write()
    worker.run(job)
    return artifacts.read_json(job.folder / jobs.RESULT, "the worker")


def test_a_tiny_race_from_store_to_result(tiny, monkeypatch, capsys):
    monkeypatch.setattr(speedrun, "worker", in_this_process)
    speedrun.main(["train", "ours", "ours:train.lr=1e-6", "--minutes=1e-6", "--steps=8", *tiny.arguments])
    # Every mark is behind the first step, so that drafts are of the start, step 1 and the end.
    drafts = sorted((tiny.out / "ours" / "drafts").iterdir())
    assert [draft.name for draft in drafts] == ["step-000000", "step-000001", "step-000008"]
    first, last = (DrafterCheckpoint.open(drafts[at]).tensors["fc.weight"] for at in (0, -1))
    assert not torch.equal(first, last)

    # All prompts are decoded with every drafter, too, and the counts must agree, or this is refused.
    speedrun.main(["measure", *tiny.arguments, "compare.verified=100", "evaluate.num_prompts=4"])
    result = artifacts.read_json(tiny.out / "speedrun.json", "the test")
    ours, slow = result["trainings"]
    assert result["prompts"] == {"other": 4, "trained": 4}
    assert ours["points"][0]["tokens"] == 0 < ours["points"][-1]["tokens"]
    assert ours["flops_per_token"] == slow["flops_per_token"] > 0
    assert ours["acceptance"]["trained"][0][0] == slow["acceptance"]["trained"][0][0]  # the same first weights
    assert ours["acceptance"]["trained"][-1][0] > slow["acceptance"]["trained"][-1][0]
    assert result["best"] == {"ours": "ours"}
    assert str(tiny.out) not in json.dumps(result)

    capsys.readouterr()
    speedrun.main(["train", "ours", "--minutes=1e-6", "--steps=8", *tiny.arguments])
    assert "finished before" in capsys.readouterr().out
    with pytest.raises(UserError, match="made with other options"):
        speedrun.main(["train", "ours", "--minutes=2", "--steps=8", *tiny.arguments])
