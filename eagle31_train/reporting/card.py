"""The model card that goes with an exported drafter.

Everything on the card is a recorded fact: hyper-parameters and counts come from the manifests of the stages, results
from measurements of this very checkpoint, or the card says that there are none. Results are what the stages left:
run_dir/evaluate, run_dir/serving, and folders that `eagle31_train.compare` wrote.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle31_train import artifacts
from eagle31_train.checkpoint.config_json import MLA_DEFAULTS
from eagle31_train.checkpoint.contract import caveats
from eagle31_train.config import RENAMED, Config, DrafterShape
from eagle31_train.console import note
from eagle31_train.errors import UserError
from eagle31_train.evaluation.intervals import bracket
from eagle31_train.reporting import tables
from eagle31_train.reporting.evaluation_figures import pictures
from eagle31_train.reporting.evaluation_page import RESULT, conditions
from eagle31_train.reporting.figures import Picture
from eagle31_train.reporting.html import escape
from eagle31_train.reporting.markdown import code, grid, image, plain, scrubbed
from eagle31_train.reporting.recipe import commands, serve_command
from eagle31_train.reporting.tables import ALL, SERVING, Section

EVALUATE, COMPARE = "eagle31 evaluate", "eagle31 compare"
CardPicture = tuple[Picture, Path, str]  # where it lies, and where the card has it, below the exported folder


@dataclass(frozen=True)
class CardResult:
    """One result: the stage's manifest, or result.json of a comparison; the pictures of it that the card shows; and
    what a comparison calls this checkpoint."""

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


def read_results(run: Path, identity: str, checkpoint: str, comparisons: Sequence[Path]) -> CardResults:
    """What was measured of the checkpoint in `run`; UserError where a result is damaged, or a comparison is of others.

    Args:
        identity: of what was trained. checkpoint: fingerprint of what is exported. comparisons: their folders.
    """
    compared = [_comparison(folder, number, identity) for number, folder in enumerate(comparisons, 1)]
    evaluation = _stage(run / "evaluate", "checkpoint", identity, "acceptance", f"{EVALUATE} …")
    serving = _stage(run / "serving", "export", checkpoint, "serving", f"{EVALUATE} … evaluate.backend=vllm")
    return CardResults(evaluation, serving, compared)


def _stage(folder: Path, key: str, identity: str, images: str, command: str) -> CardResult | None:
    """A stage's result, where it has left one of this checkpoint; one of another is named and left out."""
    path = folder / artifacts.MANIFEST
    if not path.is_file():
        return None
    manifest = artifacts.read_json(path, command)
    if manifest.get("inputs", {}).get(key) != identity:
        note(f"export: {folder} is of other weights or an earlier version, and not on the card: run `{command}` again")
        return None
    result = manifest["result"] if "result" in manifest else {"serving": manifest["serving"]}
    return CardResult(manifest, _pictures(folder, manifest, result, images, command))


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
    return CardResult(result, _pictures(folder, result, result, f"comparison-{number}", f"{COMPARE} …"), names)


def _pictures(folder: Path, record: Mapping[str, Any], result: dict[str, Any], at: str, made_by: str) -> list[CardPicture]:
    """The pictures of all workloads, of the first, and of serving; tables have the others."""
    # Those of an earlier result, or of a later one that was stopped, have the same names.
    if damage := artifacts.first_damaged(folder, record.get("files", {})):
        raise UserError(f"{damage}: run `{made_by}` again, which measures nothing twice")
    sections = [ALL, SERVING, *(workload["name"] for workload in result.get("workloads", [])[:1])]
    files = [(picture, folder / f"{picture.name}.png") for picture in pictures(result) if picture.section in sections]
    return [(picture, file, f"images/{at}/{file.name}") for picture, file in files if file.is_file()]


# ---------------------------------------------------------------- the card


def render(
    config: Config,
    shape: DrafterShape,
    train: Mapping[str, Any],
    data: Mapping[str, Any] | None,
    measured: CardResults,
) -> str:
    """The card as Markdown with YAML front matter; train, data: manifests, of data None where the stage left none."""
    target = plain(config.target.name)
    parts = [
        _front_matter(config, shape),
        f"# {_kind(shape)} drafter{' with MLA' * (shape.architecture == 'mla')} for {target}",
        f"A drafter of {tables.count(shape.num_layers, 'layer')} for speculative decoding with {target}: it proposes "
        "tokens, the target verifies them, and with greedy decoding the output is the target's own, token for token. "
        "Made with eagle31; served by vLLM.",
        "## Serve",
        code(serve_command(config, config.repo or "PATH_TO_THIS_FOLDER", published=True)),
        *(f"{plain(caveat)}." for caveat in caveats_of(shape, data)),
        "To go back, serve without `--speculative-config`; the target itself is unchanged:",
        code(serve_command(config, None, published=True)),
        *results(measured),
        "## Drafter",
        _table("field", asdict(shape) if shape.architecture == "mla" else _without(asdict(shape), *MLA_DEFAULTS)),
        "## Data",
        _table("count", _without(data, "files", "inputs", "fingerprint", "seconds"))
        if data is not None
        else "The data stage left no manifest beside this checkpoint.",
        "## Training",
        _table("hyper-parameter", train.get("inputs", {})),
        _table("result", {key: train[key] for key in TRAINED if key in train}),
        "## Repeat",
        "With the same version of eagle31; on several devices `eagle31 run` trains. Folders are shown as `/path/to/…`:",
        code("\n".join(commands(config))),
        "## Licence",
        "None is stated: whoever publishes these weights chooses one that the target's licence and the data "
        "allow, and adds it as `license:` at the top of this file.",
    ]
    return "\n\n".join(parts) + "\n"


