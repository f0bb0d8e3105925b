"""What a run writes down of its steps: rows that a resumed run repeats."""

from types import SimpleNamespace

import pytest

from train.metrics import Reporter

# An accelerator as a reporter sees it.
RECORDER = SimpleNamespace(is_main_process=True, log=lambda values, step: None)


def fill(folder, steps, done=0):
    """Report steps, as a launch that goes on after those that are done."""
    reporter = Reporter(RECORDER, folder, done, 1000)
    for step in range(done + 1, steps + 1):
        reporter.log(step, {"loss": 1 / step})
        reporter.timing(step, {"seconds": 0.5, "waited": 0.1, "aside": 0.0, "tokens": 100, "memory_bytes": None})
        if step % 10 == 0:
            reporter.log(step, {"heldout_loss": 2 / step})
    reporter.close()


@pytest.mark.parametrize("done", [0, 61, 119])
def test_rows_after_a_stop_are_the_same_bytes(tmp_path, done):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    fill(whole, 120)
    fill(stopped, 120)
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"step": 120, "lo')
    fill(stopped, 120, done)
    for name in ("metrics.jsonl", "timings.jsonl"):
        assert (stopped / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(
    "damaged", [b'{"step": ', b'{"step": Infinity}', b'{"step": 1e999}', b"[" * 5000, b"[1]", b"\xff"], ids=range(6)
)
def test_damaged_and_missing_rows_are_named_when_a_run_goes_on(tmp_path, capsys, damaged):
    fill(tmp_path, 30)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    lines[11] = damaged + b"\n"
    file.write_bytes(b"".join(lines))
    Reporter(RECORDER, tmp_path, 20, 1000).close()
    assert capsys.readouterr().out == f"{file}:12 is damaged, and its row is lost: remove the line\n"
    assert file.read_bytes() == b"".join(lines[:22])
    file.write_bytes(b"".join(lines[:5]))
    Reporter(RECORDER, tmp_path, 20, 1000).close()
    assert capsys.readouterr().out == f"{file} lacks the rows of steps 6 to 20\n"
