"""What a run's folder says about its training, as arrays. Nothing here needs torch."""

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from eagle31_train import artifacts
from eagle31_train.report.thin import Floats
from eagle31_train.schema import UserError

METRICS, TIMINGS, LAUNCHES, CONFIG = "metrics.jsonl", "timings.jsonl", "launches.jsonl", "config.yaml"
HELDOUT = "heldout_"


class Table:
    """Rows of one kind, column by column: steps [N], and numbers [N] with NaN where a row has none."""

    def __init__(self) -> None:
        self._steps = array("d")
        self._columns: dict[str, array[float]] = {}

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Append a row; a list is a column per depth, and what is no number is not kept."""
        index = len(self._steps)
        self._steps.append(step)
        for name, value in values.items():
            if isinstance(value, list):
                for depth, part in enumerate(value):
                    self._put(f"{name}/{depth}", index, part)
            else:
                self._put(name, index, value)

    def _put(self, name: str, index: int, value: Any) -> None:
        if not isinstance(value, int | float):
            return
        column = self._columns.setdefault(name, array("d"))
        if gap := index - len(column):
            column.extend([np.nan] * gap)
        column.append(value)

    @property
    def steps(self) -> Floats:
        return np.array(self._steps, dtype=np.float64)

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, name: str) -> bool:
        return bool(np.isfinite(self[name]).any())

    def __getitem__(self, name: str) -> Floats:
        """[N]; NaN throughout for a column that no row has."""
        full = np.full(len(self), np.nan)
        if (column := self._columns.get(name)) is not None:
            full[: len(column)] = column
        return full

    def depths(self, name: str) -> list[Floats]:
        """The columns of a list, one per depth; [] if no row has it."""
        found: list[Floats] = []
        while f"{name}/{len(found)}" in self._columns:
            found.append(self[f"{name}/{len(found)}"])
        return found


@dataclass(frozen=True)
class History:
    """All that is known of a training.

    folder: run/train. train, heldout, timings: what was measured. launches: newest last. config:
    resolved, {} if it was not saved, and `config_text` as it was. manifest: None before the end.
    notes: what the reader should know of the files, a line each.
    """

    folder: Path
    train: Table
    heldout: Table
    timings: Table
    launches: list[dict[str, Any]]
    config: dict[str, Any]
    config_text: str
    manifest: dict[str, Any] | None
    notes: list[str]

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.folder.resolve().parent.name)

    @property
    def last_step(self) -> int:
        return int(self.train.steps[-1])

    @property
    def total(self) -> int | None:
        """Optimizer steps of the whole run, where it is known."""
        known = [self.manifest or {}, *(launch.get("facts") or {} for launch in reversed(self.launches))]
        return next((int(source["steps"]) for source in known if source.get("steps")), None)

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
        return self.train.steps[self.train[name] == 1]

    def option(self, name: str) -> Any:
        """Of `train.` in the configuration; None where it was not saved."""
        return (self.config.get("train") or {}).get(name)


def read(run: Path) -> History:
    """Read the folder of a run, or the folder `train` in it.

    Raises:
        UserError: there is no training in it, no step is done yet, or a file is damaged.
    """
    folder = next((folder for folder in (run / "train", run) if (folder / METRICS).is_file()), None)
    if folder is None:
        raise UserError(f"there is no training in {run}: {run / 'train' / METRICS} is missing")
    notes: list[str] = []
    train, heldout, timings = Table(), Table(), Table()
    for row in _rows(folder / METRICS, notes):
        step = row.pop("step")
        measured = {name.removeprefix(HELDOUT): v for name, v in row.items() if name.startswith(HELDOUT)}
        if measured:
            heldout.add(step, measured)
        if len(measured) < len(row):
            train.add(step, {name: v for name, v in row.items() if not name.startswith(HELDOUT)})
    if not len(train):
        raise UserError(f"{folder / METRICS} holds no step yet: wait for the first one")
    for row in _rows(folder / TIMINGS, notes):
        timings.add(row.pop("step"), row)
    text, config = _config(folder / CONFIG)
    manifest = folder / artifacts.MANIFEST
    return History(
        folder,
        train,
        heldout,
        timings,
        list(_rows(folder / LAUNCHES, notes, needs=None)),
        config,
        text,
        artifacts.read_json(manifest, "train.py") if manifest.exists() else None,
        notes,
    )


def ratio(part: Floats, whole: Floats) -> Floats:
    """Element by element; NaN where the whole is not above 0."""
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)


def _rows(path: Path, notes: list[str], needs: str | None = "step") -> Iterator[dict[str, Any]]:
    """The rows of a file, {} of one that is missing; a torn last line is what a running training leaves."""
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
    if not path.is_file():
        return "", {}
    try:
        text = path.read_text(encoding="utf-8")
        config = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({' '.join(str(error).split())}): remove it") from None
    return text, config if isinstance(config, dict) else {}
