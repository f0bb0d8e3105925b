"""Turn rows into samples: masked, split and counted, with every refusal on record.

Whether a prompt is held out depends on its text alone, not on other rows, their order, the answers or the seed. So it
never changes, and all samples of a prompt fall on the same side.
"""

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from numpy.typing import NDArray

from data_prep import masks, written
from data_prep.sample import Sample, Samples, given
from eagle31_train.common import artifacts
from eagle31_train.common.console import Progress
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.rows.formats import TEMPLATE_ARGS, Row
from eagle31_train.rows.messages import Message, is_learnt
from eagle31_train.targets.chat import ChatTemplate

SPLITS = ("train", "heldout")
FEATURES = Features(
    {
        "id": Value("string"),
        "source": Value("string"),
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("bool")),
    }
)


def _digest(messages: Iterable[Message]) -> bytes:
    """SHA-256 of roles and words, white space stripped."""
    prompt = [[message["role"], message["content"].strip()] for message in messages]
    text = json.dumps(prompt, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def place(messages: list[Message]) -> float:
    """Return a conversation's place in [0, 1), a hash of what precedes the first answer to a user (a greeting answers
    nobody). It is held out if its place is below `data.heldout`, so raising that only adds prompts."""
    asked = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    prompt = [*messages[:asked], *takewhile(lambda message: message["role"] != "assistant", messages[asked:])]
    return _place(_digest(prompt))


def _place(digest: bytes) -> float:
    return int.from_bytes(digest[:4], "big") / 2**32


def _digest_of_ids(ids: list[int] | str) -> bytes:
    return hashlib.sha256(json.dumps(ids).encode()).digest()


def check_shares(places: set[float], share: float) -> None:
    """UserError if `share` holds out all prompts at these places (at least one), or none though it is above 0."""
    if max(places) < share:
        raise UserError(f"data.heldout={share} holds out every prompt: lower it, or add prompts")
    if 0 < share <= (first := min(places)):
        enough = math.ceil(first * 1000 + 1e-6) / 1000
        remedy = f"data.heldout={enough} would hold out one" if enough < 1 and len(places) > 1 else "add prompts"
        raise UserError(
            f"data.heldout={share} holds out none of {len(places)} prompts, so acceptance cannot be measured: "
            f"{remedy}, and data.heldout=0 does without"
        )


@dataclass
class Split:
    """The samples of one split in input order, each with its id and its source."""

    rows: list[tuple[str, str, Sample]] = field(default_factory=list)

    def shuffle(self, seed: int) -> None:
        order = np.random.Generator(np.random.PCG64(seed)).permutation(len(self.rows)).tolist()
        self.rows = [self.rows[i] for i in order]

    def coverage(self, draft_tokens: NDArray[np.bool_]) -> tuple[float | None, dict[str, float]]:
        """Return the share of the assistant's tokens in the draft vocabulary ([V] bool), in all and by source."""
        inside, counted = Counter[str](), Counter[str]()
        for _, source, sample in self.rows:
            drafted = draft_tokens[sample.input_ids[sample.loss_mask]]
            inside[source] += int(drafted.sum())
            counted[source] += len(drafted)
        whole = inside.total() / counted.total() if counted.total() else None
        return whole, {source: inside[source] / counted[source] for source in sorted(counted) if counted[source]}

    def summary(self) -> dict[str, Any]:
        """Count conversations (a turn by itself is one), tokens and assistant tokens, in all and by source."""
        by_source: dict[str, Counter[str]] = defaultdict(Counter)
        for _, source, sample in self.rows:
            counted = {"tokens": len(sample.input_ids), "assistant_tokens": int(sample.loss_mask.sum())}
            by_source[source].update(conversations=1, **counted)
        total = sum(by_source.values(), Counter(conversations=0, tokens=0, assistant_tokens=0))
        return {
            **{key: total[key] for key in ("conversations", "tokens", "assistant_tokens")},
            "by_source": {source: dict(by_source[source]) for source in sorted(by_source)},
        }

    def dataset(self, name: str) -> Dataset:
        """Return the split as a `Dataset`; the same samples give the same fingerprint and the same bytes."""
        columns = {
            "id": [identity for identity, _, _ in self.rows],
            "source": [source for _, source, _ in self.rows],
            "input_ids": [sample.input_ids for _, _, sample in self.rows],
            "loss_mask": [sample.loss_mask for _, _, sample in self.rows],
        }
        dataset = Dataset.from_dict(columns, features=FEATURES)
        rows = (  # one at a time: as text, all together are larger than the data
            [i, source, sample.input_ids.tobytes().hex(), np.packbits(sample.loss_mask).tobytes().hex()]
            for i, source, sample in self.rows
        )
        dataset._fingerprint = artifacts.fingerprint([name, *map(artifacts.fingerprint, rows)])
        return dataset


@dataclass
class Collected:
    """Everything that the rows gave. refused: see `refusal`. counts: by source; `stage.COUNTS` says of what."""

    splits: dict[str, Split] = field(default_factory=lambda: {name: Split() for name in SPLITS})
    refused: list[dict[str, str]] = field(default_factory=list)
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    places: set[float] = field(default_factory=set)  # of the usable conversations


def collect(rows: Iterator[Row], template: ChatTemplate, max_length: int, heldout: float) -> Collected:
    """Mask, split and count every row."""
    result, all_asked = Collected(), set[bytes]()
    for row in Progress(rows, desc="conversations", unit="row", leave=False):
        try:
            found = _samples(row, template, max_length)
        except Refused as error:
            result.refused.append(refusal(row, str(error)))
            continue
        where, asked = _place_and_question(row)
        result.places.add(where)  # all its turns fall on the same side
        split = result.splits["heldout" if where < heldout else "train"]
        split.rows += [(row.id + suffix, row.source, sample) for suffix, sample in found.samples]
        result.refused += [refusal(row, reason, suffix) for suffix, reason in found.refused]
        result.counts[row.source].update(
            repeated=int(row.sample == 0 and asked in all_asked),
            cut=sum(sample.cut for _, sample in found.samples),
            no_end_of_turn=sum(sample.open_turns for _, sample in found.samples),
            split_turns=int(found.split),
            from_words=0 if written.known(row.messages) else sum(map(is_learnt, row.messages)),
            given_ids=int(row.tokens is not None),
            args_unread=int(bool(template.unread(row.template_args))),
            inserted=found.inserted,
            tools_unread=int(bool(row.tools) and not template.reads_tools),
        )
        all_asked.add(asked)
    return result


def _samples(row: Row, template: ChatTemplate, max_length: int) -> Samples:
    """Return what a row is learnt as: of its own ids and mask, of its answers' token ids if it has all, or of words."""
    if row.problem:
        raise Refused(row.problem)
    if row.tokens:
        return given(template, row.tokens, max_length)
    own = template.under(row.template_args)
    if not written.known(row.messages):
        return masks.samples(own, row.messages, max_length, row.tools)
    if row.template not in (None, own.identity):
        raise Refused(
            "its token ids come from another chat template or template arguments: use those, or remove token_ids"
        )
    return written.samples(own, row.messages, max_length, row.tools)


def _place_and_question(row: Row) -> tuple[float, bytes]:
    """Return a row's place (see `place`), and a digest of all that it asks. For a row of tokens, the digest is of the
    ids that are not learnt, and the place of its conversation's id or, if unknown, of the ids before the first answer.
    """
    if row.tokens:
        ids, mask = row.tokens
        asked = [i for i, learnt in zip(ids, mask, strict=True) if not learnt]
        prompt = ids[: mask.index(True)] if row.conversation is None else row.conversation
        return _place(_digest_of_ids(prompt)), _digest_of_ids(asked)
    question = [message for message in row.messages if message["role"] != "assistant"]
    if row.template_args:  # they change how it is asked
        question.append({"role": TEMPLATE_ARGS, "content": json.dumps(row.template_args, sort_keys=True)})
    return place(row.messages), _digest(question)


def refusal(row: Row, reason: str, suffix: str = "") -> dict[str, str]:
    """Return the manifests' entry for a row, or a turn of it, that is not used."""
    return {"id": row.id + suffix, "source": row.source, "where": row.where, "reason": reason}


def most_common(refused: list[dict[str, Any]]) -> str:
    reasons = Counter(entry["reason"] for entry in refused)
    most = reasons.most_common(3)
    named, others = [f"{count} × {reason}" for reason, count in most], reasons.total() - sum(n for _, n in most)
    return "; ".join([*named, *([f"{others} for other reasons"] if others else [])]) or "no rows"
