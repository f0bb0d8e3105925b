"""Whose the folder is: what a run's weights depend on, and the record of it that its folder carries."""

import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from eagle31_train import artifacts, locks
from eagle31_train.checkpoint import run_folder
from eagle31_train.checkpoint.run_folder import CHECKPOINTS, RECORD
from eagle31_train.provenance import Provenance

LOCK = ".training"  # beside train/, which may be replaced as a whole


def alone(run: Path) -> AbstractContextManager[None]:
    """While this lasts, no other process trains in the run's folder.

    Raises:
        UserError: another one does.
    """
    return locks.alone(run / LOCK, f"another process trains in {run / 'train'} now")


def join(run: Path) -> AbstractContextManager[Any]:
    """While this lasts, the lock of the run's folder, if it is here, is open here too: `locks.users_of` names us."""
    return (run / LOCK).open("a") if (run / LOCK).exists() else nullcontext()


def begun(folder: Path, made_from: Provenance) -> bool:
    """Whether this very run has a checkpoint in the folder, from which it goes on."""
    record = folder / RECORD
    there = record.is_file() and bool(run_folder.in_order(folder / CHECKPOINTS))
    return there and made_from.matches(artifacts.read_json(record, "train.py"))


def claim(folder: Path, made_from: Provenance, overwrite: bool) -> None:
    """Mark the folder as this run's; a folder that holds another run, finished or not, is refused.

    Raises:
        UserError: the folder holds a run of other inputs and `overwrite` is off.
    """
    shutil.rmtree(folder.with_name(f".{folder.name}.old"), ignore_errors=True)  # of a kill while it was replaced
    record = folder / RECORD
    if record.exists():
        begun = artifacts.read_json(record, "train.py")
        made_from.refuse_other(folder, begun, overwrite)
        if not made_from.matches(begun):
            artifacts.discard(folder)
    artifacts.write_json(record, made_from.record())
