"""What a plan is made of: the target's sizes, the drafter's shape and the data, counted where they can be."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eagle31_train import artifacts
from eagle31_train.checkpoint.shape import drafter_shape
from eagle31_train.config import Config, DrafterShape, default_aux_layers
from eagle31_train.errors import UserError
from eagle31_train.planning.work import Work, count_work, made_mask

EXAMPLE = 100_000_000  # tokens that are planned for where nobody has counted or said how many there are
LOOKED_AT = 1000  # conversations whose loss masks stand for all of them
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")  # of a config.json: not all run for a token


@dataclass(frozen=True)
class Target:
    """Sizes of the target. parameters: those that one token runs through."""

    hidden_size: int
    vocab_size: int
    layers: int
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
    """From plan.*, and what that leaves open from the target's own config.json and weights, if they are here.

    Raises:
        UserError: a size is neither given nor to be found without a download.
    """
    p, folder = config.plan, Path(config.target.path)
    found: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        found = artifacts.read_json(folder / "config.json", "the target's own")
        found = found.get("text_config", found)  # of a model that sees, too
    experts = any((found.get(name) or 0) > 1 for name in EXPERTS)
    sizes: dict[str, Any] = {
        "hidden_size": p.hidden_size or found.get("hidden_size"),
        "vocab_size": p.vocab_size or found.get("vocab_size"),
        "layers": p.layers or found.get("num_hidden_layers"),
        "target_parameters": p.target_parameters or (None if experts else _parameters(folder)),
    }
    if missing := [f"plan.{name}" for name, value in sizes.items() if not value]:
        raise UserError(f"no value for {', '.join(missing)}, nor in a folder {config.target.path}: set them")
    return Target(*sizes.values())


def _parameters(folder: Path) -> float | None:
    """All parameters in a folder's safetensors files, by their headers; less the second copy that some carry."""
    total = 0
    for file in folder.glob("*.safetensors"):
        if file.name.startswith("consolidated"):  # all weights once more, in their maker's own layout
            continue
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return float(total) or None


def planned_shape(config: Config, target: Target, draft_vocab_size: int) -> DrafterShape:
    """The drafter's architecture, joined with its target; UserError for a drafter that training would refuse."""
    layers = config.target.aux_layers or default_aux_layers(target.layers)
    return drafter_shape(config.drafter, target.hidden_size, target.vocab_size, draft_vocab_size, sorted(set(layers)))


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
