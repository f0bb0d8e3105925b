"""What the vLLM engine does around vLLM; the engine itself runs in tests/vllm."""

import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
from pipeline import tiny_config

from eagle31_train.errors import UserError
from eagle31_train.targets import vllm_engine
from eagle31_train.targets.vllm_engine import OURS, states_folder

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
