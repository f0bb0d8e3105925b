"""Workloads: the held-out prompts and further suites, each as it is and once under every perturbation.

A suite is a file of JSON lines, a data set of the hub, or one that `datasets` saved; `configs/suite/` has those that
the field reports. How a row becomes a question, its suite says; rows with prompt, turns or messages need no explaining.
"""

import difflib
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from eagle31_train import artifacts
from eagle31_train.measure import perturb
from eagle31_train.measure.perturb import Around, Distractor, Perturbation
from eagle31_train.measure.prompts import (
    Prompt,
    before_answer,
    choose,
    conversation,
    files_of,
    from_heldout,
    lines_of,
    rendered,
)
from eagle31_train.measure.rendering import Message, Rendering, UnfitError
from eagle31_train.schema import Config, UserError

HELDOUT = "heldout"
PROMPTS = "prompts"  # those of evaluate.prompts


@dataclass(frozen=True)
class Workload:
    """Prompts that are reported together, and how they are decoded.

    left_out: ids of prompts that do not belong, and why. notes: what a reader of its numbers should know.
    """

    name: str
    suite: str
    perturbation: str | None
    prompts: list[Prompt]
    temperature: float
    top_p: float
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Suite:
    """Where a set of prompts lies and how a row becomes a question.

    prompt: a column (a text, texts of which the first is asked, or messages), or a text with {column}s in it.
    tools, id, source: columns. subset: one of the hub's configurations of the set, or several, which are its sources.
    only: {column: value, or list of values} that rows must have. placeholder: what stands in rows that are not public.
    """

    path: str
    prompt: str | None = None
    tools: str | None = None
    id: str | None = None
    source: str | None = None
    subset: str | list[str] | None = None
    split: str = "test"
    revision: str | None = None
    only: dict[str, Any] = field(default_factory=dict)
    placeholder: str | None = None


def workloads(config: Config, data: dict[str, Any] | None, longest: int) -> list[Workload]:
    """Everything that the configuration wants decoded, the held-out prompts (or evaluate.prompts) first.

    A suite's prompts are chosen as they are; its perturbed forms are of the same prompts, less those that do not fit.

    Args:
        config: which; data: stage 1's manifest, where the held-out split or its texts are needed.
        longest: tokens that a prompt may have.

    Raises:
        UserError: an unknown suite or perturbation, an unreadable or empty set, or none that fits.
    """
    options = config.evaluate
    perturbations = [perturb.find(name) for name in options.perturbations]
    if twice := {p.name for p in perturbations if perturbations.count(p) > 1}:
        raise UserError(f"evaluate.perturbations has {', '.join(sorted(twice))} twice: once is enough")
    suites = {name: _suite(name, given) for name, given in options.suites.items() if given is not None}
    transforms = any(perturbation.transform for perturbation in perturbations)
    needed = transforms or suites or options.prompts is not None
    rendering = Rendering.load(config.target) if needed else None
    found: list[Workload] = []
    notes: list[str] = []
    if options.prompts is None:
        prompts = _heldout(config, data, rendering if transforms else None)
        found += _forms(config, HELDOUT, prompts, notes, perturbations, rendering, data, longest)
    else:
        assert rendering is not None
        prompts, notes = _read(PROMPTS, Suite(options.prompts), "evaluate.prompts", rendering)
        found += _forms(config, PROMPTS, prompts, notes, perturbations, rendering, data, longest)
    for name, suite in suites.items():
        assert rendering is not None
        prompts, notes = _read(name, suite, f"evaluate.suites.{name}.path", rendering)
        found += _forms(config, name, prompts, notes, perturbations, rendering, data, longest)
    return found


def inputs(config: Config) -> dict[str, Any]:
    """What the prompts depend on beside the data: options and the contents of files, for a stage's fingerprint."""
    options = config.evaluate
    suites = {name: _suite(name, given) for name, given in options.suites.items() if given is not None}
    if options.prompts is not None:
        suites[PROMPTS] = Suite(options.prompts)
    found: dict[str, Any] = {"perturbations": [perturb.find(name).name for name in options.perturbations]}
    if suites or options.perturbations:
        found["template_args"] = config.target.template_args
        if config.target.chat_template is not None:
            found["template"] = artifacts.file_sha256(Path(config.target.chat_template))[:16]
    for name, suite in suites.items():
        content = {key: value for key, value in vars(suite).items() if value and key != "path"}
        if _is_hub_id(suite.path):
            content["hub"] = suite.path
        else:
            folder = Path(suite.path)
            option = "evaluate.prompts" if name == PROMPTS else f"evaluate.suites.{name}.path"
            files = (
                sorted(f for f in folder.rglob("*") if f.is_file()) if folder.is_dir() else files_of(suite.path, option)
            )
            content["files"] = [artifacts.file_sha256(file)[:16] for file in files]
        found[f"suite {name}"] = content
    return found


