"""What is inside a store, complete or begun, as text for people."""

from collections.abc import Iterator
from statistics import median
from typing import Any

from tqdm import tqdm

from eagle31_train.errors import UserError
from eagle31_train.store.backends import Storage
from eagle31_train.store.format import EXTRACT
from eagle31_train.store.head import Head
from eagle31_train.store.shard_plan import Plan
from eagle31_train.store.verify import inspect


def describe(storage: Storage) -> str:
    """Everything worth knowing of a store, some twenty lines.

    Raises:
        UserError: there is no store, or its small files are damaged.
    """
    head, problems = inspect(storage)
    verify = f"see `python -m eagle31_train.store verify {storage.location}`"
    if head.plan is None or head.provenance is None:
        raise UserError(f"{problems[0].text}: {verify}")
    rows = [*_contents(head, head.plan), *head.provenance["inputs"].items(), *head.provenance["states"].items()]
    rows += [("fidelity", (head.manifest or {}).get("fidelity")), ("damaged", verify if problems else None)]
    return "\n".join(f"{name:<17}  {value}" for name, value in rows if value not in (None, {}))


def _contents(head: Head, plan: Plan) -> Iterator[tuple[str, Any]]:
    yield "store", f"{head.storage.location}, fingerprint {head.provenance and head.provenance['fingerprint']}"
    done = [shard for shard in plan.shards if shard.name in head.lines]
    state = f"{len(done)} of {len(plan.shards)} committed, {len(head.consumed)} of them used up by a training"
    yield "shards", state if head.manifest else f"{state}; unfinished, `{EXTRACT}` goes on with it"
    for split, lengths in plan.lengths.items():
        text = f"{len(lengths):,} samples, {sum(lengths):,} tokens"
        if lengths:
            text += f"; of a sample: {min(lengths):,} to {max(lengths):,} tokens, median {median(lengths):,.0f}"
        yield split, text
    if tokens := sum(shard.tokens for shard in done):
        size = sum(head.lines[shard.name].size for shard in done)
        yield "bytes", f"{tqdm.format_sizeof(size, 'B')}, {size / tokens:,.0f} per token"
