"""What was measured of a checkpoint, with its pictures: what the model card tells beside the facts of its making.

Results are what the stages left: run_dir/evaluate, run_dir/serving, and folders that `eagle31_train.compare` wrote. One
that belongs to another checkpoint says nothing of this one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle31_train import artifacts
from eagle31_train.measure.page import RESULT
from eagle31_train.measure.pictures import ALL, SERVING, Picture, pictures
from eagle31_train.schema import UserError

EVALUATE, COMPARE = "python -m eagle31_train.evaluate", "python -m eagle31_train.compare"
COMPARISON = [  # what the card needs of one
    *("definitions", "draft_tokens", "drafters", "workloads"),
    *("title", "trainings", "identities", "command", "files"),
]


@dataclass(frozen=True)
class Illustration:
    """A picture. file: where it lies. name: where the card has it, as an address below the exported folder."""

    file: Path
    name: str
    picture: Picture


@dataclass(frozen=True)
class Finding:
    """One result: its manifest, or result.json of a comparison, and the pictures of it that the card shows.

    ours: what a comparison calls this checkpoint.
    """

    told: dict[str, Any]
    pictures: list[Illustration] = field(default_factory=list)
    ours: list[str] = field(default_factory=list)

    @property
    def fingerprint(self) -> str:
        """Changes with every word and picture."""
        drawn = [(shown.name, artifacts.file_sha256(shown.file)) for shown in self.pictures]
        return artifacts.fingerprint([self.told, drawn])


@dataclass(frozen=True)
class Results:
    """Everything that was measured of a checkpoint."""

    evaluation: Finding | None
    serving: Finding | None
    comparisons: list[Finding]

    @property
    def fingerprints(self) -> dict[str, Any]:
        """Of each."""
        return {
            "evaluate": self.evaluation and self.evaluation.fingerprint,
            "serving": self.serving and self.serving.fingerprint,
            "comparisons": [comparison.fingerprint for comparison in self.comparisons],
        }

    @property
    def pictures(self) -> list[Illustration]:
        """Of all."""
        found = [self.evaluation, self.serving, *self.comparisons]
        return [picture for finding in found if finding for picture in finding.pictures]


def read(run: Path, identity: str, checkpoint: str, comparisons: Sequence[Path]) -> Results:
    """What was measured of the checkpoint in `run`.

    Args:
        identity: of what was trained, as `measure/drafters.py` gives it. checkpoint: fingerprint of what is exported,
            as export.json has it. comparisons: folders of those that it is part of.

    Raises:
        UserError: a result is damaged, or a comparison is of others.
    """
    compared = [comparison(folder, number, identity) for number, folder in enumerate(comparisons, 1)]
    return Results(evaluation(run, identity), serving(run, checkpoint), compared)


def evaluation(run: Path, identity: str) -> Finding | None:
    """The evaluation of what was trained; None where there is none.

    Raises:
        UserError: it is damaged.
    """
    folder, again = run / "evaluate", f"{EVALUATE} …"
    if (told := _manifest(folder, "checkpoint", identity, again)) is None:
        return None
    return Finding(told, list(_shown(folder, told["result"], "acceptance", f"{again} overwrite=true")))


def serving(run: Path, checkpoint: str) -> Finding | None:
    """How vLLM served what is exported; None where that was not measured.

    Raises:
        UserError: it is damaged.
    """
    folder, again = run / "serving", f"{EVALUATE} … evaluate.backend=vllm"
    if (told := _manifest(folder, "export", checkpoint, again)) is None:
        return None
    return Finding(told, list(_shown(folder, {"serving": told["serving"]}, "serving", f"{again} overwrite=true")))


def comparison(folder: Path, number: int, identity: str) -> Finding:
    """A comparison that the checkpoint is part of.

    Args:
        number: counts those of one card from 1 on.

    Raises:
        UserError: the folder holds none, or one of other checkpoints, or pictures that are not of its numbers.
    """
    again = f"`{COMPARE} …` again, which measures nothing twice"
    if not (folder / RESULT).is_file():
        raise UserError(f"comparisons: {folder} has no {RESULT}: give the folder that `{COMPARE}` wrote")
    told = artifacts.read_json(folder / RESULT, COMPARE)
    if lacking := [key for key in COMPARISON if key not in told]:
        raise UserError(
            f"comparisons: {folder / RESULT} has no {lacking[0]}, so it is no comparison, or one of an earlier "
            f"version: run {again}"
        )
    if not (ours := [name for name, some in told["identities"].items() if identity in some]):
        raise UserError(
            f"comparisons: {folder} compares {', '.join(told['drafters'])}, none of which has the weights in train/: "
            f"compare this run as `{COMPARE} RUN_DIR …`, again where it was, or leave the folder out"
        )
    # Those of an earlier comparison, or a later one that was stopped, have the same names.
    if damage := artifacts.first_damaged(folder, told["files"]):
        raise UserError(f"comparisons: {damage}: run {again}")
    return Finding(told, list(_shown(folder, told, f"comparison-{number}", f"{COMPARE} …")), ours)


def _manifest(folder: Path, key: str, ours: str, again: str) -> dict[str, Any] | None:
    """A stage's manifest, where it has left one of this checkpoint: of another's, the user is told."""
    path = folder / artifacts.MANIFEST
    if not path.is_file():
        return None
    told = artifacts.read_json(path, again)
    if told.get("inputs", {}).get(key) != ours:
        print(f"export: {folder} is of other weights or an earlier version, and not on the card: run `{again}` again")
        return None
    if damage := artifacts.first_damaged(folder, told.get("files", {})):
        raise UserError(f"{damage}: run `{again}` again")
    return told


def _shown(folder: Path, result: Mapping[str, Any], room: str, again: str) -> Iterator[Illustration]:
    """The pictures of all workloads, of the first, and of serving; tables have the others."""
    sections = [ALL, SERVING, *(workload["name"] for workload in result.get("workloads", [])[:1])]
    for picture in pictures(dict(result)):
        if picture.section not in sections:
            continue
        file = folder / f"{picture.name}.png"
        if not file.is_file():
            raise UserError(f"{file} is missing: run `{again}` again")
        yield Illustration(file, f"images/{room}/{file.name}", picture)
