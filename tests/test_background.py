"""A thread that runs one call at a time, and of whose failure somebody hears."""

from threading import Event

import pytest

from eagle31_train.common.background import Background

LONG = 30  # seconds after which something that was to happen did not


class Broken(Exception):
    pass


def fail():
    raise Broken


@pytest.mark.parametrize("look", [lambda calls: calls.start(print), Background.wait, Background.close])
def test_who_looks_next_is_told_of_a_failure_and_nobody_after(look):
    calls = Background("test")
    calls.start(fail)
    with pytest.raises(Broken):
        look(calls)
    calls.close()


def test_a_failure_is_told_of_as_soon_as_it_is_there_and_nobody_waits_for_it():
    go = Event()
    with Background("test") as calls:
        calls.check()
        calls.start(lambda: go.wait(LONG) and fail())
        calls.check()
        go.set()
        calls._call.exception()
        with pytest.raises(Broken):
            calls.check()
        calls.check()


def test_a_call_begins_when_the_one_before_has_ended():
    go, ended = Event(), []

    def call():
        go.wait(LONG)
        ended.append(1)

    with Background("test") as calls:
        calls.start(call)
        calls._call.add_done_callback(lambda _: ended.append(2))
        go.set()
        calls.start(print)
        assert ended[0] == 1


def test_a_block_that_fails_does_so_with_its_own_error_after_its_call_has_ended():
    """Else a file would still be written while others clean up."""
    go, ended = Event(), []

    def call():
        go.wait(LONG)
        ended.append(1)
        raise Broken

    def block():
        with Background("test") as calls:
            calls.start(call)
            go.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        block()
    assert ended == [1]
