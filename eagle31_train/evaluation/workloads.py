"""Workloads: the held-out prompts and further suites (`configs/suite/`), each as it is and under every perturbation."""

import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from eagle31_train.common import artifacts
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.config import Config, is_hub_set
from eagle31_train.evaluation import perturb
from eagle31_train.evaluation.perturb import Context, Filler, Perturbation
from eagle31_train.evaluation.prompts import OWN_FORMS, Prompt, Suite, choose, from_heldout, from_suite, suite_of
from eagle31_train.evaluation.sampling import Sampling
from eagle31_train.evaluation.trajectories import digest
from eagle31_train.provenance import LAYOUTS
from eagle31_train.rows import samples
from eagle31_train.rows.files import find_files
from eagle31_train.targets.chat import ChatTemplate, rendered_otherwise
from eagle31_train.targets.description import describe_target

HELDOUT = "heldout"
PROMPTS = "prompts"  # those of evaluate.prompts
SINCE_3 = ("system_prompt", "tools", "history")  # columns that layout 3 of a suite reads, or reads otherwise
MEASURED = "used to measure acceptance during training"
TRAINED_ON = "prompts are in the training data, too"  # the end of a note that belongs beside the numbers themselves
TOO_LONG = "more than the {} tokens that target and drafter leave beside the answer"
LOOPING = 0.3  # compressed share of a text's bytes; 14 % of the demo's held-out answers are below it


@dataclass(frozen=True)
class Workload:
    """Prompts that are reported together, and how they are decoded. left_out: reasons, by id. notes: for readers."""

    name: str
    suite: str
    perturbation: str | None
    prompts: list[Prompt]
    temperature: float
    top_p: float
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    top_k: int | None = None

    def sampling(self, drafts: str) -> Sampling:
        """Return how tokens are chosen. drafts: evaluate.draft_sampling."""
        return Sampling(self.temperature, self.top_p, drafts, self.top_k)

    @property
    def remarks(self) -> Iterator[str]:
        yield from self.notes
        for why in dict.fromkeys(self.left_out.values()):
            ids = [prompt for prompt, reason in self.left_out.items() if reason == why]
            yield f"left out {len(ids)} ({', '.join(ids[:5])}{', …' * (len(ids) > 5)}): {why}"


def workloads(
    config: Config,
    data: dict[str, Any],
    longest: int,
    caveats: Sequence[str] = (),
    measured_on: Collection[str] = (),
) -> list[Workload]:
    """Return all workloads of the configuration, the held-out prompts (or evaluate.prompts) first.

    UserError if one cannot be had. A suite's prompts are chosen in their plain form, from those that no training was
    measured on. Its perturbed forms are of the same prompts, without those that do not fit.

    Args:
        data: stage 1's manifest. longest: tokens that a prompt may have. caveats: notes for all workloads.
        measured_on: prompts, by their `trajectories.digest`.
    """
    options, perturbations, template = config.evaluate, _perturbations(config), ChatTemplate.load(config.target)
    template.check_rows(config.target, describe_target(config.target).vocab_size)
    if change := rendered_otherwise(template, data):
        caveats = [*caveats, f"the target renders or ends conversations otherwise than in training ({change})"]
    # From the manifest: `datasets` saves an empty split and then cannot load it.
    splits = {name for name, split in data["splits"].items() if split["conversations"]}
    dataset = config.data_folder / "dataset"
    sets = _read_sets(config, HELDOUT in splits, perturbations, template)
    trained_on = trained_prompts(dataset) if "train" in splits and sets.keys() != {HELDOUT} else frozenset()
    filled = any(one.filled for one in perturbations)
    answers = _answers(dataset, template) if filled and HELDOUT in splits else None

    chosen = []
    for name, (prompts, notes) in sets.items():
        plain = _plain(name, prompts, config, longest, measured_on)
        if name != HELDOUT and (shared := sum(digest(prompt.ids) in trained_on for prompt in plain.prompts)):
            notes = [*notes, f"{shared} of {len(plain.prompts)} {TRAINED_ON}"]
        plain = replace(plain, notes=[*notes, *caveats])
        # Without a held-out split, contexts are filled with the suite's other prompts.
        others = [Filler(tuple(p.ids), p.messages[-1]["content"]) for p in prompts if p.messages]
        context = Context(template, config.data.max_length, others if answers is None else answers)
        chosen += [plain, *(_perturbed(plain, perturbation, context, longest) for perturbation in perturbations)]
    if "train" in splits:
        limit = longest_sample(dataset)
        for one in chosen:
            needed = max(len(prompt.ids) for prompt in one.prompts) + options.max_new_tokens
            if needed > limit:
                one.notes.append(
                    f"prompts and answers have up to {needed:,} tokens, training's samples up to {limit:,}"
                )
    return chosen


