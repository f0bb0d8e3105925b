"""The one way every stage is called: Hydra's configuration from `configs/`, checked, then the stage.

    eagle31 extract +experiment=smollm2 target.dtype=float32

`+experiment=NAME` picks a whole recipe from `configs/experiment/`; `key=value` changes one option.
A mistake by the user ends with one line on standard error and exit status 2.
"""

import argparse
import dataclasses
import difflib
import functools
import operator
import re
import shutil
import sys
import tempfile
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from eagle31_train import precision
from eagle31_train.allocator import keep_freed_memory
from eagle31_train.config import REMOVED, RENAMED, Config, check_value
from eagle31_train.console import explained, is_main, note, tidy
from eagle31_train.errors import UserError
from eagle31_train.locations import CONFIGS, project


def load_config(
    overrides: list[str], saved: Path | None = None, config_dir: Path | None = None, resolve: bool = True
) -> Config:
    """Compose `configs/config.yaml` with the overrides and check it against the schema.

    Args:
        overrides: `key=value`, `+experiment=NAME`, or `+experiment=FILE.yaml` of a recipe of one's own.
        saved: a resolved configuration, as runs keep it, to begin with instead.
        config_dir: a folder with groups of one's own, like `configs/`: experiment/, target/, …
        resolve: give options that say `auto` of a precision the value that this machine, or a record, decides.

    Raises:
        UserError: an unknown key or group (with the nearest valid name), a value of the wrong
            type, or a mandatory option that is missing or empty.
    """
    if config_dir is not None and not config_dir.is_dir():
        raise UserError(f"--config-dir {config_dir} is no folder")
    with tempfile.TemporaryDirectory() as copies:
        keys = {override.partition("=")[0].lstrip("+") for override in overrides}
        if twice := [f"{old} is called {new} now" for old, new in RENAMED.items() if {old, new} <= keys]:
            raise UserError(f"{twice[0]}: give it once")
        overrides = [_named(override, Path(copies)) for override in overrides]
        folders = [CONFIGS, Path(copies), *([config_dir.resolve()] if config_dir else [])]
        config = _load([_checked(override, folders) for override in overrides], saved, folders)
    if resolve:
        precision.resolve(config)
    return config


def _load(overrides: list[str], saved: Path | None, folders: list[Path]) -> Config:
    OmegaConf.register_new_resolver("project", project, replace=True)
    ConfigStore.instance().store(name="schema", node=_schema())
    try:
        if saved is not None:
            if not saved.is_file():
                raise UserError(f"{saved} is missing: give a run's folder, or a recipe with +experiment=NAME")
            # Options that were added since have their defaults.
            ConfigStore.instance().store(name="saved", node=OmegaConf.merge(_schema(), OmegaConf.load(saved)))
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            searched = f"hydra.searchpath=[{','.join(_quoted(f'file://{folder}') for folder in folders[1:])}]"
            composed = _composed([searched, *overrides], "config" if saved is None else "saved")
        if OmegaConf.is_missing(composed, "name") and not OmegaConf.is_missing(composed, "target.path"):
            composed.name = Path(composed.target.path).name.lower()
        # run_dir is made of the name, and OmegaConf stumbles over the one that is missing behind the other.
        missing = ["name"] if OmegaConf.is_missing(composed, "name") else sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise UserError(
                f"no value for {', '.join(missing)}: pick a recipe with +experiment=NAME "
                f"({', '.join(choices('experiment', folders))}) or set {missing[0]}=…"
            )
        config = OmegaConf.to_object(_with_new_names(composed))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise UserError(_explain(error)) from None
    assert isinstance(config, Config)
    for option in ("name", "run_dir"):
        if not getattr(config, option).strip():
            raise UserError(f"{option}= is empty: give {option}=… a value (is a variable of the shell not set?)")
    for name, _, field in _options(Config):
        check_value(name, operator.attrgetter(name)(config), field.metadata)
    return config


def _named(override: str, folder: Path) -> str:
    """The override; a recipe that is given as a file is copied to where Hydra finds it, under a name of its own.

    Raises:
        UserError: there is no such file.
    """
    group, _, value = override.partition("=")
    if group.lstrip("+") != "experiment" or not value.endswith((".yaml", ".yml")):
        return override
    if not (file := Path(value)).is_file():
        raise UserError(f"{override}: there is no file {value}")
    (folder / "experiment").mkdir(exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9]", "_", f"own_{file.stem}")  # of letters that Hydra takes
    shutil.copyfile(file, folder / "experiment" / f"{name}.yaml")
    return f"{group}={name}"


