"""What a run writes down of its steps: rows that a resumed run repeats."""

import math
import random

import pytest
import torch

from train.metrics import Reporter, summarise


class Recorder:
    """An accelerator as a reporter sees it."""

    is_main_process = True

    def log(self, values, step):
        pass


def losses(count):
    """A noisy falling curve."""
    rng = random.Random(0)
    return [(3 + 5 * math.exp(-step / 40)) * rng.uniform(0.9, 1.1) for step in range(count)]


def fill(folder, curve, start=0):
    made = Reporter(Recorder(), folder, start, 1000)
    for step, loss in enumerate(curve[start:], start + 1):
        made.log(step, {"loss": loss, "acceptance_estimate": 1 + 1 / loss})
        made.timing(step, {"seconds": 0.5, "waited": 0.1, "tokens": 100, "memory_bytes": None})
        if step % 10 == 0:
            made.log(step, {"heldout_loss": loss * 1.1})
    made.close()


def test_a_depth_that_no_slot_reaches_has_no_share_and_not_none_right():
    sums = torch.ones(8, 2)
    sums[:, 1] = 0
    found = summarise(sums)
    for name in ("loss", "accuracy", "prefix", "rms"):
        assert found[f"{name}_at_depth"] == [1, None]
    assert found["acceptance_estimate"] == 2


# ---------------------------------------------------------------- going on


@pytest.mark.parametrize("done", [0, 61, 119])
def test_rows_after_a_stop_are_the_same_bytes(tmp_path, done):
    curve = losses(120)
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
