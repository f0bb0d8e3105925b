"""A disk that is full from an operation of a command on: one line, nothing half-written, and with room the same command
ends as if nothing had been. And folders that may only be read."""

import errno
import json
import re
import shutil
from pathlib import Path

import pytest
from commanding import COMMANDS, EXPORT, READ_ONLY, RUN, Commands, commands


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    with commands(tmp_path_factory.mktemp("disk")) as made:
        yield made


SEEN: dict[str, set] = {}  # by command: what it left where it failed, and from which it ended well with room


def contents(folder: Path) -> dict[str, bytes]:
    """Files by name, without what tells the time, or where a run was stopped."""
    files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
    skipped = re.compile(r"metrics\.jsonl|launches|\.png$|\.html$|config\.yaml|\.lock$|/wandb/|state\.json$")
    return {
        name: file.read_bytes() if name.endswith((".safetensors", ".arrow")) else b""
        for name, file in files.items()
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


def pushed(disk: Commands, out: Path) -> bool:
    """Whether the hub has what was exported; False if it has nothing, and never a part."""
    files = disk.hub.files("me/draft") if "me/draft" in disk.hub.repositories else {}
    assert files in ({}, {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()})
    return bool(files)


def fill(disk: Commands, name: str, at: int, folder: Path) -> None:
    """The command on a disk that is full from operation `at` on, and once more with room."""
    command, (before, after, _) = COMMANDS[name], disk.folders(name)
    where = f"{name}, operation {at}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(before, folder)
    disk.hub.repositories.clear()
    status, _, said = disk.run(command.words, folder, at)
    assert "Traceback" not in said, f"{where}:\n{said}"
    if status:  # what nobody needs, such as a cache, may be left out
        assert status == 2, f"{where}:\n{said}"
        assert said.strip().splitlines()[-1].startswith("error: "), f"{where}:\n{said}"
        if command.out and (ours := folder / command.out).exists():  # no manifest would tell whether it is whole
            whole = after / command.out
            names = [sorted(file.name for file in place.rglob("*")) for place in (ours, whole)]
            assert names[0] == names[1], f"{where}: a part stays"
            assert contents(ours) == contents(whole), f"{where}: something half-written stays"
            assert ours.is_dir() or ours.read_bytes() == whole.read_bytes(), f"{where}: half-written"
        pushed(disk, folder / EXPORT)
        if (left := state(folder)) in SEEN.setdefault(name, set()):
            return
        SEEN[name].add(left)
    status, _, said = disk.run(command.words, folder)
    assert status == 0, f"{where}, with room:\n{said}"
    ours, wanted = contents(folder), contents(after)
    assert ours.keys() == wanted.keys(), f"{where}: other files: {sorted(ours.keys() ^ wanted.keys())}"
    differ = [file for file in wanted if ours[file] != wanted[file]]
    assert not differ, f"{where}: {differ}"
    assert name != "push" or pushed(disk, folder / EXPORT)


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.few])
def test_a_full_disk_costs_nothing_but_time(disk, name, tmp_path):
    """In the middle of what it writes; at its first operation, see below."""
    operations, few = disk.folders(name)[2], COMMANDS[name].few
    for n in range(few):
        fill(disk, name, 1 + operations * (2 * n + 1) // (2 * few), tmp_path / "full")


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_costs_nothing_but_time_at_any_operation(disk, name, tmp_path):
    for at in range(1, disk.folders(name)[2] + 1):
        fill(disk, name, at, tmp_path / "full")


@pytest.mark.parametrize("words", READ_ONLY)
def test_commands_that_only_look_write_nothing(disk, words, tmp_path):
    shutil.copytree(disk.folders(READ_ONLY[words])[1], tmp_path / "full")
    status, operations, said = disk.run(words, tmp_path / "full", at=1)
    assert (status, operations) == (0, 0), said


# ---------------------------------------------------------------- folders that may only be read


@pytest.mark.parametrize("words", ["train", f"store verify {RUN}/store", "extract", f"store info {RUN}/store"])
def test_a_store_that_may_only_be_read_is_read(disk, words, tmp_path):
    """By a training, too; and an extraction of what is there already."""
    shutil.copytree(disk.folders("extract")[1], folder := tmp_path / "full")
    ended = disk.run(words, folder, 1, folder / RUN / "store", errno.EROFS)
    assert (ended.status, ended.operations) == (0, 0), ended.said
    if words == "train":
        assert contents(folder) == contents(disk.folders("train")[1])


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if name != "verify"])
def test_where_nothing_can_be_written_a_command_says_so(disk, name, tmp_path):
    before = disk.folders(COMMANDS[name].after)[1]
    shutil.copytree(before, folder := tmp_path / "full")
    ended = disk.run(COMMANDS[name].words, folder, 1, folder, errno.EROFS)
    assert "Traceback" not in ended.said, ended.said
    assert ended.status == 2, ended.said
    assert re.search(r"^error: .*Read-only file system", ended.last), ended.said
    assert state(folder) == state(before)
