"""Every profile trains on CUDA what one process trains on a CPU, and goes on from every other.

One process where there is one GPU, two where there are more; FSDP2 needs two.
"""

import json
from types import SimpleNamespace

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


def run_in(folder, trainings):
    """Launch them with as many processes as there are GPUs, two at most."""
    return several.train(folder / "results", trainings, "ddp", min(GPUS, 2), on_gpus=True)


def training(profile, run, *more, stop_after=None):
    words = [*golden.OPTIONS, f"run_dir={run.folder}", *more]
    return {"profile": profile, "options": words, "how": {"stop_after": stop_after}}


def new_run(folder):
    folder.mkdir()
    return SimpleNamespace(folder=golden.make_run(folder))


def rows(run):
    return [json.loads(line) for line in (run.folder / "train" / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return [row["loss"] for row in rows(run) if "loss" in row]


@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_relay_of_all_profiles_has_the_golden_losses(tmp_path, precision):
    run, trainings = new_run(tmp_path / "run"), []
    each = golden.STEPS // len(PROFILES)
    for place, profile in enumerate(PROFILES, 1):
        stop = place * each if place < len(PROFILES) else None
        trainings.append(training(profile, run, f"train.precision={precision}", stop_after=stop))
    results = run_in(tmp_path, trainings)
    assert [ranks[0][0] for ranks in results] == ["stopped"] * (len(PROFILES) - 1) + ["done"]
    assert losses(run) == pytest.approx(KEPT, rel=TOLERANCE[precision])
    launches = [
        json.loads(line)["facts"] for line in (run.folder / "train" / "launches.jsonl").read_text().splitlines()
    ]
    assert all(facts["device"].startswith("cuda") for facts in launches)
