"""Is a store whole? Every byte is compared with what was written, and what is wrong is named with its samples."""

from collections import Counter
from collections.abc import Iterator

from eagle31_train import artifacts
from eagle31_train.console import Progress
from eagle31_train.errors import UserError
from eagle31_train.store.backends import Storage
from eagle31_train.store.format import PLAN, PROVENANCE, SHARDS, TARGET, line_name
from eagle31_train.store.head import Head, Problem, big_files, damage_of, read_head, read_lines
from eagle31_train.store.shard import ContentError, open_shard
from eagle31_train.store.shard_plan import Plan, shape_of


def inspect(storage: Storage) -> tuple[Head, list[Problem]]:
    """`read_head` with every committed line, and with what is missing.

    Raises:
        UserError: there is no store.
    """
    head, problems = read_head(storage)
    if not problems and head.manifest is head.provenance is None and not storage.names("shards"):
        raise UserError(f"there is no store in {storage.location}: correct the address")  # a plan alone is none yet
    if head.manifest is None and storage.size(SHARDS) is not None and storage.size(artifacts.MANIFEST) is None:
        problems.append(Problem(f"{storage.location}/{artifacts.MANIFEST} is missing, though all shards were there"))
    if head.provenance is None or head.plan is None:
        text = f"{storage.location} lacks a whole {PROVENANCE} or {PLAN}, without which no shard can be checked"
        problems.append(Problem(text))
    elif head.manifest is None:
        lines, damaged = read_lines(storage, head.plan.shards, head.provenance["fingerprint"])
        head.lines |= lines
        problems += damaged
    return head, problems


def check(storage: Storage, checked: Counter[str]) -> Iterator[Problem]:
    """Everything that is wrong with a store, complete or begun; on the way, `checked` counts what is whole.

    It counts the shards, tokens and bytes that are whole; shards that are coming, not being committed yet, and those
    consumed by a training, which removed them. It holds `complete` where the store is.

    Raises:
        UserError: there is no store, or it cannot be read at all.
    """
    head, problems = inspect(storage)
    yield from problems
    if head.plan is None or head.provenance is None:
        return
    if head.manifest is not None:
        checked["complete"] = 1
    else:
        checked["coming"] = len(head.plan.shards) - len(head.lines)
    for name in big_files(storage):
        coming = name == TARGET and head.manifest is None and storage.size(line_name(name)) is None
        if not coming and (damage := damage_of(storage, name, head.provenance["fingerprint"])):
            yield Problem(damage)
    yield from _shards(head, head.plan, head.provenance["states"], checked)


def _shards(head: Head, plan: Plan, states: dict, checked: Counter[str]) -> Iterator[Problem]:
    """Open every committed shard, and count those that were used up."""
    storage, shape = head.storage, shape_of(states)
    gone = {name for name in head.consumed if storage.size(name) is None}
    checked["consumed"] = len(gone)
    shards = [shard for shard in plan.shards if shard.name in head.lines and shard.name not in gone]
    sizes = {shard.name: head.lines[shard.name].size for shard in shards}
    storage.prefetch(sizes)
    with Progress(total=sum(sizes.values()), unit="B", unit_scale=True, desc="verify", leave=False) as bar:
        for shard in shards:
            line, where = head.lines[shard.name], f"{storage.location}/{shard.name}"
            try:
                file = open_shard(storage, line, plan.lengths_of(shard), shape, states["vocab_size"])
                if bad := [str(shard.first + index) for index in file.not_finite()]:
                    text = f"{where} holds states that are not finite, in sample {', '.join(bad)} of {shard.split}"
                    yield Problem(text, shard.name)
                else:
                    checked.update(shards=1, tokens=shard.tokens, bytes=line.size)
            except FileNotFoundError:
                yield Problem(f"{where} ({shard.samples()}) is missing")
            except ContentError as error:
                yield Problem(f"{where} ({shard.samples()}) {error}", shard.name)
            bar.update(line.size)
