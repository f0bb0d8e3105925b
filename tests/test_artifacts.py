"""Outputs: when a stage counts as finished, whole files only, and changes named."""

import json
from pathlib import Path

import pytest

from eagle31_train import artifacts

# ---------------------------------------------------------------- describe_change, fingerprint


def test_changes_are_named_by_their_dotted_option():
    old = {"a": 1, "b": {"c": [1], "d": {"e": "x"}, "same": 0}, "gone": 1}
    new = {"a": 1, "b": {"c": [1, 2], "d": {"e": "y"}, "same": 0}, "came": 2}
    assert artifacts.describe_change(old, new) == (
        "b.c: [1] there, [1, 2] here; b.d.e: x there, y here; came: nothing there, 2 here; gone: 1 there, nothing here"
    )
    assert artifacts.describe_change({}, {"unset": None}) == "unset: nothing there, None here"
    assert artifacts.describe_change(old, old) == ""


# ---------------------------------------------------------------- written whole


def tear(file, data):
    with file.open("wb") as opened:
        opened.write(data[:5])
    raise OSError("No space left on device")


def refuse(_from, _to):
    raise OSError("No space left on device")


@pytest.mark.parametrize(("step", "failure"), [("write_bytes", tear), ("replace", refuse)])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step, failure):
    file = tmp_path / "sub" / "state.json"
    artifacts.write_json(file, {"old": 1})
    monkeypatch.setattr(Path, step, failure)
    with pytest.raises(OSError, match="No space left"):
        artifacts.write_json(file, {"new": 2})
    assert json.loads(file.read_bytes()) == {"old": 1}
    assert [path.name for path in file.parent.iterdir()] == ["state.json"]


def test_commit_replaces_files_and_folders_whole(tmp_path):
    for name, text in ((".new", "new"), ("old", "old")):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / text).write_text(text)
    artifacts.commit(tmp_path / ".new", tmp_path / "old")
    assert [path.name for path in (tmp_path / "old" / "deep").iterdir()] == ["new"]
    assert not (tmp_path / ".new").exists()
