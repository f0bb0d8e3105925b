"""A disk that is full from an operation of a stage on: one line, nothing half-written, and with room the same command
ends as if nothing had been."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import speaking

HERE = Path(__file__).resolve().parent
STAGES = ("data", "extract", "train", "evaluate", "export", "report")
FEW = {"extract": 2, "export": 1, "report": 1}  # operations that `make test` tries of a stage, beside the first
MANY = 60  # of those that `make test-slow` tries: some 1.5 seconds each, twice


class Disk:
    """The forks, and the run that they go on with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        library = folder / "full_disk.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "full_disk.c", "-ldl"], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(library), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": f"{HERE.parent}:{HERE}", "MPLCONFIGDIR": str(folder / "matplotlib")}
        self.process = subprocess.Popen(
            [sys.executable, HERE / "full_disk.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment, cwd=folder,
        )  # fmt: skip
        self.words = [f"target.path={speaking.make('llama-tied', folder / 'target')}", "name=full", *speaking.SMALL]
        self.words += ["regenerate=true", "data.prompts=self", "+experiment=any", "data.draft_vocab_size=null"]
        self.words += ["train.checkpoint_every=8"]

    def run(self, stage: str, folder: Path, at: int = 0) -> tuple[int, int, str]:
        """Exit status, number of operations, and what was said."""
        words = [stage, "runs/full"] if stage == "report" else [stage, *self.words]
        log = self.folder / "log"
        job = {"words": words, "folder": str(folder), "at": at, "log": str(log)}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["status"], answer["operations"], log.read_text(encoding="utf-8").rpartition("\noperations ")[0]


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    made = Disk(tmp_path_factory.mktemp("disk"))
    yield made
    made.process.stdin.close()
    made.process.wait()


@pytest.fixture(scope="module")
def stages(disk):
    """Stage → the folder before it, the folder after it, and how many operations it took."""
    found, before = {}, disk.folder / "nothing"
    before.mkdir()
    for stage in STAGES:
        after = disk.folder / f"after {stage}"
        shutil.copytree(before, after)
        status, operations, said = disk.run(stage, after)
        assert status == 0, said
        found[stage], before = (before, after, operations), after
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Files by name, without what tells the time, or where a run was stopped."""
    files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
    skipped = re.compile(r"metrics\.jsonl|launches|\.png$|\.html$|config\.yaml|\.lock$|/wandb/|state\.json$")
    return {
        name: file.read_bytes() if name.endswith((".safetensors", ".arrow")) else b""
        for name, file in files.items()
        if not skipped.search(name)
    }


def fill(disk: Disk, stages: dict, stage: str, at: int, folder: Path) -> None:
    """The stage on a disk that is full from operation `at` on, and once more with room."""
    before, after, _ = stages[stage]
    where = f"{stage}, operation {at}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(before, folder)
    status, _, said = disk.run(stage, folder, at)
    assert "Traceback" not in said, f"{where}:\n{said}"
    if status:  # what nobody needs, such as a cache, may be left out
        assert status == 2, f"{where}:\n{said}"
        assert said.strip().splitlines()[-1].startswith("error: "), f"{where}:\n{said}"
        ours, whole = (place / "runs" / "full" / stage for place in (folder, after))
        if stage in ("export", "report") and ours.exists():  # no manifest would tell whether they are whole
            names = [sorted(file.name for file in place.rglob("*")) for place in (ours, whole)]
            assert names[0] == names[1], f"{where}: a part stays"
            assert contents(ours) == contents(whole), f"{where}: something half-written stays"
    status, _, said = disk.run(stage, folder)
    assert status == 0, f"{where}, with room:\n{said}"
    ours, wanted = contents(folder), contents(after)
    assert ours.keys() == wanted.keys(), f"{where}: other files: {sorted(ours.keys() ^ wanted.keys())}"
    differ = [name for name in wanted if ours[name] != wanted[name]]
    assert not differ, f"{where}: {differ}"


ALL = [pytest.param(stage, None, marks=pytest.mark.slow) for stage in STAGES]


@pytest.mark.parametrize(("stage", "few"), [*FEW.items(), *ALL])
def test_a_full_disk_costs_nothing_but_time(disk, stages, stage, few, tmp_path):
    operations = stages[stage][2]
    few = few or min(operations, MANY)
    for at in sorted({1, *(operations * n // few for n in range(1, few + 1))}):
        fill(disk, stages, stage, at, tmp_path / "full")
