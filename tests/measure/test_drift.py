"""Drift of many prompts: slots count alike, whichever prompt they are of."""

import numpy as np
import pytest
import torch
from conftest import make_document, make_objective, make_shape

from eagle31_train.measure.drift import MEASURES, drift_sums
from eagle31_train.measure.results import Drift, Measured, Trajectory
from eagle31_train.measure.unrolled import unroll

DEPTH = 3


def constant(value, depth=DEPTH):
    return Drift(*([value + step for step in range(depth)] for _ in MEASURES))


def measured(slots, drift):
    return Measured("p", "made", slots + 1, [0] * slots, drift)


def mean_drift(measured):
    """Over all slots of all prompts, as tables tell it."""
    sums, slots = drift_sums(measured)
    return Drift(**{name: (sums[name].sum(0) / slots.sum()).tolist() for name in MEASURES})


def test_prompts_weigh_as_many_slots_as_they_have():
    prompts = [measured(30, constant(1.0)), measured(10, constant(5.0))]
    for name in MEASURES:
        assert getattr(mean_drift(prompts), name) == [2.0, 3.0, 4.0], name


def test_an_output_cut_in_two_drifts_as_the_whole():
    """The second half's prompt is longer, so only what does not depend on the boundary can be compared."""
    objective = make_objective(make_shape())
    document = make_document(make_shape(), 30, torch.Generator().manual_seed(0))
    told = document.tokens.tolist()

    def part(begin, end):
        """Slots at begin-1 .. end-2 of the same sequence."""
        trajectory = Trajectory(told[:begin], told[begin : end + 1], told[end + 1 :], document.aux)
        accepted, drift = unroll(objective.drafter, objective.teacher.target_ids, trajectory, DEPTH, drift=True)
        return Measured("p", "made", len(trajectory.output), accepted, drift)

    halves, whole = mean_drift([part(6, 9), part(9, 25)]), part(6, 25).drift
    for name in ("sink", "own", "rms", "entropy"):
        assert getattr(halves, name) == pytest.approx(getattr(whole, name), rel=1e-12), name
    both = np.add(halves.prompt, halves.verified)
    assert both == pytest.approx(np.add(whole.prompt, whole.verified), rel=1e-12)


def test_prompts_without_drift_are_left_out():
    told = measured(4, constant(2.0))
    assert mean_drift([measured(0, None), told]) == told.drift
    for nobody in ([measured(0, None)], []):
        assert len(drift_sums(nobody)[1]) == 0


def test_sums_of_prompts_drawn_again_are_means_over_their_slots():
    prompts = [measured(3, constant(1.0)), measured(1, constant(9.0)), measured(0, None)]
    sums, slots = drift_sums(prompts)
    assert slots.tolist() == [3, 1]
    drawn = np.array([0, 0, 1])
    assert (sums["rms"][drawn].sum(0) / slots[drawn].sum()).tolist() == [15 / 7, 22 / 7, 29 / 7]


def test_drifts_of_unlike_depths_do_not_mix():
    with pytest.raises(ValueError, match="shape"):
        mean_drift([measured(2, constant(1.0)), measured(2, constant(1.0, depth=2))])
