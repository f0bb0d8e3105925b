"""A store shared among commands that nothing connects: `extract.part` of `extract.parts`, as on as many machines."""

import json
import threading

import fsspec
import pytest
from pipeline import contents, make_run, options, tiny_config

from eagle31_train import extract as stage
from eagle31_train.cli import load_config
from eagle31_train.extract import extract, inputs_of, process_of
from eagle31_train.schema import UserError
from eagle31_train.store import Store, StoreWriter, stream
from eagle31_train.targets.hf import HiddenStateTarget

AT_ONCE = "store.patience=0"  # who would wait gives up


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run extracted by one command."""
    folder = tmp_path_factory.mktemp("whole")
    make_run(folder)
    extract(tiny_config(folder))
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What waits looks often; and transformers loads one model at a time: commands are threads here."""
    right, lock = stage.make_engine, threading.Lock()

    def make_engine(config):
        with lock:
            return right(config)

    monkeypatch.setattr(stage, "make_engine", make_engine)
    monkeypatch.setattr(stream, "POLL", 0.01)


@pytest.fixture
def command(whole, tmp_path):
    """`command(part, parts, …)`: the configuration of one of several commands with the data and target of `whole`."""
    make_run(tmp_path)

    def config(part, parts, *more):
        shared = [f"target.path={whole / 'target'}", f"extract.part={part}", f"extract.parts={parts}"]
        return load_config(options(tmp_path, *shared, *more))

    return config


def timeless(files):
    """Every file of a store, its manifest without the time it took."""
    manifest = json.loads(files["manifest.json"])
    del manifest["seconds"], manifest["check"]
    return {**files, "manifest.json": json.dumps(manifest)}


def store_of(folder):
    return contents(folder / "run" / "store")


