"""`python -m eagle31_train.store`: what it says of whole, begun and damaged stores, and what --remove makes of them."""

import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from made import LENGTHS, Made
from pipeline import contents, flip_bit, make_run, tiny_config

from eagle31_train import artifacts
from eagle31_train.extract import extract
from eagle31_train.place import LocalPlace, open_place
from eagle31_train.store.__main__ import main
from eagle31_train.store.info import histogram, human
from eagle31_train.store.sealed import unseal
from eagle31_train.store.stream import consume
from eagle31_train.store.verify import problems

MADE = Made(aux_codec="fp8", last_codec="int8")
NAMES = [planned.name for planned in MADE.plan.shards]
SAMPLES = [planned.samples() for planned in MADE.plan.shards]


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


# ---------------------------------------------------------------- whole


def test_a_whole_store_is_one_line_and_zero(store, said):
    before = contents(store)
    status, out, err = said("verify", store)
    assert (status, err) == (0, [])
    size = sum(len(data) for name, data in before.items() if name in NAMES)
    assert len(out) == 1
    assert out[0].startswith(
        f"{store}: complete and whole; 5 shards checked, 9 samples, 55 tokens, {human(size)} at "
    ), "5 and 3 held-out samples and their tokens"
    assert out[0].endswith("B/s") or out[0].endswith("bytes/s")
    assert said("verify", store, "--remove")[0] == 0
    assert contents(store) == before


def test_a_begun_store_is_whole_as_far_as_it_goes(tmp_path, said):
    MADE.write(tmp_path, stop_after=3)
    status, out, _ = said("verify", tmp_path)
    assert status == 0
    assert out[0].startswith(f"{tmp_path}: unfinished, and whole as far as it goes; 3 shards checked, ")
    assert out[0].endswith("; 2 shards still to come")
    flip_bit(tmp_path / NAMES[1])
    status, out, _ = said("verify", tmp_path)
    assert status == 1
    assert out[0].startswith(f"{tmp_path}/{NAMES[1]} ({SAMPLES[1]}) ")


def test_a_used_up_shard_is_counted_and_not_missing(tmp_path, said):
    MADE.write(tmp_path, stop_after=4)
    consume(LocalPlace("", tmp_path), MADE.plan.shards[2:3], "t" * 16, False)
    status, out, _ = said("verify", tmp_path)
    assert status == 0
    assert out[0].endswith("; 1 shards used up by a training; 1 shards still to come")
    MADE.write(tmp_path)
    assert said("verify", tmp_path)[0] == 0
    (tmp_path / NAMES[3]).unlink()
    status, out, _ = said("verify", tmp_path)
    assert (status, out[0]) == (1, f"{tmp_path}/{NAMES[3]} ({SAMPLES[3]}) is missing")


# ---------------------------------------------------------------- damaged


def spoil(store):
    """Several faults at once; what each must be called, in order."""
    flip_bit(store / NAMES[0])
    contents = [(store / name).read_bytes() for name in NAMES[2:4]]
    for name, data in zip(NAMES[2:4], reversed(contents), strict=True):
        (store / name).write_bytes(data)
    shutil.copy(store / NAMES[1], store / "shards" / "train-00099.safetensors")
    (store / NAMES[4]).unlink()
    lines = (store / "shards.jsonl").read_bytes().splitlines(keepends=True)
    (store / "shards.jsonl").write_bytes(b"".join([lines[0], lines[2], lines[3], lines[4]]))
    return [
        f"{store}/shards.jsonl has ",
        f"{store}/shards.jsonl has no line for {NAMES[1]} ({SAMPLES[1]})",
        f"{store}/{NAMES[0]} ({SAMPLES[0]}) is not as it was written (its checksum differs)",
        f"{store}/{NAMES[2]} ({SAMPLES[2]}) has ",
        f"{store}/{NAMES[3]} ({SAMPLES[3]}) has ",
        f"{store}/{NAMES[4]} ({SAMPLES[4]}) is missing",
        f"{store}/shards/train-00099.safetensors is no file of this store",
        f"{store}: 7 problems; ",
    ]


def test_everything_wrong_is_a_line_of_its_own(store, said):
    expected = spoil(store)
    before = contents(store)
    status, out, err = said("verify", store)
    assert (status, err) == (1, [])
    for line, start in zip(out, expected, strict=False):
        assert line.startswith(start)
    assert out[3].endswith(f"; it is {NAMES[3]} under another name")
    assert out[4].endswith(f"; it is {NAMES[2]} under another name")
    assert f"`python -m eagle31_train.store verify {store} --remove` takes away what is damaged" in out[-1]
    assert len(out) == len(expected) + 1
    assert contents(store) == before
    assert list(problems(LocalPlace(str(store), store))) == out[:7]


