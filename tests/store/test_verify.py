"""`eagle31 store verify --remove`: what is damaged goes, and extraction makes it anew."""

import pytest
from made import Made, message_of
from pipeline import contents, flip_bit

from eagle31_train.store import codec
from eagle31_train.store.verify import main

MADE = Made(aux_codec="fp8", last_codec="int8")
NAMES = [planned.name for planned in MADE.plan.shards]


@pytest.fixture
def store(tmp_path):
    MADE.write(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def said(capsys):
    """said(*arguments): (exit status, lines on stdout, lines on stderr)."""

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err.splitlines()

    return run


def spoil(store):
    flip_bit(store / NAMES[0])
    contents = [(store / name).read_bytes() for name in NAMES[2:4]]
    for name, data in zip(NAMES[2:4], reversed(contents), strict=True):
        (store / name).write_bytes(data)
    (store / NAMES[4]).unlink()
    lines = (store / "shards.jsonl").read_bytes().splitlines(keepends=True)
    (store / "shards.jsonl").write_bytes(b"".join([lines[0], lines[2], lines[3], lines[4]]))


def test_states_that_are_no_numbers_are_named_by_their_sample(tmp_path, said, monkeypatch):
    made = Made(aux_codec="fp8", last_codec="int8")
    planned = next(shard for shard in made.plan.of("train") if shard.end - shard.first > 1)
    made.of(planned)[1].aux[0] = float("nan")
    message = message_of(made.write, tmp_path / "refused")
    assert f"{planned.name}: sample {planned.first + 1}: the target's hidden states are not finite" in message
    monkeypatch.setattr(codec, "_finite", lambda values: values)
    made.write(tmp_path / "store")
    status, out, _ = said("verify", tmp_path / "store")
    assert status == 1
    assert out[0].endswith(f"{planned.name} holds states that are not finite, in sample {planned.first + 1} of train")
    assert out[1].split(": ")[1] == "problems"


def test_what_is_removed_is_made_anew_and_nothing_else(store, said):
    whole = contents(store)
    spoil(store)
    status, out, _ = said("verify", store, "--remove")
    assert status == 1
    assert out[-1].startswith("removed: 3 files; ")
    MADE.write(store)
    assert contents(store) == whole
