"""Whose the folder is: what a run's weights depend on, and the record of it that its folder carries."""

import shlex
import shutil
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle31_train import artifacts, locks
from eagle31_train.schema import Config, UserError
from eagle31_train.store import Store

LAYOUT = 3  # raise it when the same inputs are trained otherwise
# Options that steer memory, reporting, saving and stopping but not what is learnt.
UNRELATED = {"accumulation", "recompute", "compile", "workers", "eval_every", "eval_samples", "checkpoint_every"}
UNRELATED |= {"keep_checkpoints", "time_limit", "skip_nonfinite", "wandb", "project", "tensorboard"}
RECORD = "inputs.json"
LOCK = ".training"  # beside train/, which may be replaced as a whole


def check_made(config: Config) -> None:
    """Refuse a run without data or without a store, with the commands that make them: the run's own options.

    A store that is elsewhere, or that training is to follow, speaks for itself.

    Raises:
        UserError: one of them, or both, are not there.
    """
    options = "".join(f" {shlex.quote(word)}" for word in sys.argv[1:] if "=" in word)
    made = {config.data_folder: "python -m data_prep"}
    if "://" not in config.store_location and not config.store.follow:
        made[Path(config.store_location)] = "python -m eagle31_train.extract"
    absent = {str(folder): command for folder, command in made.items() if not folder.is_dir()}
    if absent:
        raise UserError(
            f"there is nothing to train on: {' and '.join(absent)} {'are' if len(absent) > 1 else 'is'} missing; run "
            + ", then ".join(f"`{command}{options}`" for command in absent.values())
        )


def training_inputs(config: Config, store: Store, vocab_sha: str, start: str | None) -> dict[str, Any]:
    """Everything that the trained weights depend on; `start` is what the initial weights are known by, if given."""
    recipe = {name: value for name, value in asdict(config.train).items() if name not in UNRELATED}
    recipe.pop("init_revision")
    return {
        "layout": LAYOUT,
        "store": store.fingerprint,
        "data": store.inputs["data"],
        "vocab": vocab_sha[:16],
        "drafter": asdict(config.drafter),
        "train": {**recipe, "init_from": start},
        "seed": config.seed,
    }


def alone(run: Path) -> AbstractContextManager[None]:
    """While this lasts, no other process trains in the run's folder.

    Raises:
        UserError: another one does.
    """
    return locks.alone(run / LOCK, f"another process trains in {run / 'train'} now")


def claim(folder: Path, fingerprint: str, inputs: dict[str, Any], overwrite: bool) -> None:
    """Mark the folder as this run's; a folder that holds another run, finished or not, is refused.

    Raises:
        UserError: the folder holds a run of other inputs and `overwrite` is off.
    """
    shutil.rmtree(folder.with_name(f".{folder.name}.old"), ignore_errors=True)  # of a kill while it was replaced
    record = folder / RECORD
    if record.exists():
        begun = artifacts.read_json(record, "train.py")["inputs"]
        if begun != inputs and not overwrite:
            raise UserError(
                f"{folder} holds a run of other inputs ({artifacts.describe_change(begun, inputs)}): "
                "choose another name=… or run_dir=…, or replace it with overwrite=true"
            )
        if begun != inputs:
            artifacts.discard(folder)
    artifacts.write_json(record, {"fingerprint": fingerprint, "inputs": inputs})