def _read_sets(
    config: Config, held_out: bool, perturbations: Sequence[Perturbation], template: ChatTemplate
) -> dict[str, tuple[list[Prompt], list[str]]]:
    """Return all prompts of each set that is asked for, by its name, with notes for readers."""
    sets: dict[str, tuple[list[Prompt], list[str]]] = {}
    if config.evaluate.prompts is None:
        if not held_out:
            raise UserError(f"{config.data_folder} holds out no prompts: set data.heldout, or evaluate.prompts=FILE")
        rendered_anew = any(one.transform for one in perturbations)
        sets[HELDOUT] = from_heldout(config.data_folder / "dataset", template if rendered_anew else None), []
    for name, (option, suite) in _suites(config).items():
        prompts, notes = from_suite("" if name == PROMPTS else name, suite, option, template)
        if again := len(prompts) - len({tuple(prompt.ids) for prompt in prompts}):
            notes.append(f"{again} of {len(prompts)} prompts are repeats, and count once")
        sets[name] = prompts, notes
    return sets


def inputs(config: Config) -> dict[str, Any]:
    """Return what the workloads depend on besides stage 1's data: options, and hashes of the contents of files."""
    options, target = config.evaluate, config.target
    facts: dict[str, Any] = {"perturbations": [perturbation.name for perturbation in _perturbations(config)]}
    suites = _suites(config)
    if suites or options.perturbations:
        facts |= {"rendering": artifacts.rendering_fingerprint(target.path), "template_args": target.template_args}
        if target.chat_template is not None:
            facts["template"] = artifacts.file_sha256(Path(target.chat_template))[:16]
    if options.perturbations:
        facts["max_length"] = config.data.max_length
    for option, suite in suites.values():
        content: Any = suite.path
        own_form = suite.prompt is None or suite.prompt in OWN_FORMS
        layout = LAYOUTS["suite"] if own_form or suite.tools else 2
        if not is_hub_set(suite.path):
            folder = Path(suite.path)
            files = sorted(folder.rglob("*")) if folder.is_dir() else [f for _, f in find_files(suite.path, option)]
            files = [file for file in files if file.is_file()]
            content = [artifacts.file_sha256(file)[:16] for file in files]
            layout = max(map(_layout, files), default=1)
        facts[option] = {**{key: value for key, value in vars(suite).items() if value}, "path": content}
        if layout > 1:
            facts[option]["layout"] = layout
    return facts


def asked(config: Config) -> dict[str, str]:
    """Return the names of the workloads, and a fingerprint of the set that each one's prompts are from."""
    facts, sets = inputs(config), {HELDOUT: ""} if config.evaluate.prompts is None else {}
    sets |= {name: artifacts.fingerprint(facts[option]) for name, (option, _) in _suites(config).items()}
    forms = [None, *(one.name for one in _perturbations(config))]
    return {_named(suite, form): prompts for suite, prompts in sets.items() for form in forms}


def _named(suite: str, perturbation: str | None) -> str:
    return f"{suite} · {perturbation}" if perturbation else suite


def _layout(file: Path) -> int:
    """Return the earliest layout of suites that reads a file's rows as the newest does, so that what was measured on
    them stays up to date."""
    content = file.read_bytes()
    key = r'"%s"\s*:' if file.suffix in (".json", ".jsonl") else "%s"
    columns = {name for name in (*OWN_FORMS, *SINCE_3) if re.search((key % name).encode(), content)}
    if file.suffix == ".gz" or len(columns & {*OWN_FORMS}) > 1 or columns & {*SINCE_3}:
        return LAYOUTS["suite"]
    return 2 if re.search(b"system|developer", content) else 1


