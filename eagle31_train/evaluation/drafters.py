"""The drafters that are measured, in memory beside their target; and how long their prompts may be."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.config import Config
from eagle31_train.evaluation.serving.command import max_model_len
from eagle31_train.model.drafter import Drafter
from eagle31_train.targets.hf import DTYPES, HiddenStateTarget, read_config


@dataclass(frozen=True)
class Candidate:
    """A drafter in memory, beside its target.

    identity: its checkpoint's. target_ids: [Vd] int64, on the drafter's device.
    """

    name: str
    identity: str
    drafter: Drafter
    target_ids: Tensor

    @property
    def aux_layers(self) -> list[int]:
        """The auxiliary layers that it reads."""
        return self.drafter.shape.aux_layers


def load(checkpoint: DrafterCheckpoint, name: str, target: HiddenStateTarget, config: Config) -> Candidate:
    """The drafter as it is served: weights rounded to the target's dtype, and run in evaluate.dtype.

    Raises:
        UserError: damaged weights, or a drafter that was made for another target.
    """
    drafter = checkpoint.load(target, DTYPES[config.target.dtype], DTYPES[config.evaluate.dtype])
    ids = torch.from_numpy(checkpoint.vocab.target_ids).to(target.embedding.weight.device)
    return Candidate(name, checkpoint.identity, drafter, ids)


def longest_prompt(config: Config, positions: Iterable[int | None], drafted: Iterable[int] = ()) -> int:
    """How many tokens a prompt may have, so that vLLM takes it and drafts every time: near the last position it drafts
    less. With evaluate.backend=vllm, its own limit and its depths count, too.

    Args:
        positions: of every drafter, where they are limited. drafted: numbers of draft tokens that are tried here.

    Raises:
        UserError: a limit of vLLM's that is no number.
    """
    options = config.evaluate
    limits = [*positions, getattr(read_config(config.target), "max_position_embeddings", None)]
    if options.backend == "vllm":
        limits.append(max_model_len(config))
        drafted = [*drafted, *options.serve_speculative_tokens]
    # What vLLM needs beyond an answer, or it shortens the last drafts: positions of a verification, and of the next,
    # which it prepares meanwhile as if all of it were accepted (seen in 0.32, async scheduling).
    past_the_end = 2 * (max(drafted, default=0) + 1)
    return min(limit for limit in limits if limit) - options.max_new_tokens - past_the_end
