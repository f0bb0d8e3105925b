"""A loss or gradient that is not finite, on any rank, stops all of them before it harms; or its step is left out."""

from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import several
import torch
from pipeline import assert_close, assert_equal
from safetensors.torch import load_file
from several import training

from eagle31_train.errors import UserError
from eagle31_train.store import Store
from train import order

NAN, INF = float("nan"), float("inf")
RECIPE = ["train.checkpoint_every=1", "train.keep_checkpoints=20"]
SHARED = ["train.gradient_accumulation_steps=2"]
POISONED = 4  # a sample whose states are harmed; step 3 is the first that trains it
ALL = ("ddp", "fsdp2", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
HARMS = {
    "a sample's states are inf": ["sample", POISONED, INF],
    "a loss is nan": ["loss", [3], 1, NAN],
    "a loss is inf": ["loss", [3], 1, INF],
    "a gradient is nan": ["gradient", [3], 1, NAN],
    "a gradient is inf": ["gradient", [3], 1, INF],
}


def plan(run):
    """The samples of every step, and their lengths."""
    lengths = Store(run.folder / "run" / "store").split("train").lengths
    return order.schedule(lengths, 60, 0, 3, None), lengths


def guilty(run, harm, ranks, parts):
    """Which samples step 3 should be stopped for: the harmed one's micro-batch, a rank's, or nobody knows whose."""
    batches, lengths = plan(run)
    shares = order.share(batches[2], lengths, ranks * parts)
    if harm[0] == "sample":
        return next(sorted(part) for part in shares if POISONED in part)
    return sorted(i for part in shares[harm[2] :: ranks] for i in part) if harm[0] == "loss" else sorted(batches[2])


def assert_stopped(run, message, harm, ranks, parts):
    """Stopped at step 3, for the right samples, and nothing of it is on the disk."""
    assert message.startswith(f"step 3: loss or gradient is not finite (samples {guilty(run, harm, ranks, parts)} of ")
    assert "\n" not in message
    assert [row["step"] for row in run.rows()] == [1, 2], "and every row is JSON, see not_a_number"
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000001", "step-000002"]
    for file in run.checkpoints.glob("*/*.safetensors"):
        assert all(torch.isfinite(tensor.float()).all() for tensor in load_file(file).values()), file


def fit(run, *options, harm=()):
    """Train by one process, harmed; the message with which it stopped, or None."""
    with ExitStack() as patches:
        several.disturb(patches, harm=harm)
        try:
            run.fit(*options)
        except UserError as error:
            return str(error)


def at(run, step):
    return [load_file(run.checkpoints / f"step-{step:06d}" / f"{name}.safetensors") for name in ("model", "optimizer")]


# ---------------------------------------------------------------- one process


def test_a_step_that_is_left_out_is_as_if_it_were_in_no_schedule(new_run):
    run, absent = new_run(), new_run()
    assert fit(run, *RECIPE, "train.skip_nonfinite=2", harm=["gradient", [3, 6], 0, NAN]) is None
    assert fit(absent, *RECIPE, harm=["absent", [3, 6]]) is None
    for ours, theirs in zip(at(run, 12), at(absent, 10), strict=True):
        assert_equal(ours, theirs)
    for ours, theirs in zip(at(run, 3), at(run, 2), strict=True):
        assert_equal(ours, theirs)
    left_out = [row for row in run.rows() if row.get("left_out")]
    assert [row["step"] for row in left_out] == [3, 6]
    assert not any("loss" in row for row in left_out)
    trained = [row["loss"] for row in run.rows() if "loss" in row]
    assert trained == absent.losses()
    assert run.manifest()["left_out"] == [3, 6]
    assert run.manifest()["updates"] == absent.manifest()["updates"] == 10
    assert run.manifest()["pairs"] == absent.manifest()["pairs"]


# ---------------------------------------------------------------- two processes


@dataclass
class Came:
    """Runs by name, and what each of their trainings came to on each rank."""

    runs: dict
    results: dict


def launch(copy_of, folder, kinds, harms, profile):
    """Under each kind: every harm, and two harmed steps that are left out, with a third after a stop."""
    runs, trainings = {}, []

    def add(name, kind, *options, **how):
        if name not in runs:
            runs[name] = copy_of(folder / " ".join(name).replace("'", ""))
        trainings.append((name, training(kind, runs[name], *RECIPE, *SHARED, *options, **how)))

    for kind in kinds:
        for name in harms:
            add((kind, name), kind, harm=HARMS[name])
        skip = "train.skip_nonfinite=2"
        add((kind, "left out"), kind, skip, stop_after=4, harm=["gradient", [3, 6], 1, NAN])
        add((kind, "left out"), kind, skip, harm=["gradient", [6, 9], 1, INF])
    results = several.train(folder / "results", [one for _, one in trainings], profile=profile)
    by_name = {}
    for (name, _), result in zip(trainings, results, strict=True):
        by_name.setdefault(name, []).append(result)
    return Came(runs, by_name)


def assert_all_stopped(came, kind, name):
    [[first, second]] = came.results[kind, name]
    assert first == second
    assert first[0] == "refused"
    assert_stopped(came.runs[kind, name], first[1], HARMS[name], 2, 2)


def assert_left_out(came, kind, absent):
    """Two steps changed nothing, in whatever launch they were; the third stopped the run."""
    run, (first, second) = came.runs[kind, "left out"], came.results[kind, "left out"]
    assert [status for status, _ in first] == ["stopped"] * 2
    assert [status for status, _ in second] == ["refused"] * 2
    assert second[0] == second[1]
    samples = sorted(plan(run)[0][8])
    assert second[0][1].startswith(f"step 9: loss or gradient is not finite (samples {samples} of the train split)")
    assert "after 2 steps that were left out" in second[0][1]
    assert [row["step"] for row in run.rows() if row.get("left_out")] == [3, 6]
    assert len(run.rows()) == 8
    for ours, theirs in zip(at(run, 8), at(absent, 6), strict=True):
        assert_close(ours, theirs, 5e-6)
    for ours, theirs in zip(at(run, 6), at(run, 5), strict=True):
        assert_equal(ours, theirs)


@pytest.fixture(scope="module")
def absent(copy_of, tmp_path_factory):
    """One process, in whose schedule those two steps are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        run = copy_of(tmp_path_factory.mktemp("absent"))
        assert fit(run, *RECIPE, harm=["absent", [3, 6]]) is None
        return run


FEW = ("a sample's states are inf", "a gradient is nan")


def test_what_one_rank_meets_stops_both_or_is_left_out_by_both(copy_of, tmp_path, absent):
    came = launch(copy_of, tmp_path, ["zero2"], FEW, "zero2")
    for name in FEW:
        assert_all_stopped(came, "zero2", name)
    assert_left_out(came, "zero2", absent)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_every_harm_under_every_profile(copy_of, tmp_path, absent, kind):
    came = launch(copy_of, tmp_path, [kind], HARMS, kind)
    for name in HARMS:
        assert_all_stopped(came, kind, name)
    assert_left_out(came, kind, absent)
