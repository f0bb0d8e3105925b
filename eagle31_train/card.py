"""The model card that goes with an exported drafter, and the command that serves it.

Everything on the card is a recorded fact: hyper-parameters and counts come from the manifests of
the stages, results (`card_results.py`) from measurements of this very checkpoint, or the card says there are none.
"""

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eagle31_train import card_results, cli
from eagle31_train.contract import caveats
from eagle31_train.draft_config import MLA_DEFAULTS
from eagle31_train.findings import Finding
from eagle31_train.markdown import code, grid, plain, public
from eagle31_train.measure.serving.command import flags, speculation, target_arguments
from eagle31_train.schema import Config, DrafterShape, UserError, as_plain

# Options that say where things go or whether to upload, not what is made.
_NOT_THE_RECIPE = ("overwrite", "push", "repo", "private", "comparisons")


@dataclass(frozen=True)
class Facts:
    """What the card tells; None where a stage left no manifest, or one that is not of this checkpoint."""

    config: Config
    shape: DrafterShape
    train: Mapping[str, Any]
    data: Mapping[str, Any] | None
    evaluation: Finding | None = None
    serving: Finding | None = None
    comparisons: Sequence[Finding] = ()


def serve_command(config: Config, drafter: str | None, published: bool = False) -> str:
    """The shell command with which vLLM serves the target, with this drafter or without.

    Args:
        published: with paths as others may see them.
    """
    path = config.target.path
    command = ["vllm", "serve", public(path) if published else path, *flags(target_arguments(config))]
    if drafter:
        options = speculation(config, drafter, config.evaluate.draft_tokens)
        command += ["--speculative-config", json.dumps(options, ensure_ascii=False)]
    return shlex.join(command)


def render(facts: Facts) -> str:
    """The card as Markdown with YAML front matter."""
    config = facts.config
    target = config.target.name
    here = config.repo or "PATH_TO_THIS_FOLDER"
    kind = _kind(facts.shape)
    parts = [
        _front_matter(config, facts.shape),
        f"# {kind} drafter{' with MLA' * (facts.shape.architecture == 'mla')} for {plain(target)}",
        f"A one-layer drafter for speculative decoding with {plain(target)}: it proposes tokens, the target "
        "verifies them, and with greedy decoding the output is the target's own, token for token. "
        "Made with eagle31; served by vLLM.",
        "## Serve",
        code(serve_command(config, here, published=True)),
        *(f"{plain(caveat)}." for caveat in caveats(facts.shape)),
        "To go back, serve without `--speculative-config`; the target itself is unchanged:",
        code(serve_command(config, None, published=True)),
        *card_results.sections(facts.evaluation, facts.serving, facts.comparisons),
        "## Drafter",
        _table("field", "value", _drafter(facts.shape)),
        "## Data",
        _data(facts.data),
        "## Training",
        _training(facts.train),
        "## Repeat",
        "With the same version of eagle31, from its checkout:",
        code("\n".join(commands(config))),
        "Folders outside the checkout are shown as `/path/to/…`.",
        "## Licence",
        "None is stated: whoever publishes these weights chooses one that the target's licence and the data "
        "allow, and adds it as `license:` at the top of this file.",
    ]
    return "\n\n".join(parts) + "\n"


def commands(config: Config) -> list[str]:
    """The commands of all five stages that make this drafter again."""
    options = shlex.join(overrides(config))
    return [
        command("data_prep", config),
        command("eagle31_train.extract", config),
        f"accelerate launch --quiet train.py {options}",
        command("eagle31_train.evaluate", config),
        command("eagle31_train.export", config),
    ]


def command(stage: str, config: Config) -> str:
    """The command that runs a stage with this configuration."""
    return f"python -m {stage} {shlex.join(overrides(config))}"


