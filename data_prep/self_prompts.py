"""Prompts that the target writes itself: it goes on from its chat template where a user would speak.

The method is Magpie's (arXiv 2406.08464). A chat model that is given its template up to the user's words, and nothing
else, writes what a user might say, and ends it with the token that ends a user's turn, or with the text that stands
there in formats without such a token. So a drafter can be made of a target's name alone. Later turns are written in the
same way after an answer of the target's.

What was written is filtered, and every refusal is counted (`Written`). It goes to `run_dir/prompts.jsonl`, one prompt a
line, and from there on is a file of prompts like any other. A journal keeps each text as soon as it exists, and every
text has its own seed, so a killed run goes on and ends in the same file.
"""

import json
import re
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from data_prep.answers import NO_CHARACTER, Job, Local, Remote
from data_prep.formats import Message, Refused, Row
from data_prep.journal import Answer, Journal
from data_prep.template import ChatTemplate
from eagle31_train import artifacts
from eagle31_train.config import SELF, Config
from eagle31_train.console import Progress, note
from eagle31_train.errors import UserError
from eagle31_train.provenance import Provenance

OUTPUT = "prompts.jsonl"
MARK = "\u2603 the user's words \u2603"  # put where a user speaks, to see what the template writes around it
MOST_TRIES = 4  # for each prompt that is wanted
REPETITIVE = 0.15  # zlib's size of a text of words that come again and again, as a share of the text's


@dataclass
class Written:
    """One conversation's prompts on their way.

    number: of the try, which seeds its draws. kind: the name of its system prompt, "" without one.
    """

    number: int
    kind: str
    messages: list[Message] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)


def write_prompts(config: Config, template: ChatTemplate) -> Path:
    """Have the target write `data.self_prompts.count` prompts; returns `run_dir/prompts.jsonl`.

    Raises:
        UserError: the template writes nothing after a user's words, or too few texts are of use.
    """
    output = Path(config.run_dir) / OUTPUT
    stop = user_stop(template)
    settings = _settings(config, template)
    made_from = Provenance(settings)
    journal = Journal(output)
    if journal.finished(made_from, config.overwrite):
        note(f"prompts: {output} is up to date")
        return output
    with journal:
        # How many are wanted changes none of them: the journal's texts serve another count, too.
        texts = artifacts.fingerprint({**settings, "count": None})
        writer = Writer(config, template, stop, journal, texts)
        done = writer.write()
        lines = [
            {"id": f"{SELF}-{one.number:06}", **({"kind": one.kind} if one.kind else {}), "turns": one.turns}
            for one in done
        ]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        turns = sum(len(one.turns) for one in done)
        journal.finish(text, made_from, prompts=len(done), turns=turns, refused=dict(writer.refused))
    refused = ", ".join(f"{count} {reason}" for reason, count in writer.refused.most_common()) or "none"
    note(f"prompts: the target wrote {len(done):,} prompts of {turns:,} turns in {output}")
    note(f"prompts: refused: {refused}")
    return output


def user_stop(template: ChatTemplate) -> int | str:
    """What ends a user's turn: a token; of templates without one, the text before the answer, such as "[/INST]".

    Raises:
        UserError: the template writes nothing there, so nobody could tell where the user stops.
    """
    after = template.render([{"role": "user", "content": MARK}], add_generation_prompt=True).partition(MARK)[2]
    first = template.encode(after)[:1]
    if first and first[0] in template.added:
        return first[0]
    if not after.strip():
        raise UserError(
            "data.prompts=self needs a chat template that writes something after a user's words, and this one "
            f"writes {after!r} there: give prompts as data.prompts=FILE"
        )
    return after.strip().splitlines()[0]


def problem_of(text: str, seen: set[str]) -> str | None:
    """Why a text is of no use as a prompt; None if it is. `seen`: the prompts before it, as `_alike` makes them."""
    if not re.search(r"\w\W*\w", text):
        return "empty"
    if NO_CHARACTER in text:
        return "bytes that are no text"
    data = text.encode()
    if len(data) > 200 and len(zlib.compress(data)) < REPETITIVE * len(data):
        return "repeats itself"
    return "written before" if _alike(text) in seen else None


