"""`eagle31 run`: which words its stages are given, and under which profile it trains."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from multiprocessing import get_context
from subprocess import CalledProcessError
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest
import torch
from datasets import Dataset
from launching import ROOT
from made import status_of
from published_targets import FOLDER
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from eagle31_train import compose, launcher, new, run
from eagle31_train.common.console import STOPPED
from eagle31_train.common.locations import CONFIGS

OLD = ROOT / "tests" / "fixtures" / "v68c343f"


@pytest.fixture
def started(monkeypatch):
    """The commands that a run starts, none of which is run."""
    commands = []

    def finished(words, environment):
        commands.append(words)
        call.threads.append(environment.get("OMP_NUM_THREADS"))
        call.environments.append(environment)
        return 0

    monkeypatch.setattr(run, "finished", finished)

    def call(*words):
        commands.clear()
        call.threads, call.environments = [], []
        monkeypatch.setattr(sys, "argv", ["eagle31 run", *words])
        run.main()
        return commands

    return call


def test_without_a_recipe_and_prompts_it_says_what_it_takes(started, capsys):
    qwen = f"target.path={FOLDER / 'qwen3_8b'}"
    commands = started(qwen, "name=x")
    said = capsys.readouterr().out
    assert "no recipe given: using +experiment=any" in said
    assert len(commands) == len(run.STAGES)
    for words in commands:
        assert words[-3:] == ["+experiment=any", qwen, "name=x"]
    config = compose.load_config(commands[0][-3:])
    assert (config.train.optimizer, config.train.ttt_length, config.data.prompts) == ("muon", 3, "self")

    commands = started("+experiment=smollm2", "train.lr=1", "--until", "data")
    assert [words[-2:] for words in commands] == [["+experiment=smollm2", "train.lr=1"]]
    assert "no recipe" not in capsys.readouterr().out


DRAFT = f"train.init_from={OLD / 'run' / 'export'} target.path="
REFUSED = [  # what is asked, what is said, and up to or from where it would be done
    ("--from export --until data", "--from export comes after --until data: no stage is left", ""),
    ("push=true", "repo=owner/name", "--until train"),
    ("push=true repo=me/a..b", "repo=owner/name", ""),
    ("push=true repo=me/a export_format=speculators", "push with export_format=vllm", "target.path=a/b --from export"),
    ("store.max_bytes=1GB", "`eagle31 extract` and `eagle31 train store.follow=true` side by side", "--from train"),
    ("store.max_bytes=1GB", "side by side", "--until extract"),
    ("train.finish=true", "train.finish=true needs a checkpoint", "--from evaluate"),
    ("evaluate.perturbations=[nope]", "evaluate.perturbations has no 'nope'", "--until train"),
    ("evaluate.prompts=nowhere.jsonl", "evaluate.prompts=nowhere.jsonl does not exist", "--until train"),
    ("comparisons=[./nowhere]", "comparisons=./nowhere does not exist", "--until train"),
    ("train.init_from=runs/nowhere", "train.init_from=runs/nowhere does not exist", ""),
    (f"{DRAFT}{OLD / 'target'} target.aux_layers=[1]", "reads layers [1, 2, 3], but [1] would be", ""),
    (f"{DRAFT}{OLD / 'target'} target.aux_layers=[0,1,2]", "set 'target.aux_layers=[1, 2, 3]'", ""),
    (f"{DRAFT}{OLD / 'target'} target.aux_layers=[1,2,3] train.init_revision=v2", "revision v2", ""),
    (f"{DRAFT}{FOLDER / 'qwen3_8b'}", "is for a target 24 wide", ""),
    ("train.time_limit=10", "train.time_limit=10 is not a duration", ""),
    ("store.cache_bytes=lots", "store.cache_bytes=lots is not a size in bytes", ""),
    ("evaluate.backend=vllm evaluate.vllm_python=nowhere", "=nowhere cannot import vLLM", "--until train"),
    ("target.device=cuda", "target.device=cuda: there is no CUDA device here", "--until data"),
    ("train.betas=[0.9]", "must be two numbers", ""),
    ("evaluate.num_speculative_tokens=9", "must be at least evaluate.num_speculative_tokens=9", ""),
    ("drafter.parallel=true train.ttt_length=1", "drafter.parallel=true learns nothing", ""),
    ("--profile fsdp2", "--profile fsdp2 needs several devices", "--until extract"),
    ("train.context_parallel=2", "train.context_parallel=2 does not divide processes=1", "--until extract"),
    ("train.kernels=fused --profile cpu", "train.kernels=fused does not run on a CPU", "--until extract"),
    ("--profile zero2", "train.optimizer=muon needs whole matrices", "train.optimizer=adamw"),
]


@pytest.mark.parametrize(("words", "said", "fine"), REFUSED)
def test_what_cannot_end_well_is_refused_before_any_work(words, said, fine, started, capsys):
    assert status_of(started, "+experiment=smollm2", *words.split()) == 2
    assert said in capsys.readouterr().err
    assert not fine or started("+experiment=smollm2", *words.split(), *fine.split())


def test_what_is_there_or_was_needed_at_the_start_alone_is_not_refused(started, tmp_path):
    """Folders with an @ in their path, and a run that has begun with weights that are gone since."""
    place = tmp_path / "me@corp"
    place.mkdir()
    assert started("+experiment=smollm2", f"comparisons=[{place}]")
    shutil.copytree(OLD / "run" / "export", place / "draft")
    ours = ["+experiment=smollm2", f"target.path={OLD / 'target'}", f"train.init_from={place / 'draft'}"]
    assert started(*ours, "target.aux_layers=[1,2,3]")
    (tmp_path / "run" / "train").mkdir(parents=True)
    (tmp_path / "run" / "train" / "inputs.json").write_text("{}")
    assert started("+experiment=smollm2", "train.init_from=./gone", f"run_dir={tmp_path / 'run'}")
    (tmp_path / "run" / "train" / "manifest.json").write_text("{}")  # it has ended, on another machine
    assert started("+experiment=smollm2", "--profile", "fsdp2", f"run_dir={tmp_path / 'run'}")
    (tmp_path / "run" / "train" / "checkpoints" / "step-000001").mkdir(parents=True)
    assert started("+experiment=smollm2", "train.finish=true", f"run_dir={tmp_path / 'run'}")


def test_a_conversation_that_fits_in_no_batch_is_refused_before_extraction(started, tmp_path, capsys):
    Dataset.from_dict({"input_ids": [[1] * 95, [1] * 5]}).save_to_disk(tmp_path / "data" / "dataset" / "train")
    (tmp_path / "data" / "manifest.json").write_text("{}")
    words = ["+experiment=smollm2", f"run_dir={tmp_path}", "--from", "extract"]
    assert status_of(started, *words, "train.batch_tokens=94") == 2
    assert "has 95 tokens: set train.batch_tokens=95 or more" in capsys.readouterr().err
    assert started(*words, "train.batch_tokens=95")
    assert started(*words, "train.batch_tokens=94", "--until", "extract")


@pytest.mark.parametrize(
    ("first", "last", "between"),
    [
        # What is pushed has the card of what was measured.
        ("train", "summary", ["train", "export push=false", "evaluate", "export", "summary"]),
        ("evaluate", "export", ["evaluate", "export"]),
        ("export", "export", ["export"]),
        ("data", "train", ["data", "extract", "train"]),
    ],
)
def test_vllm_serves_what_was_exported_before(started, monkeypatch, first, last, between):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("eagle31_train.evaluation.serving.engine.check", lambda _: None)
    commands = started("+experiment=smollm2", "evaluate.backend=vllm", "--from", first, "--until", last)
    names = {*run.STAGES, "push=false"}
    assert [" ".join(word for word in words if word in names) for words in commands] == between
    alone = [threads is None for threads in started.threads]
    assert alone == [stage == "evaluate" for stage in between], "its server chooses its own threads"


@pytest.mark.parametrize("status", [STOPPED, 128 + signal.SIGTERM])
def test_a_stage_that_was_told_to_stop_has_nothing_to_mend(started, monkeypatch, capsys, status):
    monkeypatch.setattr(run, "finished", lambda *_: status)
    assert status_of(started, "+experiment=smollm2") == STOPPED
    said = capsys.readouterr().err
    assert " stopped" in said
    assert "fix the error" not in said


WHOLE = ("target.device_map=auto", "target.device=cuda:1", "extract.engine=vllm")  # one process has the whole target


@pytest.mark.parametrize(
    ("stage", "options", "profile"),
    [
        ("train", "--profile zero2 train.optimizer=adamw", "zero2"),
        *(("train", f"--profile {alone}", None) for alone in run.ALONE),
        ("extract", "--profile zero2", "ddp"),
        *(("extract", f"--profile zero2 {option}", None) for option in WHOLE),
    ],
)
def test_a_stage_is_launched_on_all_gpus_that_it_can_use(started, monkeypatch, stage, options, profile):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(run.os, "sched_getaffinity", lambda _: range(24))
    (words,) = started("+experiment=smollm2", "--from", stage, "--until", stage, *options.split())
    assert "--profile" not in words
    threads = None if "engine=vllm" in options else "6" if profile else "24"
    assert started.threads == [threads], "processes share the job's cores, and vLLM chooses its own"
    assert words[words.index(stage) + 1] == "+experiment=smollm2"
    assert ("eagle31_train.launcher" in words) == ("--num_processes" in words) == (profile is not None)
    if profile:
        assert words[words.index("--num_processes") + 1] == "4"
        assert words[words.index("--config_file") + 1] == str(CONFIGS / "accelerate" / f"{profile}.yaml")
    assert all((CONFIGS / "accelerate" / f"{name}.yaml").is_file() for name in run.PROFILES)


def test_stages_have_the_environment_of_the_command_which_decides(started, monkeypatch):
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", run.USE_CPU):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", "/disk/hf")
    started("+experiment=smollm2", "--profile", "cpu")
    wanted = {"HF_HOME": "/disk/hf", "OMP_WAIT_POLICY": "PASSIVE", "ACCELERATE_USE_CPU": "true"}
    assert all(environment.items() >= wanted.items() for environment in started.environments)
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "3")
    started("+experiment=smollm2")
    wanted = {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "3"}
    assert all(environment.items() >= wanted.items() for environment in started.environments)
    assert not any(run.USE_CPU in environment for environment in started.environments)


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        ("--profile fsdp2", {}, "--profile fsdp2 needs several devices"),
        ("train.kernels=fused", {"ACCELERATE_USE_CPU": "1"}, "train.kernels=fused does not run on a CPU"),
    ],
)
def test_what_one_gpu_cannot_train_is_refused_before_any_work(started, monkeypatch, capsys, words, variables, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert started("+experiment=smollm2", "train.kernels=fused")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert status_of(started, "+experiment=smollm2", *words.split()) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def handlers():
    """The handlers of signals are as before once a test has ended."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def stage(monkeypatch):
    """The process of a stage; a test says what its `wait` does."""
    process = MagicMock()
    monkeypatch.setattr(run.subprocess, "Popen", lambda words, env: nullcontext(process))
    return process


