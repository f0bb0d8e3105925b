"""Initial weights: a drafter that was trained and exported comes back bit for bit, and otherwise as is said. Those that
would mean something else here, or are not those a run began with, are refused in one line."""

import json
import shutil
from dataclasses import asdict
from functools import cache

import conftest
import numpy as np
import pytest
import torch
from conftest import make_document, make_mla_shape, make_shape
from made import Split, message_of
from pipeline import KEPT, VOCAB, assert_equal, flip_bit
from transformers import LlamaConfig
from warming import begin, edit, refusal, with_vocab

from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.common import artifacts
from eagle31_train.export import export
from eagle31_train.model.norm import RMSNorm
from eagle31_train.targets.description import description_of
from train import initial_weights

EAGLE3 = ("drafter.fc_norm=false", "drafter.norm_output=false")
OTHERS = [i for i in range(VOCAB) if i % 3]  # shares some tokens with KEPT, and has some of its own


@pytest.fixture(scope="module")
def learnt(by_one):
    """learnt(*options): a run that has learnt something, exported in fp32; not to be changed."""

    @cache
    def of(*options):
        run = by_one("train.max_steps=4", *options)
        export(run.config("train.max_steps=4", *options))
        return run

    return of


@pytest.fixture
def draft(learnt, tmp_path):
    """draft(tensors, **settings): a changed copy of the export."""
    exported, count = learnt().folder / "run/export", iter(range(100))
    return lambda tensors=None, **settings: edit(exported, tmp_path / f"draft{next(count)}", tensors, **settings)


# ---------------------------------------------------------------- the same drafter again


WINDOW = "drafter.sliding_window=5"
# Wider than its target, so with an embedding of its own.
WIDER = ("drafter.hidden_size=48", "drafter.share_embedding=false", "drafter.attention_bias=true")
WIDER += ("drafter.mlp_bias=true", WINDOW)


@pytest.mark.parametrize("options", [(), WIDER], ids=["usual", "wider"])
@pytest.mark.parametrize("where", ["", "newest", "export"])
def test_a_run_and_its_export_come_back_bit_for_bit(learnt, new_run, where, options):
    run = learnt(*options)
    begun = begin(new_run(), run.newest() if where == "newest" else run.folder / "run" / where, *options)
    assert_equal(begun.weights, run.weights())
    assert not [name for name, fresh in begun.fresh.items() if fresh.equal(begun.weights[name])]
    assert begun.said.startswith("train: starting from the weights of ")
    assert begun.said.count("\n") == 0


def test_what_is_left_open_is_as_in_the_first_weights(learnt, new_run):
    """The target has another eps, base and number of positions. No weight knows of positions: they are the target's."""
    source, run = learnt().folder / "run", new_run()
    mine = [f"drafter.{name}=null" for name in ("rms_norm_eps", "rope_theta", "max_position_embeddings", "head_dim")]
    raw = LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, vocab_size=VOCAB,
        num_hidden_layers=4, rms_norm_eps=1e-3, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    manifest = run.folder / "run/data/manifest.json"
    of = asdict(description_of(raw.to_dict(), raw, "target"))
    artifacts.write_json(manifest, artifacts.read_json(manifest, "") | {"target": of})
    run.fit(f"train.init_from={source}", "train.max_steps=1", *mine)
    shape = json.loads((run.newest() / "drafter.json").read_text())
    assert [shape[name] for name in ("rms_norm_eps", "rope_theta", "head_dim")] == [1e-5, 1e4, 8]
    assert shape["max_position_embeddings"] == 512


@pytest.mark.parametrize("own", ["run", "run/export"])
def test_a_run_does_not_begin_with_itself(learnt, new_run, own):
    run = new_run().fit("train.max_steps=1")
    shutil.copytree(learnt().folder / "run/export", run.folder / "run/export")
    message = message_of(run.fit, f"train.init_from={run.folder / own}", "overwrite=true")
    assert "is this run's own folder" in message


def test_a_lower_precision_is_widened_exactly(learnt, draft, new_run):
    low = {n: t.half() for n, t in learnt().weights().items()}
    begun = begin(new_run(), draft(low))
    assert_equal(begun.weights, {name: tensor.float() for name, tensor in low.items()})
    assert {tensor.dtype for tensor in begun.weights.values()} == {torch.float32}


def test_an_unfinished_run_gives_its_newest_checkpoint(learnt, copy_of, new_run, tmp_path):
    run = copy_of(tmp_path).fit("train.max_steps=4", "train.checkpoint_every=2")
    (run.train / "manifest.json").unlink()
    assert run.saved() == [2, 4]
    for source, step in ((run.train, 4), (run.checkpoints / "step-000002", 2)):
        begun = begin(new_run(), source)
        assert_equal(begun.weights, run.at(step)[0])
        # A later checkpoint of the run would be another start, where the command names none.
        told = f"set train.init_from={run.checkpoints / 'step-000004'} to be able to" in begun.said
        assert told == (source == run.train)
    flip_bit(run.checkpoints / "step-000004" / "model.safetensors")
    assert "model.safetensors does not match its checksum" in refusal(new_run(), run.train)


