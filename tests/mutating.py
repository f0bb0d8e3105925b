"""Broken inputs: JSON documents, texts and files, one to three mistakes away from a good one, drawn by hypothesis."""

import copy
import json
import os
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from eagle31_train.common.errors import UserError

ROOM = 2 << 30  # bytes that a case may take beyond what the process has
SECONDS = 20  # of processor time that it may take
LONGEST = 2000  # characters of a line that says what is wrong

DEEP = json.loads("[" * 300 + "]" * 300)
VALUES = [
    None, True, False, 0, 1, -1, 3, 7, 10**15, 2**63, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "yarn", "linear", "default", "64", "../..", "/dev/zero", "\x1b[2J", "\u202e", "\ud800", "x" * 5000,
    [], [[]], [1], [-1], [10**15], ["a"], [None], [1.5], list(range(300)), {}, {"a": 1}, {"": {}}, DEEP,
]  # fmt: skip


def cases(strategy, quick, thorough):
    """A test of one argument, over `quick` cases of a strategy, and over `thorough` among the slow tests.

    The cases are the same in each run: hypothesis draws them by the name of the test.
    """

    def decorate(test):
        many = pytest.param(thorough, marks=[pytest.mark.slow, pytest.mark.timeout(4 * 3600)])

        @pytest.mark.parametrize("count", [quick, many])
        def run(count, request):
            names = test.__code__.co_varnames[1 : test.__code__.co_argcount]
            fixtures = [request.getfixturevalue(name) for name in names]

            def one(case):
                test(case, *fixtures)

            one.__qualname__ = one.__name__ = test.__name__
            options = {"max_examples": count, "derandomize": True, "database": None, "deadline": None}
            health = list(hypothesis.HealthCheck)
            hypothesis.settings(**options, suppress_health_check=health)(hypothesis.given(strategy)(one))()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


@contextmanager
def bounded():
    """Nothing within takes more than ROOM of memory: what does fails with a MemoryError, and the machine goes on. What
    takes more than SECONDS fails the test, by what no `except Exception` catches."""
    before = signal.signal(signal.SIGPROF, lambda *_: pytest.fail(f"a case takes more than {SECONDS} s"))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    there = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (there + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def outcome(call):
    """What a call returns, or the UserError that it ends with: one line, bounded as the memory is."""
    with bounded():
        try:
            return call()
        except UserError as error:
            problem = error
    text = str(problem)
    assert "\n" not in text, text
    assert 0 < len(text) < LONGEST, text[:LONGEST]
    assert problem.__suppress_context__ or problem.__context__ is None
    return problem


UNREADABLE = ["itself", "/dev/zero", "pipe"]  # in the place of a file: links to nowhere, and what never ends


def spoil(path, kind):
    """Put one of UNREADABLE, a dangling link, or an empty folder, in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"itself": path.name, "dangling": "nowhere/at/all"}.get(kind, kind))


def parts(data):
    """Header and tensors of a safetensors file."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def with_header(header, tensors):
    """Such a file."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors


# A tensor of impossibly many rows, none of which has a byte: safetensors takes it, and torch does not.
ENDLESS = {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}


class Acting:
    """Pickled, it makes a folder when it is read."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


# ---------------------------------------------------------------- JSON


def places(value, path=()):
    """The path of every value in a JSON document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


@st.composite
def documents(draw, good, names=(), values=()):
    """A JSON document with up to three mistakes; `names`: of keys that may come beside those there."""
    value = {"top": copy.deepcopy(draw(st.sampled_from(good)))}
    hostile = st.sampled_from([*VALUES, *values]).map(copy.deepcopy)
    for _ in range(draw(st.integers(0, 3))):
        *path, key = draw(st.sampled_from([path for path in places(value) if path]))
        holder = at(value, path)
        what = draw(st.sampled_from(["replace", "replace", "replace", "remove", "wrap", "swap", "add"]))
        if what == "replace":
            holder[key] = draw(hostile)
        elif what == "remove" and path:
            del holder[key]
        elif what == "wrap":
            holder[key] = draw(st.sampled_from([[holder[key]], {"a": holder[key]}, [holder[key]] * 3]))
        elif what == "swap":
            holder[key] = copy.deepcopy(at(value, draw(st.sampled_from([path for path in places(value) if path]))))
        elif isinstance(holder[key], dict):
            holder[key][draw(st.sampled_from([*names, "a", ""]))] = draw(hostile)
    return value.get("top")


@st.composite
def texts(draw, document):
    """The bytes of a document as JSON; now and then cut short, with bytes changed, or none of it."""
    data = json.dumps(draw(document)).encode()
    return draw(torn(data)) if draw(st.integers(0, 4)) == 0 else data


@st.composite
def torn(draw, data):
    """Bytes that are not as they were."""
    at_byte = draw(st.integers(0, max(0, len(data) - 1)))
    what = draw(st.sampled_from(["cut", "change", "insert", "empty", "deep", "twice"]))
    if what == "cut":
        return data[:at_byte]
    if what == "change":
        return data[:at_byte] + bytes([draw(st.integers(0, 255))]) + data[at_byte + 1 :]
    if what == "insert":
        return data[:at_byte] + draw(st.binary(max_size=8)) + data[at_byte:]
    return {"empty": b"", "deep": b'{"a":' * 5000 + b"1" + b"}" * 5000, "twice": data + data}[what]
