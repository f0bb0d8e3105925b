"""Where vLLM's worker leaves states: in memory if they fit there, and nothing of a killed process stays."""

import shutil
from collections import namedtuple

import pytest
from made import message_of

from eagle31_train.targets import vllm_engine
from eagle31_train.targets.vllm_engine import FOLDER, states_folder

Usage = namedtuple("Usage", "free")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Memory with 10 bytes free, and a disk with 100."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    for folder in (memory, disk):
        folder.mkdir()
    monkeypatch.setattr(vllm_engine, "RAM_DISK", memory)
    monkeypatch.setattr(vllm_engine.tempfile, "gettempdir", lambda: str(disk))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10 if folder == memory else 100))
    return memory, disk


def test_states_lie_in_memory_if_they_fit_else_on_the_disk(places):
    assert [states_folder(size).parent for size in (10, 11)] == list(places)
    assert "TMPDIR" in message_of(states_folder, 101)


def test_folders_of_killed_processes_go_and_those_in_use_stay(places):
    memory, _ = places
    left, foreign = memory / f"{FOLDER}-left", memory / "other"
    for folder in (left, foreign):
        folder.mkdir()
    used = states_folder(1)
    assert sorted(memory.iterdir()) == sorted([used, foreign])
    states_folder(1)
    assert used.is_dir()
