"""The options of a command: Hydra's configuration from `configs/`, changed as the command line says, and checked.

`+experiment=NAME` picks a whole recipe from `configs/experiment/`; `key=value` changes one option.
"""

import copy
import dataclasses
import difflib
import functools
import operator
import os
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from eagle31_train import precision
from eagle31_train.combinations import check_options
from eagle31_train.common.console import say
from eagle31_train.common.errors import UserError
from eagle31_train.common.locations import CONFIGS, project
from eagle31_train.config import SELF, Config, TargetConfig, check_value
from eagle31_train.earlier import REMOVED, RENAMED, UNSET

ANY = "+experiment=any"  # the recipe of a command line that names none
SAVED = ("train", "config.yaml")  # a run's options, in its folder
GIVEN = "experiment=given"  # the recipe that was given as a file
GROUPS = [folder.name for folder in CONFIGS.iterdir() if folder.is_dir()]
GIVES_DATA = ("data.prompts", "data.conversations", "data.sources")


def load_config(
    overrides: list[str], saved: Path | None = None, config_dir: Path | None = None, resolve: bool = True
) -> Config:
    """Compose `configs/config.yaml` with the overrides and check it against the schema.

    Args:
        overrides: `key=value`, `+experiment=NAME`, `+experiment=FILE.yaml` for your own recipe, or a run's folder
            for all of its options.
        saved: a run's resolved configuration, to start from instead.
        config_dir: a folder with your own groups, like `configs/`: experiment/, target/, …
        resolve: replace each precision of `auto` by the value that a record, or this machine, decides.

    Raises:
        UserError: an unknown key or group, a value of the wrong type, or a mandatory option that is missing or empty.
    """
    if config_dir is not None and not config_dir.is_dir():
        raise UserError(f"--config-dir {config_dir} is not a folder")
    if saved is None:
        saved, overrides = _run_and_options(overrides)
    folders = [CONFIGS, *([config_dir.resolve()] if config_dir else [])]
    keys = {key_of(word) for word in overrides}
    if twice := [f"{old} has been renamed {new}" for old, new in RENAMED.items() if {old, new} <= keys]:
        raise UserError(f"{twice[0]}: set only {twice[0].split()[-1]}")
    groups = [word for word in overrides if key_of(word) in GROUPS]
    recipe = next((word.partition("=")[2] for word in groups if key_of(word) == "experiment"), "")
    try:
        checked = tuple(_checked_group(word, folders) for word in groups)
        shipped = saved is None and config_dir is None and GIVEN not in checked
        composed = copy.deepcopy(_shipped(checked)) if shipped else _composed(checked, saved, folders)
        if saved is not None and any(key_of(word).startswith(GIVES_DATA) for word in overrides):
            composed.regenerate = None  # follows from the new data, unless also given
            composed.data.prompts = None if composed.data.prompts == SELF else composed.data.prompts
        for word in overrides:
            if word not in groups:
                _set(composed, word)
        config = _to_config(composed, recipe)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise UserError(_explain(error).replace("'experiment/given'", recipe)) from None
    if resolve:
        precision.resolve(config)
    return config


def _run_and_options(words: list[str]) -> tuple[Path | None, list[str]]:
    """Return the options of the run that a command line names, if any, as a file, and those to set on top of them."""
    runs = [word for word in words if is_run(word)]
    if not runs:
        return None, words
    if len(runs) > 1:
        raise UserError(f"{' and '.join(runs)} are different runs: pass only one")
    options = [word for word in words if word not in runs]
    anew = any(key_of(word) == "name" for word in options)  # a new run with that run's options
    run_dir = "run_dir=runs/${name}" if anew else f"run_dir={runs[0]}"
    return Path(runs[0], *SAVED), [run_dir, "overwrite=false", *options]


def is_run(word: str) -> bool:
    """Return whether a word of a command line is a run's folder, with the run's options in it."""
    return os.path.isfile(Path(word, *SAVED))  # noqa: PTH113 (Path's raises for a long word)


