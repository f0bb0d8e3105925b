"""Initial weights: a drafter that was trained and exported comes back bit for bit, and otherwise as is said."""

import shutil

import numpy as np
import pytest
import torch
from pipeline import KEPT, VOCAB, assert_equal, save_quietly, tiny_config, tiny_llama, write_data
from safetensors.torch import load_file
from warming import begin, edit, refusal, with_vocab

from eagle31_train.export import export
from eagle31_train.extract import extract
from eagle31_train.model.batch import build_batch
from eagle31_train.store import Store
from eagle31_train.store.codec import as_encoded
from train import initial_weights
from train.metrics import summarise

EAGLE3 = ("drafter.fc_norm=false", "drafter.norm_output=false")
OTHERS = [i for i in range(VOCAB) if i % 3]  # shares some tokens with KEPT, and has some of its own


@pytest.fixture(scope="module")
def learnt(copy_of, tmp_path_factory):
    """learnt(*options): a run trained until it knows its conversations, and exported in fp32; not to be changed."""
    made = {}

    def of(*options):
        if options not in made:
            run = copy_of(tmp_path_factory.mktemp("learnt")).fit("train.epochs=30", *options)
            export(run.config("train.epochs=30", *options))
            made[options] = run
        return made[options]

    return of


@torch.no_grad()
def measured(begun, split="heldout", unroll=3):
    """Loss and acceptance estimate of the drafter on a split, as training reports them."""
    documents = begun.store.split(split)
    batch = build_batch(documents.read_all(range(len(documents))), unroll, begun.kept, "mask")
    return summarise(begun.objective(batch, torch.ones(unroll))[1].stacked())


# ---------------------------------------------------------------- the same drafter again


@pytest.mark.core
@pytest.mark.parametrize("where", ["", "newest", "export"])
def test_a_run_and_its_export_come_back_bit_for_bit(learnt, new_run, where):
    run = learnt()
    begun = begin(new_run(), run.newest() if where == "newest" else run.folder / "run" / where)
    assert_equal(begun.weights, run.weights())
    assert not torch.equal(begun.fresh["fc.weight"], begun.weights["fc.weight"])
    assert begun.said.startswith("train: starts with the weights of ")
    assert begun.said.count("\n") == 0


def test_fc_starts_as_large_as_is_said(new_run):
    whole, small = (begin(new_run(), "null", f"train.fc_init_scale={scale}").weights for scale in (1, 0.25))
    assert torch.equal(small.pop("fc.weight"), 0.25 * whole.pop("fc.weight"))
    assert_equal(small, whole)


def test_training_begins_with_them(learnt, new_run):
    run, options = learnt(), ("train.max_steps=1", "train.lr=1e-9")
    warmed = new_run().fit(f"train.init_from={run.folder / 'run'}", *options)
    for name, tensor in run.weights().items():
        torch.testing.assert_close(warmed.weights()[name], tensor, rtol=0, atol=1e-8)
    assert warmed.losses()[0] < 0.2 * new_run().fit(*options).losses()[0]


def test_the_loss_is_the_one_that_training_ended_with(learnt, new_run):
    run = learnt()
    ended = run.manifest()["heldout"]
    for source in (run.folder / "run", run.folder / "run" / "export"):
        measures = measured(begin(new_run(), source))
        assert measures["acceptance_estimate"] == ended["acceptance_estimate"]
        assert measures["loss"] == pytest.approx(ended["loss"], rel=1e-6)  # other batches add up otherwise


def test_a_lower_precision_is_widened_exactly(learnt, new_run, tmp_path):
    run = learnt()
    low = {n: t.half() for n, t in run.weights().items()}
    begun = begin(new_run(), edit(run.folder / "run" / "export", tmp_path / "half", low))
    assert_equal(begun.weights, {name: tensor.float() for name, tensor in low.items()})
    assert {tensor.dtype for tensor in begun.weights.values()} == {torch.float32}


