"""The model card that goes with an exported drafter.

Everything on the card is a recorded fact: hyper-parameters and counts come from the manifests of the stages, results
(`card_results.py`) from measurements of this very checkpoint, or the card says that there are none.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from eagle31_train.checkpoint.config_json import MLA_DEFAULTS
from eagle31_train.checkpoint.contract import caveats
from eagle31_train.config import RENAMED, Config, DrafterShape
from eagle31_train.evaluation.intervals import bracket
from eagle31_train.reporting import tables
from eagle31_train.reporting.card_results import CardResult, CardResults
from eagle31_train.reporting.evaluation_page import conditions
from eagle31_train.reporting.html import escape
from eagle31_train.reporting.markdown import code, grid, image, plain, scrubbed
from eagle31_train.reporting.recipe import commands, serve_command
from eagle31_train.reporting.tables import Section


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
