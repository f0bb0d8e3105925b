"""Three gradient steps of a published drafter's full size on a CPU, in bf16: `python -m benchmarks.full_size`.

Not how it is trained: without AdamW, whose fp32 state would take 29 GB for Kimi's, and on random states. It shows,
where no GPU is, that a step of this size is computed, every gradient finite, and that the loss falls. It takes 18 GiB.
"""

import argparse
import resource
import time

import torch
from torch import Tensor

from benchmarks import machine
from eagle31_train.cli import load_config
from eagle31_train.codec import plain
from eagle31_train.document import Document
from eagle31_train.drafter.batch import Batch, build_batch
from eagle31_train.drafter.model import Drafter
from eagle31_train.loss import Objective, Teacher
from eagle31_train.schema import Config
from eagle31_train.shape import drafter_shape

LENGTH, PROMPT = 192, 128  # tokens of the one document, and of its prompt
STEP = 2.0  # length of a step along the gradient, as a share of one


def random(*size: int, std: float = 1.0) -> Tensor:
    """[*size] bf16."""
    return torch.empty(size, dtype=torch.bfloat16).normal_(std=std)


def make(config: Config) -> tuple[Objective, Batch, Tensor]:
    """A recipe's drafter with random weights in bf16, a document of random states, and the weights of its steps."""
    H, V, K = config.plan.hidden_size, config.plan.vocab_size, config.train.unroll
    assert H is not None
    assert V is not None
    shape = drafter_shape(config.drafter, H, V, V, config.target.aux_layers or [])
    drafter = Drafter(shape, random(V, H, std=0.02)).bfloat16()
    teacher = Teacher(torch.ones(H), 1e-5, random(V, H, std=0.02), torch.arange(V))
    document = Document(
        tokens=torch.randint(0, V, (LENGTH,)),
        loss_mask=torch.arange(LENGTH) >= PROMPT,
        top1=torch.randint(0, V, (LENGTH,)),
        aux=plain(random(LENGTH, len(shape.aux_layers), H)),
        last=plain(random(LENGTH, H)),
    )
    batch = build_batch([document], K, torch.ones(V, dtype=torch.bool), "mask")
    weights = torch.tensor([config.train.gamma**k / int(count) for k, count in enumerate(batch.trained)])
    return Objective(drafter, teacher, config.train.loss), batch, weights


def step(objective: Objective, batch: Batch, weights: Tensor) -> float:
    """One step down the gradient; the loss before it. AssertionError where a gradient is missing or not finite."""
    objective.zero_grad(set_to_none=True)
    loss, _ = objective(batch, weights)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in objective.drafter.named_parameters()}
    for name, gradient in gradients.items():
        assert gradient is not None, f"{name} has no gradient"
        assert gradient.isfinite().all(), f"the gradient of {name} is not finite"
    norm = torch.stack([g.float().norm() for g in gradients.values() if g is not None]).norm()
    with torch.no_grad():
        for parameter in objective.drafter.parameters():
            parameter.add_(parameter.grad * (-STEP / float(norm)))
    return loss.item()


def main() -> None:
    """Build, step, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--experiment", default="kimi", help="a recipe that says its target's sizes (plan.*)")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    objective, batch, weights = make(load_config([f"+experiment={chosen.experiment}"]))
    trained = sum(p.numel() for p in objective.drafter.parameters())
    print(machine.summary(machine.describe()))
    print(f"{trained:,} trained parameters, {LENGTH} tokens, {len(batch.layout.slots)} slots, {batch.unroll} steps")
    for number in range(3):
        began = time.perf_counter()
        loss = step(objective, batch, weights)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"step {number}: loss {loss:.4f}, {time.perf_counter() - began:.1f} s, {peak:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
