"""Workloads: the held-out prompts and further suites, each as it is and once under every perturbation.

`configs/suite/` has the suites that the field reports.
"""

import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import DatasetDict

from eagle31_train import artifacts
from eagle31_train.config import Config
from eagle31_train.errors import UserError
from eagle31_train.evaluation import perturb
from eagle31_train.evaluation.perturb import Context, Filler, Perturbation
from eagle31_train.evaluation.prompts import Prompt, Suite, choose, files_of, from_heldout, from_suite, suite_of
from eagle31_train.evaluation.rendering import Rendering, UnfitError
from eagle31_train.evaluation.training_data import TrainingSplit
from eagle31_train.evaluation.trajectories import digest

HELDOUT = "heldout"
PROMPTS = "prompts"  # those of evaluate.prompts
LEFT_OUT = "evaluate.leave_out names it"
MEASURED = "acceptance was measured on it during training"
LOOPING = 0.3  # compressed share of a text; of the demo's held-out answers 14 % are under it


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

    @property
    def remarks(self) -> Iterator[str]:
        """Its notes, and what it leaves out."""
        yield from self.notes
        for why in dict.fromkeys(self.left_out.values()):
            ids = [prompt for prompt, reason in self.left_out.items() if reason == why]
            yield f"left out {len(ids)} ({', '.join(ids[:5])}{', …' * (len(ids) > 5)}): {why}"


def workloads(
    config: Config,
    data: dict[str, Any] | None,
    longest: int,
    caveats: Sequence[str] = (),
    measured_on: Collection[str] = (),
) -> list[Workload]:
    """Everything that the configuration wants decoded, the held-out prompts (or evaluate.prompts) first.

    A suite's prompts are chosen as they are, of those that evaluate.leave_out does not name and no training was
    measured on; its perturbed forms are of the same prompts, less those that do not fit.

    Args:
        data: stage 1's manifest; None where there is none, and evaluate.prompts is given.
        longest: tokens that a prompt may have.
        caveats: notes for all of them (`training_data.caveats`).
        measured_on: prompts, as `trajectories.digest` knows them.

    Raises:
        UserError: an unknown suite, perturbation or id to be left out, an unreadable or empty set, or a workload that
            nothing fits.
    """
    perturbations = _perturbations(config)
    suites = _suites(config)
    maker = _Maker(config, data, longest, measured_on)
    sets: dict[str, tuple[list[Prompt], list[str]]] = {}
    if config.evaluate.prompts is None:
        sets[HELDOUT] = maker.heldout(any(perturbation.transform for perturbation in perturbations)), []
    else:
        sets[PROMPTS] = from_suite("", Suite(config.evaluate.prompts), "evaluate.prompts", maker.rendering)
    for name, suite in suites.items():
        sets[name] = from_suite(name, suite, _option(name), maker.rendering)
    known = [prompt.id for prompts, _ in sets.values() for prompt in prompts]
    if unknown := set(config.evaluate.leave_out).difference(known):
        raise UserError(f"evaluate.leave_out has {min(unknown)!r}: ids of prompts are {', '.join(known[:5])}, …")
    made = [
        form for name, (prompts, notes) in sets.items() for form in maker.forms(name, prompts, notes, perturbations)
    ]
    return [replace(one, notes=[*one.notes, *caveats]) for one in made]


