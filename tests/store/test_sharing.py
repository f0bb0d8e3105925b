"""Processes that share a cache: each file comes once, the bound holds for all together, and a death holds nobody up."""

import multiprocessing

import pytest
import sharers
from sharers import LONG, NAMES, content_of, downloads, lay, shared

FORK = multiprocessing.get_context("forkserver")  # a child of a process that has imported, and done nothing else
FORK.set_forkserver_preload(["eagle31_train.store"])


@pytest.fixture
def answers(tmp_path):
    """`answers(function, arguments)`: what that function answers, in one process per tuple of arguments."""
    lay(tmp_path)
    started = []

    def answers(function, arguments):
        queue = FORK.Queue()
        processes = [FORK.Process(target=function, args=(tmp_path, *given, queue)) for given in arguments]
        for process in processes:
            process.start()
            started.append(process)
        found = [queue.get(timeout=LONG) for _ in processes]
        for process in processes:
            process.join(LONG)
        assert [process.exitcode for process in processes] == [0] * len(processes)
        return found

    yield answers
    for process in started:
        process.kill()


def test_many_that_read_at_random_keep_the_bound_and_get_on(answers, tmp_path):
    most = answers(sharers.read_at_random, [(400, seed) for seed in range(3)])
    assert 200 < max(most) <= 400
    assert len(downloads(tmp_path)) > len(NAMES)  # files left and came again


def test_what_a_killed_process_was_fetching_is_fetched_by_who_waits(tmp_path):
    lay(tmp_path)
    half = FORK.Event()
    other = FORK.Process(target=sharers.stall, args=(tmp_path, half))
    other.start()
    assert half.wait(LONG)
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        other.kill()
        other.join(LONG)

    try:
        assert shared(tmp_path, 1000, sleep=sleep).local("a").read_bytes() == content_of("a")
    finally:
        other.kill()
    assert len(naps) == 1
    assert downloads(tmp_path) == ["a", "a"]
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] in (["a", ".lock"], [".lock", "a"])
