"""Bytes of a micro-batch by formula, against what torch allocates on a CPU, and of profiles, against real processes."""

import json
import math

import pytest
import torch
from holding import SHAPE
from launching import ROOT, command, execute
from plan_cases import LOGITS, SMALL_MLA, measure, objective_and_batch, shape_of

from benchmarks.shapes import turns
from eagle31_train.checkpoint.contract import weight_shapes
from eagle31_train.common.locations import CONFIGS
from eagle31_train.model import linear
from eagle31_train.planning.footprint import PROFILES, Activations, State, Step, activations, memory
from eagle31_train.planning.planned import read_bucket
from eagle31_train.planning.work import count_work

BF16, FP32 = 2, 4


CASES = [
    ({}, BF16, False, "int8", 7),
    ({"num_key_value_heads": 8}, FP32, False, "bf16", 3),
    ({"norm_before_residual": True}, BF16, True, "fp8", 7),
    ({"norm_output": False, "fc_norm": False}, BF16, False, "bf16", 7),
    ({"draft_vocab_size": 2000, "num_key_value_heads": 8}, BF16, False, "bf16", 3),
    ({**SMALL_MLA, "norm_before_residual": True}, FP32, True, "int8", 3),
    ({"num_layers": 3, "norm_before_fc": True, "norm_output": False}, BF16, False, "bf16", 3),
    ({"num_layers": 2, "norm_before_fc": True, "fc_norm": False}, BF16, True, "int8", 3),
    ({"parallel": True, "ptd_token_id": 0}, BF16, False, "bf16", 7),
    ({"parallel": True, "ptd_token_id": 0, "num_layers": 2}, FP32, True, "int8", 4),
    ({"parallel": True, "ptd_token_id": 0, "norm_before_residual": True}, BF16, True, "int8", 7),
]
TIERED = [(SMALL_MLA, BF16, True, "bf16", 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)]


@pytest.mark.parametrize(("changes", "value", "recompute", "codec", "unroll"), TIERED)
def test_activations_are_what_torch_allocates(monkeypatch, changes, value, recompute, codec, unroll):
    """What is kept within 0.5 %, the worst moment within 10 %."""
    monkeypatch.setattr(linear, "ROWS", 1)  # as on a GPU; filled up, products keep no copies of weights in 16 bits
    shape, masks = shape_of(**changes), [turns(512, 0.5), turns(300, 0.2), turns(200, 1.0)]
    low = torch.bfloat16 if value == BF16 else torch.float32
    objective, batch = objective_and_batch(shape, masks, unroll, low, codec)
    objective.autocast = torch.bfloat16 if value == BF16 else None
    objective.drafter.recompute = recompute
    kept, peak = measure(objective, batch, torch.full((unroll,), 1e-3))

    work = count_work([mask.numpy() for mask in masks], unroll)
    step = Step(value, decodes=codec != "bf16" or value == FP32, recompute=recompute, logits=LOGITS, flash=False)
    reckoned = activations(shape, work, step)
    assert reckoned.after_forward == pytest.approx(kept, rel=0.005)
    assert reckoned.peak == pytest.approx(peak, rel=0.1)


def test_freezing_lm_head_saves_its_gradient():
    work = count_work([turns(64, 0.5).numpy()], 3)
    shape = shape_of()
    trained, frozen = (activations(shape, work, Step(train_lm_head=trains)) for trains in (True, False))
    assert trained.head - frozen.head == FP32 * shape.draft_vocab_size * shape.hidden_size


NOTHING = Activations(0, 0, 0, 0, 0)


def test_every_profile_is_a_file_and_every_file_a_profile():
    """But for the CPU's and those of several machines, which hold as much."""
    files = {file.stem for file in (CONFIGS / "accelerate").glob("*.yaml")}
    assert {profile.name for profile in PROFILES} == {n for n in files if not n.startswith("multinode")} - {"cpu"}
    for profile in PROFILES:
        text = (CONFIGS / "accelerate" / f"{profile.name}.yaml").read_text()
        assert (f"configs/deepspeed/{profile.name}.json" in text) == profile.deepspeed, profile.name
        if profile.deepspeed:
            settings = json.loads((CONFIGS / "deepspeed" / f"{profile.name}.json").read_text())["zero_optimization"]
            assert settings["stage"] == profile.stage
            assert ("offload_optimizer" in settings) == profile.offload


HELD = {f"{p.name} {o}": (p, o) for o in ("adamw", "muon") for p in PROFILES if not (o == "muon" and p.deepspeed)}


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "optimizer"), HELD.values(), ids=HELD.keys())
def test_what_two_processes_hold_is_what_is_reckoned(profile, optimizer, tmp_path):
    """Weights, moments, flat copies and buckets, device and host together, after two steps: within 1 %."""
    launched = command(profile.name if profile.several else "one", 2, ROOT / "tests" / "holding.py")
    done = execute([*launched, str(tmp_path), f"train.optimizer={optimizer}"], profile.name)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"held')))

    bucket, overlap = read_bucket(profile)
    target = 2 * SHAPE.target_hidden_size * (SHAPE.vocab_size + SHAPE.draft_vocab_size)
    sizes = weight_shapes(SHAPE)
    groups = [[math.prod(s) for s in sizes.values() if (len(s) > 1) == several] for several in (True, False)]
    muons = [tuple(s) for name, s in sizes.items() if len(s) > 1 and name != "lm_head.weight"]
    state = State(groups, orthogonal=muons if optimizer == "muon" else ())
    m = memory(profile, state, 2, target, NOTHING, 0.0, bucket, overlap)
    # On a CPU device and host are one.
    assert found["held"] == pytest.approx(m.held + m.host, rel=0.01), found


def test_sharding_divides_what_it_says():
    state = State([[600, 200], [10]])
    P = 4 * 810
    of = {profile.name: memory(profile, state, 5, 0.0, NOTHING, 0.0) for profile in PROFILES}
    assert (of["gpu"].weights, of["gpu"].moments, of["gpu"].copies) == (P, 2 * P, 0)
    assert of["ddp"].held == of["gpu"].held + P
    assert (of["zero1"].weights, of["zero1"].moments, of["zero1"].copies) == (P, 2 * P / 5, P / 5)
    assert of["zero1"].held == of["zero2"].held
    assert of["zero2_offload"].moments == 0
    assert of["zero2_offload"].host == P + 4 * 600
    assert of["fsdp2"].held == 3 * P / 5
    assert of["zero3"].held == 5 * P / 5
    assert of["zero3_offload"].host == P
    assert all(m.peak == m.held + max(m.step, m.exchange) for m in of.values())