# ---------------------------------------------------------------- prompts of a set


def _suite(name: str, given: Any) -> Suite:
    where = f"evaluate.suites.{name}"
    if isinstance(given, str):
        given = {"path": given}
    if not isinstance(given, dict):
        raise UserError(f"{where}={given} is no suite: give {{path: FILE or hub id, …}}")
    known = [f.name for f in fields(Suite)]
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
            raise UserError(f"{where} has no option {key!r}: {hint}")
    if not given.get("path"):
        raise UserError(f"{where} has no path: give a file of JSON lines or a hub id such as org/name")
    if name in (HELDOUT, PROMPTS) or not re.fullmatch(r"[\w.-]+", name):
        raise UserError(f"{where}: a suite cannot be called {name!r}: choose another name")
    return Suite(**given)


def _heldout(config: Config, data: dict[str, Any] | None, rendering: Rendering | None) -> list[Prompt]:
    folder = config.data_folder
    # Asked of the manifest: `datasets` saves an empty split and then cannot load it.
    if data is None or not data["splits"]["heldout"]["conversations"]:
        raise UserError(
            f"{folder} holds out no prompts (data.heldout=0): set data.heldout and run `python -m data_prep` again, "
            "or set evaluate.prompts=FILE"
        )
    return from_heldout(folder / "dataset", rendering)


def _read(name: str, suite: Suite, option: str, rendering: Rendering) -> tuple[list[Prompt], list[str]]:
    """The prompts of a suite, and what is to be told of them.

    Raises:
        UserError: it cannot be read, a row lacks its columns, an id stands there twice, or no row is left.
    """
    prompts: dict[str, Prompt] = {}
    several = placeholders = 0
    for where, default_id, source, row in _rows(name, suite, option):
        if any(row.get(column) not in _listed(wanted) for column, wanted in suite.only.items()):
            if missing := suite.only.keys() - row.keys():
                raise UserError(_lacks(where, sorted(missing), row))
            continue
        messages, turns = _asked(suite, row, where)
        several += turns > 1
        if suite.placeholder is not None and any(suite.placeholder in message["content"] for message in messages):
            placeholders += 1
            continue
        columns = {key: column for key in ("tools", "id", "source") if (column := getattr(suite, key)) is not None}
        own = suite.prompt is None or not _columns(suite.prompt) <= row.keys()
        if missing := set(columns.values()) - row.keys():
            if not own:  # a file in one of our own forms has its own names for them
                raise UserError(_lacks(where, sorted(missing), row))
            columns = {key: column for key, column in columns.items() if column not in missing}
        said = row if own else {}
        prompt = rendered(
            {**said, **{key: row[column] for key, column in columns.items()}},
            messages,
            default_id,
            rendering,
            where,
            source,
        )
        if prompt.id in prompts:
            raise UserError(f"{where}: the id {prompt.id!r} stands there twice: make ids unique")
        prompts[prompt.id] = prompt
    if not prompts:
        empty = f"; {placeholders} rows hold placeholders for texts that are not public" if placeholders else ""
        raise UserError(f"{option}={suite.path} has no prompts{empty}: give another file, split or filter")
    notes = []
    if several:
        notes.append(f"the first of several turns is asked, in {several} of {len(prompts)} prompts")
    if placeholders:
        notes.append(f"{placeholders} rows with a placeholder instead of a text are left out")
    return list(prompts.values()), notes


def _rows(name: str, suite: Suite, option: str) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Of each row: where it stands, an id and a source in case that it has none, and its columns."""
    path = Path(suite.path)
    if not path.is_dir() and not _is_hub_id(suite.path):
        for where, line, row in lines_of(files_of(suite.path, option)):
            # Files of evaluate.prompts are its sources; a suite is one.
            yield where, line, line.rpartition("-")[0] if name == PROMPTS else name, row
        return
    subsets = suite.subset if isinstance(suite.subset, list) else [suite.subset]
    for subset in subsets:
        source = str(subset) if len(subsets) > 1 else name
        for number, row in enumerate(_dataset(suite, subset, option), 1):
            yield f"{suite.path} ({subset or suite.split}), row {number}", f"{source}-{number}", source, dict(row)


def _dataset(suite: Suite, subset: str | None, option: str) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk

    folder = Path(suite.path)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
            saved = load_from_disk(str(folder))
            return saved[suite.split] if isinstance(saved, DatasetDict) else saved
        return load_dataset(suite.path, subset, split=suite.split, revision=suite.revision)
    except Exception as error:
        # The hub's client raises a dozen unrelated types: no network, no such set, split or permission.
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{option}={suite.path} (split {suite.split}) cannot be loaded ({reason}): give a file as {option}=FILE"
        ) from None


def _is_hub_id(path: str) -> bool:
    return (
        re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None
        and Path(path).suffix not in (".json", ".jsonl")
        and not Path(path).exists()
    )


def _asked(suite: Suite, row: dict[str, Any], where: str) -> tuple[list[Message], int]:
    """The messages of a row, and how many turns it has."""
    template = suite.prompt
    if template is None or not (needed := _columns(template)) <= row.keys():
        if template is not None and not row.keys() & {"prompt", "turns", "messages"}:
            raise UserError(_lacks(where, sorted(needed - row.keys()), row))
        turns = row.get("turns") if "prompt" not in row else None
        return conversation(row, where), len(turns) if isinstance(turns, list) else 1
    try:
        value = template.format_map(row) if "{" in template else row[template]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{where}: prompt={template!r} cannot be filled in ({error!r}): change the suite") from None
    match value:
        case str(text) if text.strip():
            return [{"role": "user", "content": text}], 1
        case [str(text), *_] if text.strip():
            return [{"role": "user", "content": text}], len(value)
        case [dict(), *_]:
            return before_answer(value, where), 1
    raise UserError(f"{where}: {template} is no text, no texts and no messages: name another column in the suite")


def _columns(template: str) -> set[str]:
    """The columns that a suite's prompt reads."""
    if "{" not in template:
        return {template}
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    return {re.split(r"[.\[]", name)[0] for name in names}


