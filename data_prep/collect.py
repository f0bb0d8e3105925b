"""Rows become samples: masked, split and counted, with every refusal on record."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Features, List, Value
from numpy.typing import NDArray
from tqdm import tqdm

from data_prep.messages import Row
from data_prep.split import is_heldout, prompt_digest
from data_prep.template import ChatTemplate, RefusedError, Sample
from data_prep.turns import samples
from eagle31_train import artifacts

SPLITS = ("train", "heldout")
COUNTED_APART = 64  # sources whose tokens are counted apart: rows may name thousands, and each takes V numbers
FEATURES = Features(
    {
        "id": Value("string"),
        "source": Value("string"),
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("bool")),
    }
)


@dataclass
class Split:
    """The samples of one split, in input order, and what they add up to."""

    ids: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def add(self, identity: str, source: str, sample: Sample) -> None:
        self.ids.append(identity)
        self.sources.append(source)
        self.samples.append(sample)

    def token_counts(self, vocab_size: int) -> dict[str, NDArray[np.int64]]:
        """[V] int64 by source: how often the assistant wrote each token; all as "" where there are too many sources."""
        counts: dict[str, NDArray[np.int64]] = {}
        few = len(set(self.sources)) <= COUNTED_APART
        for name, sample in zip(self.sources, self.samples, strict=True):
            source = name if few else ""
            if source not in counts:
                counts[source] = np.zeros(vocab_size, dtype=np.int64)
            # Not bincount with minlength=V: that would add up V numbers for every sample.
            np.add.at(counts[source], sample.input_ids[sample.loss_mask], 1)
        return counts

    def summary(self) -> dict[str, Any]:
        """Conversations (a turn by itself counts as one), tokens and assistant tokens, in all and by source."""
        by_source: dict[str, Counter[str]] = {}
        for source, sample in zip(self.sources, self.samples, strict=True):
            by_source.setdefault(source, Counter()).update(_counts(sample))
        total = sum(by_source.values(), Counter(conversations=0, tokens=0, assistant_tokens=0))
        return {
            **{key: total[key] for key in ("conversations", "tokens", "assistant_tokens")},
            "by_source": {source: dict(by_source[source]) for source in sorted(by_source)},
        }

    def dataset(self, name: str) -> Dataset:
        """The split for `datasets`; the same samples give the same fingerprint and the same bytes."""
        columns = {
            "id": self.ids,
            "source": self.sources,
            "input_ids": [sample.input_ids for sample in self.samples],
            "loss_mask": [sample.loss_mask for sample in self.samples],
        }
        dataset = Dataset.from_dict(columns, features=FEATURES)
        dataset._fingerprint = self.fingerprint(name)
        return dataset

    def shuffle(self, seed: int) -> None:
        """Put the samples in random order."""
        order = np.random.Generator(np.random.PCG64(seed)).permutation(len(self.ids)).tolist()
        self.ids, self.sources, self.samples = (
            [column[i] for i in order] for column in (self.ids, self.sources, self.samples)
        )

    def fingerprint(self, name: str) -> str:
        """A hash of the split's content."""
        rows = (  # one at a time: all of them as text are larger than the data
            [i, source, sample.input_ids.tobytes().hex(), np.packbits(sample.loss_mask).tobytes().hex()]
            for i, source, sample in zip(self.ids, self.sources, self.samples, strict=True)
        )
        return artifacts.fingerprint([name, *map(artifacts.fingerprint, rows)])


def _counts(sample: Sample) -> dict[str, int]:
    return {
        "conversations": 1,
        "tokens": len(sample.input_ids),
        "assistant_tokens": int(sample.loss_mask.sum()),
    }


@dataclass
class Shared:
    """Prompts that more than one source has: one side of the split holds all of them, but they are learnt as often."""

    first: dict[bytes, tuple[str, str]] = field(default_factory=dict)  # digest → source and id of the first row
    pairs: list[list[str]] = field(default_factory=list)  # ids of the first row, and of one of another source

    def see(self, row: Row) -> None:
        source, identity = self.first.setdefault(prompt_digest(row.messages)[:16], (row.source, row.id))
        if source != row.source:
            self.pairs.append([identity, row.id])


@dataclass
class Collected:
    """Everything that the rows gave."""

    splits: dict[str, Split] = field(default_factory=lambda: {name: Split() for name in SPLITS})
    refused: list[dict[str, str]] = field(default_factory=list)
    shared: Shared = field(default_factory=Shared)
    # By source. cut: samples past max_length; open: answers without end of turn; split_turns: conversations that
    # became one sample per assistant turn; inserted: answers before which the template put an empty thought;
    # respelt: answers that have not as many tokens as the target wrote; tools_unread: conversations with tools, which
    # the template does not write.
    counts: dict[str, Counter[str]] = field(default_factory=dict)

    def count(self, source: str, **more: int) -> None:
        self.counts.setdefault(source, Counter()).update(more)

    def refuse(self, row: Row, reason: str, suffix: str = "") -> None:
        self.refused.append(refusal(row, reason, suffix))

    def total(self, what: str) -> int:
        """A count over all sources."""
        return sum(counts[what] for counts in self.counts.values())

    def datasets(self) -> DatasetDict:
        """Both splits."""
        return DatasetDict({name: split.dataset(name) for name, split in self.splits.items()})


def refusal(row: Row, reason: str, suffix: str = "") -> dict[str, str]:
    """What the manifests tell of a row, or a turn of it, that is not learnt."""
    return {"id": row.id + suffix, "source": row.source, "where": row.where, "reason": reason}


def collect(rows: Iterator[Row], template: ChatTemplate, max_length: int, heldout: float) -> Collected:
    """Mask, split and count every row; what cannot be learnt from is refused by name and reason."""
    result = Collected()
    for row in tqdm(rows, desc="conversations", unit="row", dynamic_ncols=True):
        try:
            if row.problem:
                raise RefusedError(row.problem)
            found = samples(template, row.messages, max_length, row.tools)
        except RefusedError as error:
            result.refuse(row, str(error))
            continue
        # By the conversation's prompt, so that all its turns fall on the same side.
        split = result.splits["heldout" if is_heldout(row.messages, heldout) else "train"]
        for suffix, sample in found.samples:
            split.add(row.id + suffix, row.source, sample)
            result.count(row.source, cut=int(sample.cut), open=sample.open_turns)
        for suffix, reason in found.refused:
            result.refuse(row, reason, suffix)
        result.count(row.source, split_turns=int(found.split), inserted=found.inserted, respelt=found.respelt)
        result.count(row.source, tools_unread=int(bool(row.tools) and not template.reads_tools))
        result.shared.see(row)
    return result
