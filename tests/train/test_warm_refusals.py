"""Initial weights that would mean something else here, or are not those a run began with, are refused in one line."""

import json
import shlex
import shutil
from dataclasses import replace

import pytest
import torch
from pipeline import assert_equal, flip_bit, message_of
from warming import begin, edit, refusal

from eagle31_train import artifacts
from eagle31_train.checkpoint import hub
from eagle31_train.checkpoint.run_folder import RECORD
from eagle31_train.cli import load_config
from eagle31_train.errors import UserError
from eagle31_train.export import export
from eagle31_train.model import vocab
from eagle31_train.store import Store
from train import initial_weights
from train.build import shape_of


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
    "rope_theta": ({"rope_theta": 5000, "rope_parameters": None}, "drafter.rope_theta=5000.0"),
    "rope_scaling": (
        {"rope_scaling": YARN, "rope_parameters": None},
        "'drafter.rope_scaling={rope_type:yarn,factor:4.0,original_max_position_embeddings:512}'",
    ),
    "rms_norm_eps": ({"rms_norm_eps": 1e-6}, "drafter.rms_norm_eps=1e-06"),
    "norm_before_residual": ({"norm_before_residual": True}, "drafter.norm_before_residual=true"),
    "two at once": (
        {"rms_norm_eps": 1e-6, "rope_theta": 500000.0, "rope_parameters": None},
        "drafter.rms_norm_eps=1e-06 drafter.rope_theta=500000.0",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_no_tensor_shows_is_refused_with_the_options_that_mend_it(new_run, draft, name):
    settings, options = SETTINGS[name]
    message = refusal(new_run(), draft(**settings))
    assert message.endswith(f": set {options}")
    begin(new_run(), draft(**settings), *shlex.split(options))


@pytest.mark.parametrize(
    ("option", "there", "here"),
    [
        ("intermediate_size=48", 32, 48),
        ("head_dim=16", 8, 16),
        ("num_key_value_heads=4", 2, 4),
        ("num_attention_heads=2", 4, 2),
        ("hidden_size=24 drafter.share_embedding=false", 32, 24),
        ("fc_norm=false", True, False),  # 3.1 does not go back to 3
        ("norm_output=false", True, False),
    ],
)
def test_other_options_are_refused_with_the_one_that_mends_them(new_run, run, option, there, here):
    name = option.split("=")[0]
    message = refusal(new_run(), run.folder / "run", *f"drafter.{option}".split())
    assert message.endswith(f"({name}: {there} there, {here} here): set drafter.{name}={str(there).lower()}")


def test_rope_is_compared_by_what_it_does(new_run, draft):
    here = "drafter.rope_scaling={type:yarn,factor:4.0,original_max_position_embeddings:512}"
    begin(new_run(), draft(rope_scaling=YARN, rope_parameters=None), here)
    begin(new_run(), draft(max_position_embeddings=4096))
    # Without its original length, yarn goes by the longest position.
    shorter = draft(rope_scaling={"rope_type": "yarn", "factor": 4.0}, rope_parameters=None, max_position_embeddings=32)
    message = refusal(new_run(), shorter, here)
    assert message.endswith("{rope_type:yarn,factor:4.0,original_max_position_embeddings:32}'")


def test_another_target_and_other_layers_are_refused(new_run, draft):
    zeros = {"embed_tokens.weight": torch.zeros(41, 32), "t2d": None}
    message = refusal(new_run(), draft(zeros, vocab_size=41))
    assert "for another target, of hidden size 32 and 41 tokens; the store's target has 32 and 40" in message
    message = refusal(new_run(), draft(eagle_aux_hidden_state_layer_ids=[1, 3, 4]))
    assert "reads the inputs of layers [1, 3, 4], but the store holds those of [1, 3, 5]: run" in message
    message = refusal(new_run(), draft(eagle_aux_hidden_state_layer_ids=[0, 2, 4]))
    assert "but the store holds those of [1, 3, 5] (if its eagle_aux_hidden_state_layer_ids count outputs" in message


def test_layers_that_a_config_leaves_to_vllm_are_those_of_the_target(new_run, run, draft, tmp_path):
    config = new_run().config()
    assert initial_weights.target_layers(config) == 6
    message = refusal(new_run(), draft(eagle_aux_hidden_state_layer_ids=None))  # 2, 6 // 2 and 6 - 3: two layers
    assert "num_aux_hidden_states 3, but the layer ids [2, 3]" in message
    config.target.path = str(tmp_path / "none")
    with pytest.raises(UserError, match="whose layers vLLM would count, cannot be read"):
        initial_weights.target_layers(config)


# ---------------------------------------------------------------- the embedding


def test_the_targets_embedding_may_be_there_and_another_may_not(new_run, run, draft):
    target = begin(new_run(), run.folder / "run").store.target["embed_tokens"]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_equal(begin(new_run(), draft({"embed_tokens.weight": target.to(dtype)})).weights, run.weights())
    other = target.clone()
    other[7] *= 1.02
    message = refusal(new_run(), draft({"embed_tokens.weight": other}))
    assert message.endswith("(1 of 40 rows are not the target's): set drafter.share_embedding=false")
    own = begin(new_run(), draft({"embed_tokens.weight": other}), "drafter.share_embedding=false")
    assert torch.equal(own.weights["embed_tokens.weight"], other)
    none = begin(new_run(), draft(), "drafter.share_embedding=false")
    assert torch.equal(none.weights["embed_tokens.weight"], target)
    assert "it shares the target's embedding, from which embed_tokens starts" in none.said


# ---------------------------------------------------------------- no source


def test_nothing_to_begin_with_is_one_line(new_run, run, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "holds neither a run with a checkpoint nor a config.json" in refusal(new_run(), tmp_path / "empty")
    assert "is no folder, and no hub id" in refusal(new_run(), "/no/such/folder")
    message = message_of(new_run(), "train.init_from=nobody/nothing")  # tests run with HF_HUB_OFFLINE
    assert message.startswith("nobody/nothing is no folder here, and cannot be had from the hub (")
    message = message_of(new_run(), f"train.init_from={run.folder / 'run'}", "train.init_revision=v1")
    assert "revision v1 is for a repository of the hub" in message
    assert "train.init_revision=v1 is of nothing" in message_of(new_run(), "train.init_revision=v1")
    message = message_of(new_run(), f"train.init_from={run.folder / 'run'}", "train.fc_init_scale=0.5")
    assert "train.fc_init_scale=0.5 is of weights that start afresh" in message
    own = new_run()
    own.fit("train.max_steps=1")
    message = message_of(own, f"train.init_from={own.folder / 'run'}")
    assert "is this run's own folder: choose another name" in message


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("model.safetensors", flip_bit),
        ("drafter.json", lambda path: path.unlink()),
        ("manifest.json", lambda path: path.write_bytes(b"")),
        ("manifest.json", flip_bit),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_a_damaged_checkpoint_is_refused(new_run, run, tmp_path, file, harm, finished):
    shutil.copytree(run.folder / "run", tmp_path / "run")
    if not finished:
        (tmp_path / "run/train/manifest.json").unlink()
    harm(next((tmp_path / "run/train/checkpoints").iterdir()) / file)
    assert "checkpoints/step-000001" in refusal(new_run(), tmp_path / "run")


def test_a_checkpoint_needs_no_moments(new_run, run, tmp_path):
    shutil.copytree(run.folder / "run", tmp_path / "run")
    (tmp_path / "run/train/checkpoints/step-000001/optimizer.safetensors").unlink()
    assert_equal(begin(new_run(), tmp_path / "run").weights, run.weights())


def test_a_checkpoint_away_from_its_run_says_no_vocabulary(new_run, run, tmp_path):
    shutil.copytree(run.newest(), tmp_path / "a/b/step-000001")
    assert "inputs.json is missing" in message_of(new_run(), f"train.init_from={tmp_path / 'a/b/step-000001'}")


# ---------------------------------------------------------------- a run goes on


SHORT = ("train.epochs=2", "train.checkpoint_every=4")  # eight steps


def stopped(run, *options):
    """A run that was stopped after its first checkpoint."""
    run.fit(*SHORT, *options)
    (run.train / "manifest.json").unlink()
    shutil.rmtree(run.checkpoints / "step-000008")
    return run


@pytest.mark.slow
def test_a_run_that_goes_on_needs_its_source_no_more(new_run, draft):
    source = draft()
    init = f"train.init_from={source}"
    whole = new_run().fit(*SHORT, init)
    begun = stopped(new_run(), init)
    shutil.rmtree(source)
    assert_equal(begun.fit(*SHORT, init).weights(), whole.weights())
    begun.fit(*SHORT, init)  # up to date
    assert "is no folder" in message_of(new_run(), *SHORT, init)


@pytest.mark.slow
def test_a_run_that_goes_on_asks_the_hub_nothing(new_run, draft, monkeypatch):
    source, asked = draft().rename(draft().parent / ("c" * 40)), []

    def fetch(repo, revision):
        asked.append((repo, revision))
        return source

    monkeypatch.setattr(hub, "fetch", fetch)
    options = ("train.init_from=me/draft", "train.init_revision=v1")
    begun = stopped(new_run(), *options)
    # By name once; then the commit that was found, whatever the name means by now.
    assert set(asked) == {("me/draft", "v1"), ("me/draft", "c" * 40)}
    assert asked[-1] == ("me/draft", "c" * 40)
    assert json.loads((begun.train / RECORD).read_text())["inputs"]["train"]["init_from"] == f"me/draft@{'c' * 40}"
    asked.clear()
    begun.fit(*SHORT, *options)
    assert asked == []
    begun.fit(*SHORT, "train.init_from=me/draft", "train.init_revision=v2")  # is asked for, and is the same commit
    assert set(asked) == {("me/draft", "v2")}


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


def test_weights_that_change_between_the_record_and_the_start_are_refused(new_run, draft):
    run, source = new_run(), draft()
    artifacts.write_json(run.train / RECORD, {"inputs": {"train": {"init_from": "0123456789abcdef"}}})
    assert "holds other weights than this run began with" in refusal(run, source)


def test_identity_tells_contents_apart_and_not_places(new_run, run, draft):
    def known_by(source):
        return initial_weights.identity(new_run().config(f"train.init_from={source}"))

    other = draft({"norm.weight": torch.full((32,), 0.5)})
    assert known_by(draft()) == known_by(draft()) != known_by(other)
    assert known_by(draft()) != known_by(draft(rms_norm_eps=1e-6))
    assert known_by(run.folder / "run") == known_by(run.newest())
    assert initial_weights.identity(new_run().config()) is None


def test_what_does_not_fit_can_be_refused_before_a_folder_is_claimed(new_run, draft, monkeypatch):
    run, options = new_run(), (f"train.init_from={draft(rms_norm_eps=1e-6)}", "drafter.rms_norm_eps=1e-06")
    config = run.config(options[0])
    store = Store(run.folder / "run/store")
    shape = shape_of(config.drafter, store, vocab.read(config.data_folder / "vocab.safetensors"))
    with pytest.raises(UserError, match=r"set drafter\.rms_norm_eps=1e-06$"):
        initial_weights.check(config, shape, store, {})
    initial_weights.check(run.config(), shape, store, {})
    right = run.config(*options)
    initial_weights.check(right, replace(shape, rms_norm_eps=1e-6), store, {})
    # Of a run that goes on, nothing is asked.
    stopped(run, *options)
    monkeypatch.setattr(initial_weights, "open_source", None)
    initial_weights.check(right, shape, store, {})


@pytest.mark.slow
def test_a_finished_run_is_not_replaced_by_one_that_is_refused(new_run, draft):
    source = draft()
    init = f"train.init_from={source}"
    begun = new_run().fit("train.max_steps=1", init)
    whole = begun.manifest()
    message = message_of(begun, "train.max_steps=1", init, "drafter.rms_norm_eps=1e-6", "overwrite=true")
    assert message.endswith("set drafter.rms_norm_eps=1e-05")
    assert begun.manifest() == whole
    shutil.rmtree(source)
    begun.fit("train.max_steps=1", init, "overwrite=true")  # of the same inputs, it goes on, and needs no source
    assert begun.manifest() == whole


def test_an_option_is_spelt_as_the_command_line_takes_it():
    option = initial_weights._option
    options = [
        option("q_lora_rank", None),
        option("fc_norm", True),
        option("rope_theta", 5e4),
    ]
    assert options == ["drafter.q_lora_rank=null", "drafter.fc_norm=true", "drafter.rope_theta=50000.0"]
    config = load_config(["+experiment=smollm2", *options])
    assert (config.drafter.q_lora_rank, config.drafter.fc_norm, config.drafter.rope_theta) == (None, True, 5e4)
