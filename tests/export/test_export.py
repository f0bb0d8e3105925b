"""From a trained run to the checkpoint: what is written, what is refused, and that nothing is half-written."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from made import message_of
from pipeline import contents, write_store
from plan_cases import shape_of
from planting import interrupt, replaced
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle31_train import compose, export
from eagle31_train.checkpoint import config_json
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.checkpoint.run_folder import CONFIG, in_order, read_export, training_of_export
from eagle31_train.common import artifacts
from eagle31_train.config import DrafterConfig
from eagle31_train.model import vocab
from eagle31_train.targets.derive import complete
from eagle31_train.targets.description import TargetDescription
from tests.export.conftest import TINY, TINY_IDS


def test_the_checkpoint_is_the_trained_drafter(run, capsys):
    trained = load_file(run.checkpoint / "model.safetensors")
    export.export(run.config("target.dtype=bfloat16"))
    config, tensors, _ = run.exported()
    assert config == config_json.config_json(TINY, "bfloat16", "someone/a-target")
    assert config["torch_dtype"] == "bfloat16"
    assert tensors.keys() == trained.keys() | {"d2t", "t2d"}
    for name, tensor in trained.items():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name], tensor.bfloat16()), name
    ids = torch.from_numpy(TINY_IDS)
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(tensors["d2t"] + torch.arange(12), ids)
    assert tensors["t2d"].dtype == torch.bool
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)
    with safe_open(run.folder / "export" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    command = (
        "vllm serve someone/a-target --speculative-config "
        f"""'{{"method": "eagle3", "model": "{run.folder}/export", "num_speculative_tokens": 3}}'"""
    )
    assert command in capsys.readouterr().out
    recorded = artifacts.read_json(run.folder / "export.json", "")["serve"]
    assert recorded.replace("{export}", f"{run.folder}/export") == command, "for a run whose folder is moved"


@pytest.mark.parametrize(
    ("after", "name"),
    [(Path, "manifest.json"), (Path, "drafter.json"), (Path, "model.safetensors"), (artifacts, "model.safetensors")],
)
def test_files_that_another_process_removes_once_they_were_seen_are_named(after, name, run, monkeypatch):
    """As a training with overwrite=true does, after a look whether they are there (Path), or whole (artifacts)."""
    config = run.config()

    @replaced(monkeypatch, after, "is_file" if after is Path else "first_damaged")
    def look(real, first, *given):
        found = real(first, *given)
        gone = [first] * (first.name == name) if after is Path else list(run.folder.rglob(name))
        for path in gone:
            path.unlink(missing_ok=True)
        return found

    assert re.search(rf"{name} (is missing|cannot be read|has just been removed)", message_of(export.export, config))
    assert not (run.folder / "export").exists()


def test_the_card_repeats_the_training_and_not_the_exports_options(run):
    """And leaves to the target what it decides by itself."""
    described = asdict(TargetDescription("llama", 16, 40, 4, 32, 2, 1, 8, 1e-5, 1e4, {}, 128))
    manifest = run.folder / "data" / "manifest.json"
    artifacts.write_json(manifest, {**json.loads(manifest.read_text()), "target": described})
    left_open = ["train.optimizer=muon", "train.lr=null", "train.weight_decay=null"]
    others = ["drafter.train_lm_head=true", "drafter.norm_before_residual=true", "drafter.rms_norm_eps=1e-6"]
    bounded = ["store.max_bytes=1GB", "store.follow=true"]  # which `eagle31 run` refuses
    decisive = ["data.heldout=0.4", "seed=7", "store.last_codec=bf16", "data.conversations=c.jsonl"]
    then = complete(run.config(*left_open, *others, *bounded, *decisive), described)
    then = replace(then, train=replace(then.train, lr=None))  # as training records what was left open
    (run.folder / "train" / CONFIG).write_text(compose.to_yaml(then))
    export.export(run.config(*left_open, "drafter.train_lm_head=false", "evaluate.num_speculative_tokens=2"))
    repeat = run.exported()[2].split("eagle31 run ")[1].splitlines()[0].split()
    drafter = {f"drafter.{one}" for one in ("train_lm_head=true", "norm_before_residual=true", "rms_norm_eps=1e-06")}
    assert drafter | {*decisive, "evaluate.num_speculative_tokens=2"} <= set(repeat)
    assert not set(bounded) & set(repeat)
    assert not [word for word in repeat if word.startswith(("regenerate", "data.prompts"))], "both follow from that"
    decided = ("drafter.intermediate_size", "train.lr", "train.weight_decay")
    assert not [word for word in repeat if word.startswith(decided) and not word.endswith("=null")]


def test_a_licence_is_on_the_card_and_files_of_others_stay(run):
    export.export(run.config("license=apache-2.0"))
    out = run.folder / "export"
    assert yaml.safe_load(run.exported()[2].split("---")[1])["license"] == "apache-2.0"
    others = {"LICENSE": "ours", "notes/a.md": "mine"}
    (out / "notes").mkdir()
    for name, text in others.items():
        (out / name).write_text(text)
    card, cards = out / "README.md", set()
    said = ["evaluate.draft_sampling=probabilistic", "target.trust_remote_code=true", "target.template_args={a: 1}"]
    said += ["target.revision=v1", "target.chat_template=mine.jinja", "evaluate.num_speculative_tokens=5", "repo=me/d"]
    weights = (out / "model.safetensors").read_bytes()
    for more in range(8):
        export.export(run.config("license=mit", *said[:more]))
        assert {name: (out / name).read_text() for name in others} == others
        cards.add(card.read_text())
    assert len(cards) == 8, "of another command there is another card"
    assert '"model": "me/d", "num_speculative_tokens": 5' in card.read_text()
    assert (out / "model.safetensors").read_bytes() == weights
    card.write_text(card.read_text() + "more words")
    assert training_of_export(out) is not None, "it is still the export of this training"
    assert "README.md was edited after the export" in message_of(export.export, run.config("license=mit"))
    assert card.read_text().endswith("more words")
    export.export(run.config("license=mit", "overwrite=true"))
    assert not card.read_text().endswith("more words")
    assert (out / "LICENSE").read_text() == "ours"


@pytest.mark.parametrize("killed", ["before its folder is named", "between two renames", "before its files are listed"])
def test_an_export_that_was_killed_is_made_good_and_files_of_others_stay(run, killed):
    export.export(run.config())
    out, recorded = run.folder / "export", run.folder / "export.json"
    weights, theirs = (out / "model.safetensors").read_bytes(), {out / name for name in ("LICENSE", "notes/a.md")}
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    if killed == "before its folder is named":
        interrupt(artifacts, "commit", export.export, run.config("license=mit"), when=lambda _, final: final == out)
        assert (out / "model.safetensors").read_bytes() == weights, "whoever serves it goes on"
    else:
        interrupt(artifacts, "list_files", export.export, run.config("license=mit"))
    assert not recorded.exists()
    if killed == "between two renames":  # with which a folder replaces another
        out.rename(run.folder / ".export.old")
    export.export(run.config("license=mit"))
    assert {path.read_text() for path in theirs} == {"mine"}
    assert 'license: "mit"' in run.exported()[2]
    listed = json.loads(recorded.read_text())["files"]
    assert artifacts.first_damaged(run.folder, listed) is None
    assert not {str(path.relative_to(run.folder)) for path in theirs} & listed.keys()


def test_other_shapes_are_exported_too(run):
    run.set_vocab(vocab.DraftVocab(np.arange(40, dtype=np.int64), 40))
    run.set_shape(replace(TINY, draft_vocab_size=40, fc_norm=False))
    run.change_tensors(lm_head__weight=torch.randn(40, 16), fc_norm__0__weight=None, fc_norm__1__weight=None)
    export.export(run.config())
    config, tensors, _ = run.exported()
    assert not [name for name in tensors if name in ("d2t", "t2d") or name.startswith("fc_norm")]
    assert config["draft_vocab_size"] == config["vocab_size"] == 40
    assert config["fc_norm"] is False


def test_an_export_is_of_the_weights_of_train_and_whole(run):
    """Trained again from the same inputs, weights differ on a GPU."""
    export.export(run.config())
    out, trained = run.folder / "export", run.checkpoint / "model.safetensors"
    before = trained.read_bytes()
    run.change_tensors(norm__weight=torch.full((16,), 0.5))
    assert "run `eagle31 export` again, with overwrite=true" in message_of(read_export, run.folder)
    assert training_of_export(out) is None
    trained.write_bytes(before)
    run.change_tensors()
    (out / "README.md").write_text("edited by hand")
    assert training_of_export(out) is not None
    (out / "model.safetensors").write_bytes(b"damaged")
    assert "model.safetensors" in message_of(read_export, run.folder)


def test_the_newest_checkpoint_is_the_last_beyond_a_million_steps_too(tmp_path):
    for step in ("step-1000000", "step-999999", "step-000010", "step-new"):
        (tmp_path / step).mkdir()
    assert [one.name for one in in_order(tmp_path)] == ["step-000010", "step-999999", "step-1000000"]


def test_the_format_of_speculators_has_its_names_and_is_the_same_drafter(run):
    export.export(run.config("export_format=speculators", "target.path=someone/a-target"))
    config, tensors, _ = run.exported()
    assert config["speculators_config"]["verifier"]["name_or_path"] == "someone/a-target"
    assert "layers.0.self_attn.q_proj.weight" in tensors
    assert not [name for name in tensors if name.startswith("midlayer.")]
    assert DrafterCheckpoint.open(run.folder / "export").shape == TINY


def test_a_parallel_drafter_is_exported_and_read_again(run):
    run.set_shape(parallel := replace(TINY, parallel=True, ptd_token_id=39))
    run.change_tensors(mask_hidden=torch.randn(1, 32))
    assert "trained with parallel=True, but the options say False" in message_of(export.export, run.config())
    export.export(run.config("drafter.parallel=true"))
    config, tensors, _ = run.exported()
    assert (config["ptd_token_id"], tensors["mask_hidden"].shape) == (39, (1, 32))
    assert DrafterCheckpoint.open(run.folder / "export").shape == parallel
    tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, 32)
    save_file(tensors, run.folder / "export/model.safetensors")
    assert DrafterCheckpoint.open(run.folder / "export").tensors["mask_hidden"].shape == (1, 32)  # as others write it


def taken(**tensors):
    return lambda run: run.change_tensors(**tensors)


def of_other_data(run):
    artifacts.write_json(run.folder / "data" / "manifest.json", {"dataset_fingerprint": "b" * 16, "files": {}})


def of_another_target(run):
    """As the store says that it was trained on."""
    (run.folder / "train" / CONFIG).write_text(compose.to_yaml(run.config()))
    write_store(run.folder)


@pytest.mark.parametrize(
    ("spoil", "option", "named"),
    [
        (taken(fc_norm__1__weight=None), "seed=0", r"^.*step-000007.*fc_norm\.1\.weight is missing"),
        (lambda run: (run.checkpoint / "model.safetensors").write_bytes(b"{}"), "seed=0", "safetensors has 2 bytes"),
        (taken(norm__weight=torch.full((16,), 1e6)), "target.dtype=float16", "norm.weight holds 16 NaN or infinite"),
        (taken(), "drafter.norm_output=false", "was trained with norm_output="),
        (taken(), "drafter.head_dim=8", "was trained with head_dim="),
        (taken(), "drafter.max_position_embeddings=64", "max_position_embeddings"),  # half
        (taken(), "target.aux_layers=[0,2]", "was trained with aux_layers="),
        (of_other_data, "seed=0", "is not the data that the drafter was trained on"),
        (of_another_target, "seed=0", "was trained for some/target, but target.path is someone/a-target"),
    ],
)
def test_what_cannot_be_exported_is_named_and_nothing_is_written(spoil, option, named, run):
    spoil(run)
    before = contents(run.folder)
    assert re.search(named, message_of(export.export, run.config(option)))
    assert contents(run.folder) == before


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 1.0}


def shape_asked_for(scaling, **options):
    """Of a drafter that was trained with this scaling."""
    trained = SimpleNamespace(shape=shape_of(rope_scaling=scaling), folder="run/train/checkpoints/step-000001")
    target = SimpleNamespace(aux_layers=None)
    config = SimpleNamespace(drafter=DrafterConfig(**options), target=target, export_sliding_window=None)
    return export.exported_shape(config, trained)


def test_a_scaling_that_is_open_is_the_trainings_and_one_that_is_given_in_part_is_compared_so():
    """And a base that is given without a scaling means none."""
    assert [shape_asked_for(scaling).rope_scaling for scaling in (None, YARN)] == [None, YARN]
    assert shape_asked_for(YARN, rope_scaling={"beta_fast": 1.0}).rope_scaling == YARN
    assert shape_asked_for(None, rope_theta=1e4).rope_scaling is None
    for other in ({"rope_scaling": {"beta_fast": 32.0}}, {"rope_theta": 1e4}):
        assert "rope_scaling" in message_of(shape_asked_for, YARN, **other)
