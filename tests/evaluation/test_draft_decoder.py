"""The drafter at serving time against the unroll that trains it: the same hidden states, to 1e-5 in fp32."""

from functools import partial
from itertools import product

import pytest
import torch
from conftest import make_document, make_mla_shape, make_objective, make_shape

from eagle31_train.model.batch import build_batch
from eagle31_train.model.decode import DraftDecoder
from eagle31_train.store.document import Document

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
    packed = build_batch([own], K, torch.ones(objective.drafter.shape.vocab_size, dtype=torch.bool), "keep")
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
    make_shape(sliding_window=6),
    make_shape(sliding_window=3, num_layers=2),  # shorter than a round
    make_shape(attention_bias=True, mlp_bias=True),
    make_shape(num_layers=3, norm_before_fc=True, qk_norm=True, norm_output=False),
    make_shape(**PARALLEL, num_layers=3, qk_norm=True),
    make_mla_shape(num_layers=2),
    make_mla_shape(norm_output=False, fc_norm=False, q_lora_rank=None),
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
        assert decoder.draft(K) == tokens.tolist()  # drafting twice changes nothing


@pytest.mark.parametrize("off", [-1, 1])
def test_a_cache_with_another_window_is_seen(document, off):
    objective = make_objective(make_shape(sliding_window=6), torch.float32)
    decoder = decoder_of(objective)
    decoder._caches[0]._window += off
    decoder.extend(document.all_aux[:9].float(), document.tokens[1:10])
    tokens, z = drafted(decoder)
    assert (z - unrolled(objective, document, 8, tokens)).abs().max() > 1e-3


def shifted_states(decoder, aux, tokens):
    decoder.extend(aux[1:10], tokens[1:10])


def shifted_tokens(decoder, aux, tokens):
    decoder.extend(aux[:9], tokens[:9])


def pre_norm_feedback(decoder, aux, tokens):
    decoder.drafter.feedback = lambda h, z: h
    decoder.extend(aux[:9], tokens[1:10])


def standing_positions(decoder, aux, tokens):
    queries = decoder.drafter.midlayer.self_attn.queries
    decoder.drafter.midlayer.self_attn.queries = lambda x, positions: queries(x, positions.clamp(max=8))
    decoder.extend(aux[:9], tokens[1:10])


def blind_to_own_steps(decoder, aux, tokens):
    (cache,), first = decoder._caches, 9
    attend = cache.attend
    cache.attend = lambda x, positions, lengths: attend(x, positions, [first] * len(lengths))
    decoder.extend(aux[:9], tokens[1:10])


def round_left_behind(decoder, aux, tokens):
    decoder.extend(aux[:6], tokens[1:7])
    decoder.draft(3)
    decoder.lengths[0] += 2  # rows of the round before are taken for verified ones
    decoder.extend(aux[8:9], tokens[9:10])


def another_mask_token(decoder, aux, tokens):
    right = decoder.drafter.mask
    decoder.drafter.mask = lambda: (right()[0] - 1, right()[1])
    decoder.extend(aux[:9], tokens[1:10])


def mask_rows_one_too_far(decoder, aux, tokens):
    (cache,) = decoder._caches
    write = cache.write
    decoder.extend(aux[:9], tokens[1:10])
    cache.write = lambda x, rows, positions: write(x, rows, positions + 1)


def blind_to_other_mask_rows(decoder, aux, tokens):
    decoder.extend(aux[:9], tokens[1:10])
    (cache,) = decoder._caches
    cache.write = lambda x, rows, positions: None


OF_BOTH = [shifted_states, shifted_tokens, standing_positions, round_left_behind]
OF_CHAINS = [*OF_BOTH, pre_norm_feedback, blind_to_own_steps]
OF_PARALLEL = [*OF_BOTH, another_mask_token, mask_rows_one_too_far, blind_to_other_mask_rows]


@pytest.mark.parametrize(
    ("shape", "mistake"), [*(({}, each) for each in OF_CHAINS), *((PARALLEL, each) for each in OF_PARALLEL)]
)
def test_a_planted_mistake_is_seen(document, shape, mistake):
    objective = make_objective(make_shape(**shape), torch.float32)
    decoder = decoder_of(objective)
    mistake(decoder, document.all_aux.float(), document.tokens)
    tokens, z = drafted(decoder)
    for name in ("feedback", "mask"):  # the unroll is the right one
        vars(decoder.drafter).pop(name, None)
    vars(decoder.drafter.midlayer.self_attn).pop("queries", None)
    assert (z - unrolled(objective, document, 8, tokens)).abs().max() > 1e-3


ROUNDS = [[6, 1, 11], [1, 4, 1], [3, 2, 1]]  # rows that each sequence takes in


def together(decoder, documents, leave=None, rounds=ROUNDS):
    """Outputs [count, D] of each round of each sequence; sequence `leave` leaves before the last round."""
    done, there, found = [0] * len(documents), list(range(len(documents))), []
    for number, counts in enumerate(rounds):
        if leave is not None and number == len(rounds) - 1:
            there.remove(leave)
            decoder.select(there)
        counts = [counts[row] for row in there]
        ranges = [(documents[row], done[row], done[row] + count) for row, count in zip(there, counts, strict=True)]
        aux = torch.cat([document.all_aux[start:end] for document, start, end in ranges])
        decoder.extend(aux, torch.cat([d.tokens[start + 1 : end + 1] for d, start, end in ranges]), counts)
        for row, (_, _, end) in zip(there, ranges, strict=True):
            done[row] = end
        found.append(dict(zip(there, torch.stack([z for _, z in decoder.unroll(K)], 1), strict=True)))
    return found


@pytest.mark.parametrize("make", [make_shape, make_mla_shape, partial(make_shape, num_layers=2, **PARALLEL)])
@pytest.mark.parametrize("leave", [None, 0, 2])
def test_sequences_draft_together_what_each_drafts_alone(make, leave):
    objective = make_objective(make(), torch.float64)
    generator = torch.Generator().manual_seed(2)
    documents = [make_document(objective.drafter.shape, 24, generator) for _ in range(3)]
    ids = objective.teacher.target_ids
    found = together(DraftDecoder(objective.drafter, ids, 30, 3), documents, leave)
    for row, document in enumerate(documents):
        alone = together(
            DraftDecoder(objective.drafter, ids, 30), [document], rounds=[[counts[row]] for counts in ROUNDS]
        )
        for here, there in zip(found, alone, strict=True):
            if row in here:
                torch.testing.assert_close(here[row], there[0], rtol=1e-12, atol=1e-12)
    assert (0 in found[-1]) == (leave != 0)
