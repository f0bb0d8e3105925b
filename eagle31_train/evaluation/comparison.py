"""The drafters that `eagle31_train.compare` is asked to compare: their names, their checkpoints, and the folder."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle31_train import artifacts, cli
from eagle31_train.checkpoint import hub
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.checkpoint.run_folder import read_export
from eagle31_train.config import Config
from eagle31_train.errors import UserError
from eagle31_train.store import read_manifest
from eagle31_train.targets.hf import read_config

COMPARISONS = Path("runs/compare")
Named = dict[str, list[str]]  # a drafter's name → its trainings


def is_drafter(word: str) -> bool:
    """Whether a word names a drafter: it is no option, or a folder whose name looks like one (runs/lr=1)."""
    return "=" not in word or Path(parted(word)[1][0]).is_dir()


def parted(word: str) -> tuple[str | None, list[str]]:
    """A DRAFTER argument: its name, where it gives one, and its trainings."""
    before, _, rest = word.partition(":")
    name, trainings = (before, rest) if before and rest and "/" not in before else (None, word)
    return name, [training.rstrip("/") for training in trainings.split(",")]


def named(words: Sequence[str]) -> Named:
    """Drafters by name: as NAME:… says, else the last part of the path, or as many as tell it from the others.

    Raises:
        UserError: a name or training that stands there twice, or a training without a name.
    """
    arguments = [parted(word) for word in words]
    # Never all of an absolute path: names stand in pictures and on public cards.
    paths = [Path(trainings[0]).absolute().parts[1:] for _, trainings in arguments]
    drafters_by_name: Named = {}
    for (given, trainings), path in zip(arguments, paths, strict=True):
        count = next((n for n in range(1, len(path)) if sum(path[-n:] == other[-n:] for other in paths) == 1), 1)
        name = given or "/".join(path[-count:]) or trainings[0]
        if name in drafters_by_name or name == "plain":  # which decoding without a drafter is called
            raise UserError(f"two drafters are called {name}: tell them apart as NAME:{trainings[0]}")
        if "" in trainings or len(set(trainings)) < len(trainings):
            raise UserError(f"{name} is {','.join(trainings)}, which has a training twice or none: give each once")
        drafters_by_name[name] = trainings
    return drafters_by_name


def read(drafter: str, config: Config, data: dict[str, Any]) -> DrafterCheckpoint:
    """The checkpoint of a run, or of an exported or published draft, its weights read.

    Raises:
        UserError: it cannot be read, was trained for another target, or may have been trained on held-out prompts.
    """
    checkpoint = DrafterCheckpoint.open(drafter, target_layers=lambda: read_config(config.target).num_hidden_layers)
    checkpoint.tensors  # noqa: B018 (or damaged weights are refused after the target is loaded)
    if checkpoint.train is not None and (saved := checkpoint.train / "config.yaml").is_file():
        store = read_manifest(cli.load_config([f"run_dir={checkpoint.train.parent}"], saved))
        checkpoint.check_store(store, config.target)
    inputs = checkpoint.inputs
    if config.evaluate.prompts is None and inputs is not None and inputs.get("data") != data["dataset_fingerprint"]:
        raise UserError(
            f"{checkpoint.where} was trained on other data than {config.data_folder}, perhaps on its held-out prompts: "
            "give prompts that nothing was trained on as evaluate.prompts=FILE"
        )
    return checkpoint


def exported(drafter: str) -> Path:
    """The folder of a drafter that vLLM can serve; UserError where it is not exported, or of other weights."""
    folder = Path(drafter) if Path(drafter).is_dir() else hub.fetch(drafter, None)
    if not (folder / "train").is_dir():
        return folder
    read_export(folder)
    return folder / "export"


def folder_of(trainings: Named, config: Config, result: str) -> Path:
    """Where the comparison is written; `result`: the file there that says what was compared, and may not be of other
    drafters of the same names."""
    if config.compare.out is not None:
        return Path(config.compare.out)
    out = COMPARISONS / "-".join(re.sub(r"[^\w.]+", "_", name) for name in trainings)
    if config.overwrite or not (out / result).is_file():
        return out
    earlier = artifacts.read_json(out / result, "this command").get("trainings", {})
    there, here = ([[Path(one).resolve() for one in some] for some in of.values()] for of in (earlier, trainings))
    if there != here:
        words = shlex.join(f"{name}:{','.join(some)}" for name, some in earlier.items())
        raise UserError(f"{out} compares {words}: give another compare.out=…, or replace it with overwrite=true")
    return out
