"""Where a run is followed: trackers through accelerate. trackers.json has the ids under which they know the run.

Weights & Biases knows a run by its id, which the run keeps over all its launches, and ignores steps that it was sent
before; offline, `wandb sync` joins the folders of one id. Of each launch it records when, how, from which commit, with
which versions and on what. TensorBoard is told from which step on earlier events do not count.
"""

import importlib.util
import os
import re
import uuid
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker

from eagle31_train import artifacts
from eagle31_train.config import Config
from eagle31_train.console import note
from eagle31_train.errors import UserError

TRACKERS = "trackers.json"


def loggers(config: Config) -> list[str | GeneralTracker]:
    """The trackers that are asked for, as `Accelerator(log_with=…)` takes them; a UserError without TensorBoard."""
    trackers: list[str | GeneralTracker] = [] if config.train.wandb == "disabled" else ["wandb"]
    if config.train.tensorboard:
        if importlib.util.find_spec("tensorboard") is None:  # accelerate would leave it out without a word
            raise UserError("train.tensorboard=true needs TensorBoard: run `pip install 'eagle31[tensorboard]'`")
        trackers.append(TensorBoardTracker("tensorboard", Path(config.run_dir) / "train"))
    return trackers


def start(accelerator: Accelerator, config: Config, inputs: dict[str, Any], step: int) -> None:
    """Start the trackers of an accelerator that was made with `loggers`; every rank calls it. UserError if Weights &
    Biases cannot be reached, or knows no such user. inputs: shown beside the curves. step: optimizer steps done before
    this launch."""
    if not accelerator.is_main_process:
        return
    folder, mode, settings = Path(config.run_dir) / "train", config.train.wandb, {}
    file = folder / TRACKERS
    known = artifacts.read_json(file, "train.py") if file.exists() else {}
    if mode != "disabled":
        # No other run has this id, also not one of the same inputs: its steps would be taken for known ones.
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", config.name)[:40]
        known.setdefault("wandb", f"{name}-{uuid.uuid4().hex[:8]}")
        settings["wandb"] = {
            "dir": str(folder),
            "mode": mode,
            "name": config.name,
            "id": known["wandb"],
            "config": inputs,
            "settings": {"silent": True},  # 30 lines at the end of a run; ours says where it is
            "allow_val_change": True,  # the configuration is shown again at every launch
            # Offline there is nobody to resume from: parts of the same id are joined when they are synchronised.
            "resume": None if mode == "offline" else "allow",
        }
        artifacts.write_json(file, known)
    for tracker in accelerator.log_with:
        if isinstance(tracker, TensorBoardTracker):
            tracker.init_kwargs["purge_step"] = step + 1 if step else 0
    try:
        accelerator.init_trackers(config.train.project, init_kwargs=settings)
    except Exception as error:
        if not type(error).__module__.startswith("wandb"):
            raise
        raise UserError(f"Weights & Biases does not start: {error} (train.wandb=offline needs no network)") from None
    if mode != "disabled":
        run = accelerator.get_tracker("wandb", unwrap=True)
        where = f"offline: wandb sync {os.path.relpath(Path(run.dir).parent)}" if run.offline else run.url
        note(f"train: Weights & Biases, {where}")
