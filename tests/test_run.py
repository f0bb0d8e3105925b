"""`eagle31 run`: which words its stages are given, and under which profile it trains."""

import signal
import sys
from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest
from published_targets import FOLDER
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from eagle31_train import cli, launcher, new, run
from eagle31_train.config import Config, DataConfig, TargetConfig
from eagle31_train.console import STOPPED


@pytest.fixture
def started(monkeypatch):
    """The commands that a run starts, none of which is run."""
    commands = []
    monkeypatch.setattr(run, "finished", lambda words, _: commands.append(words) or 0)

    def call(*words):
        commands.clear()
        monkeypatch.setattr(sys, "argv", ["eagle31 run", *words])
        run.main()
        return commands

    return call


def test_without_a_recipe_and_prompts_it_says_what_it_takes(started, capsys):
    qwen = f"target.path={FOLDER / 'qwen3_8b'}"
    commands = started(qwen, "name=x")
    said = capsys.readouterr().out
    assert "no recipe is named: +experiment=any" in said
    assert "the target writes them itself" in said
    assert len(commands) == len(run.STAGES)
    for words in commands:
        assert words[-5:] == ["+experiment=any", qwen, "name=x", *run.WRITTEN]
    config = cli.load_config(commands[0][-5:])
    assert (config.train.optimizer, config.train.ttt_length, config.data.prompts) == ("muon", 3, "self")

    commands = started("+experiment=smollm2", "train.lr=1", "--until", "data")
    assert [words[-2:] for words in commands] == [["+experiment=smollm2", "train.lr=1"]]
    started("+experiment=any", qwen, "name=x", "--until", "data")
    assert "no recipe" not in capsys.readouterr().out
    (words,) = started(qwen, "name=x", "data.conversations=c.jsonl", "--until", "data")
    assert words[-1] == "data.conversations=c.jsonl", "nothing is answered anew that is given"


def test_stages_that_end_before_they_begin_are_refused(started, capsys):
    with pytest.raises(SystemExit):
        started("+experiment=smollm2", "--from", "export", "--until", "data")
    assert "--from export comes after --until data: no stage is left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "repo=owner/name"),
        ("repo=draft", "repo=owner/name"),
        ("repo=me/a..b", "repo=owner/name"),
        ("repo=me/a export_format=speculators", "a folder of yours: push with export_format=vllm"),
    ],
)
def test_an_upload_that_cannot_be_is_refused_before_any_work(words, said, started, capsys):
    with pytest.raises(SystemExit):
        started("+experiment=smollm2", "push=true", *words.split())
    assert said in capsys.readouterr().err
    assert started("+experiment=smollm2", "push=true", *words.split(), "--until", "train")


def test_a_target_of_the_hub_may_be_named_on_the_hub(started):
    assert started("target.path=org/target", "push=true", "repo=me/a", "export_format=speculators", "--from", "export")


def test_an_extraction_that_would_wait_for_the_training_after_it_is_refused(started, capsys):
    bounded = ["+experiment=smollm2", "store.max_bytes=1GB"]
    with pytest.raises(SystemExit):
        started(*bounded)
    assert "`eagle31 extract` and `eagle31 train store.follow=true` at once" in capsys.readouterr().err
    assert started(*bounded, "--until", "extract")
    assert started(*bounded, "--from", "train")


def test_a_profile_is_taken_by_its_name(started, monkeypatch, capsys):
    monkeypatch.setattr(run, "launch_profile", lambda: ("ddp", 4))
    words = started("+experiment=smollm2", "--from", "train", "--until", "train", "--profile", "zero2")[0]
    file = words[words.index("--config_file") + 1]
    assert file == str(cli.CONFIGS / "accelerate" / "zero2.yaml")
    assert words[words.index("--num_processes") + 1] == "4"
    assert "--profile" not in words
    assert "training on 4 GPUs, profile zero2" in capsys.readouterr().out
    assert all((cli.CONFIGS / "accelerate" / f"{name}.yaml").is_file() for name in run.PROFILES)


@pytest.mark.parametrize(
    ("options", "processes"),
    [("", 4), ("target.device_map=auto", 1), ("target.device=cuda:1", 1), ("extract.engine=vllm", 1)],
)
def test_extraction_is_on_every_gpu_that_can_hold_the_target(started, monkeypatch, capsys, options, processes):
    monkeypatch.setattr(run, "launch_profile", lambda: ("ddp", 4))
    extract = ["+experiment=smollm2", "--from", "extract", "--until", "extract", "--profile", "zero2", *options.split()]
    words = started(*extract)[0]
    assert ("--num_processes" in words) == (processes > 1)
    if processes > 1:
        assert words[words.index("--num_processes") + 1] == str(processes)
        assert words[words.index("--config_file") + 1] == str(cli.CONFIGS / "accelerate" / "ddp.yaml")
        assert words[words.index("extract") :] == ["extract", "+experiment=smollm2"]
        assert "run: extracting on 4 GPUs" in capsys.readouterr().out