def at_once(*configs):
    """Run commands together; what each raised, or None."""
    raised = [None] * len(configs)

    def work(index):
        try:
            extract(configs[index])
        except BaseException as error:
            raised[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(configs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def message_of(config):
    with pytest.raises(UserError) as error:
        extract(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def written(monkeypatch, stop_after=None):
    """Names of the shards that are committed from here on; the writer after so many is interrupted."""
    names, right = [], StoreWriter.write

    def write(self, shard, *rest):
        if len(names) == stop_after:
            raise KeyboardInterrupt
        right(self, shard, *rest)
        names.append(shard.name)

    monkeypatch.setattr(StoreWriter, "write", write)
    return names


# ---------------------------------------------------------------- the store of one


def test_parts_at_the_same_time_make_the_store_of_one(whole, tmp_path, command, capsys):
    assert at_once(command(1, 2), command(0, 2)) == [None, None]
    assert timeless(store_of(tmp_path)) == timeless(store_of(whole))
    said = capsys.readouterr()
    assert said.out.count("bytes each") == 1
    assert said.out.count("extract: extract.part=1 is done; part 0 finishes ") == 1
    assert said.err.count("extract:   0%") == 2, "each part has a screen of its own"


def test_parts_one_after_the_other_make_the_store_of_one(whole, tmp_path, command, monkeypatch, capsys):
    assert "waiting for the first process to prepare the store: nothing came" in message_of(command(1, 2, AT_ONCE))
    assert "waiting for the other processes' shards: nothing came" in message_of(command(0, 2, AT_ONCE))
    assert "manifest.json" not in store_of(tmp_path)
    theirs = written(monkeypatch)
    extract(command(1, 2, AT_ONCE))
    assert 0 < len(theirs) < 8
    theirs.clear()
    extract(command(0, 2, AT_ONCE))
    assert theirs == [], "part 0 only finishes the store"
    assert timeless(store_of(tmp_path)) == timeless(store_of(whole))
    capsys.readouterr()
    extract(command(1, 2))
    assert "extract: up to date" in capsys.readouterr().out


def test_parts_of_a_remote_store_make_the_store_of_one(whole, tmp_path, command):
    far = "memory://bucket/parts"
    caches = [[f"store_dir={far}", f"store.cache_dir={tmp_path / name}"] for name in ("here", "there")]
    assert at_once(command(1, 2, *caches[1]), command(0, 2, *caches[0])) == [None, None]
    fs, root = fsspec.url_to_fs(far)
    files = {path.removeprefix(f"{root}/"): fs.cat_file(path) for path in fs.find(root)}
    assert timeless(files) == timeless(store_of(whole))


def test_more_parts_than_shards_make_the_store_of_one(whole, tmp_path, command):
    assert at_once(*[command(part, 11) for part in reversed(range(11))]) == [None] * 11
    assert timeless(store_of(tmp_path)) == timeless(store_of(whole))


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_stopped_parts_are_carried_on_by_any_number(whole, tmp_path, command, parts):
    for part in range(2):
        with pytest.MonkeyPatch.context() as patch:
            written(patch, stop_after=1)
            with pytest.raises(KeyboardInterrupt):
                extract(command(part, 2))
    shards = tmp_path / "run" / "store" / "shards"
    committed = {file: file.stat().st_mtime_ns for file in shards.glob("*.safetensors")}
    assert len(committed) == 2
    assert at_once(*[command(part, parts) for part in range(parts)]) == [None] * parts
    assert timeless(store_of(tmp_path)) == timeless(store_of(whole))
    assert all(file.stat().st_mtime_ns == at for file, at in committed.items()), "made again"


def test_neither_part_nor_parts_is_an_input(command):
    assert inputs_of(command(0, 1)) == inputs_of(command(0, 7)) == inputs_of(command(6, 7))


def test_a_part_may_be_a_launch_of_several_processes(command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = []
    for part in range(3):
        for rank in range(4):
            monkeypatch.setenv("RANK", str(rank))
            found.append(process_of(command(part, 3)))
    assert [process.rank for process in found] == list(range(12))
    assert {process.ranks for process in found} == {12}
    assert [process.rank for process in found if process.speaks] == [0, 4, 8]


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("part", "parts", "words"),
    [
        (2, 2, "extract.part=2 is no part: they are numbered from 0, and with extract.parts=2 the last is 1"),
        (-1, 2, "extract.part=-1 is no part: they are numbered from 0, and with extract.parts=2 the last is 1"),
        (1, 1, "extract.part=1 is no part: they are numbered from 0, and with extract.parts=1 the last is 0"),
        (0, 0, "extract.parts=0 must be 1 or more: it is the number of commands that share the store"),
    ],
)
def test_a_part_that_there_is_not_is_refused(whole, tmp_path, command, part, parts, words):
    assert message_of(command(part, parts)) == words
    assert not (tmp_path / "run" / "store").exists()
    assert message_of(command(part, parts, f"store_dir={whole / 'run' / 'store'}")) == words, "of a finished one, too"


def test_a_part_of_another_number_writes_nothing_until_part_0_is_of_that_number(whole, tmp_path, command):
    message_of(command(0, 2, AT_ONCE))
    before = store_of(tmp_path)
    assert (
        "waiting for the first process to prepare the store for 3 processes; 2 share it so far (extract.parts is the "
        "same for every part): nothing came"
    ) in message_of(command(1, 3, AT_ONCE))
    assert store_of(tmp_path) == before
    assert at_once(*[command(part, 3) for part in (2, 1, 0)]) == [None] * 3
    assert timeless(store_of(tmp_path)) == timeless(store_of(whole))


def test_a_part_with_other_options_is_refused_at_once(tmp_path, command):
    message_of(command(0, 2, AT_ONCE))
    before = store_of(tmp_path)
    message = message_of(command(1, 2, "store.aux_codec=fp8"))
    assert "holds a begun store of another run (" in message
    assert "codecs.aux: bf16 there, fp8 here" in message
    assert store_of(tmp_path) == before


def test_the_gate_looks_at_every_part(command, monkeypatch):
    """Though the one shard that the store records a comparison of is part 0's, and right."""
    message_of(command(0, 2, AT_ONCE, "extract.gate_batches=1"))
    right = HiddenStateTarget.states

    def after_the_norm(self, tokens, mask):
        states = right(self, tokens, mask)
        return type(states)(states.aux, self.final_norm(states.last))

    monkeypatch.setattr(HiddenStateTarget, "states", after_the_norm)
    theirs = written(monkeypatch)
    message = message_of(command(1, 2, "extract.gate_batches=1"))
    assert "likely cause: the last hidden state was taken after the final norm" in message
    assert theirs == []


@pytest.mark.parametrize("removed", [True, False])
def test_a_damaged_shard_of_a_finished_store_is_made_again_by_the_part_whose_it_is(
    whole, tmp_path, command, monkeypatch, removed
):
    assert at_once(command(0, 2), command(1, 2)) == [None, None]
    store, theirs = tmp_path / "run" / "store", written(monkeypatch)
    shard = Store(store).plan.share(1, 2)[-1].name
    if removed:
        (store / shard).unlink()
    else:
        (store / shard).write_bytes((store / shard).read_bytes()[:-3])
    # Each part alone: part 1 must not write beside a manifest, nor part 0 finish what is not whole.
    assert "waiting for the first process to prepare the store" in message_of(command(1, 2, AT_ONCE))
    assert "waiting for the other processes' shards" in message_of(command(0, 2, AT_ONCE))
    assert "manifest.json" not in store_of(tmp_path)
    assert theirs == []
    extract(command(1, 2, AT_ONCE))
    assert theirs == [shard]
    extract(command(0, 2, AT_ONCE))
    assert theirs == [shard]
    assert timeless(store_of(tmp_path)) == timeless(store_of(whole))


def test_the_same_part_twice_at_a_time_is_refused_and_disturbs_nothing(whole, tmp_path, command, monkeypatch):
    """The second would remove what the first is building: both build a shard under one name."""
    right, said = StoreWriter.write, []

    def write(self, *rest):
        if not said:
            before = store_of(tmp_path)
            said.append("")  # what comes back here does not ask again
            said[0] = message_of(command(0, 1))
            assert store_of(tmp_path) == before
        right(self, *rest)

    monkeypatch.setattr(StoreWriter, "write", write)
    extract(command(0, 1))
    assert said == [
        f"another process extracts the same shards of {tmp_path / 'run' / 'store'} now: wait for it, or choose another "
        "name=… or run_dir=…"
    ]
    assert timeless(store_of(tmp_path)) == timeless(store_of(whole))