def test_weights_that_were_trained_for_another_target_are_told_of(learnt, draft, new_run):
    told = "those weights were trained for"
    assert f"{told} org/other, and" in begin(new_run(), draft(target_model_name="org/other")).said
    assert told not in begin(new_run(), draft(target_model_name="org/target")).said, "a copy of a hub's"
    run = learnt().folder / "run"
    moved = new_run()
    options = moved.folder / "moved/train/config.yaml"
    shutil.copytree(run, options.parents[1])
    record = options.with_name("inputs.json")
    known = artifacts.read_json(record, "the test")
    artifacts.write_json(record, {**known, "target": {**known["target"], "name": "elsewhere"}})
    shutil.rmtree(options.parents[1] / "store")
    assert told not in begin(moved, options.parents[1]).said, "the same weights"
    artifacts.write_json(record, {**known, "target": {**known["target"], "name": "elsewhere", "weights": "others"}})
    assert f"{told} elsewhere, and" in begin(new_run(), options.parents[1]).said


# ---------------------------------------------------------------- another vocabulary


def by_hand(rows, theirs, ours, instead):
    """lm_head's rows for the tokens `ours`, one by one; `instead` for those that are not among `theirs`."""
    head = []
    for row, token in enumerate(ours):
        head.append(rows[theirs.index(token)] if token in theirs else instead[row])
    return torch.stack(head)


@pytest.mark.parametrize("where", ["", "export"])
def test_rows_of_lm_head_are_taken_token_by_token(learnt, new_run, where):
    source = learnt()
    begun = begin(with_vocab(new_run(), OTHERS), source.folder / "run" / where)
    rows = source.weights()["lm_head.weight"]
    right = by_hand(rows, KEPT, OTHERS, begun.fresh["lm_head.weight"])
    assert torch.equal(begun.weights["lm_head.weight"], right)
    missing = [token for token in OTHERS if token not in KEPT]
    assert f"{len(missing)} of {len(OTHERS)} draft tokens are not in their vocabulary" in begun.said
    target = begun.store.target["lm_head"]
    assert all(torch.equal(begun.weights["lm_head.weight"][OTHERS.index(token)], target[token]) for token in missing)
    # The loop can tell: ids off by one, rows in their own order, and rows by offset give other heads.
    wrong = [[token - 1 for token in KEPT], sorted(OTHERS[: len(KEPT)]), (np.array(KEPT) - np.arange(32)).tolist()]
    assert not any(torch.equal(by_hand(rows, ids, OTHERS, begun.fresh["lm_head.weight"]), right) for ids in wrong)


@pytest.mark.parametrize("trained", [True, False])
def test_rows_that_a_frozen_lm_head_would_never_learn_are_told_of_beside_trained_ones(learnt, new_run, trained):
    source = learnt(f"drafter.train_lm_head={json.dumps(trained)}").folder / "run"
    for frozen in (True, False):
        begun = begin(with_vocab(new_run(), OTHERS), source, f"drafter.train_lm_head={json.dumps(not frozen)}")
        assert ("set drafter.train_lm_head=true" in begun.said) == (frozen and trained)


def test_a_draft_without_an_lm_head_has_the_targets(draft, new_run):
    begun = begin(new_run(), draft(dict.fromkeys(["d2t", "t2d", "lm_head.weight"]), draft_vocab_size=None))
    assert torch.equal(begun.weights["lm_head.weight"], begun.store.target["lm_head"][torch.tensor(KEPT)])
    assert "those weights have no lm_head: it starts as a copy of the target's" in begun.said


