"""Whole commands where a folder is something else, a record is another's, or the same command runs beside: each ends
well or in one line, and what was there stays as it was. On a disk that is full from an operation of a command on: one
line, nothing half-written, and with room the same command ends as if nothing had been. And folders that may only be
read."""

import errno
import json
import re
import shutil
from pathlib import Path

import pipeline
import pytest
from commanding import COMMANDS, EXPORT, READ_ONLY, RUN, Commands, Ended, commands
from mutating import spoil

STAGES = ("data", "extract", "train", "evaluate", "export", "summary")
PLACES = {"run_dir": RUN, "data_dir": f"{RUN}/data", "store_dir": f"{RUN}/store"}
KINDS = ("a file", "dangling", "itself", "folder")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with commands(tmp_path_factory.mktemp("hostile")) as there:
        yield there


@pytest.fixture
def folder(made, tmp_path):
    """A finished run, to be harmed."""
    shutil.copytree(made.folders("export")[1], tmp_path / "full")
    return tmp_path / "full"


def everything(folder: Path) -> dict[str, bytes | str]:
    """Names, and contents or where a link leads; without locks, which stay."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else ""
        for path in sorted(folder.rglob("*"))
        if not path.name.startswith((".training", ".store.extracting"))
    }


def refused(ended: Ended, *words: str) -> None:
    """One line, that says these."""
    assert ended.status == 2, ended.said
    assert "Traceback" not in ended.said, ended.said
    assert ended.last.startswith("error: "), ended.said
    assert len(ended.last) < 2000
    assert all(word in ended.last for word in words), ended.last


def ended_well(ended: Ended) -> bool:
    """Whether it did; else it said in one line why not."""
    assert "Traceback" not in ended.said, ended.said
    if ended.status:
        refused(ended)
    return not ended.status


def replace(place: Path, kind: str) -> None:
    place.rename(place.with_name("aside"))
    if kind == "a file":
        place.write_text("mine")
    else:
        spoil(place, kind)


ALL = [(stage, option, kind) for option in PLACES for kind in KINDS for stage in STAGES]
FEW = ALL[::7]  # of every stage, option and kind


@pytest.mark.parametrize("cases", [FEW, pytest.param(ALL, marks=pytest.mark.slow)], ids=["few", "all"])
def test_what_lies_where_a_folder_belongs_is_named_or_made_anew(made, cases, tmp_path):
    for stage, option, kind in cases:
        folder = tmp_path / "full"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made.folders("export")[1], folder, symlinks=True)
        replace(folder / PLACES[option], kind)
        before = everything(folder)
        where = f"{stage} with {option} {kind}"
        if not ended_well(made.run(stage, folder, more=[f"{option}={PLACES[option]}"])):
            assert everything(folder) == before, where
        else:
            # Its own output may be another: a card has the data's counts unless the data is gone.
            others = {name: now for name, now in everything(folder).items() if f"{RUN}/{stage}" not in str(name)}
            assert all(before[name] == now for name, now in others.items() if name in before), where


def test_a_record_of_a_training_without_a_drafter_is_damaged(made, folder):
    begun = folder / RUN / "train" / "inputs.json"
    begun.write_text(json.dumps({**json.loads(begun.read_text()), "inputs": {"data": "1" * 16}}))
    before = everything(folder)
    refused(made.run("train", folder), "inputs.json is damaged (it has no drafter)")
    assert everything(folder) == before


def test_a_run_may_have_any_name(made, folder):
    """Without quotes within the word; every stage after a finished one finds it. More of them: test_cli.py."""
    name = "\u00fc\u4e2d\u0301 ~a=b [1] $x;{y} \u202ex"
    (folder / RUN).rename(folder / "runs" / name)
    before = everything(folder)
    for stage in ("train", "evaluate", "summary", "export"):
        assert ended_well(made.run(stage, folder, more=[f"name={name}"]))
    assert ended_well(made.run(["report", f"runs/{name}"], folder))
    after = everything(folder)
    assert {path.partition("/")[2].partition("/")[0] for path in after if path.startswith("runs/")} == {name}
    assert before.keys() <= after.keys()


TWICE = ("data", "extract", "train", "evaluate", "export", f"report {RUN}", f"compare {RUN} other:{EXPORT}")


@pytest.mark.parametrize("command", TWICE)
def test_the_same_command_twice_at_once_is_done_once_or_refused(made, command, tmp_path):
    name = command.split()[0]
    before, after, _ = made.folders(name)
    shutil.copytree(before, folder := tmp_path / "full")
    ends = [ended_well(ended) for ended in made.start([command] * 2, folder)]
    assert all(ends) or ended_well(made.run(command, folder))
    names = {path for path in everything(after) if not path.endswith(".jsonl")}
    assert names == {path for path in everything(folder) if not path.endswith(".jsonl")}


# ---------------------------------------------------------------- full disks

SEEN: dict[str, set] = {}  # by command: what it left where it failed, and from which it ended well with room


def contents(folder: Path) -> dict[str, bytes]:
    """Files by name, without what tells the time, or where a run was stopped."""
    skipped = re.compile(r"metrics\.jsonl|launches|\.png$|\.html$|config\.yaml|\.lock$|/wandb/|state\.json$")
    return {
        name: data if name.endswith((".safetensors", ".arrow")) else b""
        for name, data in pipeline.contents(folder).items()
        if not skipped.search(name)
    }


def state(folder: Path) -> tuple:
    """What the same command begins with: names, and of files that tell the time whether they are whole."""

    def kind(file: Path) -> object:
        data = file.read_bytes()
        if file.suffix == ".jsonl":
            return data.count(b"\n"), data[-1:] == b"\n"
        if file.suffix != ".json":
            return data if file.suffix in (".safetensors", ".arrow") else len(data)
        try:
            return sorted(json.loads(data))
        except ValueError:
            return len(data)

    paths = sorted(folder.rglob("*"))
    return tuple((str(path.relative_to(folder)), repr(kind(path)) if path.is_file() else "") for path in paths)


def pushed(made: Commands, out: Path) -> bool:
    """Whether the hub has what was exported; False if it has nothing, and never a part."""
    files = made.hub.files("me/draft") if "me/draft" in made.hub.repositories else {}
    assert files in ({}, pipeline.contents(out))
    return bool(files)


def fill(made: Commands, name: str, at: int, folder: Path) -> None:
    """The command on a disk that is full from operation `at` on, and once more with room."""
    command, (before, after, _) = COMMANDS[name], made.folders(name)
    where = f"{name}, operation {at}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(before, folder)
    made.hub.repositories.clear()
    ended = made.run(command.words, folder, at)
    if not ended_well(ended):  # what nobody needs, such as a cache, may be left out
        assert "[Errno" not in ended.last, f"{where}: it is not said where: {ended.last}"
        if command.out and (ours := folder / command.out).exists():  # no manifest would tell whether it is whole
            whole = after / command.out
            assert everything(ours).keys() == everything(whole).keys(), f"{where}: a part stays"
            assert contents(ours) == contents(whole), f"{where}: something half-written stays"
            assert ours.is_dir() or ours.read_bytes() == whole.read_bytes(), f"{where}: half-written"
        pushed(made, folder / EXPORT)
        if (left := state(folder)) in SEEN.setdefault(name, set()):
            return
        SEEN[name].add(left)
    assert ended_well(made.run(command.words, folder)), f"{where}, with room"
    ours, wanted = contents(folder), contents(after)
    assert ours.keys() == wanted.keys(), f"{where}: other files: {sorted(ours.keys() ^ wanted.keys())}"
    differ = [file for file in wanted if ours[file] != wanted[file]]
    assert not differ, f"{where}: {differ}"
    assert name != "push" or pushed(made, folder / EXPORT)


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.few])
def test_a_full_disk_costs_nothing_but_time(made, name, tmp_path):
    """In the middle of what it writes; at its first operation, see below."""
    operations, few = made.folders(name)[2], COMMANDS[name].few
    for n in range(few):
        fill(made, name, 1 + operations * (2 * n + 1) // (2 * few), tmp_path / "full")


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_costs_nothing_but_time_at_any_operation(made, name, tmp_path):
    for at in range(1, made.folders(name)[2] + 1):
        fill(made, name, at, tmp_path / "full")


@pytest.mark.parametrize("words", READ_ONLY)
def test_commands_that_only_look_write_nothing(made, words, tmp_path):
    shutil.copytree(made.folders(READ_ONLY[words])[1], tmp_path / "full")
    status, operations, said = made.run(words, tmp_path / "full", 1)
    assert (status, operations) == (0, 0), said


# ---------------------------------------------------------------- folders that may only be read


@pytest.mark.parametrize("words", ["train", f"store verify {RUN}/store", "extract", f"store info {RUN}/store"])
def test_a_store_that_may_only_be_read_is_read(made, words, tmp_path):
    """By a training, too; and an extraction of what is there already."""
    shutil.copytree(made.folders("extract")[1], folder := tmp_path / "full")
    ended = made.run(words, folder, 1, folder / RUN / "store", errno.EROFS)
    assert (ended.status, ended.operations) == (0, 0), ended.said
    if words == "train":
        assert contents(folder) == contents(made.folders("train")[1])


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if name != "verify"])
def test_where_nothing_can_be_written_a_command_says_so(made, name, tmp_path):
    before = made.folders(COMMANDS[name].after)[1]
    shutil.copytree(before, folder := tmp_path / "full")
    refused(made.run(COMMANDS[name].words, folder, 1, folder, errno.EROFS), "Read-only file system")
    assert state(folder) == state(before)
