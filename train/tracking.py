"""Trackers that follow a run, through accelerate, and a record of its launches.

    config.yaml      the resolved configuration of the newest launch
    launches.jsonl   one line per launch: when, how, from which commit, with which versions, on what
    trackers.json    the ids under which the trackers know the run

Weights & Biases knows a run by its id, which the run keeps over all its launches, and ignores steps that it has already
received. Offline, `wandb sync` joins the folders with the same id. TensorBoard gets the step from which on earlier
events do not count.
"""

import importlib.util
import json
import os
import platform
import re
import shlex
import sys
import uuid
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker

from eagle31_train import compose
from eagle31_train.checkpoint.run_folder import CONFIG
from eagle31_train.combinations import check_wandb
from eagle31_train.common import artifacts, locations, machine
from eagle31_train.common.console import note
from eagle31_train.common.errors import UserError
from eagle31_train.config import Config
from eagle31_train.reporting.training_page import LAUNCHES
from train.metrics import plain

TRACKERS = "trackers.json"
PACKAGES = ("eagle31", "torch", "accelerate", "deepspeed", "transformers", "datasets", "numpy", "wandb")


def loggers(config: Config) -> list[str | GeneralTracker]:
    """Return the trackers asked for, as `Accelerator(log_with=…)` takes them. UserError if a package is missing."""
    check_wandb(config.train)
    trackers: list[str | GeneralTracker] = [] if config.train.wandb == "disabled" else ["wandb"]
    if config.train.tensorboard:
        if importlib.util.find_spec("tensorboard") is None:  # accelerate would silently leave it out
            raise UserError("train.tensorboard=true needs TensorBoard: run `pip install 'eagle31[tensorboard]'`")
        trackers.append(TensorBoardTracker("tensorboard", config.train_folder))
    return trackers


def start(accelerator: Accelerator, config: Config, inputs: dict[str, Any], step: int) -> None:
    """Start the trackers of an accelerator that was made with `loggers`; every rank calls this. Raise UserError if
    Weights & Biases cannot be reached, or does not know the user. inputs: what the trained weights depend on, shown
    beside the curves; step: number of steps done before this launch."""
    if not accelerator.is_main_process:
        return
    folder, mode, settings = config.train_folder, config.train.wandb, {}
    file = folder / TRACKERS
    known = artifacts.read_json(file, "train.py") if file.exists() else {}
    if mode != "disabled":
        # No other run may have this id, not even one with the same inputs: its steps would be ignored as known.
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", config.name)[:40]
        known.setdefault("wandb", f"{name}-{uuid.uuid4().hex[:8]}")
        settings["wandb"] = {
            "dir": str(folder),
            "mode": mode,
            "name": config.name,
            "id": known["wandb"],
            "config": inputs,
            "settings": {"silent": True},  # not its 30 lines at the end; ours says where the run is
            "allow_val_change": True,  # the configuration is shown again at every launch
            # Offline there is no server to resume from: parts with the same id are joined when they are synchronised.
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
        raise UserError(
            f"Weights & Biases could not start ({error}): without a network, set train.wandb=offline"
        ) from None
    if mode != "disabled":
        run = accelerator.get_tracker("wandb", unwrap=True)
        where = f"offline: wandb sync {shlex.quote(os.path.relpath(Path(run.dir).parent))}" if run.offline else run.url
        note(f"train: Weights & Biases, {where}")


def record_launch(config: Config, facts: Mapping[str, Any]) -> None:
    """Save the resolved configuration and add a line about this launch. The main process calls it, once. `facts`: JSON;
    reports show all of it, and draw `after_step` (0 for the first launch) and `steps` of the run."""
    folder = config.train_folder
    artifacts.write_text(folder / CONFIG, compose.to_yaml(replace(config, train=replace(config.train, finish=False))))
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    launch = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "git": machine.checkout(locations.ROOT),
        "versions": {"python": platform.python_version(), **machine.versions(PACKAGES)},
        "host": {
            "name": platform.node(),
            "system": platform.platform(),
            "cpu": machine.processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "devices": [torch.cuda.get_device_name(index) for index in range(cuda)],
            "cuda": torch.version.cuda,
        },
        "facts": dict(facts),
    }
    path = folder / LAUNCHES
    before = path.read_bytes() if path.exists() else b""  # kept as it is: damage in it must not stop training
    line = json.dumps(plain(launch), ensure_ascii=False, allow_nan=False) + "\n"
    artifacts.write_bytes(path, before + line.encode())
