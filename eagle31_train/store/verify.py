"""Is a store whole? Every byte is compared with what was written, and what is wrong is named with its samples."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tqdm import tqdm

from eagle31_train import artifacts
from eagle31_train.place import Place
from eagle31_train.schema import UserError
from eagle31_train.store.head import Head, Problem, read_head
from eagle31_train.store.ledger import (
    CONSUMED,
    EXTRACT,
    PLAN,
    PROVENANCE,
    REMAKE,
    SHARDS,
    STREAM,
    TARGET,
    TARGET_LINE,
    Line,
    difference,
    read_target_line,
)
from eagle31_train.store.plan import PlannedShard
from eagle31_train.store.sealed import checksum
from eagle31_train.store.shard import ContentError, open_shard
from eagle31_train.store.stream import read_consumed

FILES = {artifacts.MANIFEST, PROVENANCE, PLAN, SHARDS, TARGET, TARGET_LINE, STREAM, CONSUMED}


@dataclass
class Checked:
    """What was found whole.

    coming: shards that are not committed yet. consumed: shards that a training has used up and removed.
    """

    complete: bool = False
    shards: int = 0
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    coming: int = 0
    consumed: int = 0


def problems(place: Place) -> Iterator[str]:
    """Everything that is wrong with a store, complete or begun, one line each.

    Raises:
        UserError: there is no store, or it cannot be read at all.
    """
    return (problem.text for problem in check(place, Checked()))


def check(place: Place, checked: Checked) -> Iterator[Problem]:
    """`problems`; on the way, `checked` counts what is whole."""
    head, found = read_head(place)
    yield from found
    if head is None:
        return
    checked.complete = head.manifest is not None
    if not checked.complete:
        checked.coming = len(head.plan.shards) - len(head.lines)
    yield from _target(head)
    yield from _shards(head, checked)
    yield from _strays(head)


def _target(head: Head) -> Iterator[Problem]:
    """The target's weights, by their line; in an unfinished store both may be still to come."""
    place = head.place
    if head.manifest is None and place.size(TARGET_LINE) is None:
        return  # still to come: whoever follows waits, and a continued extraction writes both anew
    try:
        line = read_target_line(place, head.provenance["fingerprint"])
    except UserError as error:
        yield Problem(str(error))
        return
    if damage := difference(place, TARGET, line.entry):
        yield Problem(damage)


def _shards(head: Head, checked: Checked) -> Iterator[Problem]:
    """Open every committed shard, and count those that were used up."""
    lines = {line.checksum: line for line in head.lines.values()}
    shards = []
    for shard in head.plan.shards:
        if shard.name in head.consumed and head.place.size(shard.name) is None:
            checked.consumed += 1
        elif shard.name in head.lines:
            shards.append(shard)
    head.place.prefetch([shard.name for shard in shards])
    total = sum(head.lines[shard.name].size for shard in shards)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="verify", disable=None)
    with bar:
        for shard in shards:
            line = head.lines[shard.name]
            if damage := _damage(head, shard, line, lines):
                yield Problem(f"{head.place.location}/{shard.name} ({shard.samples()}) {damage}", shard)
            else:
                checked.shards += 1
                checked.samples += shard.end - shard.first
                checked.tokens += shard.tokens
                checked.bytes += line.size
            bar.update(line.size)


def _damage(head: Head, shard: PlannedShard, line: Line, lines: dict[str, Line]) -> str | None:
    """What is wrong with a shard's file, in words that follow its name. `lines` tell whose file it is instead."""
    try:
        open_shard(
            head.place, line, head.plan.lengths_of(shard), head.shape, head.provenance["states"]["vocab_size"], {}
        )
    except FileNotFoundError:
        used_up = shard.name in read_consumed(head.place).shards  # by a training, since we looked
        return None if used_up else "is missing"
    except ContentError as error:
        other = lines.get(checksum(head.place.local(shard.name)))
        return f"{error}" + (f"; it is {other.name} under another name" if other and other is not line else "")
    return None


def _strays(head: Head) -> Iterator[Problem]:
    """Files that are none of the store's."""
    place, planned = head.place, {shard.name for shard in head.plan.shards}
    if head.manifest is None:  # lines have files of their own
        planned |= {shard.line for shard in head.plan.shards}
    sizes: dict[int, list[Line]] = {}
    for line in head.lines.values():
        sizes.setdefault(line.size, []).append(line)
    for name in place.names("shards"):
        if name not in planned:
            same = [
                line for line in sizes.get(place.size(name) or 0, ()) if checksum(place.local(name)) == line.checksum
            ]
            copy = f", but a copy of {same[0].name}" if same else ""
            yield Problem(f"{place.location}/{name} is no file of this store{copy}: remove it", stray=name)
    for name in place.names(""):
        if name not in FILES - ({STREAM} if head.manifest else set()):
            yield Problem(f"{place.location}/{name} is no file of this store: remove it")


def remove(place: Place, found: Iterable[Problem]) -> str:
    """Take away what `check` found damaged, so that the next extraction makes that anew, and only that.

    The store is unfinished from then on. Damaged small files stay: extraction writes them again in any case.

    Returns:
        What was removed, in words.
    """
    head, _ = read_head(place)
    if head is None:  # no line tells which shard is which
        return f"nothing was removed: {REMAKE}; then verify it again"
    bad = {problem.shard.name for problem in found if problem.shard}
    strays = [problem.stray for problem in found if problem.stray]
    place.remove(artifacts.MANIFEST)  # whoever reads it now finds it unfinished
    for name in strays:
        place.remove(name)
    for shard in head.plan.shards:  # and as in an unfinished store, each line gets a file of its own
        if shard.name in bad:
            place.remove(shard.line)
            place.remove(shard.name)
        elif shard.name in head.lines:
            place.write(shard.line, head.lines[shard.name].sealed())
    place.remove(SHARDS)
    left = sum(shard.name in bad or shard.name not in head.lines for shard in head.plan.shards)
    return (
        f"removed: shards {len(bad)}, other files {len(strays)}; `{EXTRACT}` with its configuration makes "
        f"anew: shards {left}, and no others"
    )
