"""The entry point of every stage: compose and check its options, then run it.

    eagle31 extract +experiment=smollm2 target.dtype=float32

A mistake by the user ends with one line on standard error and exit status 2.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from omegaconf import OmegaConf

from eagle31_train import precision
from eagle31_train.common.allocator import keep_freed_memory
from eagle31_train.common.console import explained, note, parser, say, tidy
from eagle31_train.common.locations import CONFIGS
from eagle31_train.compose import ANY, OPTIONS, choices, is_run, key_of, load_config, to_yaml
from eagle31_train.config import Config


def run(
    stage: Callable[[Config], None],
    description: str,
    argv: list[str] | None = None,
    before: str = "",
    resolve: bool = True,
    tells: str = "target.dtype",
) -> None:
    """Parse the command line, compose the configuration, run the stage; exit as `console.explained` says.

    Args:
        resolve: see `load_config`.
        tells: the precision option that the stage uses; if it was `auto`, print how it was resolved.
        before: what the usage line shows before the options; the caller parses it.
    """
    usage = f"%(prog)s {before}[-h] [--cfg] [--config-dir DIR] [RUN] [key=value ...]"
    options = parser(description, prog=_program(), usage=usage, epilog=_options_help())
    options.add_argument(
        "overrides", nargs="*", metavar="key=value", help="options, listed below; a run's folder stands for its options"
    )
    options.add_argument("--cfg", action="store_true", help="print the resolved configuration and stop")
    options.add_argument("--config-dir", type=Path, help="a folder of recipes and groups of your own, like configs/")
    with explained(), tidy():
        arguments = options.parse_intermixed_args(argv)
        given = arguments.overrides
        words = with_recipe(given)
        config = load_config(words, None, arguments.config_dir, resolve=False)
        if words != given and (longer := with_recipe(given, config)) != words:
            words = longer
            config = load_config(words, None, arguments.config_dir, resolve=False)
        resolved = precision.resolve(config) if resolve else {}
        if arguments.cfg:
            note(to_yaml(config).rstrip("\n"))
            return
        if words != given:
            lengths = " ".join(words[1 : len(words) - len(given)])
            also = f" with {lengths} (room for thoughts, or this run's own lengths)" if lengths else ""
            better = _better_recipes(config.target.path)
            say(f"no recipe given: using {ANY} (configs/experiment/any.yaml){also}; {better}")
        if tells in resolved:
            say(resolved[tells])
        keep_freed_memory()
        stage(config)


def _program() -> str:
    """Return how this command was called: `eagle31 plan`, or `python -m eagle31_train.plan`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or sys.argv[0].startswith("eagle31 "):
        return Path(sys.argv[0]).name
    return f"python -m {spec.name.removesuffix('.__main__')}"


def with_recipe(words: list[str], config: Config | None = None) -> list[str]:
    """Return the words of a command line, with the recipe ANY in front if they name neither a recipe nor a run.

    If the target of their `config` thinks, its answers get room for that, too, as far as the words say no lengths.
    """
    if any(word.lstrip("+").startswith("experiment=") or is_run(word) for word in words):
        return words
    if config is None:
        return [ANY, *words]
    from eagle31_train.targets.derive import answer_lengths  # slow to import (transformers)

    lengths = answer_lengths(config, given={key_of(word) for word in words})
    return [ANY, *(f"{option}={tokens}" for option, tokens in lengths.items()), *words]


def _better_recipes(target: str) -> str:
    """Return the shipped recipes for a hub id, or how to write one. A recipe has the name of its target's file."""
    made = [f for f in sorted((CONFIGS / "target").glob("*.yaml")) if (CONFIGS / "experiment" / f.name).is_file()]
    own = [f"+experiment={file.stem}" for file in made if OmegaConf.select(OmegaConf.load(file), "path") == target]
    return f"made for this target: {', '.join(own)}" if own else "write your own with `eagle31 new NAME`"


def _options_help() -> str:
    lines = [
        f"recipes (+experiment=…): {', '.join(choices('experiment'))}",
        "",
        "options (key=value), with the defaults that a recipe begins with in brackets. Without a recipe,",
        "+experiment=any sets some of them; --cfg prints all values in use:",
    ]
    for name, (_, field) in OPTIONS.items():
        make = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        shown = "required" if default == "???" else "null" if default is None else str(default)
        shown = "the target's" if name == "name" else shown
        lines.append(f"  {name:<32} {field.metadata['help']} [{shown}]")
    return "\n".join(lines)
