"""What a run's folder says about its training, as arrays. Nothing here needs torch."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from eagle31_train import artifacts
from eagle31_train.errors import UserError
from eagle31_train.reporting.figures import Floats

METRICS, TIMINGS, LAUNCHES, CONFIG = "metrics.jsonl", "timings.jsonl", "launches.jsonl", "config.yaml"
HELDOUT = "heldout_"  # before the names of what was measured on held-out samples and prompts
ESTIMATE = "acceptance_estimate"
EARLIER = {"tau": ESTIMATE, f"{HELDOUT}tau": HELDOUT + ESTIMATE}  # as earlier versions called it
LENGTH = "acceptance_length"  # on held-out prompts; of runs whose store had trajectories
Row = dict[str, Any]


class Table:
    """Rows of one kind by column: steps [N], and numbers [N] with NaN where a row has none."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self.steps = np.array([row["step"] for row in rows], dtype=np.float64)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: str) -> bool:
        return bool(np.isfinite(self[name]).any())

    def __getitem__(self, name: str) -> Floats:
        """[N]; NaN throughout for a column that no row has."""
        return np.array([_number(row.get(name)) for row in self._rows], dtype=np.float64)

    def depths(self, name: str) -> list[Floats]:
        """The columns [N] of a list, one per depth; [] if no row has it."""
        lists = [values if isinstance(values := row.get(name), list) else [] for row in self._rows]
        count = max(map(len, lists), default=0)
        return [np.array([_number(v[k]) if k < len(v) else np.nan for v in lists]) for k in range(count)]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


@dataclass(frozen=True)
class History:
    """All that is known of a training: its folder, run/train; the rows of metrics and timings; launches, newest last;
    the resolved config, {} if it was not saved; the manifest, None before the end; notes on the files, a line each."""

    folder: Path
    metrics: Table
    timings: Table
    launches: list[Row]
    config: dict[str, Any]
    config_text: str
    manifest: dict[str, Any] | None
    notes: list[str]

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.folder.resolve().parent.name)

    @property
    def total(self) -> int | None:
        """Optimizer steps of the whole run, where it is known."""
        sources = [self.manifest or {}, *(launch.get("facts") or {} for launch in reversed(self.launches))]
        return next((int(source["steps"]) for source in sources if source.get("steps")), None)

    @property
    def restarts(self) -> list[int]:
        """The steps after which launches but the first went on."""
        steps = [(launch.get("facts") or {}).get("after_step") for launch in self.launches]
        return [int(step) for step in steps if step]

    @property
    def busy(self) -> Floats:
        """Seconds of each timed step, without those `aside`, for evaluating and saving, where these are known."""
        return self.timings["seconds"] - np.nan_to_num(self.timings["aside"])

    def marked(self, name: str) -> Floats:
        """Steps whose rows say `"name": true`."""
        return self.metrics.steps[self.metrics[name] == 1]


def read(run: Path) -> History:
    """Read the folder of a run, or the folder `train` in it; UserError where nothing is whole."""
    folder = next((folder for folder in (run / "train", run) if (folder / METRICS).is_file()), None)
    if folder is None:
        raise UserError(f"there is no training in {run}: {run / 'train' / METRICS} is missing")
    notes: list[str] = []
    rows = _rows(folder / METRICS, notes)
    metrics = [{EARLIER.get(name, name): value for name, value in row.items()} for row in rows]
    if not metrics:
        raise UserError(f"{folder / METRICS} holds no step yet: wait for the first one")
    timings, launches = _rows(folder / TIMINGS, notes), _rows(folder / LAUNCHES, notes, needs=None)
    text, config = _config(folder / CONFIG)
    manifest = folder / artifacts.MANIFEST
    ended = artifacts.read_json(manifest, "train.py") if manifest.exists() else None
    return History(folder, Table(metrics), Table(list(timings)), list(launches), config, text, ended, notes)


def _rows(path: Path, notes: list[str], needs: str | None = "step") -> Iterator[Row]:
    """The rows of a file, none of one that is missing; a torn last line is what a running training leaves."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError:  # of JSON or of UTF-8
                row = None
            if isinstance(row, dict) and (needs is None or isinstance(row.get(needs), int)):
                yield row
            elif line.endswith(b"\n"):
                raise UserError(f"{path}:{number} is damaged: remove the line, and the report lacks its row")
            else:
                notes.append(f"{path}:{number} is only half written and was left out: it is being written, or torn")


def _config(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return text, yaml.safe_load(text) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({' '.join(str(error).split())}): remove it") from None