@pytest.mark.parametrize("pressed", [1, 2])
def test_after_ctrl_c_a_stage_ends_by_itself_and_after_another_it_is_killed(stage, pressed):
    stage.wait.side_effect = [*[KeyboardInterrupt] * pressed, 130][:2]
    assert status_of(run.finished, ["stage"], {}) == 130
    assert (stage.wait.call_count, stage.kill.called) == (2, pressed == 2), "it was left, or killed, before its end"


def test_a_sigterm_is_passed_on_to_the_stage(stage, handlers):
    def die(*_):
        raise AssertionError("the stage goes on alone")

    signal.signal(signal.SIGTERM, die)
    stage.wait.side_effect = lambda: signal.raise_signal(signal.SIGTERM) or STOPPED
    assert run.finished(["stage"], {}) == STOPPED
    stage.terminate.assert_called_once()
    assert signal.getsignal(signal.SIGTERM) is die


def test_a_sigterm_between_stages_stops_the_run(started, handlers, monkeypatch, capsys):
    monkeypatch.setattr(run, "check_inputs", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert status_of(started, "+experiment=smollm2") == STOPPED
    assert "run: stopped; run the same command again to resume" in capsys.readouterr().err


def test_a_killed_stage_is_said_and_its_status_is_a_shells(monkeypatch, capsys):
    monkeypatch.setattr(run, "command", lambda *_: ([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], 1))
    config = compose.load_config(["target.path=target", "data.prompts=self"])
    assert status_of(run.run, config, [], "extract", "train") == 137
    assert "run: stopped at extract: it was killed (out of memory?)" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, STOPPED)])