def _schema() -> DictConfig:
    """The options with their types and defaults, and with the old names of renamed ones, which are empty."""
    schema: DictConfig = OmegaConf.structured(Config)
    with open_dict(schema):
        for old in (*RENAMED, *REMOVED):
            OmegaConf.update(schema, old, None, force_add=True)
    return schema


def _with_new_names(composed: DictConfig) -> DictConfig:
    """The configuration with values of old names given to the options that they mean, which is said."""
    values: Any = OmegaConf.to_container(composed)

    def section(name: str) -> tuple[dict[str, Any], str]:
        *sections, key = name.split(".")
        return functools.reduce(dict.__getitem__, sections, values), key

    for old, new in {**RENAMED, **dict.fromkeys(REMOVED)}.items():
        holder, key = section(old)
        if (value := holder.pop(key)) is None:
            continue
        if new is None:
            note(f"{old} is read from the target's config.json now: leave it out", error=True)
            continue
        note(f"{old} is called {new} now", error=True)
        holder, key = section(new)
        holder[key] = value
    renamed: Any = OmegaConf.merge(OmegaConf.structured(Config), values)
    return renamed


def _composed(overrides: list[str], root: str = "config") -> Any:
    """Hydra's composition; a group that the recipe has already is replaced by the command line's.

    And `option={}` empties a free-form option, where Hydra would merge nothing into what the recipe has.
    """
    for at, override in enumerate(overrides):
        option = override.removeprefix("++").removesuffix("={}")
        if override == f"++{option}={{}}" and option in _free():
            groups = [o for o in overrides[at + 1 :] if (CONFIGS / o.partition("=")[0].lstrip("+")).is_dir()]
            there = OmegaConf.select(_composed([*overrides[:at], *groups], root), option)
            return _composed([*overrides[:at], *(f"~{option}.{key}" for key in there), *overrides[at + 1 :]], root)
    try:
        return compose(root, overrides)
    except HydraException as error:
        twice = re.match(r"Multiple values for (\w+)\.", str(error))
        given = [o for o in overrides if twice and o.startswith(f"+{twice[1]}=") and twice[1] != "experiment"]
        if len(given) != 1:
            raise
        return _composed([o.removeprefix("+") if o in given else o for o in overrides], root)


def run(
    stage: Callable[[Config], None],
    description: str,
    argv: list[str] | None = None,
    saved: Path | None = None,
    before: str = "",
    resolve: bool = True,
    tells: str = "target.dtype",
) -> None:
    """Parse the command line, compose the configuration, run the stage.

    Args:
        saved, resolve: see `load_config`.
        tells: the option of precision that the stage uses; it is said what was resolved.
        before: what the usage line has before the options; the caller reads it.

    Exits with 2 on a user's mistake, with 75 if the stage was told to stop and saved, with 130 on Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog=_program(),
        usage=f"%(prog)s {before}[-h] [--cfg] [--config-dir DIR] [key=value ...]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_options_help(),
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options, listed below")
    parser.add_argument("--cfg", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("--config-dir", type=Path, help="a folder of recipes and groups of your own, like configs/")
    arguments = parser.parse_intermixed_args(argv)
    with explained(), tidy():
        config = load_config(arguments.overrides, saved, arguments.config_dir, resolve=False)
        resolved = precision.resolve(config) if resolve else {}
        if arguments.cfg:
            note(to_yaml(config).rstrip("\n"))
            return
        if tells in resolved and is_main():
            note(resolved[tells])
        keep_freed_memory()
        stage(config)


ANY = "+experiment=any"  # the recipe of a command line that names none


def with_recipe(words: list[str]) -> list[str]:
    """The words of a command line; with the recipe ANY in front where it names none."""
    named = any(word.lstrip("+").startswith("experiment=") for word in words)
    return words if named else [ANY, *words]


def _program() -> str:
    """How this command was called: `eagle31 plan`, or `python -m eagle31_train.plan`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or sys.argv[0].startswith("eagle31 "):
        return Path(sys.argv[0]).name
    return f"python -m {spec.name.removesuffix('.__main__')}"


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML, for saving beside outputs."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def choices(group: str, folders: Sequence[Path] = (CONFIGS,)) -> list[str]:
    """Names in a group of configurations, such as the recipes in `experiment`."""
    return sorted(file.stem for folder in folders for file in (folder / group).glob("*.yaml"))


