"""Every slot of a trajectory at once, against the drafter written apart in fp64."""

import math
from contextlib import contextmanager
from dataclasses import fields
from unittest.mock import patch

import pytest
import reference
import reference_mla
import torch
from conftest import make_document, make_mla_shape, make_objective, make_shape

from eagle31_train.evaluation.measurement import Drift
from eagle31_train.evaluation.unrolled import SINKS, Trajectory, narrowest, unroll
from eagle31_train.model.decode import DraftDecoder

DEPTH = 5
PROMPT = 7
SHAPES = {
    "EAGLE 3.1": make_shape(),
    "EAGLE 3": make_shape(norm_output=False, fc_norm=False),
    "norm_output alone": make_shape(fc_norm=False),
    "normed residual": make_shape(norm_before_residual=True),
    "two layers": make_shape(num_layers=2),
    "three layers, normed": make_shape(num_layers=3, norm_before_fc=True, qk_norm=True, norm_output=False),
    "a window": make_shape(sliding_window=6),
    "a window in two layers, biases": make_shape(num_layers=2, sliding_window=4, attention_bias=True, mlp_bias=True),
    "parallel": make_shape(parallel=True, ptd_token_id=49),
    "parallel, three layers": make_shape(parallel=True, ptd_token_id=2, num_layers=3, norm_output=False, qk_norm=True),
    "MLA": make_mla_shape(),
    "MLA, two layers": make_mla_shape(num_layers=2),
    "MLA, EAGLE 3": make_mla_shape(norm_output=False, fc_norm=False, q_lora_rank=None),
}


@pytest.fixture(scope="module", params=SHAPES)
def drafted(request):
    """A drafter in fp64 with its target ids, and a trajectory along which its drafts are right for a while, again and
    again."""
    objective = make_objective(SHAPES[request.param])
    drafter = objective.drafter, objective.teacher.target_ids
    return drafter, agreeable(*drafter)


def agreeable(drafter, ids, prompt=PROMPT, output=14):
    """A target that says what the drafter expects for some tokens, then something else."""
    generator = torch.Generator().manual_seed(3)
    document = make_document(drafter.shape, prompt + output + DEPTH - 1, generator)
    told, aux = document.tokens[: prompt + 1].tolist(), document.all_aux.to(drafter.lm_head.weight.dtype)
    while len(told) < len(document):
        decoder = DraftDecoder(drafter, ids, 60)
        decoder.extend(aux[: len(told) - 1], torch.tensor(told[1:]))
        right = int(torch.randint(0, DEPTH + 1, (), generator=generator))
        told += [*decoder.propose(right)[0].tolist(), int(torch.randint(0, 50, (), generator=generator))]
    told = told[: len(document)]
    end = prompt + output
    return Trajectory(told[:prompt], told[prompt:end], told[end:], aux)


def test_the_narrowest_gap_is_that_of_the_draft_at_its_slot(drafted):
    drafter, trajectory = drafted
    draft_at = written_apart(*drafter, trajectory)
    for slot in (0, trajectory.slots - 1):
        _, outputs, _, _ = draft_at(PROMPT - 1 + slot)
        best, second = (drafter[0].lm_head.weight.detach() @ torch.stack(outputs).T).topk(2, 0).values
        found = narrowest(*drafter, trajectory, slot, DEPTH)
        assert found == pytest.approx(float((best - second).min()), rel=1e-9)


def written_apart(drafter, ids, trajectory):
    """The drafter that is written apart. Of a position it gives the draft there, and of that draft's steps the outputs,
    the states that they read, and the shares of each softmax."""
    weights = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
    spelled_out = reference_mla.reference_for(drafter.shape)(drafter.shape, weights, drafter.shared_embedding)
    told = [*trajectory.prompt, *trajectory.output, *trajectory.beyond]
    context = spelled_out.context(told, trajectory.aux, len(trajectory.prompt) - 1 + trajectory.slots)

    def draft_at(t):
        draft = []
        for _ in range(DEPTH):
            with watched_softmax() as shares:
                read = [*told[: t + 2], *draft]
                outputs, states = spelled_out.slot(read, trajectory.aux, t, len(draft) + 1, context)
            draft.append(int(ids[(weights["lm_head.weight"] @ outputs[-1]).argmax()]))
        return draft, outputs, states, shares

    return draft_at


def from_scratch(drafter, ids, trajectory):
    """Counts and drift by the drafter that is written apart: one slot, one step, one head, one softmax at a time."""
    heads = drafter.shape.num_attention_heads * drafter.shape.num_layers
    told = [*trajectory.prompt, *trajectory.output, *trajectory.beyond]
    first = len(trajectory.prompt) - 1
    accepted, rows = [], [[] for _ in range(DEPTH)]
    draft_at = written_apart(drafter, ids, trajectory)
    for t in range(first, first + trajectory.slots):
        draft, outputs, states, shares = draft_at(t)
        wrong = [a != b for a, b in zip(draft, told[t + 2 :], strict=False)]
        accepted.append(wrong.index(True) if True in wrong else DEPTH)
        for k in range(DEPTH):
            q = torch.softmax(drafter.lm_head.weight.detach() @ outputs[k], -1)
            rows[k].append(
                {
                    **shares_by_kind(shares[k * heads : (k + 1) * heads], len(trajectory.prompt), t),
                    "rms": math.sqrt(sum(float(x) ** 2 for x in states[k]) / len(states[k])),
                    "entropy": -sum(float(x) * math.log(float(x)) for x in q),
                }
            )
    mean = {f.name: [sum(row[f.name] for row in step) / len(step) for step in rows] for f in fields(Drift)}
    return accepted, Drift(**mean)


def shares_by_kind(heads, prompt, t):
    """Attention of each head over the keys of positions 0..t, then over own keys: means over heads."""
    found = {"sink": 0.0, "prompt": 0.0, "verified": 0.0, "own": 0.0}
    for shares in heads:
        for row, share in enumerate(shares.tolist()):
            if row > t:
                kind = "own"
            elif row < SINKS:
                kind = "sink"
            else:
                kind = "prompt" if row < prompt else "verified"
            found[kind] += share / len(heads)
    return found


@contextmanager
def watched_softmax():
    """The shares of every softmax that the reference works out within."""
    right, shares = reference.weighted, []

    def watching(scores, values):
        shares.append(torch.softmax(scores, 0))
        return right(scores, values)

    with patch.object(reference, "weighted", watching), patch.object(reference_mla, "weighted", watching):
        yield shares


@pytest.mark.parametrize("prompt", [PROMPT, 2])  # the second is shorter than the sinks
def test_counts_and_drift_equal_a_computation_from_scratch(drafted, prompt):
    drafter, _ = drafted
    trajectory = agreeable(*drafter, prompt, output=8)
    accepted, ours = unroll(*drafter, trajectory, DEPTH, drift=True)
    counts, truth = from_scratch(*drafter, trajectory)
    assert accepted == counts
    assert len(set(accepted)) > 1, "some drafts were right for a while, some wrong at once"
    for field in fields(Drift):
        assert getattr(ours, field.name) == pytest.approx(getattr(truth, field.name), rel=1e-9, abs=1e-12), field.name
    for shares in zip(ours.sink, ours.prompt, ours.verified, ours.own, strict=True):
        assert sum(shares) == pytest.approx(1, abs=1e-12)
    assert ours.own[0] == 0
    assert min(ours.own[1:]) > 0
