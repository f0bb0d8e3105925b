"""Measuring states against states: how far apart two engines are, and how far rounding alone brings them.

Distances are relative, per position and layer: |a - b| / |b|.
"""

import os
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
LEAVE_OUT = {"OMP_NUM_THREADS", "WORLD_SIZE"}


def command(*program, exits=0, **more):
    """Run a program, and fail with what it said unless it exits so."""
    env = {key: value for key, value in os.environ.items() if key not in LEAVE_OUT}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **more}
    done = subprocess.run(
        [str(part) for part in program], cwd=ROOT, env=env, text=True, capture_output=True, check=False
    )
    assert done.returncode == exits, f"{program}:\n{done.stdout[-1000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def joined(engine, conversations):
    """Per conversation [T, A + 1, H] float64: auxiliary states and the last one."""
    run = {index: torch.cat([aux, last[:, None]], 1) for index, aux, last in engine.run(conversations)}
    return [run[index].double() for index in range(len(conversations))]


def from_vllm(states, count):
    """The same of a file of `vllm/inside.py`."""
    return [torch.cat([states[f"aux.{i}"], states[f"last.{i}"][:, None]], 1).double() for i in range(count)]


def distances(ours, theirs):
    """[positions, A + 1]."""
    return torch.cat([(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in zip(ours, theirs, strict=True)])


def quantiles(distance):
    """Median and 90 % per layer; of more, single positions that happen to be touchy decide."""
    return distance.quantile(torch.tensor([0.5, 0.9], dtype=distance.dtype), dim=0)


def assert_within(ours, theirs, noise, times):
    """ours is as near to theirs as rounding alone brings them apart, `times` over."""
    found, allowed = quantiles(distances(ours, theirs)), times * quantiles(noise)
    assert (found <= allowed).all(), f"{found} is more than {allowed}"


def shown(name, distance, layers):
    """A line for people."""
    rows = "  ".join(
        f"{at}: {m:.1e} {q:.1e}" for at, (m, q) in zip([*layers, "last"], quantiles(distance).T, strict=True)
    )
    return f"  {name:<44} {rows}"
