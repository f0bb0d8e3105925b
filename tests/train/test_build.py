"""What a drafter starts with when nothing else is given."""

from types import SimpleNamespace

import pytest
import torch
from made import message_of
from pipeline import assert_equal
from warming import begin_fresh

from eagle31_train import kernels
from eagle31_train.checkpoint.contract import drafter_shape
from eagle31_train.config import DrafterConfig, TrainConfig
from eagle31_train.model.drafter import Drafter
from eagle31_train.model.layer import applied_to
from eagle31_train.store import Store
from eagle31_train.store.codec import plain
from eagle31_train.targets.derive import MOST_STEPS, STEP_TOKENS
from train import build
from train.build import choose_kernels, first_norm, look_back
from train.inputs import tokens_of_a_step

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_drafter_starts_as_an_unsure_copy_of_the_targets_last_layers(new_run):
    objective, store, kept = begin_fresh(new_run())
    drafter = objective.drafter
    rows = store.target["lm_head"][torch.from_numpy(kept.target_ids)]
    torch.testing.assert_close(drafter.lm_head.weight.data, rows.float())
    torch.testing.assert_close(drafter.norm.weight.data, first_norm(store.target["norm"].float()))
    *others, last = drafter.fc.weight.data.split(drafter.shape.hidden_size, dim=1)
    assert (last - torch.eye(len(last))).abs().max() < 0.05
    assert all(0 < other.abs().max() < 0.05 for other in others)
    smaller = begin_fresh(new_run(), "train.fc_init_scale=0.25")[0].drafter
    torch.testing.assert_close(smaller.fc.weight, drafter.fc.weight / 4)
    assert objective.teacher.eps == store.states["norm"]["eps"] == 1e-6
    assert drafter.shape.rms_norm_eps == 1e-5
    states = torch.randn(3, store.states["hidden_size"])
    capped = begin_fresh(new_run(), soft_cap=2.0)[0].teacher  # as of a Gemma 2
    torch.testing.assert_close(capped.logits(states), 2 * (objective.teacher.logits(states) / 2).tanh())


def test_fc_of_eagle_3_trains_on_scaled_states_and_is_saved_for_states_as_they_are(copy_of, by_one, tmp_path):
    eagle3 = ["drafter.fc_norm=false", "drafter.norm_output=false", "train.fc_input_scale=[0.25,2,0.5]"]
    options = [*eagle3, "train.max_steps=4", "train.weight_decay=0.1"]
    run = copy_of(tmp_path / "stopped").stopped(2, *options).fit(*options)
    assert_equal(run.weights(), by_one(*options).weights())  # nothing is rounded on the way to a checkpoint and back

    drafter, store = begin_fresh(run, *options)[0].drafter, Store(run.folder / "run" / "store")
    drafter.load_state_dict({name: drafter.from_checkpoint(name, weight) for name, weight in run.weights().items()})
    states = store.split("train").read(0).aux.decode().float()
    torch.testing.assert_close(drafter.fuse(plain(states)), states.flatten(1) @ run.weights()["fc.weight"].T)

    # AdamW's first step moves a weight that has a gradient by the rate: where states are multiplied, by as much more.
    one = [*eagle3, "train.max_steps=1", "train.warmup_ratio=0", "train.max_grad_norm=1e9"]
    moved = by_one(*one).weights()["fc.weight"] - by_one(*one, "train.lr=1e-12").weights()["fc.weight"]
    rate = by_one(*one).rows()[0]["lr"]
    farthest = [part.abs().max().item() / rate for part in moved.split(drafter.shape.target_hidden_size, dim=1)]
    assert farthest == pytest.approx([0.25, 2, 0.5], rel=1e-2)


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_a_drafter_computes_in_the_precision_that_is_asked_for_and_recomputes_where_that_is(new_run, precision):
    low = torch.bfloat16 if precision == "bf16" else torch.float32
    objective = begin_fresh(new_run(), f"train.precision={precision}", "train.activation_checkpointing=true")[0]
    assert objective.autocast == (low if precision == "bf16" else None)
    assert objective.teacher.head_rows.dtype == objective.drafter.shared_embedding.dtype == low
    assert objective.drafter.fc.weight.dtype == torch.float32
    assert objective.drafter.recompute
    assert not begin_fresh(new_run())[0].drafter.recompute


def test_the_longest_conversation_must_fit_in_a_step_and_decides_its_size_with_the_epochs():
    def tokens_of(lengths, batch_tokens=None, **options):
        split = SimpleNamespace(lengths=lengths, store=SimpleNamespace(location="there"))
        return tokens_of_a_step(split, TrainConfig(batch_tokens=batch_tokens, **options))

    assert "train.batch_tokens=30" in message_of(tokens_of, [5, 30, 7], batch_tokens=29)
    assert tokens_of([5, 30, 7], batch_tokens=30) == 30
    many = [STEP_TOKENS] * (2 * MOST_STEPS)
    assert tokens_of(many, epochs=1) == 2 * STEP_TOKENS
    assert tokens_of(many, epochs=3) == 6 * STEP_TOKENS
    assert tokens_of([5, 7 * STEP_TOKENS], epochs=1) >= 7 * STEP_TOKENS


