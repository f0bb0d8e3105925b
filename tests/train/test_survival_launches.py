"""Two processes that are stopped and killed, under several profiles, end as the two that nobody stops."""

import json
import signal
from types import SimpleNamespace

import pytest
import torch
from launching import ROOT, launch
from safetensors.torch import load_file
from watching import updates_of

from train import checkpoint

STEPS = 200
RECIPE = [f"train.max_steps={STEPS}", "train.epochs=1000", "train.eval_every=50"]
TENSORS = ("model.safetensors", "optimizer.safetensors", "rng.safetensors")

pytestmark = pytest.mark.slow


def start(profile, run, *more, **disturbance):
    """One launch, in which every rank notes what it trains."""
    disturbance["ledger"] = str(run.folder / "ledger")
    script = ROOT / "tests" / "surviving.py"
    return launch(profile, run, *RECIPE, *more, script=script, DISTURB=json.dumps(disturbance))


def saved(run):
    return [int(path.name.removeprefix("step-")) for path in checkpoint.in_order(run.checkpoints)]


def result(run):
    """Rows, tensors, and the samples of each update of each rank."""
    tensors = {f"{name} {key}": value for name in TENSORS for key, value in load_file(run.newest() / name).items()}
    updates = [updates_of(run.folder / f"ledger.{rank}") for rank in (0, 1)]
    return SimpleNamespace(rows=run.rows(), tensors=tensors, updates=updates)


def assert_same(ours, theirs, near=1e-6):
    assert ours.updates == theirs.updates
    assert [row.keys() for row in ours.rows] == [row.keys() for row in theirs.rows]
    for our, their in zip(ours.rows, theirs.rows, strict=True):
        for name in their:
            assert our[name] == pytest.approx(their[name], rel=near, abs=near), (their["step"], name)
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert {"rng.safetensors rank0.numpy", "rng.safetensors rank1.torch"} < ours.tensors.keys()
    for name, tensor in theirs.tensors.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(ours.tensors[name], tensor, rtol=0, atol=near, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert torch.equal(ours.tensors[name], tensor), name


@pytest.mark.parametrize("profile", ["ddp", "fsdp2", "zero2", "zero3"])
def test_two_processes_stopped_at_37_and_100_and_killed_after_163_end_the_same(new_run, profile):
    whole = new_run()
    done = start(profile, whole)
    assert done.returncode == 0, done.stderr[-3000:]
    run = new_run()
    for begun, step, rank in ((0, 37, 0), (37, 100, 1)):
        done = start(profile, run, tell_at=[rank, step - begun - 1])
        assert f"saved after step {step} of {STEPS}; the same command goes on" in done.stderr, done.stderr[-3000:]
        assert saved(run)[-1] == step
    death = ("train.checkpoint.Saver._save", "after", 1)  # which the main process alone has
    done = start(profile, run, "train.checkpoint_every=163", kill_at=death)
    assert f"exitcode  : {-signal.SIGKILL}" in done.stderr, done.stderr[-3000:]
    assert saved(run) == [100, 163]
    done = start(profile, run)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "train: going on after step 163 " in done.stdout
    assert_same(result(run), result(whole))