def test_an_unfinished_run_gives_its_newest_checkpoint(learnt, copy_of, new_run, tmp_path):
    run = copy_of(tmp_path).fit("train.epochs=3", "train.checkpoint_every=4")
    (run.train / "manifest.json").unlink()
    kept = sorted(run.checkpoints.iterdir())
    assert [path.name for path in kept] == ["step-000008", "step-000012"]
    assert_equal(begin(new_run(), run.train).weights, load_file(kept[1] / "model.safetensors"))
    assert_equal(begin(new_run(), kept[0]).weights, load_file(kept[0] / "model.safetensors"))


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
    assert f"{len(missing)} of {len(OTHERS)} draft tokens are not in its vocabulary" in begun.said
    target = begun.store.target["lm_head"]
    assert all(torch.equal(begun.weights["lm_head.weight"][OTHERS.index(token)], target[token]) for token in missing)
    # The loop can tell: ids off by one, rows in their own order, and rows by offset give other heads.
    wrong = [[token - 1 for token in KEPT], sorted(OTHERS[: len(KEPT)]), (np.array(KEPT) - np.arange(32)).tolist()]
    assert not any(torch.equal(by_hand(rows, ids, OTHERS, begun.fresh["lm_head.weight"]), right) for ids in wrong)


@pytest.mark.slow
def test_a_vocabulary_that_grows_to_the_whole_and_shrinks_again_loses_nothing(learnt, new_run, copy_of, tmp_path):
    source = learnt()
    grown = with_vocab(copy_of(tmp_path), list(range(VOCAB)))
    grown.fit(f"train.init_from={source.folder / 'run'}", "train.max_steps=1", "train.lr=1e-9")
    assert grown.weights()["lm_head.weight"].shape == (VOCAB, 32)
    back = begin(new_run(), grown.folder / "run")
    torch.testing.assert_close(back.weights["lm_head.weight"], source.weights()["lm_head.weight"], rtol=0, atol=1e-8)
    assert "not in its vocabulary" not in back.said


def test_a_draft_without_an_lm_head_has_the_targets(learnt, new_run, tmp_path):
    none = dict.fromkeys(["d2t", "t2d", "lm_head.weight"])
    source = edit(learnt().folder / "run" / "export", tmp_path / "shared", none, draft_vocab_size=None)
    begun = begin(new_run(), source)
    assert torch.equal(begun.weights["lm_head.weight"], begun.store.target["lm_head"][torch.tensor(KEPT)])
    assert "shares the target's lm_head" in begun.said


def test_the_vocabulary_is_found_where_the_run_had_it_or_where_this_one_has_it(learnt, new_run, copy_of, tmp_path):
    elsewhere = with_vocab(copy_of(tmp_path / "data"), OTHERS).folder / "run" / "data"
    run = copy_of(tmp_path / "run").fit(f"data_dir={elsewhere}", "train.max_steps=1")
    assert_equal(begin(with_vocab(new_run(), OTHERS), run.train).weights, run.weights())
    begun = begin(new_run(), run.train)  # found through its config.yaml; its own data folder has another one
    assert "11 of 32 draft tokens are not in its vocabulary" in begun.said
    shutil.rmtree(elsewhere)
    assert "is not the vocabulary that the drafter was trained with, nor is that in" in refusal(new_run(), run.train)


# ---------------------------------------------------------------- EAGLE 3 goes on as 3.1


def relative(g, reference):
    return ((g - reference).norm(dim=-1) / reference.norm(dim=-1)).mean().item()


def states_of(store, documents=6):
    """[n, A, H] auxiliary states of the first documents of the train split."""
    split = store.split("train")
    return torch.cat([as_encoded(split.read(i).attended_states).decode().float() for i in range(documents)])


