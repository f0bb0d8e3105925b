"""build_batch against a re-count in plain loops over positions and steps; and batches with nothing to train."""

from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from conftest import kept_mask, make_document, make_objective, make_shape
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planting import instead_of

from eagle31_train.model import batch
from eagle31_train.model.batch import Subset, build_batch
from eagle31_train.model.loss import MEASURES
from eagle31_train.store.codec import plain
from eagle31_train.store.document import Document

V = 9


def document(tokens, mask, top1, first=0):
    """A document whose states are the numbers first, first + 1, … of its positions."""
    T = len(tokens)
    ids = torch.arange(first, first + T, dtype=torch.float32)
    # As extraction leaves it: no arg-max where nothing of the assistant's follows.
    top1 = [top1[t] if t + 1 < T and mask[t + 1] else -1 for t in range(T)]
    return Document(
        torch.tensor(tokens), torch.tensor(mask), torch.tensor(top1), ids.view(T, 1, 1) + 0.5, ids.view(T, 1)
    )


@st.composite
def problems(draw):
    """Documents of 1 to 12 tokens with any masks, a draft vocabulary, K, what to do beyond it, and a subset or none."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    ids, documents = st.integers(0, V - 1), []
    for length in lengths:

        def row(of, n=length):
            return draw(st.lists(of, min_size=n, max_size=n))

        mask = draw(st.sampled_from([None, True, False]))
        mask = row(st.booleans()) if mask is None else [mask] * length
        documents.append(document(row(ids), mask, row(ids), sum(lengths[: len(documents)])))
    kept = draw(st.lists(st.booleans(), min_size=V, max_size=V))
    subset = None
    if draw(st.booleans()):
        taken = [torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n))) for n in lengths]
        subset = Subset(taken, draw(st.floats(1, 9)))
    options = {"ttt_length": draw(st.integers(1, 8)), "oov": draw(st.sampled_from(["mask", "keep"])), "subset": subset}
    return documents, torch.tensor(kept), draw(st.integers(1, 5)), options


def recount(documents, kept, ttt_length, oov, subset):
    """Everything a batch says, in plain Python; positions are packed ones unless said otherwise."""
    found = SimpleNamespace(contexts=[], slots=[], inputs=[], pairs=set())
    for name in ("trained", "eligible", "eligible_prefix", "population"):
        setattr(found, name, [0] * ttt_length)
    start = 0
    for number, d in enumerate(documents):
        x, mask, top1 = d.tokens.tolist(), d.loss_mask.tolist(), d.top1.tolist()
        T = len(x)
        context = 0
        for t in range(T):
            eligible = [k for k in range(ttt_length) if t + 2 + k < T and mask[t + 2 + k]]
            trained = [k for k in eligible if oov == "keep" or kept[top1[t + 1 + k]]]
            for k in trained:
                found.population[k] += 1
            if subset is not None and not subset.taken[number][t]:
                continue
            for k in eligible:
                found.eligible[k] += 1
                found.eligible_prefix[k] += all(j in eligible for j in range(k))
            if trained:
                found.slots.append(start + t)
                context = t + 1
                found.inputs.append([x[t + 1 + k] if t + 1 + k < T else x[T - 1] for k in range(ttt_length)])
            for k in trained:
                found.trained[k] += 1
                found.pairs.add((start + t, k, start + t + 1 + k, top1[t + 1 + k]))
        found.contexts.append((start, context))
        start += T
    return found


def check(packed, documents, wanted, chunk, scale):
    """Every field of a batch against the re-count."""
    # Of each document, the positions up to its last slot, end to end; a document without a slot leaves nothing.
    places = [start + t for start, count in wanted.contexts for t in range(count)]
    ends = list(accumulate(count for _, count in wanted.contexts if count))
    assert packed.layout.documents == list(pairwise([0, *ends]))
    assert [places[slot] for slot in packed.layout.slots.tolist()] == wanted.slots
    assert packed.positions.tolist() == [t for _, count in wanted.contexts for t in range(count)]
    assert packed.aux.decode().flatten().tolist() == [place + 0.5 for place in places]
    assert packed.following.tolist() == [place + 1 for place in places]
    assert packed.ttt_length == len(wanted.trained)
    # Tokens are read by where they stand: slots by way of a list of all that any of them reads.
    assert packed.ids[packed.read][packed.reads].T.tolist() == wanted.inputs
    assert packed.read.tolist() == sorted(set(packed.read[packed.reads].flatten().tolist()))
    S = len(wanted.slots)
    assert packed.scale == scale
    for name in ("trained", "eligible", "eligible_prefix", "population"):
        assert getattr(packed, name).tolist() == getattr(wanted, name), name
        assert getattr(packed, name).dtype == torch.int64

    # The pairs: which slot and step, taught by which position.
    taught = packed.teacher.decode().flatten().long().tolist()
    pairs = []
    for row, j, step in zip(
        *(x.tolist() for x in (packed.pair_row, packed.pair_teacher, packed.pair_step)), strict=True
    ):
        k, slot = divmod(row, S)
        assert k == step
        pairs.append((wanted.slots[slot], k, taught[j], int(packed.top1[j])))
    assert len(set(pairs)) == len(pairs) == sum(wanted.trained)
    assert set(pairs) == wanted.pairs
    assert taught == sorted({j for _, _, j, _ in wanted.pairs}), "each taught position once"

    # The chunks: runs of positions and of their pairs, together all of them.
    rows = packed.pair_teacher.tolist()
    assert rows == sorted(rows)
    assert [c[:2] for c in packed.chunks] == [
        (first, min(first + chunk, len(taught))) for first in range(0, len(taught), chunk)
    ]
    assert [p for *_, begin, end in packed.chunks for p in range(begin, end)] == list(range(len(pairs)))
    for first, last, begin, end in packed.chunks:
        assert all(first <= j < last for j in rows[begin:end])


def build_and_check(problem):
    documents, kept, chunk, options = problem
    with patch.object(batch, "CHUNK", chunk):
        packed = build_batch(documents, keep_mask=kept, **options)
    scale = 1.0 if options["subset"] is None else options["subset"].scale
    check(packed, documents, recount(documents, kept.tolist(), **options), chunk, scale)


WORKED = (
    [
        document([1, 2, 3, 4, 5, 6, 7], [False, False, True, True, False, True, True], [5, 6, 1, 2, 4, 7, 0]),
        document([8], [True], [0], 7),
        document([7, 5, 3, 1, 2], [False, False, False, True, True], [1, 0, 5, 6, 8], 8),
        document([2, 4, 6], [False, False, False], [0, 0, 0], 13),
    ],
    torch.tensor([i % 4 != 0 for i in range(V)]),
    2,
    {"ttt_length": 3, "oov": "mask", "subset": None},
)


@settings(max_examples=100)
@example(WORKED)
@given(problems())
def test_a_batch_is_what_plain_loops_count(problem):
    build_and_check(problem)


def test_contexts_are_right_with_several_threads_and_many_slots():
    """Indexed assignment with an index that occurs twice keeps any of the two, once torch shares it among threads."""
    T = 2000
    long = document([1] * T, [i > 2 for i in range(T)], [1] * T)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(20):
            packed = build_batch([long, long, long], 2, torch.ones(V, dtype=torch.bool), "mask")
            assert packed.layout.documents == [(0, T - 2), (T - 2, 2 * T - 4), (2 * T - 4, 3 * T - 6)]
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------- planted mistakes


def of_document(change):
    """The pairs are worked out of a document changed so."""

    @instead_of(batch, "_pairs")
    def plant(right, d, *rest):
        loss_mask, top1 = change(d)
        return right(Document(d.tokens, loss_mask, top1, d.aux, d.last), *rest)

    return plant


def of_batch(**changes):
    """The finished batch is changed so."""

    def plant(monkeypatch):
        right = build_batch

        def wrong(*args, **options):
            packed = right(*args, **options)
            return replace(packed, **{name: change(packed) for name, change in changes.items()})

        monkeypatch.setitem(globals(), "build_batch", wrong)

    return plant


MISTAKES = {
    "the mask of the token before": of_document(lambda d: (d.loss_mask.roll(1), d.top1)),
    "the mask of the token two before": of_document(lambda d: (d.loss_mask.roll(2), d.top1)),
    "the mask of the token after": of_document(lambda d: (d.loss_mask.roll(-1), d.top1)),
    "the arg-max of the position before": of_document(lambda d: (d.loss_mask, d.top1.roll(1))),
    "the arg-max of the position after": of_document(lambda d: (d.loss_mask, d.top1.roll(-1))),
    "every token taken for the assistant's": of_document(lambda d: (torch.ones_like(d.loss_mask), d.top1.clamp(min=1))),
    "inputs one step early": of_batch(reads=lambda p: p.reads.roll(1, 0)),
    "inputs of the slot before": of_batch(reads=lambda p: p.reads.roll(1, 1)),
    "inputs read one place late": of_batch(read=lambda p: (p.read + 1).clamp(max=len(p.ids) - 1)),
    "context inputs of the next document": of_batch(
        following=lambda p: (torch.arange(len(p.aux)) + 1).clamp(max=len(p.ids) - 1)
    ),
    "context inputs not shifted": of_batch(following=lambda p: p.following - 1),
    "positions of the whole batch": of_batch(positions=lambda p: torch.arange(len(p.aux))),
    "contexts without their last slot": of_batch(
        layout=lambda p: replace(p.layout, documents=[(begin, end - 1) for begin, end in p.layout.documents])
    ),
    "all documents taken for one": of_batch(
        layout=lambda p: replace(p.layout, documents=[(0, p.layout.documents[-1][1])])
    ),
    "states of the next context row": of_batch(aux=lambda p: plain(p.aux.decode().roll(-1, 0))),
    "teachers one position late": of_batch(teacher=lambda p: plain(p.teacher.decode() + 1)),
    "arg-max one position late": of_batch(top1=lambda p: p.top1.roll(-1)),
    "pairs of the next slot": of_batch(pair_row=lambda p: (p.pair_row + 1) % p.reads.numel()),
    "pairs of the next step": of_batch(pair_step=lambda p: (p.pair_step + 1) % p.ttt_length),
    "pairs taught by the next position": of_batch(
        pair_teacher=lambda p: (p.pair_teacher + 1).clamp(max=len(p.teacher) - 1)
    ),
    "a chunk that ends a pair late": of_batch(
        chunks=lambda p: [(first, end, begin, stop + 1) for first, end, begin, stop in p.chunks]
    ),
    "the last chunk forgotten": of_batch(chunks=lambda p: p.chunks[:-1]),
    "prefixes counted as pairs": of_batch(eligible_prefix=lambda p: p.eligible),
    "eligible counted as trained": of_batch(eligible=lambda p: p.trained),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
@pytest.mark.core
def test_a_planted_off_by_one_is_caught(mistake, monkeypatch):
    build_and_check(WORKED)
    mistake(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        build_and_check(WORKED)


# ---------------------------------------------------------------- nothing to train


# Why there is nothing: lengths of documents, and what of each is the assistant's.
NOTHING = {
    "single tokens": ([1, 1, 1], [0]),
    "no answer": ([9, 4], []),
    "first tokens only": ([6], [0, 1]),
    "out of the vocabulary": ([8], [2, 3, 4, 7]),
}


@pytest.mark.parametrize("why", NOTHING)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("lk", [0.0, 0.5])
def test_a_batch_without_a_slot_gives_zeros_and_no_nan(why, precision, lk):
    shape = make_shape()
    dtype = torch.float64 if precision == "fp64" else torch.float32
    objective = make_objective(shape, dtype)
    objective.lk = lk
    kept = kept_mask(objective)
    kept[0] = False
    (lengths, answer), generator = NOTHING[why], torch.Generator().manual_seed(0)
    documents = [make_document(shape, length, generator, answer=answer) for length in lengths]
    documents = [replace(d, aux=d.aux.to(dtype), last=d.last.to(dtype)) for d in documents]
    if why == "out of the vocabulary":
        documents = [replace(d, top1=torch.zeros_like(d.top1)) for d in documents]
    packed = build_batch(documents, 3, kept, "mask")
    assert len(packed.layout.slots) == sum(packed.trained) == 0
    # The weights that other ranks' pairs give: this part must add nothing to them.
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss, measured = objective(packed, torch.ones(3))
    loss.backward()
    assert loss.item() == 0
    for name, parameter in objective.drafter.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name
    eligible = dict(zip(("eligible", "eligible_prefix"), (packed.eligible, packed.eligible_prefix), strict=True))
    for name, row in zip(MEASURES, measured, strict=True):
        assert torch.equal(row, eligible.get(name, torch.zeros(3)).float()), name
