"""Whole commands, each in a fork of a process that has imported everything, on a disk that errs where a test wants it
(`full_disk.py`); and the folders of a small run, made command by command."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import speaking
from loopback_hub import Hub, serving_hub

HERE = Path(__file__).resolve().parent
RUN = "runs/full"
EXPORT = f"{RUN}/export"


class Command(NamedTuple):
    """words: without the run's options. after: the command in whose folder it begins. out: what has no manifest that
    tells whether it is whole, and so must be whole or absent. few: operations that `make test` tries."""

    words: str
    after: str | None = None
    out: str | None = None
    few: int = 0


COMMANDS = {
    "data": Command("data"),
    "extract": Command("extract", "data", few=2),
    "train": Command("train", "extract"),
    "evaluate": Command("evaluate", "train"),
    "export": Command("export", "evaluate", EXPORT, few=1),
    "export for speculators": Command("export export_format=speculators", "evaluate", EXPORT),
    "export for SGLang": Command("export export_format=sglang", "evaluate", EXPORT),
    "export smaller": Command("export export_vocab_size=40 export_sliding_window=16", "evaluate", EXPORT),
    "push": Command("export push=true repo=me/draft", "evaluate", EXPORT, few=1),
    "compare": Command(f"compare {RUN} other:{EXPORT}", "export", few=1),
    "report": Command(f"report {RUN}", "evaluate", f"{RUN}/report", few=1),
    "verify": Command(f"store verify {RUN}/store --cache-dir .", "extract", few=1),
    "new": Command("new mine", None, "mine.yaml", few=2),
    "toy": Command("toy --out toy", None, "toy"),
}
BARE = ("compare", "report", "store", "new", "toy", "completion")  # commands that take no recipe, or a run's own
READ_ONLY = {"summary": "export", f"store info {RUN}/store": "extract", "plan": None, "completion bash": None}


class Ended(NamedTuple):
    status: int
    operations: int  # -1 of a command that was killed
    said: str  # on both streams

    @property
    def last(self) -> str:
        return (self.said.strip().splitlines() or [""])[-1]


class Commands:
    """The forks, and the run that they go on with, on a disk of its own."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder, self.hub = folder, hub
        library = folder / "full_disk.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "full_disk.c", "-ldl"], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(library), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": f"{HERE.parent}:{HERE}"}
        environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_OFFLINE": "0"}
        self.process = subprocess.Popen(
            [sys.executable, HERE / "full_disk.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment, cwd=folder,
        )  # fmt: skip
        self.target = speaking.make("llama-tied", folder / "target")
        self.options = [f"target.path={self.target}", "name=full", *speaking.SMALL]
        self.options += ["regenerate=true", "data.prompts=self", "+experiment=any", "data.draft_vocab_size=null"]
        self.options += ["data.self_prompts.count=12", "train.max_steps=8", "train.checkpoint_every=4"]
        self.done: dict[str, tuple[Path, Path, int]] = {}

    def run(self, words: str | list[str], folder: Path, *disk: Any, more: Sequence[str] = ()) -> Ended:
        [ended] = self.start([words], folder, *disk, more=more)
        return ended

    def start(
        self,
        commands: Sequence[str | list[str]],
        folder: Path,
        at: int = 0,
        place: Path | None = None,
        error: int = errno.ENOSPC,
        more: Sequence[str] = (),
    ) -> list[Ended]:
        """Run commands at once in `folder`, with the run's options unless they take none, then `more`. `at`, `place`,
        `error`: see full_disk.c."""
        jobs = []
        for number, words in enumerate(commands):
            given = words.split() if isinstance(words, str) else words
            given = given + ([] if given[0] in BARE else [*self.options, *more])
            files = {"folder": str(folder), "place": str(place or folder), "log": str(self.folder / f"log{number}")}
            jobs.append({"words": given, "at": at, "error": error, **files})
        self.process.stdin.write(json.dumps(jobs) + "\n")
        self.process.stdin.flush()
        return [Ended(**one) for one in json.loads(self.process.stdout.readline())]

    def folders(self, name: str | None) -> tuple[Path, Path, int]:
        """Of a command: the folder before it, the folder after it, and how many operations it took."""
        if name is None:
            (nothing := self.folder / "nothing").mkdir(exist_ok=True)
            return nothing, nothing, 0
        if name not in self.done:
            before, after = self.folders(COMMANDS[name].after)[1], self.folder / f"after {name}"
            shutil.copytree(before, after)
            ended = self.run(COMMANDS[name].words, after)
            assert ended.status == 0, ended.said
            self.done[name] = before, after, ended.operations
        return self.done[name]


@contextmanager
def commands(folder: Path):
    with pytest.MonkeyPatch.context() as patch, serving_hub(patch, folder / "hub") as hub:
        made = Commands(folder, hub)
        try:
            yield made
        finally:
            made.process.stdin.close()
            made.process.wait()
