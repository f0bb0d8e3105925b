"""A step that is not finite, or has nothing to train, is left out; test_profiles.py has what stops two processes."""

import pytest
from guarding import NAN, RECIPE, fit
from pipeline import assert_equal


@pytest.mark.parametrize(
    ("mark", "listed", "harm"),
    [("left_out", "left_out", ["gradient", [3, 6], 0, NAN]), ("no_pairs", "without_pairs", ["pairs", [3, 6]])],
)
def test_a_step_that_is_left_out_is_as_if_it_were_in_no_schedule(new_run, absent, capsys, mark, listed, harm):
    run = new_run()
    assert fit(run, *RECIPE, "train.skip_nonfinite=2", harm=harm) is None
    for ours, theirs in zip(run.at(12), absent.at(10), strict=True):
        assert_equal(ours, theirs)
    for ours, theirs in zip(run.at(3), run.at(2), strict=True):
        assert_equal(ours, theirs)
    left_out = [row for row in run.rows() if row.get(mark)]
    assert [row["step"] for row in left_out] == [3, 6]
    assert not any("loss" in row for row in left_out)
    assert run.losses() == absent.losses()
    assert run.manifest()[listed] == [3, 6]
    assert run.manifest()["updates"] == absent.manifest()["updates"] == 10
    assert run.manifest()["pairs"] == absent.manifest()["pairs"]
    said = "".join(capsys.readouterr())
    assert ("step 3: left out, loss or gradient is not finite" in said) == (mark == "left_out")
    assert ("train: 2 of 12 steps had a loss or gradient that is not finite" in said) == (mark == "left_out")
    assert ("step 3: nothing to train, so nothing was updated" in said) == (mark == "no_pairs")
    assert ("train: 2 of 12 steps had nothing to train" in said) == (mark == "no_pairs")
