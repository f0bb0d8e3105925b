"""Whole steps, drafting and extraction on fake CUDA tensors: what would fail on a GPU, or wait for one, fails here.

And the plan's memory against what such a step allocates, and the bytes that it moves. The cases run in a process of
their own, fake_cuda_cases.py.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import fake_cuda_cases
import pytest

from benchmarks import fake_cuda

CASES = fake_cuda_cases.CASES
STEPS = [name for name in CASES if name.startswith(("gqa, ", "mla, ")) and "drafting" not in name]
DRAFTING = [name for name in CASES if name.endswith("drafting")]
PLANNED = [name for name in CASES if name.startswith("long ")]
# Of torch's operators, those that raise on CUDA with train.deterministic=true, by the manual of
# torch.use_deterministic_algorithms; cumsum of floats besides.
NOT_DETERMINISTIC = {"scatter_reduce", "put_", "histc", "bincount", "kthvalue", "median", "max_unpool2d", "cumsum"}


def came(name, error=False):
    """The outcome of a case, which is an error or not."""
    outcome = outcomes()[name]
    assert ("error" in outcome) == error, outcome.get("trace")
    return outcome


@functools.cache
def outcomes():
    """{case: outcome}."""
    try:
        library = fake_cuda.build(fake_cuda.ROOT / "build")
    except fake_cuda.UnavailableError as error:
        pytest.skip(f"no fake CUDA: {error}")
    script = Path(fake_cuda_cases.__file__)
    paths = {"LD_PRELOAD": str(library), "PYTHONPATH": f"{fake_cuda.ROOT}:{script.parent}"}
    words = [sys.executable, script, json.dumps(list(CASES))]
    how = {"capture_output": True, "text": True, "check": False, "timeout": 600}
    done = subprocess.run(words, env={**os.environ, **paths}, **how)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", STEPS)
def test_a_step_runs_on_the_device_alone(name):
    result = came(name)
    assert result["on_host"] == result["onto_itself"] == []
    assert "torch.float64" not in result["dtypes"]
    # Forward and backward at every step by the kernel with linear memory; in fp32 there is none.
    assert result["flash"] == (0 if "fp32" in name else 4)
    assert not NOT_DETERMINISTIC & set(result["names"])


@pytest.mark.parametrize("name", [*DRAFTING, "extraction"])
def test_drafting_and_extraction_run_on_the_device(name):
    assert "torch.float64" not in came(name)["dtypes"]


def copies(result):
    """Where copies between host and device are waited for, but for the test's own."""
    return {place for place in result["on_host"] if place.startswith("_to_copy") and "fake_cuda_cases" not in place}


def test_extraction_does_not_wait_for_the_device():
    assert copies(came("extraction")) == set()
    planted = {"_to_copy in extraction.py:add", "_to_copy in transfers.py:each_tensor"}
    assert copies(came("planted: copies")) == planted


def test_planted_mistakes_are_found():
    assert "DataDependentOutputException" in came("planted: a wait", error=True)["error"]
    assert came("planted: numbers of the host")["on_host"] == ["_to_copy in fake_cuda_cases.py:<lambda>"]
    assert "at least two devices" in came("planted: another device", error=True)["error"]
    assert "expected scalar type" in came("planted: another dtype", error=True)["error"]
    assert came("planted: a copy onto itself")["onto_itself"] == ["fake_cuda_cases.py:added"]
    assert "torch.float64" in came("planted: double precision")["dtypes"]


@pytest.mark.parametrize("name", PLANNED)
def test_the_plan_knows_what_a_gpu_holds(name):
    """Also of conversations of many turns, whose keys attention copies for every turn."""
    result = came(name)
    assert result["planned kept"] == pytest.approx(result["kept"], rel=0.02)
    assert result["planned peak"] == pytest.approx(result["peak"], rel=0.1)
    if "mla, 14" in name:  # 14 turns make seven and a half copies, 30 would make more than are made
        assert result["without attention"] < 0.85 * result["peak"]


TRAFFIC = fake_cuda_cases.TRAFFIC


@pytest.mark.parametrize("name", TRAFFIC)
def test_a_step_moves_no_more_than_it_did(name):
    """Where a change saves some, write the new numbers down; `make bench-gpu-model` says where they are moved."""
    result, (operators, gigabytes) = came(name), TRAFFIC[name]
    assert 0.98 * gigabytes < result["bytes"] / 1e9 < 1.01 * gigabytes
    assert result["operations"] <= 1.01 * operators
