"""Prompts that the target writes itself (Magpie, arXiv 2406.08464): it continues its chat template where a user would
speak, up to the token, or text, that ends a user's turn. Later turns are written in the same way, after an answer.

Usable prompts go to `run_dir/prompts.jsonl`, a file of prompts like any other; refusals are counted. A journal gets
each text as soon as it exists, and every text has its own seed, so a killed run ends in the same file when repeated.
"""

import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from data_prep.answers import Engine, Job, engine, target_inputs
from data_prep.journal import Answer, Journal
from data_prep.own_server import OwnServer
from data_prep.written import check_goes_on
from eagle31_train.common import artifacts
from eagle31_train.common.console import Progress, note
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.config import SELF, SELF_WRITTEN, Config
from eagle31_train.provenance import Provenance
from eagle31_train.rows.formats import Row
from eagle31_train.rows.messages import Message
from eagle31_train.targets.chat import USER, ChatTemplate
from eagle31_train.targets.completions import Request

NO_CHARACTER = "\ufffd"  # what bytes that are not a character decode to
MOST_TRIES = 4  # per prompt that is wanted
Stop = tuple[int | None, str | None]  # what ends a user's turn: a token, and a text
REPETITIVE = 0.15  # a text that zlib compresses to less than this share of its size repeats itself


@dataclass
class Attempt:
    """A prompt in progress: what the target has written, turn by turn, and the messages that it continues."""

    number: int  # seeds its draws
    kind: str  # the name of its system prompt, "" without one
    messages: list[Message] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)


def write_prompts(config: Config, template: ChatTemplate, own: OwnServer | None = None) -> Path:
    """Have the target write `data.self_prompts.count` prompts. Return `run_dir/prompts.jsonl`."""
    output = Path(config.run_dir) / SELF_WRITTEN
    stop = user_stop(template)
    generate, options = config.data.generate, asdict(config.data.self_prompts)
    settings = {"layout": 2, **target_inputs(config, template, "server"), **options}
    if options["turns"] > 1:
        top_k = [generate.top_k] if generate.top_k else []
        settings["answers"] = [generate.max_new_tokens, generate.temperature, generate.top_p, *top_k]
    made_from = Provenance(settings, options={name: f"data.self_prompts.{name}" for name in options})
    journal = Journal(output)
    if journal.finished(made_from, config.overwrite):
        note(f"prompts: {output} is up to date")
        return output
    with journal:
        hint = "; set data.prompts=FILE to use yours" if config.data.prompts == SELF else ""
        note(f"prompts: the target writes {options['count']:,} prompts itself{hint}")
        # The count changes none of the prompts: the journal's texts serve another count, too.
        fingerprint = artifacts.fingerprint({**settings, "count": None})
        writer = Writer(config, template, stop, journal, fingerprint, engine(config, template, own))
        journal.check_wanted(lambda key: key.startswith(writer.fingerprint), config.overwrite)
        written = writer.write()
        lines = [
            {"id": f"{SELF}-{one.number:06}", **({"kind": one.kind} if one.kind else {}), "turns": one.turns}
            for one in written
        ]
        rows = (json.dumps(line, ensure_ascii=False) for line in lines)
        turns = sum(len(one.turns) for one in written)
        journal.finish(rows, made_from, prompts=len(written), turns=turns, refused=dict(writer.refused))
    note(f"prompts: the target wrote {len(written):,} prompts ({turns:,} turns) in {output}")
    note(f"prompts: refused: {_counted(writer.refused) or 'none'}")
    return output


def user_stop(template: ChatTemplate) -> Stop:
    """Return what ends a user's turn: the first added token that the template writes after the user's words, and the
    text before that token, such as "[/INST]". Each is None if the template does not write it."""
    after = template.render([USER], add_generation_prompt=True).partition(USER["content"])[2]
    if not after.strip():
        needs = "data.prompts=self needs a chat template that writes something after a user's text"
        raise UserError(f"{needs}, not {after!r}: set data.prompts=FILE instead")
    ids = template.encode(after)
    place = next((n for n, token in enumerate(ids) if template.added.get(token, "").strip()), len(ids))
    lines = template.decode(ids[:place]).strip().splitlines()
    return next(iter(ids[place:]), None), next(iter(lines), None)


def problem_of(text: str, seen: set[str], special: Collection[str]) -> str:
    """Return why a text is no prompt, or "". `seen`: earlier ones by `_alike`; `special`: tokens that no user types."""
    if not re.search(r"\w\W*\w", text):
        return "empty"
    if NO_CHARACTER in text:
        return "bytes that are not text"
    if any(token in text for token in special):
        return "special tokens"
    data = text.encode()
    if len(data) > 200 and len(zlib.compress(data)) < REPETITIVE * len(data):
        return "repeats itself"
    return "written before" if _alike(text) in seen else ""