def _alike(text: str) -> str:
    """Two texts that differ in case, spaces and punctuation alone are one."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def _settings(config: Config, template: ChatTemplate) -> dict[str, Any]:
    """All that the prompts depend on."""
    generate = config.data.generate
    weights: Any = {"server": generate.model or config.target.path}
    if not generate.server:
        weights = {"dtype": config.target.dtype, "weights": artifacts.weights_fingerprint(config.target.path)}
    later = {"answers": [generate.max_new_tokens, generate.temperature, generate.top_p]}
    options = asdict(config.data.self_prompts)
    return {
        "layout": 2,
        "target": config.target.name,
        **weights,
        **template.fingerprints(),
        "seed": config.seed,
        **options,
        **(later if options["turns"] > 1 else {}),
    }


class Writer:
    """Writes conversations' prompts, turn by turn."""

    def __init__(
        self, config: Config, template: ChatTemplate, stop: int | str, journal: Journal, fingerprint: str
    ) -> None:
        self.config, self.template, self.journal, self.fingerprint = config, template, journal, fingerprint
        self.options = config.data.self_prompts
        self.stops = [*([stop] if isinstance(stop, int) else []), *template.end_ids]
        self.stop_text = stop if isinstance(stop, str) else None
        self.kinds = sorted(self.options.system.items()) or [("", "")]
        self.refused: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.engine = Remote(config, template) if config.data.generate.server else Local(config, template)

    def write(self) -> list[Written]:
        """As many conversations as are wanted.

        Raises:
            UserError: too many texts are of no use.
        """
        wanted, tries = self.options.count, MOST_TRIES * self.options.count
        done: list[Written] = []
        numbers = iter(range(tries))
        # Of texts, since all prompts of a batch are judged together; how many it takes is known better and better.
        with Progress(total=wanted * self.options.turns, desc="prompts", unit="text") as self.bar:
            # A batch larger than the engine's, so that texts of like length share one; as many as may be missing.
            while len(done) < wanted and (batch := list(islice(numbers, max(self.engine.at_once, wanted - len(done))))):
                for one in self._turns([self._begin(number) for number in batch]):
                    if len(done) < wanted:
                        done.append(one)
                if done:
                    self.bar.total = max(self.bar.n, round(self.bar.n * wanted / len(done)))
        if len(done) < wanted:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.most_common(3))
            raise UserError(
                f"the target wrote {len(done)} prompts of use in {tries} tries ({reasons}): is it a chat model? Ask "
                "for fewer with data.self_prompts.count, or give prompts as data.prompts=FILE"
            )
        return done

    def _begin(self, number: int) -> Written:
        kind, system = self.kinds[number % len(self.kinds)]
        return Written(number, kind, [{"role": "system", "content": system}] if system else [])

    def _turns(self, tries: list[Written]) -> list[Written]:
        """Write every turn of some tries; those whose first one is of use, in their order."""
        going = tries
        for turn in range(self.options.turns):
            if turn:
                going = self._answered(going)
            for one, written in zip(going, self._texts(going), strict=True):
                text = written.message["content"].strip()
                problem = "not ended" if written.finish_reason == "length" else problem_of(text, self.seen)
                if problem:
                    self.refused[problem if not turn else f"{problem} (a later turn)"] += 1
                    continue
                self.seen.add(_alike(text))
                one.turns.append(text)
                one.messages.append({"role": "user", "content": text})
            going = [one for one in going if len(one.turns) == turn + 1]
        return [one for one in tries if one.turns]

    def _texts(self, going: list[Written]) -> list[Answer]:
        """The user's next words in each conversation, from the journal or the target."""
        keys = [f"{self.fingerprint}-{one.number}-{len(one.turns)}" for one in going]
        requests: dict[str, tuple[list[int], int]] = {}
        for key, one in zip(keys, going, strict=True):
            if key not in self.journal.answers:
                prompt = self._prompt(one)
                seed = artifacts.fingerprint([self.config.seed, one.number, len(prompt)])
                requests[key] = prompt, int(seed[:8], 16)
        self.bar.update(len(keys) - len(requests))
        for key, text, reason in self.engine.write(requests, self.options, self.stops, self.stop_text):
            self.journal.add(key, Answer({"role": "user", "content": text}, reason, 0))
            self.bar.update()
        return [self.journal.answers[key] for key in keys]

    def _prompt(self, one: Written) -> list[int]:
        """Token ids up to where the user speaks. A space before that is the first word's: tokens begin with theirs."""
        messages = [*self.template.history(one.messages), {"role": "user", "content": MARK}]
        return self.template.encode(self.template.render(messages).partition(MARK)[0].rstrip(" "))

    def _answered(self, going: list[Written]) -> list[Written]:
        """The target's answers to what it wrote, before it writes what the user says next."""
        temperature = self.config.data.generate.temperature
        jobs: dict[str, Job] = {}
        for one in going:
            row = Row(f"{SELF}-{one.number:06}", "", "", one.messages)
            key = f"{self.fingerprint}-{one.number}-{len(one.turns)}-answer"
            jobs[key] = Job(row, 0, temperature, [], list(one.messages))
        missing = {key: job for key, job in jobs.items() if key not in self.journal.answers}
        for key, answer in self.engine.answers(missing):
            if not isinstance(answer, Refused):
                self.journal.add(key, answer)
        answered = {key: one for key, one in zip(jobs, going, strict=True) if key in self.journal.answers}
        for key, one in answered.items():
            one.messages.append(self.journal.answers[key].message)
        return list(answered.values())
