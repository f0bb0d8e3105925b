"""The fidelity gate passes right documents, and none in which a mistake was planted."""

import re
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from conftest import make_document, make_shape
from made import message_of
from pipeline import HIDDEN, VOCAB, tiny_llama
from planting import instead_of
from random_targets import random_target

from eagle31_train.config import ExtractConfig
from eagle31_train.store import document as documents
from eagle31_train.store.document import Document, supervised_positions
from eagle31_train.store.shard_plan import PlannedShard, Shape
from eagle31_train.targets import extraction as stage
from eagle31_train.targets import fidelity
from eagle31_train.targets.extraction import run_shard
from eagle31_train.targets.fidelity import ROWS, Gate, compare, report
from eagle31_train.targets.hf import HiddenStateTarget, Reference, TransformersEngine

gemma, soft_capped = partial(random_target, "gemma"), partial(random_target, "gemma2", final_logit_softcapping=2.0)
SHARD = PlannedShard("shards/train-00000.safetensors", "train", 0, 0, 6, 256, 10**6)


def check(model, config=None, plant=None, codec="bf16"):
    """Make a shard of some conversations of a model as extraction does, gate included; returns its figures."""
    engine = TransformersEngine(HiddenStateTarget(model, [1]))
    if plant:
        plant(engine)
    gate = Gate(engine, config or ExtractConfig(), shards=1)
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, VOCAB, (length,), generator=generator) for length in (90, 17, 33, 1, 90, 25)]
    rows = {
        "input_ids": [row.tolist() for row in tokens],
        "loss_mask": [[i > 2 and i % 9 != 0 for i in range(len(row))] for row in tokens],
    }
    arriving, figures = run_shard(engine, rows, Shape(HIDDEN, 1, "bf16", codec), SHARD, gate)
    assert [len(document) for document in arriving.wait()] == [len(row) for row in tokens]
    assert gate.passed
    return figures


@cache
def check_right(make, known=None, codec="bf16"):
    """Without a mistake they pass; once is enough."""
    check(make(), plant=known, codec=codec)


@pytest.mark.parametrize("make", [tiny_llama, gemma, soft_capped])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_states_pass(make, dtype):
    agreement, kl, positions = check(make().to(dtype))
    assert agreement >= 0.99
    assert 0 <= kl < 0.02
    assert 100 < positions <= ROWS


def misread(change):
    """`change` the last states (index, last, engine) that an engine gives."""

    def plant(engine):
        right = engine.run

        def wrong(tokens):
            for index, aux, last in right(tokens):
                moved, other = change(index, last, engine)
                yield moved, aux, other

        engine.run = wrong

    return plant


take_last_after_the_final_norm = misread(lambda i, last, engine: (i, engine.target.final_norm(last)))
shift_positions = misread(lambda i, last, engine: (i, last.roll(1, 0)))
mix_up_conversations = misread(lambda i, last, engine: ({0: 4, 4: 0}.get(i, i), last))  # of equal length


def misread_norm(by):
    def plant(engine):
        engine.readout = replace(engine.readout, norm=engine.readout.norm + by)

    return plant


def take_the_layer_before(engine):
    engine.target.final_norm, right = engine.target.decoder.layers[-1], engine.target.final_norm
    engine.target._taps = [engine.target.final_norm if tap is right else tap for tap in engine.target._taps]


def wide_norm():
    """A final norm whose channels differ, so that norming twice is not the same as once."""
    model = tiny_llama()
    generator = torch.Generator().manual_seed(8)
    model.model.norm.weight.data = torch.randn(HIDDEN, generator=generator) * 2
    return model


MISTAKES = [
    (wide_norm, take_last_after_the_final_norm),
    (gemma, misread_norm(-1)),  # of the form (1 + w), and read as w
    (wide_norm, misread_norm(1)),
    (tiny_llama, shift_positions),
    (tiny_llama, mix_up_conversations),
    (tiny_llama, take_the_layer_before),
]


def only_the_likeliest(engine, k=5):
    """As an engine that gives the probabilities of a few tokens only, as vLLM does."""
    right = engine.reference

    def reference(tokens, positions):
        logs, ids = right(tokens, positions).own.log_softmax(-1).topk(k)
        return Reference(logs, ids)

    engine.reference = reference


