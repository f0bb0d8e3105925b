"""The divergences and their slopes against autograd, over random shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle31_train.model.loss import divergence

pytestmark = pytest.mark.core


def random_problem(seed, pairs=9, positions=4, vocabulary=11):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(pairs, vocabulary, generator=generator, dtype=torch.float64) * 3
    log_p = (torch.randn(positions, vocabulary, generator=generator, dtype=torch.float64) * 3).log_softmax(-1)
    return logits, log_p, torch.randint(0, positions, (pairs,), generator=generator)


def teaches(log_p):
    """Probabilities and their negative entropy."""
    return log_p.exp(), (log_p.exp() * log_p).sum(-1)


def plain(logits, log_p, taught, kind, lk):
    """The definitions, written out."""
    p, q = log_p.exp()[taught], logits.softmax(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    first = kl if kind == "kl" else kl - (p * p.log()).sum(-1)
    return (1 - lk) * first - lk * torch.minimum(p, q).sum(-1).log()


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from(["kl", "ce"]), st.sampled_from([0.0, 0.3, 1.0]))
def test_value_and_slope_equal_the_definition_and_its_derivative(seed, kind, lk):
    logits, log_p, taught = random_problem(seed)
    value, slope = divergence(logits.clone(), *teaches(log_p), taught, kind, lk)
    leaf = logits.clone().requires_grad_()
    truth = plain(leaf, log_p, taught, kind, lk)
    torch.testing.assert_close(value, truth.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(slope, torch.autograd.grad(truth.sum(), leaf)[0], rtol=1e-9, atol=1e-9)
