"""What was measured of a checkpoint, with its pictures: the results that go on the model card.

They are what the stages left: run_dir/evaluate, run_dir/serving, and folders that `eagle31_train.compare` wrote. A
result that belongs to another checkpoint says nothing of this one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle31_train import artifacts
from eagle31_train.console import note
from eagle31_train.errors import UserError
from eagle31_train.reporting.evaluation_figures import pictures
from eagle31_train.reporting.evaluation_page import RESULT
from eagle31_train.reporting.figures import Picture
from eagle31_train.reporting.tables import ALL, SERVING

EVALUATE, COMPARE = "eagle31 evaluate", "eagle31 compare"
CardPicture = tuple[Picture, Path, str]  # where it lies, and where the card has it, below the exported folder


@dataclass(frozen=True)
class CardResult:
    """One result: the stage's manifest, or result.json of a comparison, and the pictures of it that the card shows.

    names: what a comparison calls this checkpoint.
    """

    content: dict[str, Any]
    pictures: list[CardPicture] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def fingerprint(self) -> str:
        """Changes with every word and picture."""
        drawn = [(name, artifacts.file_sha256(file)) for _, file, name in self.pictures]
        return artifacts.fingerprint([self.content, drawn])


@dataclass(frozen=True)
class CardResults:
    """Everything that was measured of a checkpoint."""

    evaluation: CardResult | None = None
    serving: CardResult | None = None
    comparisons: Sequence[CardResult] = ()

    @property
    def fingerprints(self) -> dict[str, Any]:
        """Of each."""
        return {
            "evaluate": self.evaluation and self.evaluation.fingerprint,
            "serving": self.serving and self.serving.fingerprint,
            "comparisons": [comparison.fingerprint for comparison in self.comparisons],
        }

    @property
    def pictures(self) -> list[CardPicture]:
        """Of all."""
        results = [self.evaluation, self.serving, *self.comparisons]
        return [picture for result in results if result for picture in result.pictures]


def read(run: Path, identity: str, checkpoint: str, comparisons: Sequence[Path]) -> CardResults:
    """What was measured of the checkpoint in `run`; UserError where a result is damaged, or a comparison is of others.

    Args:
        identity: of what was trained. checkpoint: fingerprint of what is exported. comparisons: their folders.
    """
    compared = [_comparison(folder, number, identity) for number, folder in enumerate(comparisons, 1)]
    evaluation = _stage(run / "evaluate", "checkpoint", identity, "acceptance", f"{EVALUATE} …")
    serving = _stage(run / "serving", "export", checkpoint, "serving", f"{EVALUATE} … evaluate.backend=vllm")
    return CardResults(evaluation, serving, compared)


def _stage(folder: Path, key: str, identity: str, images: str, command: str) -> CardResult | None:
    """A stage's result, where it has left one of this checkpoint: of another's, the user is told."""
    path = folder / artifacts.MANIFEST
    if not path.is_file():
        return None
    manifest = artifacts.read_json(path, command)
    if manifest.get("inputs", {}).get(key) != identity:
        note(f"export: {folder} is of other weights or an earlier version, and not on the card: run `{command}` again")
        return None
    if damage := artifacts.first_damaged(folder, manifest.get("files", {})):
        raise UserError(f"{damage}: run `{command}` again")
    result = manifest["result"] if "result" in manifest else {"serving": manifest["serving"]}
    return CardResult(manifest, list(_pictures(folder, result, images, f"{command} overwrite=true")))


def _comparison(folder: Path, number: int, identity: str) -> CardResult:
    """The card's comparison number 1, 2, …, that the checkpoint is part of."""
    if not (folder / RESULT).is_file():
        raise UserError(f"comparisons: {folder} has no {RESULT}: give the folder that `{COMPARE}` wrote")
    result = artifacts.read_json(folder / RESULT, COMPARE)
    names = [name for name, identities in result.get("identities", {}).items() if identity in identities]
    if not names:
        raise UserError(
            f"comparisons: {folder} compares {', '.join(result.get('drafters', []))}, none of which has the weights in "
            f"train/: compare this run as `{COMPARE} RUN_DIR …`, again where it was, or leave the folder out"
        )
    # Those of an earlier comparison, or a later one that was stopped, have the same names.
    if damage := artifacts.first_damaged(folder, result["files"]):
        raise UserError(f"comparisons: {damage}: run `{COMPARE} …` again, which measures nothing twice")
    return CardResult(result, list(_pictures(folder, result, f"comparison-{number}", f"{COMPARE} …")), names)


def _pictures(folder: Path, result: Mapping[str, Any], images: str, command: str) -> Iterator[CardPicture]:
    """The pictures of all workloads, of the first, and of serving; tables have the others."""
    sections = [ALL, SERVING, *(workload["name"] for workload in result.get("workloads", [])[:1])]
    for picture in pictures(dict(result)):
        if picture.section in sections:
            file = folder / f"{picture.name}.png"
            if not file.is_file():
                raise UserError(f"{file} is missing: run `{command}` again")
            yield picture, file, f"images/{images}/{file.name}"