def overrides(config: Config) -> list[str]:
    """The fewest `key=value` options that give this configuration, starting from a recipe."""
    wanted = dict(_leaves(config))
    candidates = []
    bases = {recipe: {**base, "run_dir": f"runs/{wanted['name']}"} for recipe, base in _recipes().items()}
    for recipe, base in bases.items():
        changed = [key for key in wanted if wanted[key] != base[key] and key not in _NOT_THE_RECIPE]
        candidates.append((len(changed), recipe, changed))
    if not candidates:
        return [f"{key}={_hydra(value)}" for key, value in wanted.items() if key not in _NOT_THE_RECIPE]
    _, recipe, changed = min(candidates)
    shown = [key for key in changed if not key.endswith("_dir") or not Path(wanted[key] or "").is_absolute()]
    return [f"+experiment={recipe}", *(word for key in shown for word in _option(key, wanted[key], bases[recipe][key]))]


def _option(key: str, value: Any, base: Any) -> Iterator[str]:
    """What sets an option; Hydra would merge a mapping into the recipe's, so what that has besides goes first."""
    if value and isinstance(value, dict) and isinstance(base, dict):
        yield from (f"~{key}.{inner}" for inner in base if inner not in value)
    yield f"{key}={_hydra(value)}"


@cache
def _recipes() -> dict[str, dict[str, Any]]:
    """The options of every recipe by its name; one that needs options of its own is no starting point."""
    found = {}
    for recipe in sorted(file.stem for file in (cli.CONFIGS / "experiment").glob("*.yaml")):
        with suppress(UserError):
            found[recipe] = dict(_leaves(cli.load_config([f"+experiment={recipe}"])))
    return found


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from _leaves(inner, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", inner


def _hydra(value: Any) -> str:
    """A value in Hydra's grammar; absolute paths lose what a public card should not tell."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_hydra, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra(inner)}" for key, inner in value.items()) + "}"
    if not isinstance(value, str):
        return str(value)
    value = public(value)
    # Bare words only where Hydra can read nothing else (a number, a boolean) into them.
    if re.fullmatch(r"[A-Za-z_/.][\w./:@-]*", value) and value.lower() not in (
        "null",
        "true",
        "false",
        "nan",
        "inf",
    ):
        return value
    # Hydra takes a backslash for itself, except before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"


# ---------------------------------------------------------------- sections


def _drafter(shape: DrafterShape) -> dict[str, Any]:
    """The shape's fields; those of MLA only where it has them."""
    absent = set() if shape.architecture == "mla" else MLA_DEFAULTS.keys()
    return {name: value for name, value in as_plain(shape).items() if name not in absent}


def _kind(shape: DrafterShape) -> str:
    """EAGLE 3 or 3.1."""
    if shape.fc_norm and shape.norm_output:
        return "EAGLE 3.1"
    extras = [name for name in ("fc_norm", "norm_output") if getattr(shape, name)]
    return " with ".join(["EAGLE 3", *extras])


def _front_matter(config: Config, shape: DrafterShape) -> str:
    """YAML; every value as a JSON string, which YAML reads as such whatever it holds."""
    lines = ["---"]
    if config.target.is_hub_id:  # a local folder's name would link to somebody else's model
        lines.append(f"base_model: {json.dumps(config.target.path, ensure_ascii=False)}")
    tags = ["eagle3", *(["eagle-3.1"] if _kind(shape) == "EAGLE 3.1" else []), "speculative-decoding", "vllm"]
    lines += ["library_name: vllm", "pipeline_tag: text-generation", f"tags: {json.dumps(tags)}", "---"]
    return "\n".join(lines)


def _data(data: Mapping[str, Any] | None) -> str:
    if data is None:
        return "The data stage left no manifest beside this checkpoint."
    counts = {key: value for key, value in data.items() if key not in ("files", "inputs", "fingerprint", "seconds")}
    return _table("count", "value", counts)


def _training(train: Mapping[str, Any]) -> str:
    outcome = {
        key: train[key] for key in ("steps", "slots", "tokens", "seconds", "stage_seconds", "heldout") if key in train
    }
    return _table("hyper-parameter", "value", train.get("inputs", {})) + "\n\n" + _table("outcome", "value", outcome)


def _table(left: str, right: str, values: Mapping[str, Any]) -> str:
    return grid([left, right], [[plain(key), plain(value)] for key, value in _flat(values)])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested values under dotted names."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            yield f"{prefix}{key}", f"{value:.6g}"
        elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
            yield f"{prefix}{key}", str(len(value))  # records, of refused conversations say: how many
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