def test_a_copy_is_called_one(store, said):
    shutil.copy(store / NAMES[1], store / "shards" / "train-00099.safetensors")
    status, out, _ = said("verify", store)
    assert status == 1
    assert (
        out[0]
        == f"{store}/shards/train-00099.safetensors is no file of this store, but a copy of {NAMES[1]}: remove it"
    )


def test_what_is_removed_is_made_anew_and_nothing_else(store, said, monkeypatch):
    whole = contents(store)
    spoil(store)
    status, out, _ = said("verify", store, "--remove")
    assert status == 1
    assert out[-1].startswith("removed: shards 4, other files 1; ")
    assert out[-1].endswith("makes anew: shards 5, and no others")
    status, out, _ = said("verify", store)
    assert (status, out[0].split("; ")[-1]) == (0, "5 shards still to come")
    MADE.write(store)
    assert contents(store) == whole


def test_one_damaged_shard_is_one_shard_to_make(store, said):
    whole = contents(store)
    flip_bit(store / NAMES[3])
    assert said("verify", store, "--remove")[1][-1].endswith("makes anew: shards 1, and no others")
    left = contents(store)
    assert set(whole) - set(left) == {"manifest.json", "shards.jsonl", NAMES[3]}
    assert set(left) - set(whole) == {planned.line for planned in MADE.plan.shards if planned.name != NAMES[3]}
    MADE.write(store)
    assert contents(store) == whole


@pytest.mark.parametrize("name", ["plan.json", "provenance.json"])
def test_without_the_plan_nothing_is_removed_and_extraction_makes_it(store, said, name):
    whole = contents(store)
    flip_bit(store / name)
    status, out, _ = said("verify", store, "--remove")
    assert status == 1
    assert any(f"{name} is not there whole, and no shard can be checked without it" in line for line in out)
    assert out[-1].startswith("nothing was removed: run `python -m eagle31_train.extract` again")
    MADE.write(store)
    assert contents(store) == whole


def test_extraction_makes_anew_exactly_what_was_removed(tmp_path, said, capsys):
    make_run(tmp_path)
    config = tiny_config(tmp_path, "store.aux_codec=fp8", "store.last_codec=int8")
    extract(config)
    store = tmp_path / "run" / "store"
    whole = contents(store)
    assert said("verify", store)[0] == 0
    damaged = ["shards/heldout-00000.safetensors", "shards/train-00002.safetensors"]  # one that the gate compares
    for name in damaged:
        flip_bit(store / name)
    capsys.readouterr()
    extract(config)
    assert "up to date" in capsys.readouterr().out, "sizes are right: only verify reads every byte"
    assert said("verify", store, "--remove")[0] == 1
    extract(config)
    again = contents(store)
    assert again.keys() == whole.keys()
    assert [name for name in whole if again[name] != whole[name]] == ["manifest.json"]
    manifests = [unseal(found["manifest.json"]) for found in (whole, again)]
    for manifest in manifests:
        assert manifest.pop("seconds") > 0
    assert manifests[0] == manifests[1]
    assert said("verify", store)[0] == 0


# ---------------------------------------------------------------- what is no store


def test_no_store_and_an_old_one_are_the_users_to_mend(tmp_path, said):
    for command in ("verify", "info"):
        status, out, err = said(command, tmp_path / "nowhere")
        assert (status, out) == (2, [])
        assert err == [f"error: there is no store in {tmp_path / 'nowhere'}: correct the address"]
    artifacts.write_json(tmp_path / "manifest.json", {"fingerprint": "x", "files": {}})
    (tmp_path / "shards").mkdir()
    for command in ("verify", "info"):
        status, _, err = said(command, tmp_path)
        assert status == 2
        assert len(err) == 1
        assert "holds a store of an earlier version, which cannot be read any more: remove it and run" in err[0]
    for arguments in (["verify", tmp_path, "--cache-bytes", "many"], ["info", tmp_path, "--cache-dir", tmp_path / "x"]):
        status, _, err = said(*arguments)
        assert status == 2
        assert len(err) == 1
    with pytest.raises(SystemExit) as error:
        main(["verify"])
    assert error.value.code == 2


def test_a_store_whose_seal_alone_is_damaged_is_not_taken_for_an_old_one(store, said):
    manifest = (store / "manifest.json").read_bytes()
    (store / "manifest.json").write_bytes(manifest.replace(b'"check"', b'"chick"'))
    status, out, _ = said("verify", store)
    assert status == 1
    assert out[0] == f"{store}/manifest.json is damaged (it carries no checksum of itself)"


def test_the_command_itself_explains_itself():
    command = [sys.executable, "-m", "eagle31_train.store", "--help"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent.parent, capture_output=True, text=True, check=True, timeout=600
    )
    assert "verify" in done.stdout
    assert "info" in done.stdout


# ---------------------------------------------------------------- elsewhere


