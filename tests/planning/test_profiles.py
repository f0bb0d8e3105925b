"""Memory of the launch profiles: what each holds is what real processes hold."""

import json
import math
import subprocess

import pytest
from holding import SHAPE
from launching import ROOT, command, environment

from eagle31_train.checkpoint.contract import weight_shapes
from eagle31_train.cli import CONFIGS
from eagle31_train.planning.footprint import Activations
from eagle31_train.planning.planned import read_bucket
from eagle31_train.planning.profiles import PROFILES, Setting, State, memory

NOTHING = Activations(0, 0, 0, 0, 0)


def state_of(shape, optimizer="adamw"):
    sizes = weight_shapes(shape)
    groups = [[math.prod(s) for s in sizes.values() if (len(s) > 1) == several] for several in (True, False)]
    muons = [tuple(s) for name, s in sizes.items() if len(s) > 1 and name != "lm_head.weight"]
    return State(groups, orthogonal=muons if optimizer == "muon" else ())


def setting(state, devices=2, **changes):
    return Setting(state, devices, **{"target": 0.0, "micro": NOTHING, "batch": 0.0, **changes})


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


HELD = {f"{p.name} {o}": (p, o) for o in ("adamw", "muon") for p in PROFILES if p.takes(o)}


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "optimizer"), HELD.values(), ids=HELD.keys())
def test_what_two_processes_hold_is_what_is_reckoned(profile, optimizer, tmp_path):
    """Weights, moments, flat copies and buckets, device and host together, after two steps: within 1 %."""
    launched = command(profile.name if profile.several else "one", 2, ROOT / "tests" / "holding.py")
    done = subprocess.run(
        [*launched, str(tmp_path), f"train.optimizer={optimizer}"],
        cwd=ROOT,
        env=environment(profile.name),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"held')))

    bucket, overlap = read_bucket(profile)
    target = 2 * SHAPE.target_hidden_size * (SHAPE.vocab_size + SHAPE.draft_vocab_size)
    m = memory(profile, setting(state_of(SHAPE, optimizer), target=target, bucket=bucket, overlap=overlap))
    # On a CPU device and host are one.
    assert found["held"] == pytest.approx(m.held + m.host, rel=0.01), found


def test_sharding_divides_what_it_says():
    state = State([[600, 200], [10]])
    P = 4 * 810
    of = {profile.name: memory(profile, setting(state, 5)) for profile in PROFILES}
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
