"""The model card that goes with an exported drafter.

Everything on the card is a recorded fact: hyper-parameters and counts come from the manifests of the stages, results
from measurements of this very checkpoint. If there are none, the card says so. Results are read from
run_dir/evaluate, run_dir/serving, and folders that `eagle31_train.compare` wrote.
"""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment

from eagle31_train.checkpoint import run_folder
from eagle31_train.checkpoint.config_json import MLA_DEFAULTS
from eagle31_train.checkpoint.contract import caveats, oldest_vllm
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.checkpoint.run_folder import EXPORTED
from eagle31_train.common import artifacts
from eagle31_train.common.console import note
from eagle31_train.common.errors import UserError
from eagle31_train.config import Config, DrafterShape
from eagle31_train.earlier import RENAMED
from eagle31_train.evaluation.intervals import bracket
from eagle31_train.evaluation.workloads import TRAINED_ON
from eagle31_train.model.rope import target_positions
from eagle31_train.reporting import recipe, tables
from eagle31_train.reporting.evaluation_page import RESULT, conditions, pictures
from eagle31_train.reporting.figures import Picture
from eagle31_train.reporting.html import escape
from eagle31_train.reporting.markdown import code, grid, plain, scrubbed
from eagle31_train.reporting.recipe import COMPARE, EVALUATE
from eagle31_train.reporting.tables import ALL, SERVING

CardPicture = tuple[Picture, Path, str]  # its file, and its path on the card, below the exported folder


@dataclass(frozen=True)
class CardResult:
    """One result: a manifest or result.json, the pictures of it, and what a comparison calls this checkpoint."""

    content: dict[str, Any]
    pictures: list[CardPicture] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def fingerprint(self) -> str:
        drawn = [(name, artifacts.file_sha256(file)) for _, file, name in self.pictures]
        return artifacts.fingerprint([self.content, drawn])


@dataclass(frozen=True)
class CardResults:
    evaluation: CardResult | None = None
    serving: CardResult | None = None
    comparisons: Sequence[CardResult] = ()

    @property
    def fingerprints(self) -> dict[str, Any]:
        return {
            "evaluate": self.evaluation and self.evaluation.fingerprint,
            "serving": self.serving and self.serving.fingerprint,
            "comparisons": [comparison.fingerprint for comparison in self.comparisons],
        }

    @property
    def pictures(self) -> list[CardPicture]:
        results = [self.evaluation, self.serving, *self.comparisons]
        return [picture for result in results if result for picture in result.pictures]


def read_results(config: Config, identity: str, checkpoint: str) -> CardResults:
    """Return what was measured of the run's checkpoint; UserError for a damaged result or a comparison of others.

    identity: of what was trained. checkpoint: fingerprint of what is exported, without its card.
    """
    run, dtype = Path(config.run_dir), config.target.dtype
    ours = {identity, _identity_of_export(run, checkpoint)} if config.comparisons else {identity}
    compared = [_comparison(Path(folder), number, ours, dtype) for number, folder in enumerate(config.comparisons, 1)]
    evaluation = _stage(run / "evaluate", "checkpoint", identity, "acceptance", f"{EVALUATE} …")
    if evaluation and (rounded := rounded_to(evaluation.content)) not in (None, dtype):
        note(
            f"export: {run / 'evaluate'} is of weights rounded to {rounded}, not to {dtype}, so the card leaves it "
            f"out: run `{EVALUATE} … target.dtype={dtype} overwrite=true`"
        )
        evaluation = None
    workloads = evaluation.content.get("result", {}).get("workloads", []) if evaluation else []
    if config.evaluate.draft_sampling == "greedy" and any("drafts" in one for one in workloads):
        note(
            f"export: {run / 'evaluate'} is of drafts that were sampled: set evaluate.draft_sampling=probabilistic "
            "here, too, to serve with it"
        )
    serving = _stage(run / "serving", "export", checkpoint, "serving", f"{EVALUATE} … evaluate.backend=vllm")
    return CardResults(evaluation, serving, compared)


def _identity_of_export(run: Path, checkpoint: str) -> str | None:
    """Return the identity that comparisons give to an existing, undamaged export of this checkpoint, or None."""
    with suppress(UserError):  # a damaged export is made again
        if (run / EXPORTED).is_file() and run_folder.read_export(run)["checkpoint"] == checkpoint:
            return DrafterCheckpoint.open(str(run / "export")).identity
    return None


def rounded_to(evaluation: Mapping[str, Any]) -> str | None:
    """Return the dtype to which an evaluation rounded the drafter's weights; None if its manifest lacks it."""
    dtype: str | None = evaluation["inputs"].get("target", {}).get("dtype")
    return dtype


def _stage(folder: Path, key: str, identity: str, images: str, command: str) -> CardResult | None:
    """Return a stage's result for this checkpoint, if any; leave out one of another checkpoint, with a note."""
    path = folder / artifacts.MANIFEST
    if not path.is_file():
        return None
    manifest = artifacts.read_json(path, command)
    if manifest.get("inputs", {}).get(key) != identity:
        what = "is of another drafter (its weights, format, draft tokens or window differ) or of an earlier version"
        note(f"export: {folder} {what}, so the card leaves it out: run `{command} overwrite=true`")
        return None
    result = manifest["result"] if "result" in manifest else {"serving": manifest["serving"]}
    return CardResult(manifest, _pictures(folder, manifest, result, images, command))


