"""Acceptance without the target: from its own answers to some held-out prompts, with the auxiliary states on the way.

In greedy decoding, speculation changes no token, so these say what a real decoding with any drafter would accept
(`unrolled.py`). Extraction, which has the target in memory, decodes them as stage 4 does and writes them beside the
shards; training measures its drafter on them and needs no target.

The file holds, for trajectory i: i.prompt, i.output, i.beyond, [n] int32 each, and i.aux, in the target's dtype,
[len(prompt) + len(output) - 2, A, H].

The prompts are the last ones of each source. Stage 4 takes the first ones, and leaves out those that a run was measured
on, by their `digest`.
"""

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle31_train import provenance
from eagle31_train.common.console import Progress, is_main, note
from eagle31_train.common.errors import UserError
from eagle31_train.config import Config
from eagle31_train.evaluation.decoding import Limits, decode_plain
from eagle31_train.evaluation.measurement import rounds
from eagle31_train.evaluation.prompts import Prompt, choose, prompt_of
from eagle31_train.evaluation.unrolled import Trajectory, unroll
from eagle31_train.model.drafter import Drafter
from eagle31_train.store import Store, StoreWriter
from eagle31_train.store.format import TRAJECTORIES
from eagle31_train.targets.cached import CachedTarget, why_alone
from eagle31_train.targets.hf import Engine, TransformersEngine, batches_by_length

if TYPE_CHECKING:
    from datasets import Dataset

IDS = ("prompt", "output", "beyond")
FEWEST = 2  # prompts to measure on, however few are held out
WITHOUT = "extract: no trajectories are stored, so training will not measure acceptance"


def record(config: Config, engine: Engine, writer: StoreWriter, splits: dict[str, "Dataset"]) -> None:
    """Answer `extract.trajectories` held-out prompts greedily and write them, once. If that fails, say so and go on."""
    if not config.extract.trajectories or not len(splits["heldout"]) or writer.has_trajectories:
        return
    began = time.perf_counter()
    try:
        trajectories = decode(config, engine, splits["heldout"])
    except Exception as error:
        # The target's own code may fail with a cache, or the GPU be too small. Its states can be extracted anyway.
        note(f"{WITHOUT}: {'' if isinstance(error, UserError) else type(error).__name__ + ': '}{error}")
        return
    tensors: dict[str, Tensor] = {}
    for i, one in enumerate(trajectories):
        for name in IDS:
            tensors[f"{i}.{name}"] = torch.tensor(getattr(one, name), dtype=torch.int32)
        tensors[f"{i}.aux"] = one.aux
    writer.write_tensors(TRAJECTORIES, tensors)
    note(f"extract: answered {len(trajectories)} held-out prompts for training, in {time.perf_counter() - began:.1f} s")


def decode(config: Config, engine: Engine, heldout: "Dataset") -> list[Trajectory]:
    """Return the target's own answers to held-out prompts that have a slot to draft at. UserError if there is none."""
    if not isinstance(engine, TransformersEngine):
        raise UserError(f"extract.engine={engine.name} cannot decode")
    target, options = CachedTarget(engine.target.model, engine.layers), config.evaluate
    beyond = options.max_speculative_tokens - 1
    end_ids = provenance.read_data(config)["end_ids"]
    longest = (engine.longest or 1 << 40) - options.max_new_tokens - beyond
    heldout_prompts = [prompt_of(row) for row in heldout]
    prompts = choose_prompts(heldout_prompts, config.extract.trajectories, options.num_prompts, longest)
    limits = Limits(options.max_new_tokens, frozenset(end_ids))
    trajectories: list[Trajectory] = []
    # Each batch takes as many passes as its longest answer has tokens, so make as few batches as possible.
    tokens = 1 if why_alone(target.model) else config.extract.batch_tokens
    shown = {"desc": "held-out answers", "total": len(prompts), "unit": "prompt", "disable": not is_main()}
    with Progress(**shown) as progress:
        for batch in batches_by_length(list(map(len, prompts)), tokens, batch_cost=tokens):
            rows = [prompts[index] for index in batch]
            for prompt, one in zip(rows, decode_plain(target, rows, limits, beyond=beyond, states=True), strict=True):
                assert one.aux is not None
                trajectories.append(Trajectory(prompt, one.tokens, one.beyond, one.aux))
            progress.update(len(rows))
    trajectories = [one for one in trajectories if one.slots]
    if not trajectories:
        raise UserError("every answer ends with its first token")
    return trajectories


def choose_prompts(heldout: Sequence[Prompt], count: int, evaluated: int, longest: int) -> list[list[int]]:
    """Choose at most `count` prompts, from the end of each source, and at most half of its distinct ones.

    The others are for evaluation: `evaluated` of them are left, unless fewer than FEWEST could then be chosen here.
    UserError if there is no prompt to choose."""
    distinct = {tuple(prompt.ids): prompt for prompt in heldout[::-1]}.values()
    by_source: dict[str, list[Prompt]] = {}
    for prompt in distinct:
        by_source.setdefault(prompt.source, []).append(prompt)
    ours = [prompt for prompts in by_source.values() for prompt in prompts[: len(prompts) // 2]]
    if not ours:
        raise UserError("no source has two held-out prompts, one of them for evaluation: raise data.heldout")
    count = min(count, max(FEWEST, len(distinct) - evaluated))
    return [prompt.ids for prompt in choose(ours, count, longest)[0]]


def read(store: Store, draft_tokens: int) -> list[Trajectory]:
    """Return a store's trajectories, if any. UserError if they do not go on far enough to draft so many tokens."""
    tensors, trajectories = store.trajectories, []
    for i in range(len(tensors) // 4):
        prompt, output, beyond = (tensors[f"{i}.{name}"].tolist() for name in IDS)
        trajectories.append(Trajectory(prompt, output, beyond, tensors[f"{i}.aux"]))
    if trajectories and (most := 1 + min(len(one.beyond) for one in trajectories)) < draft_tokens:
        raise UserError(
            f"evaluate.num_speculative_tokens={draft_tokens}: the trajectories of {store.location} allow at most "
            f"{most} (evaluate.max_speculative_tokens of their extraction): train with {most} or fewer"
        )
    return trajectories


def digest(prompt: Sequence[int]) -> str:
    """Return what a run records of a prompt that it was measured on."""
    return hashlib.sha256(repr(list(prompt)).encode()).hexdigest()[:16]


def reached(drafter: Drafter, target_ids: Tensor, trajectories: Iterable[Trajectory], draft_tokens: int) -> list[int]:
    """Count the verifications that decoding with the drafter would make: [draft_tokens + 1].

    First all, then those whose first 1, 2, … drafted tokens are accepted. drafter, target_ids: as in `unroll`."""
    verified: list[int] = []
    for one in trajectories:
        there = replace(one, aux=one.aux.to(target_ids.device))
        accepted, _ = unroll(drafter, target_ids, there, draft_tokens, drift=False)
        verified += rounds(accepted, draft_tokens)
    return [sum(accepted >= position for accepted in verified) for position in range(draft_tokens + 1)]
