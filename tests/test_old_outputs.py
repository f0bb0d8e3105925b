"""Outputs of an earlier version are still read, resumed and served: `fixtures/v68c343f`, made by that commit.

Each test works on a copy. Losses and weights are held to the bit on a machine like the one that made them
(made_with.json), else within TOLERANCE.
"""

import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from launching import DEFAULTS, TRAIN, environment

OLD = Path(__file__).resolve().parent / "fixtures" / "v68c343f"
TOLERANCE = 2e-3  # of a loss, relative
# Where no recipe was named, the options had their own defaults then, and not +experiment=any's.
OPTIONS = {name: [DEFAULTS, *words] for name, words in json.loads((OLD / "options.json").read_text()).items()}
EVALUATE = ["-m", "eagle31_train.evaluate", *OPTIONS["run"]]
COMPARE = ["-m", "eagle31_train.compare", "run", "mla", "compare.out=compare"]
COMPARE += ["evaluate.perturbations=[]", "evaluate.suites.extra=null"]


class Copy:
    """Of all the outputs, in a folder of its own."""

    def __init__(self, folder):
        self.folder = folder
        shutil.copytree(OLD, folder, dirs_exist_ok=True)

    def do(self, *words, expect="", status=0):
        """Run Python with these words; what it says."""
        how = {"cwd": self.folder, "env": environment("one"), "capture_output": True, "text": True, "check": False}
        done = subprocess.run([sys.executable, *map(str, words)], **how)
        said = done.stdout + done.stderr
        assert done.returncode == status, said[-3000:]
        assert expect in said, said[-3000:]
        return said

    def path(self, *parts):
        return self.folder.joinpath(*parts)

    def lines(self, *parts):
        return self.path(*parts).read_text().splitlines()

    def json(self, *parts):
        return json.loads(self.path(*parts).read_text())


@pytest.fixture
def old(tmp_path):
    return Copy(tmp_path)


def hashes(folder, pattern="*"):
    files = [file for file in sorted(folder.rglob(pattern)) if file.is_file()]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def same_machine():
    made = json.loads((OLD / "made_with.json").read_text())
    cpu = torch.backends.cpu.get_cpu_capability()
    here = {"torch": torch.__version__, "transformers": version("transformers"), "machine": platform.machine()}
    return made.items() >= {**here, "cpu": cpu}.items()


def assert_losses(ours, theirs):
    assert ours == pytest.approx(theirs, rel=TOLERANCE)


# Several commands in one process, which imports once.
IN_TURN = """
import json, runpy, sys
for words in json.loads(sys.argv[1]):
    run = runpy.run_module if words[0] == "-m" else runpy.run_path
    sys.argv = words[words[0] == "-m":]
    run(sys.argv[0], run_name="__main__")
"""


def test_every_stage_of_a_finished_run_is_up_to_date_and_changes_nothing(old):
    before, options = hashes(old.folder), OPTIONS["run"]
    modules = ["data_prep", *(f"eagle31_train.{stage}" for stage in ("extract", "evaluate", "export"))]
    commands = [["-m", module, *options] for module in modules]
    commands += [[str(TRAIN), *options], [str(TRAIN), *OPTIONS["mla"]], ["-m", modules[-1], *OPTIONS["mla"]]]
    said = old.do("-c", IN_TURN, json.dumps(commands))
    for what, times in {"extract:": 1, "evaluate:": 1, "export:": 2, "train:": 2}.items():
        assert said.count(f"{what} up to date") == times, said
    assert "run/data is up to date" in said
    assert "conversations.jsonl is up to date" in said
    assert hashes(old.folder) == before


@pytest.mark.slow
def test_a_finished_run_is_read(old):
    old.do("-m", "eagle31_train.summary", *OPTIONS["run"], expect="acceptance length")
    old.do("-m", "eagle31_train.report", "run", "--out", "report")
    old.do("-m", "eagle31_train.store", "verify", "run/store", expect="complete and intact")
    old.do("-m", "eagle31_train.store", "verify", "partial/store", expect="unfinished, but intact so far")
    old.do("-m", "eagle31_train.store", "info", "run/store")


@pytest.mark.slow
def test_a_stopped_training_ends_as_one_without_a_stop(old):
    """Stopped by SIGTERM after step 10 of 24; with Muon, which iterated in bf16 then: to rounding."""
    kept = old.lines("stopped/train/metrics.jsonl")
    old.do(TRAIN, *OPTIONS["stopped"], expect="resuming after step 10 ")
    lines = old.lines("stopped/train/metrics.jsonl")
    rows, expected = map(json.loads, lines), old.json("stopped_expected.json")["metrics"]
    ours, theirs = (
        [(row["step"], row.get("loss", row.get("heldout_loss"))) for row in some] for some in (rows, expected)
    )
    before = sum(step <= 10 for step, _ in ours)
    assert lines[:before] == kept[:before]
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    assert_losses([loss for _, loss in ours], [loss for _, loss in theirs])
    old.do(TRAIN, *OPTIONS["stopped"], expect="train: up to date")