def caveats_of(shape: DrafterShape, data: Mapping[str, Any] | None) -> list[str]:
    """What the drafter does not do everywhere, beside its target as stage 1's manifest describes it, if it does."""
    target = (data or {}).get("target", {})
    return caveats(shape, target.get("max_position_embeddings"), target.get("sliding_window"))


# ---------------------------------------------------------------- results


def results(measured: CardResults) -> Iterator[str]:
    """Acceptance, serving and comparisons, as tables; what was not measured is said, too."""
    yield "## Measured acceptance"
    if measured.evaluation:
        yield from _acceptance(measured.evaluation)
    else:
        yield "The acceptance of this checkpoint was not measured."
    yield "## Measured in vLLM"
    if served := measured.serving:
        yield from _result({"serving": served.content["serving"]}, served)
    else:
        yield "How fast vLLM is with this checkpoint was not measured."
    yield "## Compared with other drafters"
    if not measured.comparisons:
        yield "This checkpoint was not compared with others."
    for comparison in measured.comparisons:
        yield f"### {plain(comparison.content['title'])}"
        yield f"This checkpoint is {plain(' and '.join(comparison.names))}."
        yield from _result(comparison.content, comparison)
    if measured.evaluation or measured.serving or measured.comparisons:
        yield f"{plain(tables.GLOSSARY)} (of eagle31)"


def _acceptance(evaluation: CardResult) -> Iterator[str]:
    result, report = evaluation.content["result"], evaluation.content["report"]
    first, depth = result["workloads"][0], str(result["draft_tokens"])
    (numbers,) = first["drafters"].values()
    length = bracket(numbers["by_depth"][depth]["acceptance_length"])
    prompts = f"{tables.count(first['prompts'], 'prompt')} of {plain(first['name'])}, {tables.sampling(first)}"
    yield f"**Acceptance length {length} with {tables.count(int(depth), 'draft token')}**, on {prompts}."
    if report["identical"]:
        yield "Every answer that was decoded with the drafter was equal to the target's own."
    if missing := report.get("not_measured"):
        yield f"Not measured, since none of its prompts was decoded: {plain(', '.join(missing))}."
    yield from _result(result, evaluation)


def _result(result: Mapping[str, Any], source: CardResult) -> Iterator[str]:
    """What a result was measured on and how, its sections and pictures; all workloads but the first are folded."""
    measured = result if "command" in result else result.get("serving", {})
    if "command" in measured:
        yield plain(", ".join(conditions(measured))) + ":"
        yield code(scrubbed(measured["command"]))
    folded = [workload["name"] for workload in result.get("workloads", [])][1:]
    for section in tables.sections(dict(result)):
        shown = list(_section(section))
        if section.title in folded:
            summary = f"<details>\n<summary>{escape(scrubbed(section.title))}</summary>"
            shown = [summary, *shown, "</details>"]
        yield from shown
    for picture, _, name in source.pictures:
        yield image(name, f"{picture.title} ({picture.section})")


def _section(section: Section) -> Iterator[str]:
    yield f"#### {plain(section.title)}"
    if section.remarks:
        yield "\n".join(f"- {plain(remark)}" for remark in section.remarks)
    for table in section.tables:
        if table.title:
            yield f"{plain(table.title[0].upper() + table.title[1:])}:"
        yield grid(table.header, table.rows)


# ---------------------------------------------------------------- facts

TRAINED = ("steps", "kept", "slots", "tokens", "seconds", "stage_seconds", "heldout")


def _front_matter(config: Config, shape: DrafterShape) -> str:
    """YAML; every value as a JSON string, which YAML reads as such whatever it holds."""
    lines = ["---"]
    if config.target.is_hub_id:  # a local folder's name would link to somebody else's model
        lines.append(f"base_model: {json.dumps(config.target.path)}")
    tags = ["eagle3", *(["eagle-3.1"] if _kind(shape) == "EAGLE 3.1" else []), "speculative-decoding", "vllm"]
    lines += ["library_name: vllm", "pipeline_tag: text-generation", f"tags: {json.dumps(tags)}", "---"]
    return "\n".join(lines)


def _kind(shape: DrafterShape) -> str:
    """EAGLE 3 or 3.1."""
    if shape.fc_norm and shape.norm_output:
        return "EAGLE 3.1"
    return " with ".join(["EAGLE 3", *(name for name in ("fc_norm", "norm_output") if getattr(shape, name))])


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


def _table(label: str, values: Mapping[str, Any]) -> str:
    return grid([label, "value"], list(_flat(values)))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested values under dotted names."""
    for key, value in values.items():
        name = f"{prefix}{'acceptance_estimate' if key == 'tau' else key}"  # as earlier versions called it
        name = RENAMED.get(name, name)  # records keep the old names of options
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        elif isinstance(value, float):
            yield name, f"{value:.6g}"
        elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
            yield name, str(len(value))  # records, of refused conversations say: how many
        else:
            yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