@pytest.fixture
def bucket(tmp_path):
    """The URL of a store in memory, and the folder of its files here."""
    place = open_place("memory://verified/store", tmp_path / "cache", 100_000)
    MADE.write(place)
    yield place
    place.discard()
    place.close()


def test_a_remote_store_is_checked_where_it_lies(bucket, tmp_path, said):
    assert said("verify", bucket.location, "--cache-dir", tmp_path)[0] == 0
    files = fsspec.filesystem("memory")
    path = f"/verified/store/{NAMES[3]}"
    data = bytearray(files.cat_file(path))
    data[-1] ^= 1
    files.pipe_file(path, bytes(data))
    status, out, _ = said("verify", bucket.location, "--remove")
    assert status == 1
    assert out[0] == f"{bucket.location}/{NAMES[3]} ({SAMPLES[3]}) is not as it was written (its checksum differs)"
    assert said("verify", bucket.location)[1][0].endswith("; 1 shards still to come")
    MADE.write(bucket)
    assert said("verify", bucket.location)[0] == 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("eagle31-")], "copies go again"


# ---------------------------------------------------------------- info


def rows_of(lines):
    """The table of `info`, before the histograms."""
    begin = next(number for number, line in enumerate(lines) if line.startswith("store  "))
    pairs = (line.split("  ", 1) for line in lines[begin : lines.index("")])
    return {name.strip(): value.strip() for name, value in pairs}


def test_info_says_what_is_inside(store, said):
    status, out, err = said("info", store)
    assert (status, err) == (0, [])
    rows = rows_of(out)
    documents = [document for split in LENGTHS for document in MADE.documents[split]]
    tokens = sum(map(len, documents))
    taught, attended = sum(len(d.taught) for d in documents) / tokens, sum(d.attended for d in documents) / tokens
    size = sum(path.stat().st_size for path in store.glob("shards/*.safetensors"))
    assert rows["store"] == str(store)
    assert rows["shards"] == "5 of 5 committed"
    assert rows["samples"] == "3 heldout, 6 train"
    assert rows["tokens"] == "15 heldout, 40 train"
    assert rows["bytes"] == f"{human(size)}, {size / tokens:,.0f} per token"
    # fp8 and int8 at H = 16: 16 values and a scale of 2 bytes, for two layers.
    assert rows["per token"] == f"ids 9, auxiliary states {attended * 36:,.0f}, last hidden states {taught * 18:,.0f}"
    assert rows["taught"] == f"{taught:.1%} of positions; slots attend to {attended:.1%}"
    assert rows["auxiliary"].startswith("layers 1, 3 ")
    assert rows["auxiliary"].endswith("as fp8")
    assert rows["last hidden"].endswith("as int8")
    assert rows["target"].startswith("somewhere, ")
    assert rows["fingerprint"] == MADE.fingerprint
    assert "damaged" not in rows
    assert sum(int(line.split()[-1]) for line in out if "to" in line.split() and "█" in line) == 9


def test_info_says_how_far_it_has_come_and_what_is_gone(tmp_path, said):
    MADE.write(tmp_path, stop_after=4)
    consume(LocalPlace("", tmp_path), MADE.plan.shards[2:3], "t" * 16, False)
    rows = rows_of(said("info", tmp_path)[1])
    assert "4 of 5 committed, 1 of them used up by a training; unfinished" in rows["shards"]
    assert "(measured in 3 shards)" in rows["per token"]


def test_info_of_a_damaged_store_points_to_verify(store, said):
    (store / "shards.jsonl").unlink()
    assert rows_of(said("info", store)[1])["damaged"] == f"see `python -m eagle31_train.store verify {store}`"
    (store / "plan.json").unlink()
    status, _, err = said("info", store)
    assert status == 2
    assert f"see `python -m eagle31_train.store verify {store}`" in err[0]


def test_info_of_a_remote_store_fetches_a_few_shards_only(bucket, said):
    rows = rows_of(said("info", bucket.location)[1])
    assert "(measured in 2 shards)" in rows["per token"]


def test_info_of_a_real_extraction_names_its_target_and_its_fidelity(tmp_path, said):
    make_run(tmp_path)
    extract(tiny_config(tmp_path))
    rows = rows_of(said("info", tmp_path / "run" / "store")[1])
    assert rows["target"].startswith("target, float32, weights ")
    assert rows["engine"] == "transformers"
    assert rows["fidelity"].startswith("top-1 ")
    assert "layers 1, 3, 5 (input of layer i; 0 = embeddings" in rows["auxiliary"]


def test_a_histogram_counts_every_sample_once():
    for lengths in ([7], [1, 2], [3, 50, 3, 4, 3, 2048], list(range(1, 1000))):
        counts = [int(line.split()[-1].replace(",", "")) for line in histogram(lengths)]
        assert sum(counts) == len(lengths)
        assert len(counts) <= 8
    assert histogram([]) == ["  none"]