@pytest.mark.parametrize("scales", ["[1,1]", "[1,1,0.3]"])
def test_scales_that_would_round_or_are_too_few_are_refused(new_run, scales):
    words = "drafter.fc_norm=false", "drafter.norm_output=false", f"train.fc_input_scale={scales}"
    said = message_of(new_run().fit, *words)
    assert "applies only to EAGLE 3, and must have a power of two for each of the 3 auxiliary layers" in said
    assert "applies only to EAGLE 3" in message_of(new_run().fit, "train.fc_input_scale=[1,1,1]")


def test_the_first_norm_is_the_targets_scaled_down_without_its_outliers():
    """SmolLM2-135M's, from -2.1 to 3.3 about 1.78, stays in proportion; Gemma 3's has weights of 301 about 9.25."""
    even, uneven = torch.tensor([-2.1, 1.0, 1.78, 1.5, 3.3]), torch.tensor([0.2, 9.0, -9.25, 301.0, 12.0])
    torch.testing.assert_close(first_norm(even), even * 0.7 / 1.78)
    torch.testing.assert_close(first_norm(uneven), torch.tensor([0.2, 9.0, -9.25, 18.5, 12.0]) * 0.7 / 9.25)


def scores(drafter, layer, length=600):
    """[h, T, T]: what biases alone give every query for every position up to its own."""
    attention, positions = drafter.stack[layer].self_attn, torch.arange(length)
    nothing = applied_to(torch.zeros(length, attention.q_proj.in_features))
    keys, _ = attention.keys_values(nothing, positions)
    keys = keys.repeat_interleave(attention.heads // attention.groups, 1)
    given = torch.einsum("qhd,khd->hqk", attention.queries(nothing, positions), keys) * attention.scale
    return given.masked_fill(positions[:, None] < positions, -torch.inf)


def test_heads_of_a_parallel_drafter_begin_at_the_positions_that_its_mask_rows_may_need():
    """Position t is k before the mask row of step k; to look k ahead instead would be the nearest one, t + k itself."""
    options = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 64, "num_layers": 2}
    made = {"parallel": True, "attention_bias": True, "intermediate_size": 8, "hidden_size": 40}
    rope = {"rope_theta": 1e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 1000}
    shape = drafter_shape(DrafterConfig(**options, **made, **rope), 40, 9, 9, [1])
    drafter = Drafter(shape, torch.randn(9, 40))
    look_back(drafter, 3)
    for layer in range(2):
        seen = scores(drafter, layer).softmax(-1)[:, 3:]
        for head, shares in enumerate(seen):
            back = head % 3
            assert torch.equal(shares.argmax(-1), torch.arange(3, 600) - back)
            near = sum(shares.diagonal(3 - back + off).mean() for off in (-2, -1, 0, 1, 2))
            assert near > 0.9, "of 600 positions five have nearly all"


@pytest.mark.parametrize(("options", "looks"), [(["parallel"], True), (["parallel", "qk_norm"], False), ([], False)])
def test_only_a_parallel_drafter_with_biases_looks_back(new_run, options, looks):
    drafter = begin_fresh(new_run(), *(f"drafter.{name}=true" for name in ("attention_bias", *options)))[0].drafter
    assert drafter.midlayer.self_attn.q_proj.bias.any() == looks


@pytest.mark.parametrize(
    ("device", "capability", "triton", "says"),
    [
        (CPU, None, None, "plain kernels"),
        (CUDA, (9, 0), None, "fused kernels"),
        (CUDA, (7, 5), None, "plain kernels (the GPU is older than Ampere)"),
        (CUDA, (9, 0), "no compiler", "plain kernels (no compiler)"),
    ],
)
def test_kernels_are_fused_where_they_can_be_and_attention_is_switched_in_bf16_on_cuda(
    tiny, monkeypatch, device, capability, triton, says
):
    objective, fused = tiny[0], says == "fused kernels"
    monkeypatch.setattr(build, "switch_flash", lambda shape, device: "attention by FA3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels, "trial", lambda device: triton)
    assert choose_kernels(objective, TrainConfig(kernels="plain"), device) == "plain kernels"
    assert not objective.fused
    if not fused:
        given = TrainConfig(kernels="fused")
        assert "train.kernels=fused does not run here" in message_of(choose_kernels, objective, given, device)
    assert choose_kernels(objective, TrainConfig(), device) == says
    assert objective.fused == objective.drafter.norm.fused == objective.drafter.midlayer.mlp.fused == fused
    objective.autocast = torch.bfloat16
    switched = ", attention by FA3" if device == CUDA else ""
    assert choose_kernels(objective, TrainConfig(), device) == says + switched
    assert choose_kernels(objective, TrainConfig(kernels="plain"), device) == "plain kernels"