@pytest.mark.parametrize(("known", "codec"), [(None, "bf16"), (only_the_likeliest, "int8_channel")])
@pytest.mark.parametrize(("make", "plant"), MISTAKES)
def test_a_planted_mistake_stops_the_run(make, plant, known, codec):
    check_right(make, known, codec)
    said = message_of(check, make(), plant=lambda engine: (plant(engine), known and known(engine)), codec=codec)
    assert said.startswith("fidelity gate: top-1 tokens agree in ")
    assert ": check target.dtype" in said


def of_rows(change):
    """The last states of which a document keeps the supervised rows are changed by `change`; top1 is right."""

    @instead_of(Document, "of")
    def plant(right, tokens, loss_mask, top1, aux, last):
        return right(tokens, loss_mask, top1, aux, change(last, supervised_positions(loss_mask)))

    return plant


def supervise_elsewhere(by):
    """Positions are taken for supervised ones, all along, which are not."""

    @instead_of(documents, "supervised_positions")
    def plant(right, loss_mask):
        return (right(loss_mask) + by).clamp_max(len(loss_mask) - 2)

    return plant


@instead_of(stage, "top1_of")
def take_top1_of_the_neighbour(right, readout, last, loss_mask):
    top1, where = right(readout, last, loss_mask), loss_mask[1:].nonzero()[:, 0]
    top1[where] = top1[where].roll(1)
    return top1


SELECTIONS = {
    "the rows after the supervised ones": of_rows(lambda last, _: last.roll(-1, 0)),
    "the rows before the supervised ones": of_rows(lambda last, _: last.roll(1, 0)),
    "positions after the supervised ones": supervise_elsewhere(1),
    "positions before the supervised ones": supervise_elsewhere(-1),
    "rows of other supervised positions": of_rows(lambda last, at: last.index_copy(0, at, last[at].roll(1, 0))),
    "top1 of the neighbour": take_top1_of_the_neighbour,
    "the state after the norm": of_rows(lambda last, _: wide_norm().model.norm(last)),  # top1 is of the right one
}


@pytest.mark.parametrize("codec", ["bf16", "int8_channel"])
@pytest.mark.parametrize("mistake", SELECTIONS)
def test_a_mistake_in_what_is_stored_stops_the_run_and_no_codec_is_blamed(mistake, codec, monkeypatch):
    check_right(wide_norm, codec=codec)
    SELECTIONS[mistake](monkeypatch)
    assert message_of(check, wide_norm(), codec=codec).startswith("fidelity gate: top-1 tokens agree")


def forgotten_cap(engine):
    engine.readout = replace(engine.readout, soft_cap=None)


def test_logits_that_are_changed_otherwise_and_those_that_are_not_numbers_do_not_pass():
    assert "fidelity gate" in message_of(check, soft_capped(), plant=forgotten_cap)
    scaled = tiny_llama()
    scaled.config.logit_scale = 2.0
    assert "config has logit_scale=2.0, which EAGLE 3's loss does not" in message_of(check, scaled)
    assert "fidelity gate" in message_of(check, tiny_llama(), ExtractConfig(gate_top1=0.0), misread_norm(float("nan")))


def test_states_are_compared_as_the_codec_keeps_them_and_top1_is_taken_before(monkeypatch):
    exact, chosen = check(tiny_llama()), []
    monkeypatch.setattr(fidelity, "compare", lambda *given: chosen.append(compare(*given[:2])[0]) or compare(*given))
    rough = check(tiny_llama(), ExtractConfig(gate_top1=1.0, gate_kl=0.05), codec="int4")
    assert min(chosen) < 1.0 == rough[0]
    assert rough[1] > 10 * exact[1]
    said = message_of(check, tiny_llama(), ExtractConfig(gate_kl=2 * exact[1]), codec="int4")
    assert re.search(r"store\.last_codec=int4 loses too much .* use int8_channel or bf16", said)


