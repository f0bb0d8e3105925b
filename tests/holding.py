"""Two steps under the launched profile; the main process then prints the bytes that it holds, as JSON.

    holding.py FOLDER OPTION...

Run by tests/planning/test_footprint.py, in as many processes as a profile has.
"""

import gc
import json
import sys
from pathlib import Path

import torch
from plan_cases import objective_and_batch, shape_of

from eagle31_train.compose import load_config
from train.launch import make_accelerator
from train.loader import StepTotals
from train.parallel import parallelise

SHAPE = shape_of(
    hidden_size=512, target_hidden_size=512, num_attention_heads=16, vocab_size=6000, draft_vocab_size=5000
)
UNROLL = 2


def held():
    """Bytes of all storages that Python knows of."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not thing.is_meta:
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                local = getattr(tensor, "_local_tensor", tensor)
                if local is not None:
                    storage = local.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def main():
    drafter = [f"drafter.{name}=8" for name in ("intermediate_size", "num_attention_heads", "head_dim")]
    options = [*drafter, "drafter.num_key_value_heads=8", "name=x", "target.path=x", "train.wandb=disabled"]
    config = load_config([*options, *sys.argv[2:]])
    accelerator = make_accelerator(config, Path(sys.argv[1]))
    objective, batch = objective_and_batch(SHAPE, [torch.arange(24) > 11], UNROLL, torch.bfloat16)
    objective.autocast = torch.bfloat16
    parallel = parallelise(accelerator, objective, config.train)
    for _ in range(2):
        with parallel.micro_batch(last=True):
            loss, _ = parallel.model(batch, torch.full((UNROLL,), 1e-2))
            parallel.backward(loss)
        parallel.update(1e-4, StepTotals(torch.ones(2)), torch.zeros(1))
    del loss, batch
    if accelerator.is_main_process:
        print(json.dumps({"held": held(), "kind": parallel.kind}))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