def test_fc_reads_through_its_new_norm_about_what_it_read_without(learnt, new_run):
    source = learnt(*EAGLE3)
    begun = begin(new_run(), source.folder / "run")
    aux, fc = states_of(begun.store), begun.weights["fc.weight"]
    before = aux.flatten(1) @ fc.T
    starts = [begun.weights[f"fc_norm.{i}.weight"] for i in range(3)]
    assert all((start == start[0]).all() and start[0] > 0 for start in starts)

    def after(weights):
        normed = aux / aux.square().mean(-1, keepdim=True).add(1e-5).sqrt() * torch.stack(weights)
        return relative(normed.flatten(1) @ fc.T, before)

    # The mean over positions of |fc(fc_norm(a)) - fc(a)| / |fc(a)|.
    assert after(starts) < 0.2
    assert after([torch.ones(32)] * 3) > 2 * after(starts), "fc_norm left at one"
    assert after(starts[::-1]) > 2 * after(starts), "the layers in another order"
    rms = aux.square().mean(-1).sqrt()
    expected = [sorted(rms[:, i].tolist())[(len(rms) - 1) // 2] for i in range(3)]
    everything, count = initial_weights.state_rms(begun.store.split("train"))
    assert count == sum(begun.store.split("train").read(i).attended for i in range(12)) < initial_weights.POSITIONS
    assert torch.stack(starts)[:, 0].tolist() == everything.tolist()
    assert everything.tolist() == pytest.approx(expected, rel=0.1)  # of half the split


def test_only_the_first_positions_of_the_split_are_measured(learnt, new_run, monkeypatch):
    split = Store(new_run().folder / "run" / "store").split("train")
    monkeypatch.setattr(initial_weights, "POSITIONS", 20)
    rms, count = initial_weights.state_rms(split)
    first = torch.cat([as_encoded(split.read(i).attended_states).decode().float() for i in range(3)])[:20]
    assert count == 20
    assert torch.equal(rms, first.square().mean(-1).sqrt().median(0).values)


def test_an_eagle_3_drafter_goes_on_as_3_1_far_ahead_of_a_fresh_one(learnt, new_run):
    source = learnt(*EAGLE3)
    begun = begin(new_run(), source.folder / "run" / "export")
    assert "it has no fc_norm, which starts at the RMS of the target's states" in begun.said
    assert "it was trained without norm_output" in begun.said
    others = {name: tensor for name, tensor in begun.weights.items() if not name.startswith("fc_norm")}
    assert_equal(others, source.weights())
    # On what was learnt: random conversations have nothing in common that would help with others.
    ended = measured(begin(new_run(), source.folder / "run", *EAGLE3), "train")
    continued = measured(begun, "train")
    begun.objective.drafter.load_state_dict(begun.fresh)
    fresh = measured(begun, "train")
    for name in ("loss", "acceptance_estimate"):
        print(f"{name}: fresh {fresh[name]:.3f}, EAGLE 3 {ended[name]:.3f}, continued as 3.1 {continued[name]:.3f}")
    assert continued["acceptance_estimate"] > fresh["acceptance_estimate"] + 0.5 * (
        ended["acceptance_estimate"] - fresh["acceptance_estimate"]
    )


@pytest.mark.slow
def test_a_continued_drafter_is_far_ahead_on_conversations_that_nobody_has_seen(new_run, tmp_path):
    run = type(new_run())
    folder, sizes = tmp_path / "big", [24 + i % 9 for i in range(150)]
    save_quietly(tiny_llama(), folder / "target")
    write_data(folder / "run", {"train": sizes, "heldout": sizes[:24]})
    options = ("extract.shard_tokens=4000", "extract.batch_tokens=2000", "train.batch_tokens=400", "train.epochs=10")
    extract(tiny_config(folder, *options))
    source = run(folder, tmp_path / "eagle3").fit(*options, *EAGLE3)
    begun = begin(run(folder, tmp_path / "3.1"), source.folder / "run", *options)
    ended, continued = source.manifest()["heldout"]["acceptance_estimate"], measured(begun)["acceptance_estimate"]
    begun.objective.drafter.load_state_dict(begun.fresh)
    fresh = measured(begun)["acceptance_estimate"]
    print(f"held-out acceptance estimate: fresh {fresh:.3f}, EAGLE 3 {ended:.3f}, continued as 3.1 {continued:.3f}")
    assert ended > fresh + 0.7
    assert continued > fresh + 0.8 * (ended - fresh)


@pytest.mark.slow
def test_each_half_of_3_1_is_continued_by_itself(learnt, new_run):
    source = learnt(*EAGLE3).folder / "run"
    normed = begin(new_run(), source, "drafter.norm_output=false")
    assert "fc_norm" in normed.said
    assert "norm_output" not in normed.said
    fed = begin(new_run(), source, "drafter.fc_norm=false")
    assert "fc_norm" not in fed.said
    assert "norm_output" in fed.said
    assert_equal(fed.weights, learnt(*EAGLE3).weights())
    assert_equal(begin(new_run(), source, *EAGLE3).weights, learnt(*EAGLE3).weights())
