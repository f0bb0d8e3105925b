"""The losses of a hundred steps are those that were measured when they were last meant to change."""

import json

import golden
import pytest

KEPT = json.loads(golden.FILE.read_text())["losses"]
# One or two threads give the same bits. Other instruction sets (AVX-512, AVX2, SSE), kernels (oneDNN or not) and
# splits of a batch round otherwise: up to 3e-7 in a hundred steps. This leaves room for CPUs that were not tried.
TOLERANCE = 1e-5


def test_the_losses_of_a_hundred_steps_are_the_golden_ones(tmp_path):
    """If they were meant to change: `python tests/golden.py` measures them anew."""
    losses = golden.losses(tmp_path)
    assert len(losses) == len(KEPT) == golden.STEPS
    assert losses == pytest.approx(KEPT, rel=TOLERANCE)
    assert losses[-1] < losses[0] - 1, "and something was learnt: more than a nat"


@pytest.mark.slow
def test_a_ten_thousandth_of_the_learning_rate_is_noticed(tmp_path):
    losses = golden.losses(tmp_path, "train.lr=0.0020002")
    assert losses != pytest.approx(KEPT, rel=TOLERANCE)
