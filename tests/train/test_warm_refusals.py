"""Initial weights that would mean something else here, or are not those a run began with, are refused in one line."""

import shutil

import pytest
import torch
from pipeline import assert_equal, message_of
from warming import begin, edit, refusal

from eagle31_train.export import export
from train import initial_weights


@pytest.fixture(scope="module")
def run(copy_of, tmp_path_factory):
    """A run of one step, exported; not to be changed."""
    run = copy_of(tmp_path_factory.mktemp("run")).fit("train.max_steps=1")
    export(run.config("train.max_steps=1"))
    return run


@pytest.fixture
def draft(run, tmp_path):
    """draft(tensors, **settings): a changed copy of the export."""
    count = iter(range(100))
    return lambda tensors=None, **settings: edit(
        run.folder / "run/export", tmp_path / f"draft{next(count)}", tensors, **settings
    )


# ---------------------------------------------------------------- other options

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SETTINGS = {
    "rope_theta": ({"rope_theta": 5000, "rope_parameters": None}, "drafter.rope_theta=5000"),
    "rms_norm_eps": ({"rms_norm_eps": 1e-6}, "drafter.rms_norm_eps=1e-6"),
    "norm_before_residual": ({"norm_before_residual": True}, "drafter.norm_before_residual=true"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_no_tensor_shows_is_refused(new_run, draft, name):
    settings, option = SETTINGS[name]
    assert f"({name}: " in refusal(new_run(), draft(**settings))
    begin(new_run(), draft(**settings), option)


def test_another_target_and_other_layers_are_refused(new_run, draft):
    zeros = {"embed_tokens.weight": torch.zeros(41, 32), "t2d": None}
    assert "(vocab_size: 41 there, 40 here)" in refusal(new_run(), draft(zeros, vocab_size=41))
    message = refusal(new_run(), draft(eagle_aux_hidden_state_layer_ids=[1, 3, 4]))
    assert "(aux_layers: [1, 3, 4] there, [1, 3, 5] here)" in message


def test_rope_is_compared_by_what_it_does(new_run, draft):
    here = "drafter.rope_scaling={type:yarn,factor:4.0,original_max_position_embeddings:512}"
    begin(new_run(), draft(rope_scaling=YARN, rope_parameters=None), here)
    begin(new_run(), draft(max_position_embeddings=4096))
    # Without its original length, yarn goes by the longest position.
    shorter = draft(rope_scaling={"rope_type": "yarn", "factor": 4.0}, rope_parameters=None, max_position_embeddings=32)
    assert "rope_scaling." in refusal(new_run(), shorter, here)


# ---------------------------------------------------------------- the embedding


def test_the_targets_embedding_may_be_there_and_another_may_not(new_run, run, draft):
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
    assert "it shares the target's embed_tokens, from which its own starts" in none.said


# ---------------------------------------------------------------- a run goes on


SHORT = ("train.epochs=2", "train.checkpoint_every=4")  # eight steps


def stopped(run, *options):
    """A run that was stopped after its first checkpoint."""
    run.fit(*SHORT, *options)
    (run.train / "manifest.json").unlink()
    shutil.rmtree(run.checkpoints / "step-000008")
    return run


@pytest.mark.parametrize("left", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_other_weights_in_the_same_place_are_refused(new_run, draft, left):
    source, other = draft(), draft({"norm.weight": torch.full((32,), 0.5)})
    begun = stopped(new_run(), f"train.init_from={source}")
    if not left:
        shutil.rmtree(begun.checkpoints)
    shutil.rmtree(source)
    other.rename(source)
    message = message_of(begun, *SHORT, f"train.init_from={source}")
    assert "was made from other inputs (train.init_from: " in message
    begun.fit(*SHORT, f"train.init_from={source}", "overwrite=true")


def test_first_weights_that_are_read_again_are_compared_again(new_run, draft, monkeypatch):
    """A run whose only checkpoint is damaged, and whose first weights are a repository that has changed."""
    source = draft()
    begun = stopped(new_run(), f"train.init_from={source}")
    (begun.checkpoints / "step-000004" / "model.safetensors").write_bytes(b"")
    shutil.rmtree(source)
    shutil.copytree(draft(rope_theta=5000, rope_parameters=None), source)
    monkeypatch.setattr(initial_weights, "goes_by_record", lambda _: True)
    assert "(rope_theta: " in message_of(begun, *SHORT, f"train.init_from={source}")


def test_a_run_that_goes_on_needs_its_first_weights_no_more(new_run, draft):
    source = draft()
    words = [*SHORT, f"train.init_from={source}", "overwrite=true"]
    begun = stopped(new_run(), f"train.init_from={source}")
    shutil.rmtree(source)
    assert str(source) in message_of(begun, *words, "train.lr=0.02"), "another run needs them, and replaces nothing"
    begun.fit(*words)
    assert begun.rows()[-1]["step"] == begun.manifest()["steps"]
