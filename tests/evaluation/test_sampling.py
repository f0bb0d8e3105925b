"""Draws: the target's distribution, whoever drafts.

Shapes: V tokens of the target's vocabulary, Vd of the drafter's.
"""

import itertools
import math
from collections import Counter

import pytest
import torch
from conftest import make_objective, make_shape

from eagle31_train.evaluation import sampling
from eagle31_train.evaluation.decoding import Limits, decode_plain, decode_speculative
from eagle31_train.evaluation.sampling import DRAFT, TARGET, Chooser, Sampling, probabilities
from eagle31_train.targets.cached import CachedTarget
from tests.evaluation.conftest import random_llama
from tests.targets.test_generate import nucleus

V, PROMPT, DRAWS, FEW, TOKENS = 5, [3, 0, 4, 1], 10_000, 3000, 3


@pytest.mark.parametrize("top", [2, 512])
@pytest.mark.parametrize("top_p", [0.3, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, 7, 50])
def test_the_nucleus_is_cut_after_the_temperature_and_renormalised(top_k, top_p, top, monkeypatch):
    """Whatever the first look holds."""
    monkeypatch.setattr(sampling, "NUCLEUS", top)
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(3)) * 2
    for row, found in zip(logits, probabilities(logits, 0.7, top_p, top_k), strict=True):
        torch.testing.assert_close(found, nucleus(row.double() / 0.7, top_p, top_k), rtol=1e-12, atol=0)


@pytest.fixture(scope="module")
def target():
    sizes = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24}
    return CachedTarget(random_llama(5, **sizes, initializer_range=0.4), [1, 2, 4])


@pytest.fixture(scope="module")
def drafter(target):
    """A random drafter of three of the five tokens, and their ids."""
    objective = make_objective(make_shape(vocab_size=V, draft_vocab_size=3, aux_layers=[1, 2, 4]), torch.float32)
    objective.drafter.shared_embedding = target.embedding.weight.data
    return objective.drafter, objective.teacher.target_ids


def law(target, how):
    """{output of TOKENS tokens: its probability}, worked out from the model's own forward pass."""
    outputs = list(itertools.product(range(V), repeat=TOKENS))
    ids = torch.tensor([[*PROMPT, *output] for output in outputs])
    logits = target.model(ids, use_cache=False).logits[:, len(PROMPT) - 1 : -1].float()
    found = {}
    for output, row in zip(outputs, logits, strict=True):
        p = probabilities(row, how.temperature, how.top_p, how.top_k)
        found[output] = float(p.gather(1, torch.tensor(output)[:, None]).prod())
    assert sum(found.values()) == pytest.approx(1, abs=1e-5)
    return found


def sample(target, drafter, how, draft_tokens=2, count=DRAWS):
    outputs, limits = [], Limits(TOKENS, set())
    for start in range(0, count, 1000):
        prompts, seeds = [PROMPT] * 1000, range(start, start + 1000)
        if draft_tokens:
            found = decode_speculative(target, *drafter, prompts, draft_tokens, limits, how, seeds)
        else:
            found = decode_plain(target, prompts, limits, how, seeds)
        outputs += [tuple(one.tokens) for one in found]
    return outputs


def distance(outputs, law):
    """Total variation between what was drawn and its law."""
    counts = Counter(outputs)
    return sum(abs(counts[output] / len(outputs) - p) for output, p in law.items()) / 2


def bar(law, count=DRAWS):
    """Above this, one set of draws in a million: the mean distance of true draws, and McDiarmid's margin over it."""
    mean = sum(math.sqrt(2 * p * (1 - p) / (math.pi * count)) for p in law.values()) / 2
    return mean + math.sqrt(math.log(1e6) / (2 * count))


HOWS = [Sampling(1.3, 1.0, "probabilistic"), Sampling(0.8, 0.9, "probabilistic"), Sampling(0.8, 0.9, "greedy")]
FEW_LIKELIEST = [Sampling(1.3, 0.9, drafts, 3) for drafts in ("probabilistic", "greedy")]


@pytest.mark.parametrize(
    ("how", "draft_tokens", "count"),
    [
        (HOWS[0], 2, FEW),
        (HOWS[2], 2, FEW),
        *((how, 2, FEW) for how in FEW_LIKELIEST),
        *(pytest.param(how, 2, DRAWS, marks=pytest.mark.slow) for how in HOWS),
        pytest.param(HOWS[0], 1, DRAWS, marks=pytest.mark.slow),
        pytest.param(HOWS[2], 0, DRAWS, marks=pytest.mark.slow),  # plain decoding
    ],
)
def test_outputs_are_distributed_as_the_targets_own(target, drafter, how, draft_tokens, count):
    wanted = law(target, how)
    most = 0.08 * math.sqrt(DRAWS / count)
    assert distance(sample(target, drafter, how, draft_tokens, count), wanted) < bar(wanted, count) < most


VERIFY, DRAW = Chooser.verify, Chooser.draft


def q_of_another_step(self, logits, proposed, target_ids):
    self._drafted.reverse()
    return VERIFY(self, logits, proposed, target_ids)


def no_temperature_for_q(self, step, logits):
    token = DRAW(self, step, logits)
    self._drafted[-1] = logits.double().softmax(-1)
    return token


def cut_drafts(self, step, logits):
    """q is of all tokens, and the draft of the two likeliest alone."""
    DRAW(self, step, logits)
    return self._draw(probabilities(logits, self.sampling.temperature, 1.0, self.sampling.top_k), DRAFT, step)


MISTAKES = {  # what stands in whose place, and the temperature at which it shows
    "all is accepted": (sampling, "acceptance", lambda p, q, drafts: torch.ones(len(p)), 1.3),
    "nothing is subtracted": (sampling, "residual", lambda p, q: p, 1.3),
    "subtracted the wrong way": (sampling, "residual", lambda p, q: (q - p).clamp(min=0), 1.3),
    "q of another step": (Chooser, "verify", q_of_another_step, 1.3),
    "no temperature for q": (Chooser, "draft", no_temperature_for_q, 4.0),
    "the draft's own race decides the replacement": (sampling, "DRAFT", TARGET, 3.0),
    "no nucleus": (sampling, "probabilities", lambda row, t, _, k=None: probabilities(row, t, 1, k), 0.8),
    "no top_k": (sampling, "probabilities", lambda row, t, p, _=None: probabilities(row, t, p), 1.3),
    "drafts cut by top_k are drawn from all": (Chooser, "draft", cut_drafts, 1.3),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_seen(target, drafter, monkeypatch, mistake):
    """In few draws, with a bar that much higher."""
    owner, name, wrong, temperature = MISTAKES[mistake]
    top_k = 2 if "top_k" in mistake else None
    how = Sampling(temperature, 0.9 if mistake == "no nucleus" else 1.0, "probabilistic", top_k)
    wanted = law(target, how)
    monkeypatch.setattr(owner, name, wrong)
    count = FEW if name == "DRAFT" else 2000
    assert distance(sample(target, drafter, how, count=count), wanted) > bar(wanted, count)


def test_drafts_are_drawn_from_the_whole_distribution():
    """As vLLM draws them: top_p and top_k are the target's alone."""
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    chooser = Chooser(Sampling(0.8, 0.5, "probabilistic", 2), [0])
    chooser.draft(0, logits)
    torch.testing.assert_close(chooser._drafted, [(logits.double() / 0.8).softmax(-1)])
