"""The drafter at serving time against the unroll that trains it: the same hidden states, to 1e-5 in fp32."""

from functools import partial
from itertools import product

import pytest
import torch
from conftest import kept_mask, make_document, make_mla_shape, make_objective, make_shape
from planting import replaced

from eagle31_train.model.batch import build_batch
from eagle31_train.model.decode import DraftDecoder
from eagle31_train.store.document import Document
from tests.evaluation import test_unrolled

K = 5


@pytest.fixture
def document():
    return make_document(make_shape(), 24, torch.Generator().manual_seed(7))


def decoder_of(objective):
    return DraftDecoder(objective.drafter, objective.teacher.target_ids, capacity=40)


def drafted(decoder, count=K):
    """Tokens [count] and outputs [count, D] of a round."""
    steps = list(decoder.unroll(count))
    return torch.cat([token for token, _ in steps]), torch.cat([z for _, z in steps])


def unrolled(objective, document, slot, tokens):
    """[K, D] what training computes at `slot` of a document that goes on with the drafted tokens."""
    K = len(tokens)
    end = slot + 2
    told = torch.cat([document.tokens[:end], tokens])
    # Training never reads the target's states of the drafted tokens at this slot.
    own = Document.of(
        tokens=told,
        loss_mask=torch.arange(len(told)) >= end,
        top1=torch.zeros(len(told), dtype=torch.int64),
        aux=document.all_aux[: len(told)].float(),
        last=document.all_last[: len(told)].float(),
    )
    packed = build_batch([own], K, kept_mask(objective, "keep"))
    with torch.no_grad():
        z, _ = objective.drafter(packed)
    return z[:, packed.layout.slots.tolist().index(slot)]


PARALLEL = {"parallel": True, "ptd_token_id": 49}
NORMS = ("fc_norm", "norm_output", "norm_before_residual")
SHAPES = [
    *(
        make_shape(**dict(zip(NORMS, given, strict=True)), **more)
        for given in product([True, False], repeat=3)
        for more in ({}, PARALLEL, {**PARALLEL, "num_layers": 2})
    ),
    *test_unrolled.SHAPES.values(),
    make_shape(sliding_window=3, num_layers=2),  # shorter than a round
]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_round_equals_the_training_unroll(document, shape):
    objective = make_objective(shape, torch.float32)
    decoder = decoder_of(objective)
    aux, done = document.all_aux.float(), 0
    # As in serving: the prompt at once, then as many rows as were accepted, over what a round left behind.
    for rows in (6, 1, 3, 4):
        decoder.extend(aux[done : done + rows], document.tokens[done + 1 : done + rows + 1])
        done += rows
        tokens, z = drafted(decoder)
        assert set(tokens.tolist()) <= set(objective.teacher.target_ids.tolist())
        torch.testing.assert_close(z, unrolled(objective, document, done - 1, tokens), rtol=1e-5, atol=1e-5)
        assert decoder.propose(K)[0].tolist() == tokens.tolist()  # drafting twice changes nothing


def another_window(decoder, aux, tokens, off):
    decoder._caches[0]._window += off
    decoder.extend(aux[:9], tokens[1:10])


def round_left_behind(decoder, aux, tokens):
    decoder.extend(aux[:6], tokens[1:7])
    decoder.propose(3)
    decoder.lengths[0] += 2  # rows of the round before are taken for verified ones
    decoder.extend(aux[8:9], tokens[9:10])


READ_WRONGLY = [
    lambda decoder, aux, tokens: decoder.extend(aux[1:10], tokens[1:10]),  # shifted states
    lambda decoder, aux, tokens: decoder.extend(aux[:9], tokens[:9]),  # shifted tokens
    round_left_behind,
]
WINDOWS = [({"sliding_window": 6}, partial(another_window, off=off)) for off in (-1, 1)]


@pytest.mark.parametrize(("shape", "read"), [*product([{}, PARALLEL], READ_WRONGLY), *WINDOWS])
def test_a_mistake_in_what_is_read_is_seen(document, shape, read):
    objective = make_objective(make_shape(**shape), torch.float32)
    decoder = decoder_of(objective)
    read(decoder, document.all_aux.float(), document.tokens)
    tokens, z = drafted(decoder)
    assert (z - unrolled(objective, document, 8, tokens)).abs().max() > 1e-3


PARTS = {
    "drafter": lambda decoder: decoder.drafter,
    "attention": lambda decoder: decoder.drafter.midlayer.self_attn,
    "cache": lambda decoder: decoder._caches[0],
}
MISTAKES = {  # shape, whose method, and what is called in its place
    "the state before the norm": ({}, "drafter", "feedback", lambda right, h, z: h),
    "positions stand": ({}, "attention", "queries", lambda right, x, at: right(x, at.clamp(max=8))),
    "positions stand, parallel": (PARALLEL, "attention", "queries", lambda right, x, at: right(x, at.clamp(max=8))),
    "blind to own steps": ({}, "cache", "attend", lambda right, x, at, lengths: right(x, at, [9] * len(lengths))),
    "another mask token": (PARALLEL, "drafter", "mask_token", lambda right: right() - 1),
    "mask rows one too far": (PARALLEL, "cache", "write", lambda right, x, rows, at: right(x, rows, at + 1)),
    "blind to other mask rows": (PARALLEL, "cache", "write", lambda right, x, rows, at: None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_drafting_is_seen(document, mistake, monkeypatch):
    shape, part, name, wrong = MISTAKES[mistake]
    objective = make_objective(make_shape(**shape), torch.float32)
    decoder = decoder_of(objective)
    decoder.extend(document.all_aux[:9].float(), document.tokens[1:10])
    replaced(monkeypatch, PARTS[part](decoder), name)(wrong)
    tokens, z = drafted(decoder)
    monkeypatch.undo()  # the unroll is the right one
    assert (z - unrolled(objective, document, 8, tokens)).abs().max() > 1e-3


ROUNDS = [[6, 1, 11], [1, 4, 1], [3, 2, 1]]  # rows that each sequence takes in


@pytest.mark.parametrize("make", [make_shape, make_mla_shape, partial(make_shape, num_layers=2, **PARALLEL)])
@pytest.mark.parametrize("leave", [None, 0, 2])
def test_sequences_draft_together_what_each_drafts_alone(make, leave):
    objective = make_objective(make(), torch.float64)
    generator = torch.Generator().manual_seed(2)
    documents = [make_document(objective.drafter.shape, 24, generator) for _ in range(3)]
    ids, done, there = objective.teacher.target_ids, [0] * 3, [0, 1, 2]
    together, *alone = (DraftDecoder(objective.drafter, ids, 30, sequences) for sequences in (3, 1, 1, 1))
    for counts in ROUNDS:
        if counts is ROUNDS[-1] and leave is not None:
            there.remove(leave)
            together.select(there)
        read = []
        for row in there:
            start, end = done[row], done[row] + counts[row]
            read.append((documents[row].all_aux[start:end], documents[row].tokens[start + 1 : end + 1]))
            alone[row].extend(*read[-1])
            done[row] = end
        aux, tokens = map(torch.cat, zip(*read, strict=True))
        together.extend(aux, tokens, [counts[row] for row in there])
        found = torch.stack([z for _, z in together.unroll(K)], 1)
        for z, row in zip(found, there, strict=True):
            torch.testing.assert_close(z, drafted(alone[row])[1], rtol=1e-12, atol=1e-12)
