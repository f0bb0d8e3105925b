"""What a drafter starts with when nothing else is given."""

import torch

from eagle31_train.model import vocab
from eagle31_train.store import Store
from train.build import build_objective, shape_of


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
