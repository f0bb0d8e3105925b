"""From a trained run to the checkpoint: what is written, what is refused, and that nothing is half-written."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from eagle31_train import artifacts, export
from eagle31_train.checkpoint import config_json, writer
from eagle31_train.errors import UserError
from eagle31_train.model import vocab
from eagle31_train.store.sealed import seal


def test_the_checkpoint_is_the_trained_drafter(run, tiny, tiny_tensors, capsys):
    trained = load_file(run.checkpoint / "model.safetensors")
    export.export(run.config())
    config, tensors, _ = run.exported()
    assert config == config_json.config_json(tiny, "bfloat16", "someone/a-target")
    assert tensors.keys() == tiny_tensors.keys() | {"d2t", "t2d"}
    for name, tensor in trained.items():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name], tensor.bfloat16()), name
    ids = torch.tensor([0, 1, 2, 5, 8, 13, 21, 25, 30, 33, 36, 39])
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
    assert artifacts.read_json(run.folder / "export.json", "")["serve"] == command


def test_the_dtype_is_the_targets_and_others_may_read_the_weights(run):
    export.export(run.config("target.dtype=float16"))
    config, tensors, _ = run.exported()
    assert config["torch_dtype"] == "float16"
    assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {torch.float16}
    out = run.folder / "export"
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode


def test_other_shapes_are_exported_too(run, tiny):
    run.set_vocab(vocab.DraftVocab(np.arange(40, dtype=np.int64), 40))
    run.set_shape(replace(tiny, draft_vocab_size=40, fc_norm=False))
    run.change_tensors(lm_head__weight=torch.randn(40, 16), fc_norm__0__weight=None, fc_norm__1__weight=None)
    export.export(run.config())
    config, tensors, _ = run.exported()
    assert not [name for name in tensors if name in ("d2t", "t2d") or name.startswith("fc_norm")]
    assert config["draft_vocab_size"] == config["vocab_size"] == 40
    assert config["fc_norm"] is False


def test_full_rank_queries_are_exported_with_what_vllm_makes_of_them(mla_run, capsys):
    low = ("q_a_proj", "q_a_layernorm", "q_b_proj")
    mla_run.set_shape(replace(mla_run.shape, q_lora_rank=None))
    mla_run.change_tensors(
        **{f"midlayer__self_attn__{name}__weight": None for name in low},
        midlayer__self_attn__q_proj__weight=torch.ones(30, 32),
    )
    export.export(mla_run.config())
    config, tensors, body = mla_run.exported()
    assert "vLLM 0.32 stops when it loads an MLA draft with full-rank queries" in body
    assert "export: vLLM 0.32 stops" in capsys.readouterr().out
    assert config["q_lora_rank"] is None
    assert "midlayer.self_attn.q_proj.weight" in tensors


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lm_head__weight": None}, "lm_head.weight is missing"),
        ({"fc_norm__1__weight": None}, "fc_norm.1.weight is missing"),
        ({"norm__weight": None, "model__norm__weight": torch.ones(16)}, "model.norm.weight has the prefix"),
        ({"norm__weight": torch.full((16,), float("nan"))}, "norm.weight holds 16 NaN"),
        ({"midlayer__bias": torch.ones(3)}, "midlayer.bias is superfluous"),
        ({"fc__weight": torch.ones(16, 16)}, r"fc.weight has shape \[16, 16\], not \[16, 32\]"),
        ({"d2t": torch.zeros(12, dtype=torch.int64)}, "d2t"),
    ],
)
def test_a_faulty_checkpoint_is_refused_and_nothing_is_written(change, named, run):
    run.change_tensors(**change)
    before = run.listing()
    with pytest.raises(UserError, match=named) as caught:
        export.export(run.config())
    assert str(caught.value).startswith(str(run.checkpoint))
    assert "\n" not in str(caught.value)
    assert run.listing() == before


def test_a_value_that_the_dtype_cannot_hold_is_refused(run):
    run.change_tensors(norm__weight=torch.full((16,), 1e6))
    with pytest.raises(UserError, match=r"norm.weight holds 16 NaN or infinite"):
        export.export(run.config("target.dtype=float16"))


def test_what_the_disk_spoils_is_never_given_its_name(run, monkeypatch):
    real = writer.save_file

    def spoilt(tensors, path, metadata):
        real({**tensors, "norm.weight": tensors["norm.weight"] + 1}, path, metadata=metadata)

    monkeypatch.setattr(writer, "save_file", spoilt)
    before = run.listing()
    with pytest.raises(UserError, match=r"norm.weight did not read back"):
        export.export(run.config())
    assert run.listing() == before


def test_a_refused_export_leaves_the_old_one_whole(run):
    export.export(run.config())
    before = run.exported()
    run.change_tensors(lm_head__weight=None)
    with pytest.raises(UserError, match="lm_head"):
        export.export(run.config("overwrite=true"))
    assert run.exported()[0] == before[0]
    assert run.exported()[1].keys() == before[1].keys()
    assert (run.folder / "export.json").is_file()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda run: (run.folder / "train" / "manifest.json").unlink(), "train/manifest.json is missing: run"),
        (lambda run: (run.checkpoint / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda run: (run.checkpoint / "model.safetensors").write_bytes(b"{}"), "model.safetensors has 2 bytes"),
        (lambda run: (run.checkpoint / "drafter.json").write_text("{}"), "drafter.json has 2 bytes"),
        (lambda run: (run.folder / "data" / "vocab.safetensors").unlink(), "vocab.safetensors is missing"),
        (
            lambda run: run.set_vocab(vocab.DraftVocab(np.arange(12, dtype=np.int64), 40)),
            "is not the vocabulary that the drafter was trained with",
        ),
    ],
)
def test_missing_damaged_or_foreign_inputs_are_named(spoil, named, run):
    spoil(run)
    before = run.listing()
    with pytest.raises(UserError, match=named) as caught:
        export.export(run.config())
    assert "\n" not in str(caught.value)
    assert run.listing() == before


@pytest.mark.parametrize("option", ["drafter.norm_output=false", "drafter.head_dim=8", "target.aux_layers=[0,2]"])
def test_options_that_contradict_the_weights_are_refused(option, run):
    name = option.split("=")[0].split(".")[1]
    with pytest.raises(UserError, match=f"was trained with {name}="):
        export.export(run.config(option))


def test_positions_may_be_raised_after_training(run, capsys):
    export.export(run.config())
    longer = "drafter.max_position_embeddings=4096"
    with pytest.raises(UserError, match=r"max_position_embeddings: 128 there, 4096 here.*overwrite=true"):
        export.export(run.config(longer))
    export.export(run.config(longer, "overwrite=true"))
    assert run.exported()[0]["max_position_embeddings"] == 4096
    assert "of up to 4,096 tokens" in run.exported()[2]
    assert "max_position_embeddings is 4,096 now, 128 in training" in capsys.readouterr().out
    with pytest.raises(UserError, match="was trained with max_position_embeddings=128"):
        export.export(run.config("drafter.max_position_embeddings=64"))


def test_positions_are_not_raised_beyond_a_table(mla_run):
    with pytest.raises(UserError, match="max_position_embeddings=129 is beyond the 128 positions"):
        export.export(mla_run.config("drafter.max_position_embeddings=129"))
    assert not (mla_run.folder / "export").exists()


def test_a_drafter_of_another_target_is_refused(run):
    store = {"fingerprint": "f" * 16, "inputs": {"target": {"name": "someone/another-target"}}}
    (run.folder / "store").mkdir(exist_ok=True)
    (run.folder / "store" / "manifest.json").write_bytes(seal(store))
    with pytest.raises(
        UserError, match=r"was trained for someone/another-target, which had another name than target.path"
    ):
        export.export(run.config())


def test_a_finished_export_is_left_alone(run, capsys):
    export.export(run.config())
    stamp = (run.folder / "export" / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    export.export(run.config())
    assert "export: up to date" in capsys.readouterr().out
    assert (run.folder / "export" / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_damaged_export_is_made_again(run):
    export.export(run.config())
    (run.folder / "export" / "config.json").write_text("{}")
    export.export(run.config())
    assert run.exported()[0]["architectures"] == ["LlamaForCausalLMEagle3"]


def test_other_weights_need_overwrite(run):
    export.export(run.config())
    run.change_tensors(norm__weight=torch.full((16,), 0.5))
    with pytest.raises(UserError, match=r"made from other inputs \(weights: .*overwrite=true"):
        export.export(run.config())
    export.export(run.config("overwrite=true"))
    assert torch.equal(run.exported()[1]["norm.weight"], torch.full((16,), 0.5).bfloat16())


def test_push_without_a_repository_is_refused_before_any_work(run):
    before = run.listing()
    with pytest.raises(UserError, match="add repo=owner/name"):
        export.export(run.config("push=true"))
    assert run.listing() == before
