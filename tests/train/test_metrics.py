"""What a run writes down of its steps: rows that a resumed run repeats, spikes, and what a full disk does."""

import errno
import io
import json
import math
import random
from pathlib import Path

import pytest

from eagle31_train.errors import UserError
from train.jsonl import Rows
from train.metrics import Reporter, Spikes


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
    made.metrics.say = made.timings.say = made.said.append
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


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_spike(tmp_path, seed):
    assert fill(tmp_path, losses(400, seed)).said == []


def test_equal_losses_have_spikes_too_but_not_of_a_hair():
    spikes = Spikes()
    for _ in range(Spikes.WINDOW):
        spikes.add(2.0, False)
    assert not spikes.is_spike(2.0 + 1e-9)
    assert not spikes.is_spike(2.19)
    assert spikes.is_spike(2.21)


def test_a_level_that_stays_is_soon_the_usual_one():
    spikes, marked = Spikes(), []
    for step, loss in enumerate(losses(200) + [9 + 0.01 * (i % 7) for i in range(60)]):
        spike = spikes.is_spike(loss)
        marked += [step] * spike
        spikes.add(loss, spike)
    assert 10 < len(marked) < Spikes.WINDOW
    assert marked == list(range(200, 200 + len(marked)))


def test_a_loss_that_is_no_number_is_no_level(tmp_path):
    curve = losses(60)
    made = reporter(tmp_path)
    for step, loss in enumerate(curve, 1):
        made.log(step, {"loss": math.nan if step % 5 == 0 else loss})
    written = read(tmp_path / "metrics.jsonl")
    assert [row["loss"] for row in written[4::5]] == [None] * 12
    assert all(math.isfinite(loss) for loss in made.spikes.losses)
    assert made.said == []
    assert all("train/loss" not in values for step, values in made.accelerator.logged if step % 5 == 0)


# ---------------------------------------------------------------- going on


@pytest.mark.parametrize("done", [0, 5, 61, 62, 100, 119])
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


def test_spikes_are_known_again_from_the_rows_and_not_from_the_start(tmp_path):
    """The check above can fail: a reporter that forgets its losses marks other rows."""
    curve = losses(120, spikes={60, 100})
    fill(tmp_path, curve[:95])
    forgetful = reporter(tmp_path, 95)
    forgetful.spikes = Spikes()
    for step, loss in enumerate(curve[95:], 96):
        forgetful.log(step, {"loss": loss})
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl") if "spike" in row] == [61]


@pytest.mark.parametrize(
    ("tail", "kept", "said"),
    [
        (b"", 3, 0),
        (b'{"step": 4, "loss": 1.0}\n', 3, 0),
        (b'{"step": 3, "hel', 3, 0),
        (b"\x00\x00\x00\x00", 3, 0),
        (b'{"step": 3, "heldout_loss": 2.0}', 4, 0),  # whole but for its end
        (b'oops\n{"step": 3, "heldout_loss": 2.0}\n{"step": 4}\n', 4, 1),
        (b'oops\n{"step": 4}\n', 3, 1),
        (b'["step", 3]\n', 3, 1),
    ],
)
def test_rows_past_the_checkpoint_and_torn_ones_are_cut_off_and_damage_is_named(tmp_path, tail, kept, said):
    path, told, seen = tmp_path / "rows.jsonl", [], []
    good = b"".join(json.dumps({"step": step}).encode() + b"\n" for step in (1, 2, 3))
    path.write_bytes(good + tail)
    file = Rows(path, told.append)
    file.cut(3, seen.append)
    assert len(seen) == kept
    assert len(told) == said
    assert all(f"{path}:4 is damaged" in text for text in told)
    file.append({"step": 4})
    left = path.read_bytes()
    assert left.startswith(good)
    assert left.endswith(b'}\n{"step": 4}\n') or said
    assert left.count(b"\n") == kept + said + 1


def test_rows_that_a_full_disk_took_are_not_missed_without_a_word(tmp_path, capsys):
    fill(tmp_path, losses(20))
    path = tmp_path / "metrics.jsonl"
    reporter(tmp_path, 15)
    assert "lacks" not in capsys.readouterr().out
    reporter(tmp_path, 30)
    assert f"{path} lacks the rows of steps 16 to 30" in capsys.readouterr().out


def test_other_ranks_write_nothing(tmp_path):
    made = reporter(tmp_path, is_main_process=False)
    made.log(1, {"loss": 1.0})
    made.timing(1, {"seconds": 1.0})
    made.close()
    assert list(tmp_path.iterdir()) == []
    assert made.accelerator.logged == []


# ---------------------------------------------------------------- a full disk


class FullDisk(io.FileIO):
    """Takes `room` bytes more, over all files, then fails as a full disk does."""

    room = 0

    def write(self, data):
        taken = min(len(data), FullDisk.room)
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        FullDisk.room -= taken
        return super().write(data[:taken])


def test_rows_wait_for_room_on_a_full_disk_and_none_is_lost(tmp_path, monkeypatch):
    def opened(self, mode="r", *more, **options):
        return FullDisk(self, mode) if mode == "ab" else original(self, mode, *more, **options)

    original = Path.open
    monkeypatch.setattr(Path, "open", opened)
    told = []
    file, whole = Rows(tmp_path / "rows.jsonl", told.append), []
    for step in range(1, 9):
        FullDisk.room = {1: 1000, 2: 5, 5: 40, 6: 1000}.get(step, 0 if step != 7 else 7)
        row = {"step": step, "loss": 1 / step}
        file.append(row)
        whole.append(json.dumps(row) + "\n")
        if step in (1, 6):
            assert file.path.read_text() == "".join(whole)
        elif step < 6:
            assert file.path.read_text() == whole[0], "half a row stayed"
    assert [text.split(" (")[0] for text in told] == [f"{file.path} cannot be written"] * 2
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\), its last rows are lost"):
        file.close()
    FullDisk.room = 1000
    file.close()
    assert file.path.read_text() == "".join(whole)


# ---------------------------------------------------------------- trackers


def test_timings_go_to_a_file_of_their_own_and_to_the_trackers(tmp_path):
    made = reporter(tmp_path)
    made.log(1, {"loss": 2.0})
    made.timing(1, {"seconds": 0.5, "waited": 0.1, "tokens": 100, "memory_bytes": None})
    made.close()
    made.close()
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]
    assert read(tmp_path / "timings.jsonl") == [
        {"step": 1, "seconds": 0.5, "waited": 0.1, "tokens": 100, "memory_bytes": None}
    ]
    assert made.accelerator.logged == [
        (1, {"train/loss": 2.0}),
        (1, {"timing/seconds": 0.5, "timing/waited": 0.1, "timing/tokens": 100, "timing/tokens_per_second": 200.0}),
    ]
