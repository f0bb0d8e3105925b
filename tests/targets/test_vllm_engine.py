"""What the vLLM engine does around vLLM; the engine itself runs in tests/vllm."""

import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pipeline import tiny_config

from eagle31_train.errors import UserError
from eagle31_train.targets import vllm_engine
from eagle31_train.targets.vllm_engine import OURS, VllmEngine, _refusals, bound, states_folder
from eagle31_train.targets.vllm_states import CANNOT

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The RAM disk and the temporary folder, and how much room each has."""
    ram, disk = tmp_path / "ram", tmp_path / "disk"
    ram.mkdir()
    disk.mkdir()
    room = {ram: 100, disk: 1000}
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(vllm_engine, "RAM_DISK", ram)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(disk))
    monkeypatch.setattr(vllm_engine.shutil, "disk_usage", lambda place: usage(room[place]))
    return ram, disk


def test_states_go_through_memory_where_there_is_room(places):
    ram, disk = places
    assert states_folder(100).parent == ram
    assert states_folder(101).parent == disk
    with pytest.raises(UserError, match=r"has 2\.0 GB free, .*: free some, point TMPDIR elsewhere") as error:
        states_folder(2 * 10**9)
    assert "\n" not in str(error.value)


CLAIM = """
import os, sys
from pathlib import Path
from eagle31_train.targets import vllm_engine
vllm_engine.RAM_DISK = Path(sys.argv[1])
(vllm_engine.states_folder(1) / "states").write_text("x")
if sys.argv[2] == "killed":
    os._exit(9)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "left"), [("killed", 2), ("ended", 0)])
def test_a_killed_process_leaves_a_folder_that_the_next_one_removes(places, end, left):
    ram, _ = places
    mine = states_folder(1)
    subprocess.run([sys.executable, "-c", CLAIM, str(ram), end], cwd=ROOT, check=False)
    others = {path for path in ram.iterdir() if path.stem != mine.stem}
    assert len(others) == left
    another = states_folder(1)
    assert {path.stem for path in ram.iterdir()} == {mine.stem, another.stem}, "a living process keeps its own"


def test_a_folder_whose_lock_nobody_holds_is_removed_and_a_held_one_stays(places):
    ram, _ = places
    mine = states_folder(1)
    (ram / f"{vllm_engine.FOLDER}-dead").mkdir()
    (ram / f"{vllm_engine.FOLDER}-dead.lock").touch()
    another = states_folder(1)
    assert {path.stem for path in ram.iterdir()} == {mine.stem, another.stem}


@pytest.mark.parametrize("name", OURS)
def test_arguments_that_follow_from_the_configuration_are_refused(tmp_path, name):
    config = tiny_config(tmp_path, "extract.engine=vllm", f"extract.engine_args.{name}=1")
    with pytest.raises(UserError, match=rf"extract\.engine_args\.{name} cannot be set: "):
        vllm_engine.VllmEngine(config)


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        (f"Worker failed with error '{CANNOT}: No space left on device'", "free some, point TMPDIR elsewhere"),
        ("CUDA out of memory.\nTried to allocate 5 GiB", "leave more outside its cache by extract.engine_args.gpu_mem"),
    ],
)
def test_what_users_can_change_is_said_in_one_line(tmp_path, said, advice):
    with pytest.raises(UserError, match=advice) as error, _refusals(tmp_path):
        raise RuntimeError(said)
    assert "\n" not in str(error.value)
    with pytest.raises(RuntimeError, match="index out of range"), _refusals(tmp_path):
        raise RuntimeError("index out of range")


def model_config(max_model_len, own):
    """vLLM's configuration of a model with `own` positions."""

    def verify(length):
        if length > own:
            raise ValueError("User-specified max_model_len is greater than the derived one")
        return length

    return SimpleNamespace(max_model_len=max_model_len, get_and_verify_max_len=verify)


def test_a_longer_conversation_is_advised_what_can_be_done():
    longest, longer = bound(model_config(257, 4096))
    assert longest == 256, "one token is generated"
    assert longer.startswith("set extract.engine_args.max_model_len to one more than it has, or cut the data by ")
    longest, longer = bound(model_config(4096, 4096))
    assert longest == 4095
    assert longer == "cut the data by data.max_length=4095 (the target itself has no more positions)"


def test_states_go_to_the_device_that_encodes_them():
    engine = object.__new__(VllmEngine)
    engine.layers, engine._taken = [1, 3], [1, 3, 6]
    engine.readout = SimpleNamespace(head=torch.empty(1, device="meta"), depth=6)
    tokens = torch.arange(5)
    states = {"token_ids": tokens, "hidden_states": torch.zeros(3, 5, 8)}
    engine._answers = lambda asked: iter([(0, None, states)])
    [(index, aux, last)] = engine.run([tokens])
    assert (index, aux.shape, last.shape) == (0, (5, 2, 8), (5, 8))
    assert aux.is_meta
    assert last.is_meta