def _alike(text: str) -> str:
    """Return a form that is the same for texts that differ only in case, spaces and punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def _counted(refused: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in refused.most_common())


class Writer:
    def __init__(
        self,
        config: Config,
        template: ChatTemplate,
        stop: Stop,
        journal: Journal,
        fingerprint: str,
        target: Engine,
    ) -> None:
        self.config, self.template, self.journal, self.fingerprint = config, template, journal, fingerprint
        self.engine = target
        self.options = config.data.self_prompts
        token, self.stop_text = stop
        self.stops = [*([] if token is None else [token]), *template.end_ids]
        self.kinds = sorted(self.options.system.items()) or [("", "")]
        self.refused: Counter[str] = Counter()
        self.seen: set[str] = set()

    def write(self) -> list[Attempt]:
        """Write as many conversations as are wanted; UserError if too many texts are of no use."""
        wanted, tries = self.options.count, MOST_TRIES * self.options.count
        done: list[Attempt] = []
        numbers = iter(range(tries))
        # The journal's texts come all at once, and do not count for the rate (see `_turns`).
        with Progress(total=wanted * self.options.turns, desc="prompts", unit="text", smoothing=0) as self.bar:
            self.engine.started = self.bar.unpause
            tried = 0
            while len(done) < wanted and tried < tries:
                # Try as many as are probably needed in one batch: each batch waits for its longest text.
                probably = math.ceil((wanted - len(done)) * max(1, tried) / max(1, len(done)))
                batch = list(islice(numbers, max(self.engine.at_once, probably)))
                self.bar.total = self.bar.n + len(batch) * self.options.turns
                done += self._turns(list(map(self._begin, batch)))
                tried += len(batch)
                self.bar.set_postfix_str(f"{len(done):,} of {wanted:,} usable", refresh=False)
        if len(done) < wanted:
            few = f"the target wrote only {len(done)} usable prompts in {tries} tries ({_counted(self.refused)})"
            raise UserError(
                f"{few}: is it a chat model? Raise data.self_prompts.max_new_tokens if most did not end, lower "
                "data.self_prompts.count, or set data.prompts=FILE"
            )
        return done[:wanted]

    def _begin(self, number: int) -> Attempt:
        kind, system = self.kinds[number % len(self.kinds)]
        return Attempt(number, kind, [{"role": "system", "content": system}] if system else [])

    def _turns(self, tries: list[Attempt]) -> list[Attempt]:
        """Write every turn of some tries. Return those whose first turn is of use, in their order."""
        going = tries
        for turn in range(self.options.turns):
            if turn:
                going = self._answered(going)
            keys = {f"{self.fingerprint}-{one.number}-{turn}": one for one in going}
            requests = {key: self._request(one) for key, one in keys.items()}
            ask = partial(self.engine.write, self.options, self.stops, self.stop_text)
            texts = {}
            self.bar.initial += len(requests.keys() & self.journal.answers.keys())
            for key, outcome in self.journal.outcomes(requests, ask):
                texts[key] = outcome
                self.bar.update()
            going = [one for key, one in keys.items() if self._takes(one, texts[key])]
        return [one for one in tries if one.turns]

    def _takes(self, one: Attempt, outcome: Answer | Refused) -> bool:
        """Add what the target wrote to a try, or count why it is of no use. Return whether the try goes on."""
        if isinstance(outcome, Refused):
            text, problem = "", str(outcome)
        else:
            text = outcome.message["content"].strip()
            problem = "not ended" if outcome.finish_reason == "length" else self._problem(text, one)
        if problem:
            self.refused[f"{problem} (a later turn)" if one.turns else problem] += 1
            return False
        if not one.turns:
            self.seen.add(_alike(text))
        one.turns.append(text)
        one.messages.append({"role": "user", "content": text})
        return True

    def _problem(self, text: str, one: Attempt) -> str:
        # Compare a later turn with its own conversation alone: which others are there depends on the batch.
        seen = set(map(_alike, one.turns)) or self.seen
        return problem_of(text, seen, self.template.special)

    def _request(self, one: Attempt) -> Request:
        """Return the token ids up to where the user speaks. A space before that is left out: it is the first word's."""
        messages = [*self.template.history(one.messages), USER]
        try:
            text = self.template.render(messages)
        except Refused as error:  # Gemma's takes no system turn
            if self.options.system:
                raise UserError(f"data.self_prompts.system: {error}: remove it") from None
            raise UserError(f"data.prompts=self: {error}: set data.prompts=FILE instead") from None
        ids = self.template.encode(text.partition(USER["content"])[0].rstrip(" "))
        seed = int(artifacts.fingerprint([self.config.seed, one.number, len(ids)])[:8], 16)
        return Request(ids, self.options.temperature, seed)

    def _answered(self, going: list[Attempt]) -> list[Attempt]:
        """Have the target answer what it wrote, before it writes what the user says next. Return the answered tries."""
        temperature = self.config.data.generate.temperature
        keys = {f"{self.fingerprint}-{one.number}-{len(one.turns)}-answer": one for one in going}
        jobs = {
            key: Job(Row(f"{SELF}-{one.number:06}", "", "", one.messages), 0, temperature, [], list(one.messages))
            for key, one in keys.items()
        }
        kept = set()
        for key, answer in self.journal.outcomes(jobs, self.engine.answers):
            with suppress(Refused):
                if not isinstance(answer, Refused):
                    check_goes_on(self.template, answer.message, None)
                    keys[key].messages.append(answer.message)
                    kept.add(key)
        return [one for key, one in keys.items() if key in kept]