def _comparison(folder: Path, number: int, ours: Set[str | None], dtype: str) -> CardResult:
    """Return the card's comparison `number` (from 1): of one of the checkpoint's identities, and in its dtype."""
    if not (folder / RESULT).is_file():
        raise UserError(f"comparisons: {folder} has no {RESULT}: set the folder that `{COMPARE}` wrote")
    result = artifacts.read_json(folder / RESULT, COMPARE)
    names = [name for name, identities in result.get("identities", {}).items() if ours & set(identities)]
    if not names:
        raise UserError(
            f"comparisons: {folder} compares {', '.join(result.get('drafters', []))}, none of which has the weights "
            f"that are exported: compare again, the run with `{COMPARE} RUN_DIR …` or its export with `{COMPARE} "
            "RUN_DIR RUN_DIR/export …`, or remove it from comparisons"
        )
    if (rounded := result.get("weights", dtype)) != dtype:  # earlier results lack it
        raise UserError(
            f"comparisons: {folder} is of weights rounded to {rounded}, not to {dtype}: compare again with "
            f"target.dtype={dtype}, or remove it from comparisons"
        )
    return CardResult(result, _pictures(folder, result, result, f"comparison-{number}", f"{COMPARE} …"), names)


def _pictures(folder: Path, record: dict[str, Any], result: dict[str, Any], at: str, command: str) -> list[CardPicture]:
    """Return the pictures of all workloads together, of the first, and of serving; tables have the others."""
    # Pictures of an earlier result, or of a later one that was stopped, have the same names.
    if damage := artifacts.first_damaged(folder, record.get("files", {})):
        raise UserError(f"{damage}: run `{command}` again, which reuses what was measured")
    sections = [ALL, SERVING, *(workload["name"] for workload in result.get("workloads", [])[:1])]
    files = [(picture, folder / f"{picture.name}.png") for picture in pictures(result) if picture.section in sections]
    return [(picture, file, f"images/{at}/{file.name}") for picture, file in files if file.is_file()]


# Fields of training's manifest, which lists the steps that were passed over: the card counts them.
TRAINED = ("steps", "planned", "kept", "updates", "tokens", "pairs", "left_out", "without_pairs", "seconds", "heldout")
NOT_COUNTS = ("files", "inputs", "fingerprint", "seconds")  # of the data stage's manifest


def render(
    config: Config,
    shape: DrafterShape,
    train: Mapping[str, Any],
    data: Mapping[str, Any] | None,
    measured: CardResults,
) -> str:
    """The card as Markdown with YAML front matter; train, data: manifests; data is None if stage 1 left none."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"plain": plain, "code": code, "grid": grid, "scrubbed": scrubbed, "escape": escape}
    environment.filters |= {"json": json.dumps, "flat": lambda values: list(_flat(values))}
    environment.filters |= {"bracket": bracket, "count": tables.count}
    template = environment.from_string(Path(__file__).with_name("card.jinja").read_text(encoding="utf-8"))
    unused = {*(() if shape.architecture == "mla" else MLA_DEFAULTS), *(() if shape.parallel else ("ptd_token_id",))}
    return template.render(
        config=config,
        shape=shape,
        kind=_kind(shape),
        caveats=caveats_of(shape, data, config.target.template_args.get("reasoning_effort")) + whole_only(shape),
        oldest_vllm=oldest_vllm(shape),
        measured=measured,
        conditions=conditions,
        tables=tables,
        trained_on=TRAINED_ON,
        recipe=recipe,
        fields={name: value for name, value in asdict(shape).items() if name not in unused},
        data=data and {name: value for name, value in data.items() if name not in NOT_COUNTS},
        inputs=train.get("inputs", {}),
        trained={
            name: len(value) if isinstance(value := train[name], list) else value for name in TRAINED if name in train
        },
    )


def whole_only(shape: DrafterShape) -> list[str]:
    """Return what users of pipeline parallelism must know. vLLM's V1 would leave the embedding uninitialized, and
    accept nothing; V2 stops if it is on another device."""
    return ["vLLM's pipeline parallelism needs drafter.share_embedding=false in training"] * shape.share_embedding


def caveats_of(shape: DrafterShape, data: Mapping[str, Any] | None, effort: str | None = None) -> list[str]:
    """Return the drafter's limits in serving, by stage 1's manifest, if there is one. effort: the reasoning_effort of
    target.template_args."""
    target = (data or {}).get("target", {})
    scaling = target.get("rope_scaling") or {}
    positions = target_positions(target.get("max_position_embeddings"), target.get("model_type", ""), [scaling])
    sentences = caveats(shape, positions, target.get("sliding_window"))
    if effort and target.get("model_type") == "gpt_oss":
        sentences.append(
            f"Send reasoning_effort={effort} with each request: otherwise vLLM uses its own default for gpt-oss"
        )
    return sentences


def _kind(shape: DrafterShape) -> str:
    if shape.fc_norm and shape.norm_output:
        return "EAGLE 3.1"
    return " with ".join(["EAGLE 3", *(name for name in ("fc_norm", "norm_output") if getattr(shape, name))])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = f"{prefix}{'acceptance_estimate' if key == 'tau' else key}"  # as earlier versions called it
        name = RENAMED.get(name, name)  # records keep the old names of options
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        elif isinstance(value, float):
            yield name, f"{value:.6g}"
        elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
            yield name, str(len(value))  # a list of records, such as refused conversations: its length
        else:
            yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