def key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _store_recipe(file: Path) -> None:
    """Register a recipe file with Hydra, under the name in GIVEN."""
    if not file.is_file():
        raise UserError(f"+experiment={file}: there is no such file: correct the path")
    try:
        recipe = OmegaConf.load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"+experiment={file} cannot be read ({error}): write one with `eagle31 new NAME`") from None
    ConfigStore.instance().store("given", recipe, "experiment", package="_global_")


def _checked_group(override: str, folders: list[Path]) -> str:
    """Return `group=name` or `group=[name,…]` in Hydra's grammar; UserError if there are no such files."""
    group, value = key_of(override), override.partition("=")[2]
    if group == "experiment" and value.endswith((".yaml", ".yml")):
        _store_recipe(Path(_at_home(value)))
        return GIVEN
    listed = (value[:1], value[-1:]) == ("[", "]")
    names = [name.strip() for name in value[1:-1].split(",")] if listed else [value]
    for name in names:
        if name not in (known := choices(group, folders)):
            own = f"{name}.yaml"
            meant = group == "experiment" and Path(own).is_file()
            hint = f": for the file in this folder, pass +experiment={own}" if meant else _nearest(name, known)
            hint = f": did you mean target.path={name}?" if group == "target" and "/" in name else hint
            raise UserError(f"no configs/{group}/{name}.yaml{hint}")
        files = [file for folder in folders if (file := folder / group / f"{name}.yaml").is_file()]
        if len(files) > 1:
            raise UserError(f"{files[-1]} has the name of one of eagle31's own files, which Hydra would use: rename it")
    quoted = ",".join(map(_quoted, names))
    return f"{group}=[{quoted}]" if listed else f"{group}={quoted}"


@functools.cache
def _schema() -> DictConfig:
    """Return the options with types and defaults, and the old names as null, since recipes may still have them."""
    schema = OmegaConf.structured(Config)
    with open_dict(schema):
        for old in (*RENAMED, *REMOVED):
            OmegaConf.update(schema, old, None, force_add=True)
    return schema


@functools.cache
def _shipped(groups: tuple[str, ...]) -> DictConfig:
    """Return the root with groups of `configs/` only. Cached, as Hydra takes a tenth of a second."""
    return _composed(groups, None, [CONFIGS])