def inputs(config: Config) -> dict[str, Any]:
    """What the workloads depend on beside stage 1's data: options, and the contents of files by their hashes."""
    options, target = config.evaluate, config.target
    found: dict[str, Any] = {"perturbations": [perturbation.name for perturbation in _perturbations(config)]}
    if options.leave_out:  # without it, all is as it was before there was such an option
        found["leave_out"] = sorted(set(options.leave_out))
    suites = {_option(name): suite for name, suite in _suites(config).items()}
    if options.prompts is not None:
        suites["evaluate.prompts"] = Suite(options.prompts)
    if suites or options.perturbations:
        found |= {"rendering": artifacts.rendering_fingerprint(target.path), "template_args": target.template_args}
        if target.chat_template is not None:
            found["template"] = artifacts.file_sha256(Path(target.chat_template))[:16]
    if options.perturbations:
        found["max_length"] = config.data.max_length
    for option, suite in suites.items():
        content: Any = suite.path
        if (folder := Path(suite.path)).is_dir():
            content = sorted(file for file in folder.rglob("*") if file.is_file())
        elif not suite.is_hub_id or option == "evaluate.prompts":
            content = files_of(suite.path, option)
        if isinstance(content, list):
            content = [artifacts.file_sha256(file)[:16] for file in content]
        found[option] = {**{key: value for key, value in vars(suite).items() if value}, "path": content}
    return found


def _perturbations(config: Config) -> list[Perturbation]:
    names = config.evaluate.perturbations
    by_name = {perturbation.name: perturbation for perturbation in map(perturb.find, names)}
    if len(by_name) < len(names):
        raise UserError(f"evaluate.perturbations={names} has one of them twice: once is enough")
    return list(by_name.values())


def _suites(config: Config) -> dict[str, Suite]:
    """The suites by name; one that is null leaves out what a recipe has."""
    given = {name: suite for name, suite in config.evaluate.suites.items() if suite is not None}
    for name in given:
        if name in (HELDOUT, PROMPTS) or not re.fullmatch(r"[\w.-]+", name):
            raise UserError(f"evaluate.suites has {name!r}, which is no name for one: choose another, of letters and _")
    return {name: suite_of(name, suite) for name, suite in given.items()}


def _option(suite: str) -> str:
    return f"evaluate.suites.{suite}.path"


