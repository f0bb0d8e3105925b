"""What servers answered is kept: a failure, or a drafter that is added, costs nothing that was measured before."""

# ruff: noqa: F811 (fixtures)

import pytest

from eagle31_train.errors import UserError
from eagle31_train.evaluation import serving
from eagle31_train.evaluation.serving import counters
from tests.evaluation.imitated import PROMPTS, Here, asked, config, launch, measure  # noqa: F401 (fixtures)


@pytest.fixture
def started(measure, monkeypatch):
    """Measure; gives the report, and the depths of the servers that were started for it."""
    depths = []

    class Noted(Here):
        def __enter__(self):
            super().__enter__()
            depths.append(self.imitation.depth)
            return self

    monkeypatch.setattr(serving, "Server", Noted)

    def run(*options, **given):
        depths.clear()
        return measure("evaluate.serve_speculative_tokens=[1,3]", *options, **given), list(depths)

    return run


def test_what_was_measured_before_a_failure_is_not_measured_again(started, monkeypatch, capsys):
    real = counters.speculation

    def broken(counted, depth):
        if depth == 3:
            raise UserError("no room")
        return real(counted, depth)

    with monkeypatch.context() as patch:
        patch.setattr(counters, "speculation", broken)
        with pytest.raises(UserError, match="no room"):
            started()
    capsys.readouterr()
    first, depths = started()
    assert depths == [3]
    assert "serve ours, 1 draft tokens: measured before (" in capsys.readouterr().out
    again, depths = started()
    assert (again, depths) == (first, [])