def trained_prompts(dataset: Path) -> frozenset[str]:
    """Return the `trajectories.digest` of what precedes the first answer in each sample of the training split."""
    return frozenset(digest(ids[: mask.argmax()].tolist()) for ids, mask in samples.masked(dataset, "train"))


def longest_sample(dataset: Path) -> int:
    longest: int = pc.max(pc.list_value_length(samples.load(dataset, "train").data["input_ids"])).as_py()
    return longest


def _perturbations(config: Config) -> list[Perturbation]:
    return list({one.name: one for one in map(perturb.find, config.evaluate.perturbations)}.values())


def _suites(config: Config) -> dict[str, tuple[str, Suite]]:
    """Return suites by name, with the option that says where each is. A null suite removes one that a recipe has."""
    options = config.evaluate
    suites = {} if options.prompts is None else {PROMPTS: ("evaluate.prompts", Suite(options.prompts))}
    for name, given in options.suites.items():
        if name in (HELDOUT, PROMPTS) or not re.fullmatch(r"[\w.-]+", name):
            raise UserError(f"evaluate.suites cannot have the name {name!r}: choose another, of letters and _")
        if given is not None:
            suites[name] = f"evaluate.suites.{name}.path", suite_of(name, given)
    return suites


def _plain(suite: str, prompts: list[Prompt], config: Config, longest: int, measured_on: Collection[str]) -> Workload:
    options = config.evaluate
    left_out = {prompt.id: MEASURED for prompt in prompts if digest(prompt.ids) in measured_on}
    left = [prompt for prompt in prompts if prompt.id not in left_out]
    if not left:
        raise UserError(f"{suite}: acceptance was measured on all these prompts during training: use others")
    chosen, too_long = choose(left, options.num_prompts, longest)
    left_out |= dict.fromkeys(too_long, TOO_LONG.format(longest))
    return Workload(suite, suite, None, chosen, options.temperature, options.top_p, left_out, top_k=options.top_k)


def _perturbed(plain: Workload, perturbation: Perturbation, context: Context, longest: int) -> Workload:
    name = _named(plain.suite, perturbation.name)
    perturbed: list[Prompt] = []
    left_out = {prompt: why for prompt, why in plain.left_out.items() if why == MEASURED}
    for prompt in plain.prompts:
        try:
            one = perturbation.apply(prompt, context)
        except Refused as error:
            left_out[prompt.id] = str(error)
            continue
        if len(one.ids) > longest:
            left_out[prompt.id] = TOO_LONG.format(longest)
        else:
            perturbed.append(one)
    if not perturbed:
        why = "; ".join(dict.fromkeys(left_out[prompt.id] for prompt in plain.prompts))
        raise UserError(f"{name!r} has none of {len(plain.prompts)} prompts left ({why}): remove it")
    notes = [*plain.notes, perturbation.meaning]
    before = {prompt.id: prompt.ids for prompt in plain.prompts}
    if perturbation.transform and (same := sum(one.ids == before[one.id] for one in perturbed)):
        notes.append(f"{same} of {len(perturbed)} prompts are the same as without it")
    temperature = plain.temperature if perturbation.temperature is None else perturbation.temperature
    return replace(
        plain,
        name=name,
        perturbation=perturbation.name,
        prompts=perturbed,
        temperature=temperature,
        left_out=left_out,
        notes=notes,
    )


def _answers(dataset: Path, template: ChatTemplate) -> list[Filler]:
    """Return answers of the held-out split, without those that end in a loop: they would draw the target into one."""
    fillers = []
    for row in samples.load(dataset, HELDOUT):
        ids, mask = row["input_ids"], row["loss_mask"]
        text = template.decode([token for token, supervised in zip(ids, mask, strict=True) if supervised])
        for token in template.special:  # such as the end of an answer
            text = text.replace(token, " ")
        # Compressed, prose takes about half its bytes, loops a tenth.
        if len(zlib.compress(text.encode())) >= LOOPING * len(text.encode()):
            fillers.append(Filler(tuple(ids[: mask.index(True)]), text))
    return fillers
