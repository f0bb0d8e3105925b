"""Fixtures: serving measured against an imitation of vLLM's server, in a process of its own or in a thread."""

import sys
import threading
from pathlib import Path

import imitating
import pytest
from configured import configured

from eagle31_train.evaluation import serving
from eagle31_train.evaluation.prompts import Prompt
from eagle31_train.evaluation.serving import Engine, measure_serving, server

END = 40
# Of the second answer, token 5 is an end token.
PROMPTS = [Prompt("a", "chat", [1, 2, 3]), Prompt("b", "code", [30, 5]), Prompt("b", "code", [50])]
LIMIT = 9
ENGINE = Engine("0.0", "some GPU")


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The environment of the imitation; gives the file of its requests."""
    monkeypatch.setenv("PYTHONPATH", imitating.install(tmp_path / "site"))
    monkeypatch.setenv("IMITATION_PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("IMITATION_REQUESTS", str(tmp_path / "requests"))
    monkeypatch.setattr(server, "GRACE_SECONDS", 0.2)
    return tmp_path / "requests"


@pytest.fixture
def config(tmp_path):
    """A configuration that serves one number of draft tokens to one user."""

    def load(*options):
        return configured(
            f"run_dir={tmp_path / 'run'}", f"evaluate.vllm_python={sys.executable}",
            "evaluate.serve_speculative_tokens=[3]", "evaluate.concurrency=[1]", f"evaluate.max_new_tokens={LIMIT}",
            *options,
        )  # fmt: skip

    return load


@pytest.fixture
def launch(asked, config):
    """Measure a server that is a process of its own."""

    def run(*options, prompts=PROMPTS):
        return measure_serving(config(*options), {"ours": Path("ours")}, prompts, [END], ENGINE)

    return run


class Here(server.Server):
    """The imitation in a thread."""

    def __enter__(self):
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.touch()
        self.imitation = imitating.Imitation(imitating.read(self.command[3:]))
        self.thread = threading.Thread(target=self.imitation.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def close(self):
        self.imitation.shutdown()
        self.imitation.server_close()
        self.thread.join()

    def check(self, dying=False):
        pass


@pytest.fixture
def measure(launch, monkeypatch):
    """The same with a server that is here at once."""
    monkeypatch.setattr(serving, "Server", Here)
    return launch
