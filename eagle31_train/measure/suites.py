"""Workloads: the held-out prompts and further suites, each as it is and once under every perturbation.

`configs/suite/` has the suites that the field reports.
"""

import difflib
import re
import shlex
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from datasets import DatasetDict

from eagle31_train import artifacts
from eagle31_train.measure import perturb
from eagle31_train.measure.learnt import Learnt
from eagle31_train.measure.perturb import Around, Distractor, Perturbation
from eagle31_train.measure.prompts import Prompt, choose, files_of, from_heldout
from eagle31_train.measure.rendering import Rendering, UnfitError
from eagle31_train.measure.sets import Suite, read, suite_of
from eagle31_train.schema import Config, UserError

HELDOUT = "heldout"
PROMPTS = "prompts"  # those of evaluate.prompts
NAMED_OUT = "evaluate.leave_out names it"
NO_TEXTS = ("null", "true", "false", "nan", "inf")  # words that Hydra reads otherwise
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


def workloads(config: Config, data: dict[str, Any] | None, longest: int, doubts: Sequence[str] = ()) -> list[Workload]:
    """Everything that the configuration wants decoded, the held-out prompts (or evaluate.prompts) first.

    A suite's prompts are chosen as they are, of those that evaluate.leave_out does not name; its perturbed forms are
    of the same prompts, less those that do not fit.

    Args:
        config: says which.
        data: stage 1's manifest; None where there is none, and evaluate.prompts is given.
        longest: tokens that a prompt may have.
        doubts: what a reader of any of their numbers should know of the drafters (`learnt.doubts`).

    Raises:
        UserError: an unknown suite, perturbation or id to be left out, an unreadable or empty set, or a workload that
            nothing fits.
    """
    perturbations = _perturbations(config)
    suites = _suites(config)
    maker = _Maker(config, data, longest)
    sets: dict[str, tuple[list[Prompt], list[str]]] = {}
    if config.evaluate.prompts is None:
        sets[HELDOUT] = maker.heldout(any(perturbation.transform for perturbation in perturbations)), []
    else:
        sets[PROMPTS] = read("", Suite(config.evaluate.prompts), "evaluate.prompts", maker.rendering)
    for name, suite in suites.items():
        sets[name] = read(name, suite, _option(name), maker.rendering)
    _refuse_unknown(config.evaluate.leave_out, [prompt.id for prompts, _ in sets.values() for prompt in prompts])
    found = [
        form for name, (prompts, notes) in sets.items() for form in maker.forms(name, prompts, notes, perturbations)
    ]
    return [replace(one, notes=[*one.notes, *doubts]) for one in found]


def leaving_out(ids: Iterable[str]) -> str:
    """The option that leaves out these prompts, as a shell takes it."""
    return shlex.quote(f"evaluate.leave_out=[{','.join(map(_word, ids))}]")


def _word(text: str) -> str:
    """A text in Hydra's grammar: bare where nothing else can be read into it, else in the quotes that shells leave."""
    if re.fullmatch(r"[A-Za-z_][\w./-]*", text, re.ASCII) and text.lower() not in NO_TEXTS:
        return text
    # Hydra takes a backslash for itself, except before a quote.
    escaped = re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), text)
    return f'"{escaped}"'


def _refuse_unknown(wanted: list[str], known: list[str]) -> None:
    """UserError where an id that is to be left out is no prompt's."""
    for name in wanted:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known[:5])}, …"
            raise UserError(f"evaluate.leave_out has {name!r}, which is the id of no prompt: {hint}")


