"""Random states go into a checkpoint and come back from it as they were."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpointing import bits, newest, save, snapshot

from train import rng

CPU = torch.device("cpu")


def draws():
    """Some numbers of every generator; an odd count of normal ones leaves one over, which the state must hold."""
    python = [random.random(), random.gauss(0, 1), random.getrandbits(70)]
    return python, np.random.rand(3).tolist(), np.random.randn(3).tolist(), torch.randn(5).tolist()


@pytest.fixture
def seeded():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@pytest.mark.parametrize("earlier", range(3))
def test_random_states_come_back_through_a_checkpoint(seeded, tmp_path, earlier):
    for _ in range(earlier):  # after an odd number a normal one is left over
        draws()
    states = random.getstate(), np.random.get_state()
    assert (states[0][2] is not None, states[1][3]) == (earlier % 2 == 1,) * 2
    others = {kind: tensor + 1 for kind, tensor in rng.rng_state(CPU).items()}
    meant = replace(snapshot(1), rng=rng.of_all([others, rng.rng_state(CPU)]))
    save(tmp_path, meant)
    expected = draws(), draws()
    loaded = newest(tmp_path).rng
    assert loaded.keys() == {f"rank{rank}.{kind}" for rank in (0, 1) for kind in ("torch", "numpy", "python")}
    draws()
    rng.set_rng_state(rng.of_rank(loaded, 1), CPU)
    assert random.getstate() == states[0]
    ours = np.random.get_state()
    assert [part.tolist() if isinstance(part, np.ndarray) else part for part in ours] == [
        part.tolist() if isinstance(part, np.ndarray) else part for part in states[1]
    ]
    assert (draws(), draws()) == expected


def test_a_rank_that_a_checkpoint_knows_nothing_of_keeps_its_state(seeded):
    states = rng.of_all([rng.rng_state(CPU)] * 11)
    assert rng.of_rank(states, 1).keys() == {"torch", "numpy", "python"}
    before = rng.rng_state(CPU)
    rng.set_rng_state(rng.of_rank(states, 11), CPU)
    assert {kind: bits(tensor) for kind, tensor in rng.rng_state(CPU).items()} == {
        kind: bits(tensor) for kind, tensor in before.items()
    }