def option_names() -> list[str]:
    """Every option."""
    return [name for name, _, _ in _options(Config)]


def _checked(override: str, folders: list[Path]) -> str:
    """The override in Hydra's grammar, if its key exists; keys below a free-form option need no `++`."""
    key, equals, value = override.partition("=")
    key = key.lstrip("+~")
    if not key or (not equals and not override.startswith("~")):
        raise UserError(f"{override!r} is not of the form key=value")
    if (CONFIGS / key).is_dir():
        listed = (value[:1], value[-1:]) == ("[", "]")
        several = [name.strip() for name in value[1:-1].split(",")] if listed else [value]
        for name in several:
            if name not in (known := choices(key, folders)):
                raise UserError(f"no configs/{key}/{name}.yaml{_nearest(name, known)}")
        # Hydra takes a group that no defaults list names only with the plus.
        spelt = ",".join(_spelt(name, str) for name in several)
        return f"+{key}=[{spelt}]" if listed else f"+{key}={spelt}"
    kinds = {name: kind for name, kind, _ in _options(Config)}
    names = list(kinds)
    if any(key == path or key.startswith(path + ".") for path in _free()):
        override = override if override.startswith("~") else f"{override.partition('=')[0]}={_spelt(value, Any)}"
        return override if override.startswith(("+", "~")) else f"++{override}"
    if key in names or key in RENAMED or key in REMOVED:
        written = override.partition("=")[0]
        return override if override.startswith("~") else f"{written}={_spelt(value, kinds.get(RENAMED.get(key, key)))}"
    groups = [folder.name for folder in CONFIGS.iterdir() if folder.is_dir()]
    raise UserError(f"no option {key!r}{_nearest(key, [*names, *groups])}")


def _spelt(value: str, kind: Any) -> str:
    """A value as Hydra's grammar spells it: text that the grammar would refuse, or take for something else, is quoted.

    `kind`: the type of the option. Any: text is what nothing else can be.
    """
    if kind == list[str] and (value[:1], value[-1:]) == ("[", "]") and _parsed(value) is None:
        return f"[{','.join(_spelt(item.strip(), str) for item in value[1:-1].split(','))}]"
    if kind is Any and (value[:1], value[-1:]) in (("{", "}"), ("[", "]")):
        return value
    if kind not in (str, str | None, Any):
        return value
    parsed = _parsed(value)
    if parsed is None or parsed.is_sweep_override():
        return _quoted(value)
    text = isinstance(parsed.value(), str | None) and value == value.strip()
    return value if text or kind is Any else _quoted(value)


def _parsed(value: str) -> Any:
    """The value as Hydra reads it; None where it does not."""
    try:
        return OverridesParser.create().parse_override(f"key={value}")
    except HydraException:
        return None


def _quoted(text: str) -> str:
    return QuotedString(text=text, quote=Quote.single).with_quotes()


def _free() -> list[str]:
    """Options whose keys are the user's."""
    return [path for path, kind, _ in _options(Config) if typing.get_origin(kind) is dict]


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    close = close or [n for n in names if n.split(".")[-1] == name.split(".")[-1]]
    return f": did you mean {close[0]!r}?" if close else f" (there are {', '.join(sorted(names)[:12])}, …)"


def _options(cls: type, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """Every option: dotted name, type, field."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from _options(typing.cast(type, kind), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", kind, field


def _options_help() -> str:
    lines = [f"recipes (+experiment=…): {', '.join(choices('experiment'))}", "", "options (key=value):"]
    for name, _, field in _options(Config):
        make = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        shown = "required" if default == "???" else "null" if default is None else str(default)
        lines.append(f"  {name:<32} {field.metadata['help']} [{shown}]")
    return "\n".join(lines)


def _explain(error: BaseException) -> str:
    """One line for an error of Hydra's or OmegaConf's: what it says, and its first cause."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    said = " ".join((str(error) if str(cause) in str(error) else f"{error}: {cause}").split())
    return f"{error.override!r} cannot be read: {said}" if isinstance(error, OverrideParseException) else said