@pytest.mark.parametrize("options", [(), ("drafter.norm_before_fc=true",)], ids=["states", "normed states"])
def test_fc_reads_through_its_new_norm_about_what_it_read_without(learnt, new_run, options):
    source = learnt(*EAGLE3, *options)
    begun = begin(new_run(), source.folder / "run", *options)
    split, fc, norm = begun.store.split("train"), begun.weights["fc.weight"], None
    aux = torch.cat([split.read(i).aux.decode().float() for i in range(6)])
    if options:
        norm = RMSNorm(3 * 32, 1e-5)
        norm.weight.data.copy_(begun.weights["input_norm.weight"])
        aux = norm(aux.flatten(1)).detach().unflatten(1, (3, 32))
    before = aux.flatten(1) @ fc.T
    starts = [begun.weights[f"fc_norm.{i}.weight"] for i in range(3)]
    assert all((start == start[0]).all() and start[0] > 0 for start in starts)

    def after(weights):
        normed = aux / aux.square().mean(-1, keepdim=True).add(1e-5).sqrt() * torch.stack(weights)
        return ((normed.flatten(1) @ fc.T - before).norm(dim=-1) / before.norm(dim=-1)).mean().item()

    # The mean over positions of |fc(fc_norm(a)) - fc(a)| / |fc(a)|.
    assert after(starts) < 0.2
    assert after([torch.ones(32)] * 3) > 2 * after(starts), "fc_norm left at one"
    assert after(starts[::-1]) > 2 * after(starts), "the layers in another order"
    rms = aux.square().mean(-1).sqrt()
    expected = [sorted(rms[:, i].tolist())[(len(rms) - 1) // 2] for i in range(3)]
    everything = initial_weights.state_rms(split, norm).detach()
    assert torch.stack(starts)[:, 0].tolist() == everything.tolist()
    assert everything.tolist() == pytest.approx(expected, rel=0.1)  # of half the split


def test_fc_of_eagle_3_goes_on_from_served_weights(learnt, new_run):
    source = learnt(*EAGLE3)
    begun = begin(new_run(), source.folder / "run", *EAGLE3, "train.fc_input_scale=[0.25,2,0.5]")
    columns = torch.tensor([0.25, 2, 0.5]).repeat_interleave(32)
    assert (begun.weights["fc.weight"] * columns).equal(source.weights()["fc.weight"])


def test_a_window_may_be_begun_but_not_changed_or_lost(learnt, new_run):
    whole, windowed = learnt(), learnt(WINDOW)
    assert_equal(begin(new_run(), whole.folder / "run", WINDOW).weights, whole.weights())
    for options in ((), ("drafter.sliding_window=6",)):
        assert "sliding_window" in refusal(new_run(), windowed.folder / "run", *options)


# ---------------------------------------------------------------- other options

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
OTHER_BASE = {"rope_theta": 5000, "rope_parameters": None}
ONE_MORE = {"embed_tokens.weight": torch.zeros(41, 32), "t2d": None}
OTHER_KINDS = [  # the draft's change, options here, and the option with which it would fit
    (OTHER_BASE, (), "(rope_theta: ", "drafter.rope_theta=5000"),
    ({"rms_norm_eps": 1e-6}, (), "(rms_norm_eps: ", "drafter.rms_norm_eps=1e-6"),
    ({"norm_before_residual": True}, (), "(norm_before_residual: ", "drafter.norm_before_residual=true"),
    ({"tensors": ONE_MORE, "vocab_size": 41}, (), "(vocab_size: 41 there, 40 here)", None),
    ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (), "(aux_layers: [1, 3, 4] there, [1, 3, 5] here)", None),
    ({}, ("drafter.fc_norm=false",), "(fc_norm: true there, false here)", None),
    ({}, ("drafter.norm_output=false",), "(norm_output: true there, false here)", None),
]


@pytest.mark.parametrize(("change", "options", "said", "fits"), OTHER_KINDS)
def test_what_would_mean_something_else_here_is_refused(new_run, draft, change, options, said, fits):
    other = draft(**change)
    assert said in refusal(new_run(), other, *options)
    if fits:
        begin(new_run(), other, fits)


def test_rope_is_compared_by_what_it_does(new_run, draft):
    here = "drafter.rope_scaling={type:yarn,factor:4.0,original_max_position_embeddings:512}"
    begin(new_run(), draft(rope_scaling=YARN, rope_parameters=None), here)
    begin(new_run(), draft(max_position_embeddings=4096))
    # Without its original length, yarn goes by the longest position.
    shorter = draft(rope_scaling={"rope_type": "yarn", "factor": 4.0}, rope_parameters=None, max_position_embeddings=32)
    assert "rope_scaling." in refusal(new_run(), shorter, here)


def test_the_targets_embedding_may_be_there_and_another_may_not(new_run, learnt, draft):
    run = learnt()
    target = begin(new_run(), run.folder / "run").store.target["embed_tokens"]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_equal(begin(new_run(), draft({"embed_tokens.weight": target.to(dtype)})).weights, run.weights())
    other = target.clone()
    other[7] *= 1.02
    assert refusal(new_run(), draft({"embed_tokens.weight": other})).endswith("set drafter.share_embedding=false")
    own = begin(new_run(), draft({"embed_tokens.weight": other}), "drafter.share_embedding=false")
    assert torch.equal(own.weights["embed_tokens.weight"], other)
    none = begin(new_run(), draft(), "drafter.share_embedding=false")
    assert torch.equal(none.weights["embed_tokens.weight"], target)
    assert "those weights have no embed_tokens: it starts as a copy of the target's" in none.said


# ---------------------------------------------------------------- a run goes on

HALVED = {"norm.weight": torch.full((32,), 0.5)}


@pytest.fixture
def begun(draft, new_run):
    """A run that began with a draft and was stopped; this draft, gone meanwhile; and the options to go on."""
    source = draft()
    words = ["train.max_steps=4", "train.checkpoint_every=2", f"train.init_from={source}"]
    run = new_run().stopped(2, *words)
    shutil.rmtree(source)
    return run, source, words


@pytest.mark.parametrize("left", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_other_weights_in_the_same_place_are_refused(begun, draft, left):
    run, source, words = begun
    if not left:
        shutil.rmtree(run.checkpoints)
    draft(HALVED).rename(source)
    assert "was made from other inputs (train.init_from: " in message_of(run.fit, *words)
    run.fit(*words, "overwrite=true")


CHANGES = {
    "kind": (OTHER_BASE, "(rope_theta: "),
    "weights": ({"tensors": HALVED}, "has changed since the run began: set train.init_revision"),
}


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_first_weights_that_are_read_again_are_compared_again(begun, draft, monkeypatch, change, said):
    """A run whose only checkpoint is damaged, and whose first weights are a repository that has changed."""
    run, source, words = begun
    (run.checkpoints / "step-000002" / "model.safetensors").write_bytes(b"")
    draft(**change).rename(source)
    monkeypatch.setattr(initial_weights, "goes_by_record", lambda _: True)
    assert said in message_of(run.fit, *words)


def test_a_run_that_begins_anew_records_the_weights_that_it_reads(begun, draft, monkeypatch):
    run, source, words = begun
    before = initial_weights.identity(run.config(*words), None)
    draft(HALVED).rename(source)
    monkeypatch.setattr(initial_weights, "goes_by_record", lambda _: True)
    run.fit(*words, "train.lr=0.02", "overwrite=true")
    now = run.manifest()["inputs"]["train"]["init_from"]
    assert now == initial_weights.open_source(run.config(*words)).initial_identity != before


def test_a_run_that_goes_on_needs_its_first_weights_no_more(begun):
    run, source, words = begun
    words.append("overwrite=true")
    for other in ("train.lr=0.02", "train.init_revision=v2"):
        assert str(source) in message_of(run.fit, *words, other), "another run needs them, and replaces nothing"
    run.fit(*words)
    assert run.rows()[-1]["step"] == run.manifest()["steps"]


def test_a_run_that_goes_on_keeps_what_it_had_of_its_first_weights(draft, new_run):
    """Even if it may be overwritten: otherwise it would be another run, which needs them."""
    source = draft(rope_theta=5000, rope_parameters=None)
    words = ["train.max_steps=4", "train.checkpoint_every=2", f"train.init_from={source}", "drafter.rope_theta=null"]
    run = new_run().stopped(2, *words)
    shutil.rmtree(source)
    assert run.fit(*words, "overwrite=true").recorded()["drafter"]["rope_theta"] == 5000


def test_a_rope_that_sharpens_the_softmax_otherwise_is_another():
    def of(share):
        return make_mla_shape(rope_scaling={**conftest.YARN, "mscale": share, "mscale_all_dim": share})

    assert initial_weights._same_rope(of(1.0), of(1.0))
    assert not initial_weights._same_rope(of(1.0), of(0.5))


def test_a_few_large_states_do_not_move_what_fc_norm_starts_at():
    generator = torch.Generator().manual_seed(0)
    documents = [make_document(make_shape(), 9, generator, list(range(1, 9))) for _ in range(4)]
    for d in documents:
        d.aux.values[0] *= 1000  # as of a document's first token
    rms = initial_weights.state_rms(Split(documents))
    assert (rms - 3).abs().max() < 1, "make_document's states have about 3"


def test_a_checkpoint_beside_the_record_of_another_run_is_refused(new_run):
    run = new_run().fit("train.max_steps=1")
    assert DrafterCheckpoint.open(run.newest()).inputs == run.recorded()
    record = run.train / "inputs.json"
    artifacts.write_json(record, {**artifacts.read_json(record, "the test"), "fingerprint": "0" * 16})
    assert "inputs.json belongs to another run than the checkpoint" in message_of(DrafterCheckpoint.open, run.newest())


def test_tokens_behind_its_last_one_start_afresh(learnt, draft, new_run):
    rows, few = learnt().weights()["lm_head.weight"], KEPT[:20]
    maps = {"d2t": torch.tensor(few) - torch.arange(20), "t2d": None}
    begun = begin(new_run(), draft({"lm_head.weight": rows[:20].clone(), **maps}, draft_vocab_size=20))
    right = by_hand(rows, few, KEPT, begun.fresh["lm_head.weight"])
    assert torch.equal(begun.weights["lm_head.weight"], right)