@pytest.mark.parametrize("profile", run.ALONE)
def test_one_process_needs_no_launcher(started, profile):
    words = started("+experiment=smollm2", "--from", "train", "--until", "train", "--profile", profile)[0]
    assert words[-2:] == ["train", "+experiment=smollm2"]
    assert "eagle31_train.launcher" not in words


class Stage:
    """A stage's process; `happens` while it is waited for, and gives its status."""

    waits, told, killed = 0, False, False

    def __init__(self, words, env):
        assert (words, env) == (["stage"], {})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self):
        self.waits += 1
        return self.happens()

    def terminate(self):
        self.told = True

    def kill(self):
        self.killed = True


@pytest.mark.parametrize("pressed", [1, 2])
def test_after_ctrl_c_a_stage_ends_by_itself_and_after_another_it_is_killed(monkeypatch, pressed):
    class Interrupted(Stage):
        def happens(self):
            if self.waits <= pressed:
                raise KeyboardInterrupt
            return 130

        def __exit__(self, *_):
            assert (self.waits, self.killed) == (2, pressed == 2), "it was left, or killed, before its end"

    monkeypatch.setattr(run.subprocess, "Popen", Interrupted)
    with pytest.raises(SystemExit) as stopped:
        run.finished(["stage"], {})
    assert stopped.value.code == 130


def test_a_sigterm_is_passed_on_to_the_stage(monkeypatch):
    class Told(Stage):
        def happens(self):
            signal.raise_signal(signal.SIGTERM)
            return STOPPED if self.told else 0

    def die(*_):
        raise AssertionError("the stage goes on alone")

    monkeypatch.setattr(run.subprocess, "Popen", Told)
    before = signal.signal(signal.SIGTERM, die)
    try:
        assert run.finished(["stage"], {}) == STOPPED
        assert signal.getsignal(signal.SIGTERM) is die
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_killed_stage_is_said_and_its_status_is_a_shells(monkeypatch, capsys):
    monkeypatch.setattr(run, "command", lambda *_: [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    with pytest.raises(SystemExit) as stopped:
        run.run(
            Config(name="run", target=TargetConfig(path="target"), data=DataConfig(prompts="self")),
            [],
            "extract",
            "train",
        )
    assert stopped.value.code == 137
    assert "run: stopped at extract: it was killed, perhaps for want of memory" in capsys.readouterr().err


def test_ctrl_c_ends_the_launcher_without_a_traceback(monkeypatch):
    def launched(sent):
        def main():
            raise SignalException("got a signal", sent)

        monkeypatch.setitem(sys.modules, "accelerate.commands.launch", SimpleNamespace(main=main))
        launcher.main()

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as stopped:
        launched(signal.SIGINT)
    assert stopped.value.code == 130
    with pytest.raises(SignalException):
        launched(signal.SIGTERM)


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
        (failed_ranks(rank3=-signal.SIGKILL), 137, "rank 3 was killed by SIGKILL, for want of memory perhaps"),
        (failed_ranks(rank1=STOPPED, rank0=-signal.SIGTERM), STOPPED, ""),
        (failed_ranks(rank0=-signal.SIGSEGV, rank1=-signal.SIGTERM), 139, "rank 0 was killed by SIGSEGV\n"),
    ],
)
def test_the_launcher_ends_as_the_training_that_failed_first(monkeypatch, capsys, error, status, said):
    def fails():
        raise error

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setitem(sys.modules, "accelerate.commands.launch", SimpleNamespace(main=fails))
    try:
        with pytest.raises(SystemExit) as ended:
            launcher.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == status
    shown = capsys.readouterr().err
    assert said in shown
    assert bool(shown) == bool(said)


def test_a_recipe_of_ones_own_begins_as_the_recipe_for_any_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new.main(["mine"])
    mine, any_target = (cli.load_config([f"+experiment={recipe}", "target.path=x"]) for recipe in ("mine.yaml", "any"))
    assert (mine.train, mine.store, mine.data.draft_vocab_size) == (
        any_target.train,
        any_target.store,
        any_target.data.draft_vocab_size,
    )
