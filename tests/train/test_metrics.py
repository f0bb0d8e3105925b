"""What a run writes down of its steps: rows that a resumed run repeats, and spikes."""

import json
import math
import random

import pytest
import torch

from train.metrics import Reporter, Spikes, summarise


class Recorder:
    """An accelerator as a reporter sees it."""

    def __init__(self, is_main_process=True):
        self.is_main_process, self.logged = is_main_process, []

    def log(self, values, step):
        self.logged.append((step, values))


def reporter(folder, step=0, **options):
    made = Reporter(Recorder(**options), folder, step, 1000)
    made.said = []
    made.note = made.said.append
    return made


def losses(count, seed=0, spikes=()):
    """A noisy falling curve with spikes of three times the level."""
    rng = random.Random(seed)
    falling = [(3 + 5 * math.exp(-step / 40)) * rng.uniform(0.9, 1.1) for step in range(count)]
    return [loss * (3 if step in spikes else 1) for step, loss in enumerate(falling)]


def fill(folder, curve, start=0, timed=True):
    made = reporter(folder, start)
    for step, loss in enumerate(curve[start:], start + 1):
        made.log(step, {"loss": loss, "acceptance_estimate": 1 + 1 / loss})
        if timed:
            made.timing(step, {"seconds": 0.5, "waited": 0.1, "tokens": 100, "memory_bytes": None})
        if step % 10 == 0:
            made.log(step, {"heldout_loss": loss * 1.1})
    made.close()
    return made


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_depth_that_no_slot_reaches_has_no_share_and_not_none_right():
    sums = torch.ones(8, 2)
    sums[:, 1] = 0
    found = summarise(sums)
    for name in ("loss", "accuracy", "prefix", "rms"):
        assert found[f"{name}_at_depth"] == [1, None]
    assert found["acceptance_estimate"] == 2


# ---------------------------------------------------------------- spikes


def test_a_loss_far_above_the_steps_before_is_marked_and_said_once(tmp_path):
    curve = losses(200, spikes={60, 61, 62, 150})
    made = fill(tmp_path, curve)
    marked = [row["step"] for row in read(tmp_path / "metrics.jsonl") if "spike" in row]
    assert marked == [61, 62, 63, 151]
    assert all(row["spike"] is True for row in read(tmp_path / "metrics.jsonl") if "spike" in row)
    assert [text.split(",")[0] for text in made.said] == [
        f"step 61: the loss jumped to {curve[60]:.3f}",
        f"step 151: the loss jumped to {curve[150]:.3f}",
    ]


# ---------------------------------------------------------------- going on


@pytest.mark.parametrize("done", [0, 61, 119])
def test_rows_after_a_stop_are_the_same_bytes(tmp_path, done):
    curve = losses(120, spikes={60, 61, 100})
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    fill(whole, curve)
    fill(stopped, curve)
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"step": 120, "lo')
    fill(stopped, curve, done)
    for name in ("metrics.jsonl", "timings.jsonl"):
        assert (stopped / name).read_bytes() == (whole / name).read_bytes()


def test_a_damaged_line_before_the_last_is_named(tmp_path):
    curve = losses(30)
    fill(tmp_path, curve)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[11] = lines[11][:9] + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))

    # The reporter says it as it is made.
    class Listening(Reporter):
        def note(self, text):
            said.append(text)

    said = []
    Listening(Recorder(), tmp_path, 20, 1000).close()
    assert said == [f"{tmp_path}/metrics.jsonl:12 is damaged, and its row is lost: remove the line"]
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(lines[:22])


def test_spikes_are_known_again_from_the_rows_and_not_from_the_start(tmp_path):
    """The check above can fail: a reporter that forgets its losses marks other rows."""
    curve = losses(120, spikes={60, 100})
    fill(tmp_path, curve[:95])
    forgetful = reporter(tmp_path, 95)
    forgetful.spikes = Spikes()
    for step, loss in enumerate(curve[95:], 96):
        forgetful.log(step, {"loss": loss})
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl") if "spike" in row] == [61]