@pytest.mark.slow
def test_a_killed_training_whose_lm_head_decayed_is_refused_by_name_and_trained_anew_where_it_may_be(old):
    """Killed in step 8, in the middle of a row, with a checkpoint of step 4 of 14 (AdamW, bf16, windows, slots)."""
    before, said = hashes(old.path("killed")), "train.weight_decay: an earlier version also decayed lm_head"
    old.do(TRAIN, *OPTIONS["killed"], expect=said, status=2)
    assert hashes(old.path("killed")) == before
    old.do(TRAIN, *OPTIONS["killed"], "overwrite=true")
    old.do(TRAIN, *OPTIONS["killed"], expect="train: up to date")


@pytest.mark.slow
def test_an_extraction_goes_on_after_its_whole_shards(old):
    """Killed in the middle of its third (int4, fp8)."""
    shards = old.path("partial/store/shards")
    kept = {file: file.stat().st_mtime_ns for file in shards.glob("[!.]*.safetensors")}
    old.do("-m", "eagle31_train.extract", *OPTIONS["partial"], expect="extract: 766 tokens")
    assert {file: file.stat().st_mtime_ns for file in kept} == kept, "a whole shard was made again"
    old.do("-m", "eagle31_train.store", "verify", "partial/store", expect="complete and intact")
    expected, found = old.json("partial_expected.json")["sha256"], hashes(old.path("partial/store"), "*.safetensors")
    found.pop("trajectories.safetensors")  # which stores did not have then
    assert found.keys() == expected.keys()
    assert found == expected or not same_machine()
    old.do("-m", "eagle31_train.extract", *OPTIONS["partial"], expect="extract: up to date")


@pytest.mark.slow
def test_answers_go_on_from_their_journal(old):
    """Killed in the middle of the 11th: those that are whole are kept (one is marked here), the rest made."""
    journal, marked = old.path("regenerate/conversations.jsonl.partial"), "Here a lazy dog sleeps"
    first, rest = journal.read_text().split("\n", 1)
    first = json.loads(first)
    answer, first["message"]["content"] = first["message"]["content"], marked
    journal.write_text(json.dumps(first) + "\n" + rest)
    old.do("-m", "data_prep", *OPTIONS["regenerate"], expect="tokens in regenerate/conversations.jsonl")
    # What is known beside the words, then and now.
    known = re.compile(r',"(tokens":\d+|token_ids":\[[\d,]*\]|template_fingerprint":"\w+")')
    ours, theirs = (
        [known.sub("", line) for line in old.lines(run, "conversations.jsonl")] for run in ("regenerate", "run")
    )
    differ = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    assert sum(marked in a and a == b.replace(answer, marked, 1) for a, b in differ) == 1
    assert len(differ) == 1 or not same_machine()
    assert not journal.exists()


@pytest.mark.slow
def test_trainings_begin_from_weights_as_they_did(old):
    """train.init_from: a finished run that was begun from run/export, and the losses of three such beginnings."""
    old.do(TRAIN, *OPTIONS["continued"], expect="train: up to date")
    for name, expected in old.json("continued_expected.json").items():
        old.do(TRAIN, *OPTIONS[name], f"run_dir=again/{name}")
        rows = map(json.loads, old.lines("again", name, "train/metrics.jsonl"))
        found = [row["loss"] for row in rows if "loss" in row]
        assert_losses(found, expected["losses"])
        assert found == expected["losses"] or not same_machine()
        known = old.json("again", name, "train/inputs.json")["inputs"]["train"]["init_from"]
        assert known == expected["init_from"], "the weights are known by another identity"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "manifest", "kept", "words"),
    [
        ("run/evaluate", "manifest.json", "run/workloads", EVALUATE),
        ("compare", "result.json", "compare/workloads", COMPARE),
    ],
)
def test_what_was_measured_is_read_and_the_numbers_stay(old, folder, manifest, kept, words):
    """Where torch is another, so is the key, and all is measured anew."""

    def numbers():
        """All but the words: notes, and how a verdict is put."""
        told = old.json(folder, manifest)
        result = told.get("result", told)
        for workload in result["workloads"]:
            del workload["notes"]
            workload["verdict"] = {name: verdict["better"] for name, verdict in workload["verdict"].items()}
        return {key: result[key] for key in ("workloads", "drafters")}

    files, told = hashes(old.path(kept)), numbers()
    if folder == "run/evaluate":
        shutil.rmtree(old.path(folder))
    old.do(*words)
    assert hashes(old.path(kept)) == files or not same_machine(), "measured again"
    assert numbers() == told or not same_machine()
