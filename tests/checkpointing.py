"""Tiny snapshots of a run, and what is asked of the checkpoints made of them."""

import os

import torch
from conftest import make_shape

from train import checkpoint
from train.checkpoint import Saver, Snapshot

FINGERPRINT = "f" * 16
FILES = ["drafter.json", "manifest.json", "model.safetensors", "optimizer.safetensors"]
SHAPE = make_shape(rope_scaling={"rope_type": "linear", "factor": 2.0})


def snapshot(step, seed=None):
    """A snapshot of random values; those of other seeds are others, and the seed is the step unless said otherwise."""
    generator = torch.Generator().manual_seed(step if seed is None else seed)
    weights = {
        "fc.weight": torch.randn(4, 12, generator=generator),
        "norm.weight": torch.randn(4, generator=generator),
    }
    moments = {
        f"{moment}.{name}": torch.randn(tensor.shape, generator=generator)
        for moment in ("exp_avg", "exp_avg_sq")
        for name, tensor in weights.items()
    }
    extra = {"totals": {"tokens": step * 1000, "seconds": step / 3}, "tracker": {"wandb": "tiny-ä"}}
    return Snapshot(step, weights, moments, SHAPE, extra)


def saver(folder, keep=2, say=None, committed=None):
    return Saver(folder, FINGERPRINT, keep, say or refuse, committed)


def save(folder, *snapshots, keep=2):
    """Save one after the other; returns the folder."""
    ours = saver(folder, keep)
    for one in snapshots:
        ours.save(one)
    ours.close()
    assert ours.committed == step(folder, snapshots[-1].step)
    return folder


def newest(folder, said=None):
    """The newest checkpoint as it is loaded; None if there is none. Lines go to `said`."""
    path = checkpoint.newest(folder, FINGERPRINT, refuse if said is None else said.append)
    return None if path is None else checkpoint.load(path, SHAPE)


def refuse(line):
    raise AssertionError(f"nothing was to be said, but: {line}")


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.contiguous().flatten().view(torch.uint8).tolist()


def same(loaded, meant):
    """Whether two of Snapshot and Loaded are equal, bit by bit."""
    if loaded is None or (loaded.step, loaded.extra) != (meant.step, meant.extra):
        return False
    for part in ("weights", "moments"):
        ours, theirs = getattr(loaded, part), getattr(meant, part)
        if ours.keys() != theirs.keys() or any(bits(ours[name]) != bits(theirs[name]) for name in ours):
            return False
    return True


def names(folder):
    """Everything in the folder of checkpoints, hidden leftovers too."""
    return sorted(path.name for path in folder.iterdir())


def step(folder, number):
    return folder / f"step-{number:06d}"


def failing(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail
