"""Outputs: when a stage counts as finished, whole files only, and changes named."""

import json
from pathlib import Path

import pytest

from eagle31_train import artifacts
from eagle31_train.schema import UserError

INPUTS = {"data": "abc", "train": {"lr": 0.1, "betas": [0.9, 0.95]}}


def make_stage(folder, inputs=INPUTS, **files):
    """A finished stage whose output files hold the given texts."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    listed = artifacts.list_files(folder, [folder / name for name in files])
    manifest = {"fingerprint": artifacts.fingerprint(inputs), "inputs": inputs, "files": listed}
    artifacts.write_json(folder / "manifest.json", manifest)


def finished(folder, inputs=INPUTS, overwrite=False, **options):
    return artifacts.finished(folder, artifacts.fingerprint(inputs), inputs, overwrite, **options)


# ---------------------------------------------------------------- finished


def test_a_stage_is_finished_when_its_manifest_and_files_are_whole(tmp_path):
    assert finished(tmp_path / "out") is False
    make_stage(tmp_path / "out", a="one", b="two")
    assert finished(tmp_path / "out") is True


def test_files_without_a_manifest_do_not_count(tmp_path):
    (tmp_path / "a").write_text("one")
    assert finished(tmp_path) is False
    assert (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_text("on"), "has 2 bytes, not 3: truncated or replaced"),
        (lambda file: file.write_text("eno"), "does not match its checksum: damaged or replaced"),
    ],
)
def test_a_damaged_file_is_named_and_the_stage_is_made_again(tmp_path, capsys, harm, words):
    make_stage(tmp_path / "out", a="one", b="two")
    harm(tmp_path / "out" / "a")
    assert finished(tmp_path / "out") is False
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'a'} {words}; making {tmp_path / 'out'} again\n"
    assert (tmp_path / "out" / "manifest.json").exists(), "the folder is still known as ours"
    assert (tmp_path / "out" / "b").exists(), "what is whole may be used again"


def test_checksums_can_be_left_to_the_reader(tmp_path):
    make_stage(tmp_path, a="one")
    (tmp_path / "a").write_text("eno")
    assert finished(tmp_path, checksums=False) is True
    (tmp_path / "a").write_text("on")
    assert finished(tmp_path, checksums=False) is False


def test_outputs_of_other_inputs_are_refused_by_name_and_kept(tmp_path):
    make_stage(tmp_path, a="one")
    other = {"data": "abc", "train": {"lr": 0.2, "betas": [0.9, 0.95]}}
    with pytest.raises(UserError) as refused:
        finished(tmp_path, other)
    assert str(refused.value) == (
        f"{tmp_path} was made from other inputs (train.lr: 0.1 there, 0.2 here): "
        "choose another name=… or run_dir=…, or replace it with overwrite=true"
    )
    assert finished(tmp_path) is True


def test_overwrite_removes_outputs_of_other_inputs_only(tmp_path):
    make_stage(tmp_path / "out", a="one")
    assert finished(tmp_path / "out", overwrite=True) is True
    assert finished(tmp_path / "out", {"data": "other"}, overwrite=True) is False
    assert not (tmp_path / "out").exists()


def test_a_damaged_manifest_is_refused_in_one_line(tmp_path):
    (tmp_path / "manifest.json").write_bytes(b'{"fingerprint": "\xff')
    with pytest.raises(UserError, match=r"manifest\.json is damaged") as error:
        finished(tmp_path)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- describe_change, fingerprint


def test_changes_are_named_by_their_dotted_option():
    old = {"a": 1, "b": {"c": [1], "d": {"e": "x"}, "same": 0}, "gone": 1}
    new = {"a": 1, "b": {"c": [1, 2], "d": {"e": "y"}, "same": 0}, "came": 2}
    assert artifacts.describe_change(old, new) == (
        "b.c: [1] there, [1, 2] here; b.d.e: x there, y here; came: nothing there, 2 here; gone: 1 there, nothing here"
    )
    assert artifacts.describe_change({}, {"unset": None}) == "unset: nothing there, None here"
    assert artifacts.describe_change(old, old) == ""


def test_the_fingerprint_changes_with_any_value_and_not_with_the_order():
    first = artifacts.fingerprint({"a": 1, "b": [1, 2]})
    assert artifacts.fingerprint({"b": [1, 2], "a": 1}) == first
    others = [
        {"a": 2, "b": [1, 2]},
        {"a": 1, "b": [2, 1]},
        {"a": 1},
        {"a": "1", "b": [1, 2]},
        {"a": 1, "b": [1, 2], "c": None},
    ]
    assert first not in [artifacts.fingerprint(other) for other in others]
    assert len(first) == 16


# ---------------------------------------------------------------- written whole


def tear(file, text, encoding):
    file.write_bytes(text.encode(encoding)[:5])
    raise OSError("No space left on device")


def refuse(_from, _to):
    raise OSError("No space left on device")


@pytest.mark.parametrize(("step", "failure"), [("write_text", tear), ("replace", refuse)])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step, failure):
    file = tmp_path / "sub" / "state.json"
    artifacts.write_json(file, {"old": 1})
    monkeypatch.setattr(Path, step, failure)
    with pytest.raises(OSError, match="No space left"):
        artifacts.write_json(file, {"new": 2})
    assert json.loads(file.read_bytes()) == {"old": 1}
    assert [path.name for path in file.parent.iterdir()] == ["state.json"]


def test_a_value_that_json_cannot_hold_touches_no_file(tmp_path):
    file = tmp_path / "state.json"
    artifacts.write_json(file, {"old": 1})
    with pytest.raises(TypeError):
        artifacts.write_json(file, {"new": object()})
    assert artifacts.read_json(file, "x") == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_text_is_kept_as_it_is(tmp_path):
    artifacts.write_json(tmp_path / "a.json", {"wörter": "…"})
    assert "wörter" in (tmp_path / "a.json").read_text(encoding="utf-8")
    assert artifacts.read_json(tmp_path / "a.json", "x") == {"wörter": "…"}


def test_commit_replaces_files_and_folders_whole(tmp_path):
    for name, text in ((".new", "new"), ("old", "old")):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / text).write_text(text)
    artifacts.commit(tmp_path / ".new", tmp_path / "old")
    assert [path.name for path in (tmp_path / "old" / "deep").iterdir()] == ["new"]
    assert not (tmp_path / ".new").exists()


def test_reading_names_the_command_that_makes_the_file(tmp_path):
    file = tmp_path / "a.json"
    with pytest.raises(UserError, match=r"a\.json is missing: run `the command` first"):
        artifacts.read_json(file, "the command")
    for damaged in (b"{", b"[1]", b"\xff"):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a\.json is damaged .*: remove it and run `the command` again") as error:
            artifacts.read_json(file, "the command")
        assert "\n" not in str(error.value)