def test_a_signal_ends_the_launcher_without_a_traceback(monkeypatch, handlers, number, status):
    """It waits for what it launched, which gets the signal as well."""

    def main():
        lines = "import signal, sys, time", "def end(number, _): sys.exit(100 + number)"
        lines += tuple(f"signal.signal({each.value}, end)" for each in (signal.SIGINT, signal.SIGTERM))
        waiting = "\n".join([*lines, "print(flush=True); time.sleep(60)"])
        with subprocess.Popen([sys.executable, "-c", waiting], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            os.kill(os.getpid(), number)
            ended.append(process.wait())
        raise CalledProcessError(STOPPED, "train")

    def die(*_):
        raise AssertionError("it was not passed on")

    signal.signal(signal.SIGTERM, die)
    ended = []
    monkeypatch.setitem(sys.modules, "accelerate.commands.launch", SimpleNamespace(main=main))
    assert status_of(launcher.main) == status
    assert ended == [100 + number]


def test_a_signal_before_anything_is_launched_ends_the_launcher(monkeypatch):
    def main():
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(psutil.Process, "children", lambda _: [])
    monkeypatch.setitem(sys.modules, "accelerate.commands.launch", SimpleNamespace(main=main))
    process = get_context("fork").Process(target=launcher.main)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGTERM


def failed_ranks(**codes):
    """torchrun's error, of ranks that ended one after another."""
    failures = {}
    for at, (rank, code) in enumerate(codes.items()):
        failures[int(rank[4:])] = failure = ProcessFailure(at, 1, code, "no file")
        failure.timestamp = at
    return ChildFailedError("train.py", failures)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (CalledProcessError(STOPPED, "train"), STOPPED, ""),
        (failed_ranks(rank0=2), 2, ""),
        (failed_ranks(rank3=-signal.SIGKILL), 137, "rank 3 was killed by SIGKILL (out of memory?)"),
        (failed_ranks(rank1=STOPPED, rank0=-signal.SIGTERM), STOPPED, ""),
        (failed_ranks(rank0=-signal.SIGSEGV, rank1=-signal.SIGTERM), 139, "rank 0 was killed by SIGSEGV\n"),
    ],
)
def test_the_launcher_ends_as_the_training_that_failed_first(monkeypatch, capsys, handlers, error, status, said):
    fails = MagicMock(side_effect=error)
    monkeypatch.setitem(sys.modules, "accelerate.commands.launch", SimpleNamespace(main=fails))
    assert status_of(launcher.main) == status
    shown = capsys.readouterr().err
    assert said in shown
    assert bool(shown) == bool(said)


def test_a_recipe_of_ones_own_begins_as_the_recipe_for_any_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new.main(["007"])
    assert compose.load_config(["+experiment=007.yaml", "target.path=x"]).name == "007", "no number of YAML's"
    new.main(["mine"])
    mine, other = (compose.load_config([f"+experiment={recipe}", "target.path=x"]) for recipe in ("mine.yaml", "any"))
    assert (mine.train, mine.store) == (other.train, other.store)
    assert mine.data.draft_vocab_size == other.data.draft_vocab_size
