"""A long run of tiny steps holds what it held at its beginning: memory, open files and threads."""

import json
from collections import Counter
from functools import reduce

import pytest
from pipeline import options
from surviving import training

WORKERS = 2


def soak(run, output, steps, warm_up, every, *more, **disturbance):
    """What a run holds, every so many steps after its warm-up, with the saves and evaluations between them."""
    held = output.with_name("held")
    arguments = options(
        run.folder,
        f"target.path={run.extracted / 'target'}",
        f"train.max_steps={steps}",
        "train.epochs=1000000",
        f"train.workers={WORKERS}",
        *more,
    )
    with training(arguments, output, measure=[str(held), every], **disturbance) as process:
        process.join()
    assert process.exitcode == 0, output.read_text()[-3000:]
    rows = [json.loads(line) for line in held.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(every, steps + 1, every))
    return [row for row in rows if row["step"] > warm_up]


def held_throughout(rows):
    """What a part of the run never lets go: open files (without the numbers of pipes and sockets), and threads.

    What a save in the background has open for a moment is none of it.
    """
    files = (Counter(name if name.startswith("/") else name.partition(":")[0] for name in row["files"]) for row in rows)
    return reduce(Counter.__and__, files), min(row["threads"] for row in rows)


def assert_constant(rows):
    tenth = len(rows) // 10
    (files, threads), (later_files, later_threads) = (held_throughout(part) for part in (rows[:tenth], rows[-tenth:]))
    assert later_files - files == Counter()
    assert later_threads == threads


SHORT = ("train.checkpoint_every=5", "train.eval_every=10")


def test_files_and_threads_do_not_grow(new_run, tmp_path):
    assert_constant(soak(new_run(), tmp_path / "output", 130, 30, 1, *SHORT))


def test_a_file_that_every_save_leaves_open_is_found(new_run, tmp_path):
    rows = soak(new_run(), tmp_path / "output", 130, 30, 1, *SHORT, leak_at="train.checkpoint.Saver._save")
    with pytest.raises(AssertionError, match="/dev/zero"):
        assert_constant(rows)


@pytest.mark.slow
def test_memory_files_and_threads_of_10000_steps(new_run, tmp_path):
    options = ("train.checkpoint_every=500", "train.eval_every=1000")
    rows = soak(new_run(), tmp_path / "output", 10_000, 1000, 10, *options)
    assert_constant(rows)
    tenth = len(rows) // 10
    # The least and the most of a part, since a save in the background holds a copy for a moment.
    for level in (min, max):
        first, last = (level(row["bytes"] for row in part) for part in (rows[:tenth], rows[-tenth:]))
        print(f"{level.__name__}: {first:,} bytes after the warm-up, {last:,} in the end")
        assert last < 1.01 * first
