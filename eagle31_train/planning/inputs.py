"""What a plan is made of: the target's sizes, the drafter's shape and the data, counted where they can be."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eagle31_train import artifacts
from eagle31_train.config import Config
from eagle31_train.errors import UserError
from eagle31_train.planning.work import Work, count_work, made_mask
from eagle31_train.targets.description import (
    CHOSEN,
    EXPERTS,
    TargetDescription,
    description_of,
    read_raw,
    text_config,
)

EXAMPLE = 100_000_000  # tokens that are planned for where nobody has counted or said how many there are
LOOKED_AT = 1000  # conversations whose loss masks stand for all of them


@dataclass(frozen=True)
class Target:
    """The target, and how many of its parameters one token runs through."""

    description: TargetDescription
    parameters: float


@dataclass(frozen=True)
class Data:
    """What there is to learn.

    origin: where the numbers are from, in words. work: of one pass over the training split. heldout: tokens held
    out, as a share of these. longest: tokens of the longest conversation. vocabulary: Vd, None where it is not known.
    """

    origin: str
    work: Work
    heldout: float
    longest: int
    vocabulary: int | None


def read_target(config: Config) -> Target:
    """The target by its config.json alone.

    Raises:
        UserError: it has none, or is of a kind whose parameters cannot be counted.
    """
    raw = read_raw(config.target)
    text = text_config(raw)
    parameters = config.plan.target_parameters or active_parameters(text)
    if parameters is None:
        raise UserError(
            f"target.path={config.target.path} is a {raw['model_type']}, which transformers does not know: "
            "say how many parameters a token runs through, with plan.target_parameters=32e9 or the like"
        )
    return Target(description_of(raw, text, f"target.path={config.target.path}"), parameters)


def active_parameters(text: Any) -> float | None:
    """Parameters that one token runs through: all, less the experts that it is not sent to; None of unknown kinds.

    They are counted on a model without storage, so that nothing is downloaded, and experts count by their share.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text)
    except ValueError:  # no class for it
        return None
    count = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in count.items() if ".experts." in name)
    chosen, of = (next((n for key in keys if (n := getattr(text, key, None))), 1) for keys in (CHOSEN, EXPERTS))
    return sum(count.values()) - experts * (1 - chosen / of)


def read_data(config: Config) -> Data:
    """As python -m data_prep counted it, if it has run; else as plan.* says."""
    p, d = config.plan, config.data
    manifest = config.data_folder / artifacts.MANIFEST
    if not manifest.is_file():
        length = min(p.sample_tokens, d.max_length)
        work = count_work([made_mask(length, p.share)], config.train.ttt_length) * ((p.tokens or EXAMPLE) / length)
        origin = (
            "as plan.* says" if p.tokens else "an EXAMPLE: not counted (python -m data_prep) or given (plan.tokens)"
        )
        vocabulary = None if d.draft_vocab_coverage is not None else d.draft_vocab_size
        return Data(origin, work, d.heldout / max(1 - d.heldout, 0.01), d.max_length, vocabulary)
    counted = artifacts.read_json(manifest, "python -m data_prep")
    train, heldout = counted["splits"]["train"], counted["splits"]["heldout"]
    looked, longest = _look_at(config.data_folder / "dataset", config.train.ttt_length)
    work = looked * (train["tokens"] / looked.tokens)
    work = replace(work, conversations=train["conversations"], assistant=train["assistant_tokens"])
    if p.tokens:
        work = work * (p.tokens / work.tokens)
    share = heldout["tokens"] / max(train["tokens"], 1)
    return Data(f"as counted in {config.data_folder}", work, share, longest, counted["draft_vocab"]["size"])


def _look_at(dataset: Path, ttt_length: int) -> tuple[Work, int]:
    """Work of some of the training conversations, evenly spread, and the tokens of the longest of all."""
    from datasets import Dataset, load_from_disk  # a second to import

    split = load_from_disk(str(dataset))["train"]
    assert isinstance(split, Dataset)
    longest = max(chunk.value_lengths().to_numpy().max(initial=0) for chunk in split.data.column("loss_mask").chunks)
    rows = np.unique(np.linspace(0, len(split) - 1, min(LOOKED_AT, len(split))).astype(int))
    masks = (np.asarray(split[row]["loss_mask"], dtype=bool) for row in rows.tolist())
    return count_work(masks, ttt_length), int(longest)