def inputs(config: Config) -> dict[str, Any]:
    """What the workloads depend on beside stage 1's data: options, and the contents of files by their hashes."""
    found: dict[str, Any] = {"perturbations": [perturbation.name for perturbation in _perturbations(config)]}
    if config.evaluate.leave_out:  # without it, all is as it was before there was such an option
        found["leave_out"] = sorted(set(config.evaluate.leave_out))
    suites = {_option(name): suite for name, suite in _suites(config).items()}
    if config.evaluate.prompts is not None:
        suites["evaluate.prompts"] = Suite(config.evaluate.prompts)
    if suites or found["perturbations"]:
        found["rendering"] = artifacts.rendering_fingerprint(config.target.path)
        found["template_args"] = config.target.template_args
        if config.target.chat_template is not None:
            found["template"] = artifacts.file_sha256(Path(config.target.chat_template))[:16]
    if found["perturbations"]:
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
    found = {perturbation.name: perturbation for perturbation in map(perturb.find, names)}
    if len(found) < len(names):
        raise UserError(f"evaluate.perturbations={names} has one of them twice: once is enough")
    return list(found.values())


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

    @cached_property
    def rendering(self) -> Rendering:
        return Rendering.load(self.config.target)

    @property
    def has_heldout(self) -> bool:
        # Asked of the manifest: `datasets` saves an empty split and then cannot load it.
        return self.data is not None and self.data["splits"]["heldout"]["conversations"] > 0

    def heldout(self, with_messages: bool) -> list[Prompt]:
        """The held-out prompts, with the messages that their tokens say where perturbations are to transform them."""
        if not self.has_heldout:
            raise UserError(
                f"{self.config.data_folder} holds out no prompts (data.heldout=0): set data.heldout and run "
                "`python -m data_prep` again, or set evaluate.prompts=FILE"
            )
        return from_heldout(self.config.data_folder / "dataset", self.rendering if with_messages else None)

    def forms(
        self, suite: str, given: list[Prompt], notes: list[str], perturbations: list[Perturbation]
    ) -> list[Workload]:
        """A suite as it is, and under each perturbation."""
        options = self.config.evaluate
        named = [prompt for prompt in given if prompt.id in options.leave_out]
        words = {tuple(prompt.ids) for prompt in named}  # which others may have too: a question that was asked twice
        left = [prompt for prompt in given if tuple(prompt.ids) not in words]
        if not left:
            raise UserError(f"evaluate.leave_out names all {len(given)} prompts of {suite}: leave out fewer")
        chosen, too_long = choose(left, options.num_prompts, self.longest)
        left_out = {**{prompt.id: NAMED_OUT for prompt in named}, **dict.fromkeys(too_long, self._too_long)}
        if suite != HELDOUT and self._learnt and (known := sum(prompt.ids in self._learnt for prompt in chosen)):
            notes = [*notes, f"{known} of {len(chosen)} prompts are in the training data, too"]
        found = [Workload(suite, suite, None, chosen, options.temperature, options.top_p, left_out, notes)]
        for perturbation in perturbations:
            one = self._perturbed(found[0], given, perturbation)
            same = next((other.name for other in found if _says(other) == _says(one)), None)
            found.append(
                one if same is None else replace(one, notes=[*one.notes, f"the same as {same}, token for token"])
            )
        return [replace(one, notes=[*one.notes, *self._beyond_training(one)]) for one in found]

    def _perturbed(self, plain: Workload, given: list[Prompt], perturbation: Perturbation) -> Workload:
        name = f"{plain.suite} · {perturbation.name}"
        notes = [*plain.notes, perturbation.meaning]
        around = None
        if perturbation.transform is not None:
            texts = self._distractors(given) if perturbation.context else []
            around = Around(self.rendering, self.config.data.max_length, texts)
            wanted = perturbation.context(self.config.data.max_length) if perturbation.context else 0
            if (there := self._tokens(texts, wanted)) < wanted:
                notes.append(f"the other texts have {there} tokens, which are repeated to fill {wanted}")
        prompts: list[Prompt] = []
        left_out: dict[str, str] = {}
        same = 0
        for prompt in plain.prompts:
            try:
                perturbed = perturbation.apply(prompt, around)
            except UnfitError as error:
                left_out[prompt.id] = str(error)
                continue
            if len(perturbed.ids) > self.longest:
                left_out[prompt.id] = self._too_long
                continue
            prompts.append(perturbed)
            same += perturbed.ids == prompt.ids
        if not prompts:
            why = "; ".join(dict.fromkeys(left_out.values()))
            raise UserError(f"{name!r} has none of {len(plain.prompts)} prompts left: {why}; leave it out")
        if perturbation.transform is not None:
            if 0 < same < len(prompts):
                notes.append(f"{same} of {len(prompts)} prompts are the same as without it")
            before = [prompt for prompt in plain.prompts if prompt.id not in left_out]
            notes += perturbation.remarks(before, prompts, self.rendering)
        left_out |= {prompt: why for prompt, why in plain.left_out.items() if why == NAMED_OUT}
        temperature = plain.temperature if perturbation.temperature is None else perturbation.temperature
        return Workload(name, plain.suite, perturbation.name, prompts, temperature, plain.top_p, left_out, notes)

    @cached_property
    def _learnt(self) -> Learnt | None:
        """What drafters learn from, where there is such data."""
        if self.data is None or not self.data["splits"].get("train", {}).get("conversations"):
            return None
        return Learnt(self.config.data_folder / "dataset")

    def _beyond_training(self, workload: Workload) -> list[str]:
        """A note where prompts with their answers may be longer than anything that was trained on, which
        data.max_length does not tell: samples may all be far shorter."""
        if self._learnt is None:
            return []
        found, lengths = [len(prompt.ids) for prompt in workload.prompts], self._learnt.lengths
        longest, more = lengths.max(), self.config.evaluate.max_new_tokens
        if max(found) + more <= longest:
            return []
        many = "–".join(f"{length:,}" for length in dict.fromkeys((min(found), max(found))))
        median = int(np.median(lengths))
        told = f"the longest sample trained on has {longest:,}, the median {median:,}"
        return [f"prompts of {many} tokens and up to {more:,} more: {told}"]

    @property
    def _too_long(self) -> str:
        return f"more than {self.longest} tokens, which is what target and drafter leave beside the answer"

    def _tokens(self, texts: list[Distractor], enough: int) -> int:
        """How many tokens texts have; none is counted once there are enough."""
        count = 0
        for text in texts:
            if count >= enough:
                break
            count += len(self.rendering.encode(text.text))
        return count

    def _distractors(self, given: list[Prompt]) -> list[Distractor]:
        """Answers of the held-out split, which the drafter has not learnt; without one, the suite's other prompts."""
        if self.has_heldout:
            return self._answers
        return [Distractor(tuple(p.ids), p.messages[-1]["content"]) for p in given if p.messages]

    @cached_property
    def _answers(self) -> list[Distractor]:
        """Answers of the held-out split, less those that end in a loop, as many of small targets do: in front of a
        prompt it would draw the target into one, too."""
        found = []
        for row in DatasetDict.load_from_disk(str(self.config.data_folder / "dataset"))["heldout"]:
            ids, mask = row["input_ids"], row["loss_mask"]
            text = self.rendering.decode([token for token, learnt in zip(ids, mask, strict=True) if learnt])
            for token in self.rendering.special:  # where answers end
                text = text.replace(token, " ")
            if not _loops(text):
                found.append(Distractor(tuple(ids[: mask.index(True)]), text))
        return found


def _says(workload: Workload) -> tuple[list[list[int]], float]:
    return [prompt.ids for prompt in workload.prompts], workload.temperature


def _loops(text: str) -> bool:
    """Whether a text says the same again and again: prose takes about half its bytes compressed, loops a tenth."""
    data = text.encode()
    return len(zlib.compress(data)) < LOOPING * len(data)
