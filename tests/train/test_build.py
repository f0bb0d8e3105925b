"""What a drafter starts with when nothing else is given."""

import importlib.util

import pytest
import torch

from eagle31_train.config import TrainConfig
from eagle31_train.errors import UserError
from eagle31_train.model import vocab
from eagle31_train.store import Store
from train.build import build_objective, choose_kernels, shape_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_drafter_starts_as_an_unsure_copy_of_the_targets_last_layers(new_run):
    run = new_run()
    config, store = run.config(), Store(run.folder / "run" / "store")
    kept = vocab.read(config.data_folder / "vocab.safetensors")
    drafter = build_objective(config, shape_of(config.drafter, store, kept), store, kept).drafter
    rows = store.target["lm_head"][torch.from_numpy(kept.target_ids)]
    torch.testing.assert_close(drafter.lm_head.weight.data, rows.float())
    # At full size it is as sure of a wrong guess as the target of a right one.
    torch.testing.assert_close(drafter.norm.weight.data, 0.4 * store.target["norm"].float())
    *others, last = drafter.fc.weight.data.split(drafter.shape.hidden_size, dim=1)
    assert (last - torch.eye(len(last))).abs().max() < 0.05
    assert all(0 < other.abs().max() < 0.05 for other in others)


@pytest.mark.parametrize(
    ("device", "capability", "triton", "says"),
    [
        (CPU, None, True, "plain kernels"),
        (CUDA, (9, 0), True, "fused kernels"),
        (CUDA, (7, 5), True, "plain kernels (the GPU is older than Ampere)"),
        (CUDA, (9, 0), False, "plain kernels (triton is not installed)"),
    ],
)
def test_kernels_are_fused_where_they_can_be(tiny, monkeypatch, device, capability, triton, says):
    objective, _ = tiny
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: triton or None)
    assert choose_kernels(objective, TrainConfig(kernels="plain"), device) == "plain kernels"
    assert not objective.fused
    if says != "fused kernels":
        with pytest.raises(UserError, match=r"train\.kernels=fused cannot be"):
            choose_kernels(objective, TrainConfig(kernels="fused"), device)
    assert choose_kernels(objective, TrainConfig(), device) == says
    assert objective.fused == (says == "fused kernels")
    assert objective.drafter.norm.fused == objective.drafter.midlayer.mlp.fused == objective.fused