def _listed(wanted: Any) -> list[Any]:
    return wanted if isinstance(wanted, list) else [wanted]


def _lacks(where: str, missing: list[str], row: dict[str, Any]) -> str:
    return (
        f"{where} has no column {', '.join(map(repr, missing))} (it has {', '.join(row)}): change the suite's columns"
    )


# ---------------------------------------------------------------- as they are, and perturbed


def _forms(
    config: Config,
    suite: str,
    given: list[Prompt],
    notes: list[str],
    perturbations: list[Perturbation],
    rendering: Rendering | None,
    data: dict[str, Any] | None,
    longest: int,
) -> list[Workload]:
    """The workloads of one suite."""
    options = config.evaluate
    chosen, too_long = choose(given, options.num_prompts, longest)
    left_out = dict.fromkeys(too_long, f"more than {longest} tokens")
    found = [Workload(suite, suite, None, chosen, options.temperature, options.top_p, left_out, notes)]
    for perturbation in perturbations:
        name = f"{suite} · {perturbation.name}"
        around = None
        if perturbation.transform is not None:
            assert rendering is not None
            texts = _distractors(config, data, rendering, given) if perturbation.context else []
            around = Around(rendering, config.data.max_length, texts)
        prompts, left_out = _perturbed(perturbation, chosen, around, longest)
        if not prompts:
            raise UserError(
                f"workload {name!r}: none of {len(chosen)} prompts is left "
                f"({'; '.join(sorted(set(left_out.values())))}): leave out this perturbation, or lower evaluate.max_new_tokens"
            )
        temperature = options.temperature if perturbation.temperature is None else perturbation.temperature
        more = [perturbation.meaning]
        same = sum(prompt.ids == before.ids for prompt in prompts for before in chosen if before.id == prompt.id)
        if perturbation.transform is not None and same:
            more.append(f"{same} of {len(prompts)} prompts are the same as without")
        found.append(
            Workload(name, suite, perturbation.name, prompts, temperature, options.top_p, left_out, [*notes, *more])
        )
    return found


def _perturbed(
    perturbation: Perturbation, prompts: list[Prompt], around: Around | None, longest: int
) -> tuple[list[Prompt], dict[str, str]]:
    kept: list[Prompt] = []
    left_out: dict[str, str] = {}
    for prompt in prompts:
        try:
            perturbed = perturbation.apply(prompt, around)
        except UnfitError as error:
            left_out[prompt.id] = str(error)
            continue
        if len(perturbed.ids) > longest:
            left_out[prompt.id] = f"more than {longest} tokens"
        else:
            kept.append(perturbed)
    return kept, left_out


def _distractors(
    config: Config, data: dict[str, Any] | None, rendering: Rendering, given: list[Prompt]
) -> list[Distractor]:
    """Answers of the held-out split, which the drafter has not learnt; without data, the other prompts of the suite."""
    if data is None or not data["splits"]["heldout"]["conversations"]:
        said = [(prompt, (prompt.messages or [{"content": ""}])[-1]["content"]) for prompt in given]
        return [Distractor(tuple(prompt.ids), text) for prompt, text in said]
    from datasets import DatasetDict

    found = []
    for row in DatasetDict.load_from_disk(str(config.data_folder / "dataset"))["heldout"]:
        ids, mask = row["input_ids"], row["loss_mask"]
        answer = [token for token, learnt in zip(ids, mask, strict=True) if learnt]
        text = rendering.decode(answer)
        for token in rendering.special:
            text = text.replace(token, " ")
        found.append(Distractor(tuple(ids[: mask.index(True)]), text))
    return found
