"""Steps that are harmed, what they are to come to, and what is to be left of them: for one process, and for several."""

import pytest
import several
import torch
from pipeline import assert_close, assert_equal
from safetensors.torch import load_file

from eagle31_train.common import order
from eagle31_train.common.errors import UserError
from eagle31_train.store import Store

NAN, INF = float("nan"), float("inf")
RECIPE = ["train.checkpoint_every=1", "train.keep_checkpoints=20"]
SHARED = ["train.gradient_accumulation_steps=2"]
# With AdamW's own, 1e-8, an element's first update is as large as any, however small its gradient is: where that is
# next to nothing, rounding decides on it. And a multiple of the right gradient would make the same updates.
EPS = 1e-4
POISONED = 4  # a sample whose states are harmed; step 3 is the first that trains it
HARMS = {
    "inf in a sample": ["sample", POISONED, INF],
    "nan in a loss": ["loss", [3], 1, NAN],
    "nan in a gradient": ["gradient", [3], 1, NAN],
}


def schedule(run):
    """The samples of every step."""
    return order.schedule(Store(run.folder / "run" / "store").split("train").lengths, 60, 0, 3, None)


def fit(run, *options, harm=()):
    """Train by one process, harmed; the message with which it stopped, or None."""
    with pytest.MonkeyPatch.context() as patches:
        several.disturb(patches, harm=harm, eps=EPS)
        try:
            run.fit(*options)
        except UserError as error:
            return str(error)


def assert_left_out(run, first, second, absent):
    """Two steps changed nothing, in whatever launch they were; the third stopped the run."""
    assert [status for status, _ in first] == ["stopped"] * 2
    assert [status for status, _ in second] == ["refused"] * 2
    assert second[0] == second[1]
    samples = sorted(schedule(run)[8])
    assert second[0][1].startswith(f"step 9: loss or gradient is not finite (samples {samples} of the train split)")
    assert "after 2 skipped steps" in second[0][1]
    assert [row["step"] for row in run.rows() if row.get("left_out")] == [3, 6]
    assert len(run.rows()) == 8
    assert_close(run.at(8), absent.at(6), 5e-6)
    assert_equal(run.at(6), run.at(5))


def trainings(kind):
    """Of two processes, as `launch_all` of test_profiles.py takes them."""

    def shared(name, *more, **how):
        return f"{name} {kind}", kind, [*RECIPE, *SHARED, *more], {"eps": EPS, **how}

    return [
        *(shared(name, harm=harm) for name, harm in HARMS.items()),
        shared("left out", "train.skip_nonfinite=2", stop_after=4, harm=["gradient", [3, 6], 1, NAN]),
        shared("left out", "train.skip_nonfinite=2", harm=["gradient", [6, 9], 1, INF]),
        shared("no pairs", harm=["pairs", [3, 6]]),
    ]


def assert_all(came, kind, absent):
    """What two processes left of these trainings; `absent`: one process's run, whose schedule lacks steps 3 and 6."""
    runs = {name: came.runs[f"{name} {kind}"] for name in [*HARMS, "left out", "no pairs"]}
    results = {name: came.results[f"{name} {kind}"] for name in runs}
    for name in HARMS:  # stopped at step 3, and nothing of it is on the disk
        ([(status, message), other],), run = results[name], runs[name]
        assert (status, [status, message]) == ("refused", other)
        assert message.startswith(f"step 3: loss or gradient is not finite (samples {sorted(schedule(run)[2])} of ")
        assert [row["step"] for row in run.rows()] == [1, 2], "and every row is JSON, as `rows` sees"
        assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000001", "step-000002"]
        for file in run.checkpoints.glob("*/*.safetensors"):
            assert all(torch.isfinite(tensor.float()).all() for tensor in load_file(file).values()), file
    assert_left_out(runs["left out"], *results["left out"], absent)
    assert [status for status, _ in results["no pairs"][0]] == ["done"] * 2
    assert [row["step"] for row in runs["no pairs"].rows() if row.get("no_pairs")] == [3, 6]
    assert_close(runs["no pairs"].at(12), absent.at(10), 5e-6)
