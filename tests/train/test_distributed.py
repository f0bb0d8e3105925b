"""Two real processes train what one process trains: on the CPU, over loopback."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pipeline import options

from train.metrics import Reporter

ROOT = Path(__file__).resolve().parent.parent.parent
# Batches of one to four samples in four parts: empty parts, and a sample that trains nothing (LENGTHS has one).
RECIPE = ["train.batch_tokens=40", "train.accumulation=2", "train.epochs=2", "train.eval_every=5"]


def launch(launcher, run, *more):
    """Run train.py in two processes on the CPU; returns the finished process."""
    command = [sys.executable, "-m", *launcher, "train.py"]
    command += options(run.folder, f"target.path={run.extracted / 'target'}", *more)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)


def torchrun():
    return ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]


def accelerate():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    return ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", *address]


@pytest.fixture(scope="module")
def one(copy_of, tmp_path_factory):
    """The same run by one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        yield copy_of(tmp_path_factory.mktemp("one")).fit(*RECIPE)


def assert_same_run(run, one):
    weights = one.weights()
    assert run.weights().keys() == weights.keys()
    for name, tensor in run.weights().items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert len(run.rows()) == len(one.rows())
    for ours, theirs in zip(run.rows(), one.rows(), strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), (theirs["step"], name)


def test_two_processes_train_what_one_trains(new_run, one):
    run = new_run()
    done = launch(accelerate(), run, *RECIPE, "train.recompute=true")  # which changes no bit
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(f"train: {one.manifest()['steps']} steps, ") == 1, "only the main process reports"
    assert_same_run(run, one)


def test_two_processes_finish_what_one_began(new_run, one, monkeypatch):
    run, log = new_run(), Reporter.log

    def stop(self, step, values):
        log(self, step, values)
        if step == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(Reporter, "log", stop)
    with pytest.raises(KeyboardInterrupt):
        run.fit(*RECIPE, "train.checkpoint_every=3")
    done = launch(torchrun(), run, *RECIPE, "train.checkpoint_every=3")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "train: going on after step 6 " in done.stdout
    assert_same_run(run, one)


def test_a_refusal_by_the_main_process_ends_the_other_too(new_run):
    run = new_run().fit("train.max_steps=1")
    done = launch(torchrun(), run, "train.max_steps=2")
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "train.max_steps: 1 there, 2 here" in lines[0]
