"""Several processes extract one store: the same bytes as one process makes, also after some were killed."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import extracting
import pytest
from pipeline import contents, make_run, options, tiny_config

from eagle31_train.extract import extract
from eagle31_train.schema import UserError
from eagle31_train.store import tensors
from eagle31_train.targets.make import make_engine

SPAWN = multiprocessing.get_context("spawn")
ROOT = Path(__file__).resolve().parent.parent.parent
LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"]  # on a CPU, two indeed


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run extracted by one process."""
    folder = tmp_path_factory.mktemp("whole")
    make_run(folder)
    extract(tiny_config(folder))
    return folder


def timeless(folder):
    """Every file of a store, its manifest without the time it took."""
    files = contents(folder / "run" / "store")
    manifest = json.loads(files["manifest.json"])
    del manifest["seconds"], manifest["check"]
    return {**files, "manifest.json": json.dumps(manifest)}


def same_target(folder, whole):
    """folder with the data of `whole`, and the options of a run there."""
    make_run(folder)
    return options(folder, f"target.path={whole / 'target'}")


def start(rank, ranks, arguments, stops_after=None):
    """One of several processes; not forked: a fork hangs if OpenMP threads have run in the process it was made of."""
    return SPAWN.Process(target=extracting.one, args=(rank, ranks, arguments, stops_after), daemon=True)


def run_all(*processes):
    """Their exit statuses, in order."""
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def test_two_processes_of_a_launcher_make_the_bytes_of_one(whole, tmp_path):
    done = subprocess.run(
        [*LAUNCH, "--num_processes", "2", "-m", "eagle31_train.extract", *same_target(tmp_path, whole)],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("bytes each") == 1, "the first process speaks for all"
    assert done.stderr.count("extract:   0%") == 1, "and shows the bar"
    assert timeless(tmp_path) == timeless(whole)


def test_killed_processes_are_carried_on_by_any_number(whole, tmp_path):
    arguments = same_target(tmp_path, whole)
    assert run_all(*[start(rank, 3, arguments, stops_after=1) for rank in range(3)]) == [9, 9, 9]
    store = tmp_path / "run" / "store"
    committed = {file.name: file.stat().st_mtime_ns for file in (store / "shards").glob("*.safetensors")}
    assert len(committed) == 3
    assert not (store / "manifest.json").exists()
    assert run_all(*[start(rank, 2, arguments) for rank in range(2)]) == [0, 0]
    assert timeless(tmp_path) == timeless(whole)
    assert all((store / "shards" / name).stat().st_mtime_ns == at for name, at in committed.items()), "made again"


def test_the_others_wait_for_the_first_to_prepare_the_store(whole, tmp_path, capfd):
    assert run_all(start(1, 2, [*same_target(tmp_path, whole), "store.patience=0.1"])) == [2]
    assert "extract: waiting for the first process to prepare the store" in capfd.readouterr().err
    assert not (tmp_path / "run" / "store" / "provenance.json").exists()


def test_the_first_waits_for_the_others_and_says_so(whole, tmp_path, capfd):
    assert run_all(start(0, 2, [*same_target(tmp_path, whole), "store.patience=0.1"])) == [2]
    assert "extract: waiting for the other processes' shards" in capfd.readouterr().err
    store = tmp_path / "run" / "store"
    planned = json.loads((store / "plan.json").read_text())["shards"]
    assert 0 < len(list((store / "shards").glob("*.json"))) < len(planned)
    assert not (store / "manifest.json").exists()


def test_vllm_is_started_once(monkeypatch, whole):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(UserError, match=r"extract\.engine=vllm spreads over devices itself: start one process"):
        make_engine(tiny_config(whole, "extract.engine=vllm"))


# ---------------------------------------------------------------- a full disk


@pytest.mark.parametrize("failing", [2, 9, 30])
def test_a_full_disk_leaves_nothing_half_written_and_the_same_command_goes_on(whole, tmp_path, monkeypatch, failing):
    make_run(tmp_path)
    config = tiny_config(tmp_path, f"target.path={whole / 'target'}")
    store = tmp_path / "run" / "store"
    right, calls = tensors._write_all, []

    def write_all(file, data):
        calls.append(file.name)
        if len(calls) == failing:
            raise OSError(28, "No space left on device")
        right(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(tensors, "_write_all", write_all)
        with pytest.raises(UserError, match=r"is full: .* needs [\d,]+ bytes; free some and run the same") as error:
            extract(config)
    assert "\n" not in str(error.value)
    assert not list(store.rglob(".*"))
    committed = {file.stem for file in (store / "shards").glob("*.json")}
    assert {file.stem for file in (store / "shards").glob("*.safetensors")} == committed
    assert len(committed) < 8
    extract(config)
    assert timeless(tmp_path) == timeless(whole)
