"""data.generate.server=vllm: a server of our own, there for the answers and no longer."""

import json
import os
import signal
import sys
import threading
from contextlib import nullcontext

import imitating
import pytest
from families import write_rows
from made import message_of

from data_prep import client
from data_prep.own_server import LOG, OwnServer
from data_prep.stage import prepare
from eagle31_train.compose import load_config
from eagle31_train.targets.chat import ChatTemplate

TURNS = [["hello"], ["the fox", "and?"], ["how are you"], ["world"]]


@pytest.fixture
def pids(tmp_path, monkeypatch):
    """The file for the numbers of the server's processes."""
    monkeypatch.setenv("PYTHONPATH", imitating.install(tmp_path / "site"))
    monkeypatch.setattr("eagle31_train.evaluation.serving.server.GRACE_SECONDS", 1.0)
    monkeypatch.setenv("IMITATION_REQUESTS", str(tmp_path / "requests"))
    monkeypatch.setenv("IMITATION_PIDS", str(tmp_path / "pids"))
    yield tmp_path / "pids"
    assert imitating.left(tmp_path) == [], "the server outlived the stage"


def configured(folder, target, *options):
    words = ["name=own", f"run_dir={folder}", f"target.path={target}", "target.dtype=float32", "regenerate=true"]
    words += [f"data.prompts={write_rows(folder.parent / 'prompts.jsonl', [{'turns': turns} for turns in TURNS])}"]
    words += ["data.heldout=0", "data.generate.max_new_tokens=5", "data.generate.server=vllm"]
    return load_config([*words, f"evaluate.vllm_python={sys.executable}", *options])


def test_it_answers_and_is_gone(pids, tiny_target, tmp_path, capsys):
    config = configured(tmp_path / "run", tiny_target)
    prepare(config)
    template = ChatTemplate.load(config.target)
    rows = [json.loads(line) for line in (tmp_path / "run" / "conversations.jsonl").read_text().splitlines()]
    assert len(rows) == len(TURNS) - 1, "one answer has no words"
    for row in rows:
        for i, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                prompt = template.prompt_ids(row["messages"][:i])
                assert message["token_ids"] == imitating.target(prompt, 5, template.end_ids)
    assert f"starting vLLM (log: {tmp_path}/run/{LOG})" in capsys.readouterr().out
    assert imitating.left(tmp_path) == []
    pids.unlink()
    prepare(config)
    assert not pids.exists(), "what is up to date wants no server"


def test_one_that_dies_or_does_not_start_says_why(pids, tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "TRIES", 1)  # one that has ended is not asked again
    dies = configured(tmp_path / "run", tiny_target, "evaluate.vllm_args.imitate=dies")
    said = message_of(prepare, dies)
    assert "vLLM's server ended with exit status 3" in said
    assert said.endswith(f"MemoryError: no room): see {tmp_path}/run/{LOG}")
    with_model = configured(tmp_path / "run", tiny_target, "data.generate.model=m")
    assert "data.generate.model is only for a server of yours" in message_of(prepare, with_model)
    absent = configured(tmp_path / "other", tiny_target, "evaluate.vllm_python=false")
    assert message_of(prepare, absent).endswith("vLLM was started with evaluate.vllm_python=false")


@pytest.mark.parametrize("why", [None, "HF_HUB_OFFLINE is set"])
def test_it_starts_once_under_the_targets_name_and_offline_where_the_hub_is(tiny_target, tmp_path, monkeypatch, why):
    started = []
    monkeypatch.setattr("eagle31_train.targets.pretrained.out_of_reach", lambda _: why)
    start = lambda command, *_, offline: started.append((command, offline)) or nullcontext()  # noqa: E731
    monkeypatch.setattr("eagle31_train.evaluation.serving.server.serving", start)
    own = OwnServer(configured(tmp_path / "run", tiny_target))
    assert own.url() == own.url()
    ((command, offline),) = started
    assert offline == (why is not None)
    assert not any(word.startswith(("--served-model-name", "--no-enable-prefix-caching")) for word in command)


def test_after_sigterm_it_is_gone_before_the_stage(pids, tiny_target, tmp_path):
    """Or who starts the stage again finds the device's memory taken."""
    before = signal.getsignal(signal.SIGTERM)
    with OwnServer(configured(tmp_path / "run", tiny_target)) as own:
        own.url()
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
        again = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))  # as of a group's, while it ends
        again.start()
    again.join()
    assert (ended.value.code, imitating.left(tmp_path)) == (128 + signal.SIGTERM, [])
    assert signal.getsignal(signal.SIGTERM) is before