@dataclass(frozen=True)
class _Maker:
    """Makes workloads of prompts; what they need of the target and the data is read once, where it is needed."""

    config: Config
    data: dict[str, Any] | None
    longest: int
    measured_on: Collection[str]

    @cached_property
    def rendering(self) -> Rendering:
        return Rendering.load(self.config.target)

    @property
    def has_heldout(self) -> bool:
        # Asked of the manifest: `datasets` saves an empty split and then cannot load it.
        return self.data is not None and self.data["splits"]["heldout"]["conversations"] > 0

    @cached_property
    def training_split(self) -> TrainingSplit | None:
        if self.data is None or not self.data["splits"].get("train", {}).get("conversations"):
            return None
        return TrainingSplit(self.config.data_folder / "dataset")

    def heldout(self, with_messages: bool) -> list[Prompt]:
        """The held-out prompts, with the messages that their tokens say where perturbations are to transform them."""
        if not self.has_heldout:
            raise UserError(
                f"{self.config.data_folder} holds out no prompts: set data.heldout, or evaluate.prompts=FILE"
            )
        return from_heldout(self.config.data_folder / "dataset", self.rendering if with_messages else None)

    def forms(
        self, suite: str, prompts: list[Prompt], notes: list[str], perturbations: list[Perturbation]
    ) -> Iterator[Workload]:
        """A suite as it is, and under each perturbation."""
        options = self.config.evaluate
        named = [prompt for prompt in prompts if prompt.id in options.leave_out]
        texts = {tuple(prompt.ids) for prompt in named}  # which others may have too: a question that was asked twice
        left = [prompt for prompt in prompts if tuple(prompt.ids) not in texts]
        if not left:
            raise UserError(f"evaluate.leave_out names all {len(prompts)} prompts of {suite}: leave out fewer")
        measured = [prompt for prompt in left if digest(prompt.ids) in self.measured_on]
        left = [prompt for prompt in left if prompt not in measured]
        if not left:
            raise UserError(f"{suite}: training was measured on all prompts that are left: give others")
        chosen, too_long = choose(left, options.num_prompts, self.longest)
        left_out = {**{prompt.id: LEFT_OUT for prompt in named}, **{prompt.id: MEASURED for prompt in measured}}
        left_out |= dict.fromkeys(too_long, self._too_long)
        split = self.training_split
        if suite != HELDOUT and split and (known := sum(prompt.ids in split for prompt in chosen)):
            notes = [*notes, f"{known} of {len(chosen)} prompts are in the training data, too"]
        plain = Workload(suite, suite, None, chosen, options.temperature, options.top_p, left_out, notes)
        for one in (plain, *(self._perturbed(plain, prompts, perturbation) for perturbation in perturbations)):
            yield replace(one, notes=[*one.notes, *self._beyond_training(one)])

    def _perturbed(self, plain: Workload, prompts: list[Prompt], perturbation: Perturbation) -> Workload:
        name = f"{plain.suite} · {perturbation.name}"
        notes = [*plain.notes, perturbation.meaning]
        context = None
        if perturbation.transform is not None:
            texts = self._fillers(prompts) if perturbation.length else []
            context = Context(self.rendering, self.config.data.max_length, texts)
        perturbed: list[Prompt] = []
        left_out = {prompt: why for prompt, why in plain.left_out.items() if why in (LEFT_OUT, MEASURED)}
        for prompt in plain.prompts:
            try:
                one = perturbation.apply(prompt, context)
            except UnfitError as error:
                left_out[prompt.id] = str(error)
                continue
            if len(one.ids) > self.longest:
                left_out[prompt.id] = self._too_long
                continue
            perturbed.append(one)
        if not perturbed:
            why = "; ".join(dict.fromkeys(left_out.values()))
            raise UserError(f"{name!r} has none of {len(plain.prompts)} prompts left: {why}; leave it out")
        before = {prompt.id: prompt.ids for prompt in plain.prompts}
        if perturbation.transform and (same := sum(one.ids == before[one.id] for one in perturbed)):
            notes.append(f"{same} of {len(perturbed)} prompts are the same as without it")
        temperature = plain.temperature if perturbation.temperature is None else perturbation.temperature
        return Workload(name, plain.suite, perturbation.name, perturbed, temperature, plain.top_p, left_out, notes)

    def _beyond_training(self, workload: Workload) -> list[str]:
        """A note where prompts with their answers may be longer than any sample that was trained on."""
        longest = max(len(prompt.ids) for prompt in workload.prompts) + self.config.evaluate.max_new_tokens
        if self.training_split is None or longest <= (limit := self.training_split.lengths.max()):
            return []
        return [f"prompts and answers of up to {longest:,} tokens; samples trained on have at most {limit:,}"]

    @property
    def _too_long(self) -> str:
        return f"more than {self.longest} tokens, which is what target and drafter leave beside the answer"

    def _fillers(self, prompts: list[Prompt]) -> list[Filler]:
        """Answers of the held-out split, which no drafter was trained on; without one, the suite's other prompts."""
        if self.has_heldout:
            return self._answers
        return [Filler(tuple(p.ids), p.messages[-1]["content"]) for p in prompts if p.messages]

    @cached_property
    def _answers(self) -> list[Filler]:
        """Answers of the held-out split, less those that end in a loop, as many of small targets do: in front of a
        prompt it would draw the target into one, too."""
        fillers = []
        for row in DatasetDict.load_from_disk(str((self.config.data_folder / "dataset").absolute()))["heldout"]:
            ids, mask = row["input_ids"], row["loss_mask"]
            text = self.rendering.decode([token for token, supervised in zip(ids, mask, strict=True) if supervised])
            for token in self.rendering.special:  # where answers end
                text = text.replace(token, " ")
            if not _loops(text):
                fillers.append(Filler(tuple(ids[: mask.index(True)]), text))
        return fillers


def _loops(text: str) -> bool:
    """Whether a text says the same again and again: prose takes about half its bytes compressed, loops a tenth."""
    data = text.encode()
    return len(zlib.compress(data)) < LOOPING * len(data)
