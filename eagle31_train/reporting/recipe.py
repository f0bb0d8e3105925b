"""Commands that repeat what was done, with the fewest options, and the command that serves a drafter."""

import re
import shlex
from dataclasses import replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from eagle31_train import compose
from eagle31_train.common.errors import UserError
from eagle31_train.config import SELF, Config
from eagle31_train.evaluation.serving.engine import flags, speculation, target_arguments
from eagle31_train.reporting.markdown import public
from eagle31_train.targets import embedded

HERE = "{export}"  # in a recorded command: stands for the exported folder, wherever it is now
EVALUATE, COMPARE = "eagle31 evaluate", "eagle31 compare"
SGLANG = {"tensor_parallel_size": "tp_size"}  # vLLM's name of an argument → SGLang's, where they differ
# Options that say where things go or whether to upload, not what is made.
_NOT_THE_RECIPE = ("overwrite", "push", "repo", "private", "license", "comparisons")


def serve_command(config: Config, drafter: str | None, published: bool = False) -> str:
    """Return vLLM's command for the target, with or without a drafter; published: with paths as others may see them."""
    path = public(config.target.path) if published else config.target.path
    options: dict[str, Any] | None = None
    # Its config.json names the target, and the rest; from vllm 0.33 on, a target on the hub only.
    if drafter and config.export_format == "speculators" and config.target.is_hub_id:
        path = drafter
        if config.evaluate.draft_sampling != "greedy":
            options = {"draft_sample_method": config.evaluate.draft_sampling}
    elif drafter:
        options = speculation(config, drafter, config.evaluate.num_speculative_tokens, config.drafter.parallel)
    arguments = {**target_arguments(config), **chat_arguments(config, published), "speculative_config": options}
    return shlex.join(["vllm", "serve", path, *flags(arguments)])


def sglang_command(config: Config, drafter: str, window: int | None, published: bool = False) -> str:
    """Return the same for SGLang, if the drafter was exported for it. SGLang learns the window only from here."""
    steps = config.evaluate.num_speculative_tokens
    arguments = {
        "model_path": public(config.target.path) if published else config.target.path,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": drafter,
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
        **{SGLANG.get(name, name): value for name, value in target_arguments(config).items()},
        "model_impl": None,  # vLLM only
        **chat_arguments(config, published),
        "speculative_draft_window_size": window and window - 1,  # SGLang does not count a token's own key
    }
    return shlex.join(["python", "-m", "sglang.launch_server", *flags(arguments)])


def chat_arguments(config: Config, published: bool) -> dict[str, Any]:
    """Return the chat template and its variables by vLLM's and SGLang's names, where target.* replaces its own."""
    template, values = config.target.chat_template, config.target.template_args
    shown = public(template) if template and published else template
    return {"chat_template": shown, "default_chat_template_kwargs": values or None}


def command(program: str, config: Config) -> str:
    return f"{program} {shlex.join(overrides(config))}"


def commands(config: Config) -> list[str]:
    made_here = Path(config.target.path) == embedded.OUT
    kept = replace(config.store, max_bytes=None, follow=False)  # for stages in turn; the drafter is the same
    return [embedded.COMMAND] * made_here + [command("eagle31 run", replace(config, store=kept))]


def overrides(config: Config) -> list[str]:
    """Return the fewest `key=value` options that give this configuration, starting from a recipe."""
    recipes = compose.choices("experiment")
    starts = [config.name] if config.name in recipes else recipes
    return min((_from(recipe, config) for recipe in starts), key=len)


def _from(recipe: str, config: Config) -> list[str]:
    wanted, plain = _values(config), _base(recipe, ())
    given = [key for key in compose.GIVES_DATA if wanted[key] != plain[key]]
    if plain["data.prompts"] == SELF and wanted["data.prompts"] is None and any(wanted[key] for key in given):
        given.remove("data.prompts")  # other data replace it
    # What follows from the data is the base's, too, if it has the same data.
    base = {**_base(recipe, tuple(f"{key}={_hydra(wanted[key])}" for key in given)), "run_dir": f"runs/{config.name}"}
    base |= {key: plain[key] for key in given}
    changed = [key for key in wanted if wanted[key] != base[key] and key not in _NOT_THE_RECIPE]
    shown = [key for key in changed if not key.endswith("_dir") or not Path(wanted[key] or "").is_absolute()]
    words = [f"+experiment={recipe}"]
    for key in shown:
        value = wanted[key]
        # Hydra would merge a mapping into the recipe's: first remove other entries of that.
        if value and isinstance(value, dict) and isinstance(base[key], dict):
            words += [f"~{key}.{inner}" for inner in base[key] if inner not in value]
        words.append(f"{key}={_hydra(value)}")
    return words


@cache
def _base(recipe: str, data: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of a recipe with some data, with `none` for a target and a name that it leaves open."""
    start = [f"+experiment={recipe}", *data]
    try:
        config = compose.load_config(start, resolve=False)
    except UserError:
        config = compose.load_config([*start, "target.path=none", "name=none"], resolve=False)
    return _values(config)


def _values(config: Config) -> dict[str, Any]:
    return {name: attrgetter(name)(config) for name in compose.OPTIONS}


def _hydra(value: Any) -> str:
    """Return a value in Hydra's grammar, with absolute paths shortened for a public card."""
    if isinstance(value, list):
        return f"[{','.join(map(_hydra, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra(inner)}" for key, inner in value.items()) + "}"
    if not isinstance(value, str):
        return "null" if value is None else str(value).lower()
    value = public(value)
    # Bare words only where Hydra cannot read them as something else (a number, a boolean).
    others = ("null", "true", "false", "nan", "inf")
    if re.fullmatch(r"[A-Za-z_/.][\w./:@-]*( +[\w./:@-]+)*", value) and value.lower() not in others:
        return value
    return QuotedString(text=value, quote=Quote.single).with_quotes()