def _composed(groups: Sequence[str], saved: Path | None, folders: list[Path]) -> DictConfig:
    """Return the root with groups: each replaces the recipe's own, or is added if it has none."""
    OmegaConf.register_new_resolver("project", project, replace=True)
    ConfigStore.instance().store(name="schema", node=_schema())
    root = "config"
    if saved is not None:
        # Options that were added since get their defaults.
        whole = typing.cast(DictConfig, OmegaConf.merge(_schema(), OmegaConf.load(saved)))
        if not groups:
            return _with_new_names(whole, tell=False)  # the same as Hydra's, which takes a tenth of a second
        root = "saved"
        ConfigStore.instance().store(name=root, node=whole)
    searched = f"hydra.searchpath=[{','.join(_quoted(f'file://{folder}') for folder in folders[1:])}]"
    recipe = [searched, *(f"+{word}" for word in groups if key_of(word) == "experiment")]
    others = [word for word in groups if key_of(word) != "experiment"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        if others:  # Hydra requires the plus for a group that the recipe does not name
            named = compose(root, recipe, return_hydra_config=True).hydra.runtime.choices
            recipe += [word if key_of(word) in named else f"+{word}" for word in others]
        return _with_new_names(compose(root, recipe), tell=saved is None)


def _with_new_names(composed: DictConfig, tell: bool) -> DictConfig:
    """Return the configuration with the values of old names moved to the options that they mean.

    tell: report renamed options, in a recipe that its author can correct, but not in a run's record. Removed options
    are always reported.
    """
    values: Any = _at_home(OmegaConf.to_container(composed))
    for old in (*RENAMED, *REMOVED):
        section, _, key = old.rpartition(".")
        value = (values[section] if section else values).pop(key)
        if value is None or (old in REMOVED and (not value or value == UNSET.get(old))):
            continue
        if tell or old in REMOVED:
            _say_new_name(old)
        if old in RENAMED:
            values[section][RENAMED[old].partition(".")[2]] = value
    return typing.cast(DictConfig, OmegaConf.merge(OmegaConf.structured(Config), values))


def _at_home(value: Any) -> Any:
    """Return the value with each `~/…` in it expanded to the user's home, which bash and YAML do not do."""
    if isinstance(value, dict):
        return {key: _at_home(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_at_home(one) for one in value]
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value


def _say_new_name(old: str) -> None:
    now = f"has been renamed {RENAMED[old]}" if old in RENAMED else f"no longer exists ({REMOVED[old]}): remove it"
    say(f"{old} {now}", error=True)


def _to_config(composed: DictConfig, recipe: str) -> Config:
    if OmegaConf.is_missing(composed, "name"):  # OmegaConf fails on run_dir, which contains it
        unknown = OmegaConf.is_missing(composed.target, "path")
        composed.name = "unnamed" if unknown else TargetConfig(composed.target.path).name.rpartition("/")[2].lower()
    if missing := sorted(OmegaConf.missing_keys(composed)):
        recipes = ", ".join(name for name in choices("experiment") if not ANY.endswith(f"={name}"))
        remedy = f"set {missing[0]}=…, or choose a recipe that sets it, +experiment=NAME (one of {recipes})"
        if is_run(composed.run_dir):
            remedy = f"pass the run itself, {composed.run_dir}, to use its options"
        elif Path(recipe).is_file():
            remedy = f"set {missing[0]} in {recipe}"
        raise UserError(f"no value for {', '.join(missing)}: {remedy}")
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    for option in ("name", "run_dir"):
        _refuse_empty(option, getattr(config, option))
    for name, (kind, field) in OPTIONS.items():
        value = operator.attrgetter(name)(config)
        # OmegaConf checks neither the type of what ${…} resolves to nor lists in lists.
        if name in FREE and not isinstance(value, dict):
            raise UserError(f"{name}={value} is not a mapping: write '{name}={{key: value}}'")
        listed = isinstance(value, list) and not any(isinstance(item, list | dict) for item in value)
        if "list[" in str(kind) and value is not None and not listed:
            raise UserError(f"{name}={value} is not a list of single values: write '{name}=[a,b]'")
        check_value(name, value, field.metadata)
    check_options(config)
    if config.regenerate is not False and not config.data.given:
        config.data.prompts = SELF
    if config.regenerate is None:
        config.regenerate = config.data.wants_answers
    return config


def _refuse_empty(option: str, value: Any) -> None:
    """Raise UserError for an empty text: as a path or name it would silently mean another one, or none."""
    if isinstance(value, str) and not value.strip():
        raise UserError(f"{option}= is empty: set {option}=… to a value (is a shell variable not set?)")


def _set(config: DictConfig, override: str) -> None:
    """Set one option from `key=value`, or remove a free-form entry for `~key`; UserError if there is none."""
    key, (_, equals, value) = key_of(override), override.partition("=")
    if not equals and "/" in override:
        saved = Path(override, *SAVED)
        raise UserError(f"{override} is not a trained run (there is no {saved}): pass the options themselves")
    if not key or (not equals and not override.startswith("~")):
        raise UserError(f"{override!r} is not of the form key=value, such as target.path=Qwen/Qwen3-8B")
    if key in RENAMED or key in REMOVED:
        _say_new_name(key)
        if key in REMOVED:
            return
        key = RENAMED[key]
    free = any(key == name or key.startswith(f"{name}.") for name in FREE)
    if any(option.startswith(f"{key}.") for option in OPTIONS):
        raise UserError(f"{key} is a group of options: set each as {key}.NAME=…")
    if not free and key not in OPTIONS:
        raise UserError(f"no option {key!r}{_nearest(key, [*OPTIONS, *GROUPS])}")
    if override.startswith("~"):
        parent, _, last = key.rpartition(".")
        holder = OmegaConf.select(config, parent)
        if not free or key in FREE or last not in (holder or ()):
            raise UserError(f"{override}: only an existing entry of a free-form option can be removed")
        with open_dict(config):
            del holder[last]
        return
    parsed = _at_home(_parsed(override, value, Any if free else OPTIONS[key][0]))
    if not free:
        _refuse_empty(key, parsed)
    try:  # `{}` empties a free-form option; other mappings are merged
        OmegaConf.update(config, key, parsed, merge=parsed != {}, force_add=True)
    except OmegaConfBaseException as error:
        if not free and "list[" in str(OPTIONS[key][0]) and not isinstance(parsed, list):
            raise UserError(f"{key} is a list: write '{key}=[{value}]'") from None
        raise UserError(f"{override}: {str(error).splitlines()[0]}") from None


def _parsed(override: str, value: str, kind: Any) -> Any:
    """Parse a value by Hydra's grammar for an option of type `kind` (Any: text unless it can be anything else).

    Return text unchanged if the grammar refuses it, or takes it for something else.
    """
    try:
        read = OverridesParser.create().parse_override(f"key={value}")
        unread = "Hydra reads it as a sweep; write a list as [a,b]" if read.is_sweep_override() else ""
        parsed = None if unread else read.value()
    except HydraException as error:
        parsed, unread = None, " ".join(str(error).split())
    brackets = (value[:1], value[-1:])
    if kind in (str, str | None):
        return parsed if not unread and isinstance(parsed, str | None) and value == value.strip() else value
    if not unread:
        return parsed
    if kind is Any and brackets not in (("{", "}"), ("[", "]")):
        return value
    if kind == list[str] and brackets == ("[", "]"):
        return [_parsed(override, item.strip(), str) for item in value[1:-1].split(",")]
    raise UserError(f"{override!r} cannot be read: {unread}")


def _quoted(text: str) -> str:
    return QuotedString(text=text, quote=Quote.single).with_quotes()


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def choices(group: str, folders: Sequence[Path] = (CONFIGS,)) -> list[str]:
    return sorted(file.stem for folder in folders for file in (folder / group).glob("*.yaml"))


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    close = close or [n for n in names if n.split(".")[-1] == name.split(".")[-1]]
    section = name.rpartition(".")[0]
    alike = sorted(n for n in names if section and n.startswith(f"{section}."))
    listed = ", ".join(alike) or f"{', '.join(sorted(names)[:12])}, …"
    return f": did you mean {close[0]!r}?" if close else f" (available: {listed})"


def _options(cls: type, prefix: str = "") -> Iterator[tuple[str, tuple[Any, dataclasses.Field]]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from _options(typing.cast(type, kind), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", (kind, field)


def _explain(error: BaseException) -> str:
    """Return one line for an error of Hydra or OmegaConf: its message and its first cause."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = " ".join((str(error) if str(cause) in str(error) else f"{error}: {cause}").split())
    found = re.fullmatch(r"(In .+?): (\w+) raised while composing config: (.*?) full_key:( [\w.]+)? .*", text)
    if found is None:
        return text
    file, kind, what, key = found[1], found[2], found[3], (found[4] or "").strip()
    if kind == "ConfigKeyError":
        sections = {name.partition(".")[0] for name in OPTIONS}
        return f"{file}: no option {key!r}{_nearest(key, [*OPTIONS, *sections])}"
    return f"{file}: {key + ': ' if key else ''}{what}"


OPTIONS = dict(_options(Config))  # name → type and field
FREE = [name for name, (kind, _) in OPTIONS.items() if typing.get_origin(kind) is dict]  # their keys are the user's
