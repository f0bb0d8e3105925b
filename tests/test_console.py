"""What commands show: plain lines in a log, notes on lines of their own, and no traceback where a reader has enough."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from eagle31_train.common import console
from eagle31_train.common.console import Progress, explained, note, tidy
from eagle31_train.common.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


def test_a_log_has_whole_lines_and_notes_between_them(monkeypatch, capsys):
    with Progress(total=4, desc="train", unit="step") as bar:
        bar.update()
    assert capsys.readouterr().err == "", "short work leaves nothing"
    monkeypatch.setattr(console, "EVERY", 0.0)
    with Progress(total=4, desc="train", unit="step") as bar:
        for step in range(3):
            bar.update()
            if step == 1:
                note("train: step 2 was odd")
    said = capsys.readouterr()
    assert said.out == "train: step 2 was odd\n"
    assert "\r" not in said.err
    assert [line.split(", ")[:2] for line in said.err.splitlines()][-1] == ["train: 75 %", "3 of 4"]


def test_libraries_draw_no_bars_in_a_log(capsys):
    logging.enable_progress_bar()
    with tidy():
        assert list(logging.tqdm(range(3))) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def eagle31(*words, cwd=ROOT, **options):
    """A command in a process of its own, as a user starts it."""
    # Without what a container may set: with PYTHONUNBUFFERED nothing is left to be written as Python ends.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment = {**inherited, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "check": False, **options}
    return subprocess.run([sys.executable, "-m", "eagle31_train", *words], cwd=cwd, env=environment, **options)


@pytest.mark.parametrize("command", [["completion", "bash"], ["new", "mine"]])
def test_a_reader_who_has_enough_ends_a_command_without_a_traceback(command, tmp_path):
    read, write = os.pipe()
    os.close(read)
    done = eagle31(*command, cwd=tmp_path, stdout=write, text=True)
    os.close(write)
    assert "Error" not in done.stderr
    assert "Exception" not in done.stderr
    assert done.returncode in (1, 2)


def test_letters_that_the_encoding_of_the_output_lacks_are_spelt():
    done = eagle31("--help", env={"PYTHONIOENCODING": "latin-1"})
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert rb"conversations \u2192" in done.stdout


def test_an_error_output_that_cannot_be_written_keeps_the_status():
    with Path("/dev/full").open("w") as full:
        assert eagle31("nonsense", stderr=full).returncode == 2
    reading, writing = os.pipe()
    os.close(reading)  # whoever read it is gone
    assert eagle31("nonsense", stderr=writing).returncode == 2
    os.close(writing)


def test_streams_that_are_closed_lead_nowhere(tmp_path):
    done = eagle31("new", "mine", cwd=tmp_path, preexec_fn=lambda: [os.close(number) for number in (0, 1, 2)])
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "mine.yaml").is_file()


def test_a_folder_that_is_gone_is_said(tmp_path):
    (folder := tmp_path / "gone").mkdir()
    done = eagle31("new", "mine", cwd=folder, preexec_fn=folder.rmdir)
    said = b"error: the current folder no longer exists: change to another one\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_an_output_that_is_full_is_an_error():
    with Path("/dev/full").open("w") as full:
        done = eagle31("completion", "bash", stdout=full)
    said = b"error: cannot write to standard output (No space left on device): free some space where it goes\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "the device ran out of memory"),
        (torch.AcceleratorError("CUDA error: out of memory"), "the device ran out of memory"),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), None),
        (ImportError("finegrained-fp8 needs kernels"), "install the missing package"),  # in a library's own words
        (ModuleNotFoundError("No module named 'tiktoken'", name="tiktoken"), "install the missing package"),
        (ModuleNotFoundError("No module named 'train.x'", name="train.x"), None),
        (ImportError("cannot import name 'Nothing' from 'torch'", name="torch"), None),
    ],
)
def test_a_full_device_and_a_missing_package_are_one_line_and_mistakes_of_ours_a_traceback(error, said, capsys):
    with pytest.raises(SystemExit if said else type(error)), explained():
        raise error
    assert not said or said in capsys.readouterr().err


def test_of_ranks_that_fail_alike_the_first_speaks_and_none_that_fails_otherwise_is_lost(monkeypatch, tmp_path, capsys):
    def fail(rank, text):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json") if launched else "")
        with pytest.raises(SystemExit), explained():
            raise UserError(text)
        return capsys.readouterr().err

    launched = True
    assert [fail(0, "no data"), fail(1, "no data"), fail(2, "no disk")] == ["error: no data\n", "", "error: no disk\n"]

    said = []

    def speak(text, error):
        said.append(text)
        with (tmp_path / "said").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who says the same waits until it is said

    monkeypatch.setattr(console, "note", speak)
    fail(0, "no luck")
    assert said == ["error: no luck"]
    monkeypatch.undo()
    launched = False
    assert fail(0, "no data") == fail(1, "no data") == "error: no data\n"


@pytest.mark.parametrize(
    ("left", "expected"),
    [({"RANK": "3"}, (0, 1)), ({"RANK": "", "WORLD_SIZE": ""}, (0, 1)), ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8))],
)
def test_a_rank_left_over_says_nothing_of_a_process_alone(monkeypatch, left, expected):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    assert (console.rank(), console.ranks()) == expected
    assert console.is_main() == (expected[0] == 0)