def test_agreement_and_kl_of_known_logits():
    own = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 5.0]])
    rebuilt = torch.tensor([[1.0, 0.0, 0.0], [5.0, 3.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 5.0]])
    agreement, kl = compare(Reference(own), rebuilt)
    assert agreement == 0.75, "the tie of the third row counts as agreement, the second row is a miss"
    each = zip(own, rebuilt, strict=True)
    divergences = [
        torch.nn.functional.kl_div(r.log_softmax(-1), o.softmax(-1), reduction="sum").item() for o, r in each
    ]
    assert kl == pytest.approx(sum(divergences) / 4)
    given = compare(Reference(own), rebuilt, torch.tensor([0, 1, -1, 2]))
    assert given == (0.75, kl), "the choices are those given, and none agrees with nothing"
    # A choice within one rounding step of bf16 agrees, and one beyond does not.
    second = torch.tensor([[0.0, 1.0, 0.0]])
    assert compare(Reference(torch.tensor([[100.0, 99.5, 0.0]])), second)[0] == 1.0
    assert compare(Reference(torch.tensor([[100.0, 99.0, 0.0]])), second)[0] == 0.0


@pytest.mark.parametrize("k", [1, 3, 5])
def test_of_the_likeliest_tokens_alone_agreement_is_the_same_and_the_kl_a_lower_bound(k):
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(200, 6, generator=generator) * 3
    rebuilt = own + torch.randn(200, 6, generator=generator)
    logs, ids = own.log_softmax(-1).topk(k)
    whole, part = compare(Reference(own), rebuilt), compare(Reference(logs, ids), rebuilt)
    assert 0.5 < whole[0] < 1
    assert part[0] == pytest.approx(whole[0], abs=0.01), "what is near the maximum is judged by another logit's size"
    assert 0 < part[1] <= whole[1] * 1.00001
    p, q = (rows.double().softmax(-1).gather(1, ids) for rows in (own, rebuilt))
    p, q = (torch.cat([likeliest, 1 - likeliest.sum(-1, keepdim=True)], -1) for likeliest in (p, q))
    assert part[1] == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-3), "all the others together"
    wrong = compare(Reference(logs, ids), rebuilt.roll(1, 0))
    assert wrong[0] < 0.5
    assert wrong[1] > part[1]


def test_what_is_compared_is_spread_over_store_shard_and_conversation_and_every_position_counts_alike(monkeypatch):
    asked = []
    engine = SimpleNamespace(readout=SimpleNamespace(logits=lambda rows: rows))
    engine.reference = lambda tokens, positions: asked.append((len(tokens), positions.tolist())) or positions
    monkeypatch.setattr(fidelity, "compare", lambda own, *_: (float(len(own) == 64), 0.01 * len(own)))
    gate = Gate(engine, ExtractConfig(gate_batches=3, gate_top1=0.0, gate_kl=1.0), 9)
    assert gate.sampled == {0, 3, 6}
    generator = torch.Generator().manual_seed(0)
    lengths = [257, *range(34, 43)]  # of which the last 16 tokens are answers, but all of the longest
    documents = [make_document(make_shape(), n, generator, list(range(2 if n > 99 else n - 16, n))) for n in lengths]
    agreement, kl, count = gate.check(documents)
    assert [length for length, _ in asked] == [34, 37, 40, 257]
    positions = asked[-1][1]
    assert (len(positions), positions[0], positions[-1]) == (64, 1, 255)
    assert (count, agreement, kl) == (112, pytest.approx(64 / 112), pytest.approx(0.01 * (64 * 64 + 3 * 16 * 16) / 112))
    worst = {"batches": 2, "positions": 12, "top1_agreement": 0.97, "kl": 0.3}
    assert report([(0.99, 0.3, 5), (0.97, 0.1, 7)]) == worst


def test_more_is_compared_before_a_shard_is_refused(monkeypatch):
    engine = SimpleNamespace(readout=SimpleNamespace(logits=lambda rows: rows))
    engine.reference = lambda tokens, positions: len(tokens)
    generator = torch.Generator().manual_seed(0)
    documents = [make_document(make_shape(), n, generator, list(range(2, n))) for n in range(34, 54)]
    long = make_document(make_shape(), 400, generator, list(range(2, 400)))
    for wrong, passes in (((34,), True), (range(34, 54, 4), False)):  # near ties in one of them; a mistake in many
        monkeypatch.setattr(fidelity, "compare", lambda n, *_, wrong=wrong: (float(n not in wrong), 0.0))
        gate = Gate(engine, ExtractConfig(gate_top1=0.85), 1)
        if passes:
            agreement, _, count = gate.check(documents)
            assert (agreement > 0.85, count > ROWS) == (True, True)
            assert gate.check([long, documents[0]])[2] == ROWS + 32, "few conversations are compared at more positions"
        else:
            assert "top-1 tokens agree in" in message_of(gate.check, documents)
