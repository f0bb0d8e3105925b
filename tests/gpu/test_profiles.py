"""Every profile trains on CUDA what one process trains on a CPU, and goes on from every other.

One process where there is one GPU, two where there are more; FSDP2 needs two.
"""

import json

import golden
import pytest
import several
import torch

GPUS = torch.cuda.device_count()
SHARDED = ("fsdp2",) if GPUS > 1 else ()
PROFILES = ("ddp", *SHARDED, "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
KEPT = json.loads(golden.FILE.read_text())["losses"]
# In fp32 other kernels than the CPU's differ as other CPUs do, and a little more; in bf16 the CPU itself differs by
# 2e-3 from fp32 on these hundred steps.
TOLERANCE = {"no": 1e-4, "bf16": 1e-2}


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_relay_of_all_profiles_has_the_golden_losses(tmp_path, precision):
    words = [*golden.OPTIONS, f"run_dir={golden.make_run(tmp_path)}", f"train.precision={precision}"]
    each, trainings = golden.STEPS // len(PROFILES), []
    for place, profile in enumerate(PROFILES, 1):
        stop = place * each if place < len(PROFILES) else None
        trainings.append({"profile": profile, "options": words, "how": {"stop_after": stop}})
    results = several.train(tmp_path / "results", trainings, "ddp", min(GPUS, 2), on_gpus=True)
    assert [ranks[0][0] for ranks in results] == ["stopped"] * (len(PROFILES) - 1) + ["done"]
    losses = [row["loss"] for row in rows(tmp_path / "train" / "metrics.jsonl") if "loss" in row]
    assert losses == pytest.approx(KEPT, rel=TOLERANCE[precision])
    launches = rows(tmp_path / "train" / "launches.jsonl")
    assert all(launch["facts"]["device"].startswith("cuda") for launch in launches)
