"""Inspect a store of hidden states: is it intact, and what does it hold?

eagle31 store verify runs/smollm2/store
eagle31 store info s3://bucket/store

verify reads every shard and compares every byte with its checksum. In a store that is still being written it checks
what is committed. It prints what was checked and exits with 0, or prints one line per problem and exits with 1.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from eagle31_train.common import artifacts
from eagle31_train.common.console import Progress, note, parser, tidy
from eagle31_train.common.errors import UserError
from eagle31_train.common.units import byte_count
from eagle31_train.store import format as files
from eagle31_train.store.backends import Storage, Use, open_storage
from eagle31_train.store.head import Head, Problem, big_files, near, read_head, read_tensors
from eagle31_train.store.sealed import DamagedError
from eagle31_train.store.shard import open_shard
from eagle31_train.store.shard_plan import Plan
from eagle31_train.store.stream import read_consumed


def inspect(storage: Storage) -> tuple[Head, list[Problem]]:
    """Return the head of a store, and what is wrong or missing. UserError if there is no store."""
    head, problems = read_head(storage, every_line=True)
    nothing = head.manifest is head.provenance is None and storage.size(files.PROVENANCE) is None
    if nothing and not storage.sizes("shards"):  # a plan alone is no store yet
        remedy = f"use {there}" if (there := near(storage)) else "correct the address"
        raise UserError(f"there is no store in {storage.location}: {remedy}")
    if head.manifest is None and storage.size(files.SHARDS) is not None and storage.size(artifacts.MANIFEST) is None:
        problems.append(Problem(f"{storage.location}/{artifacts.MANIFEST} is missing, though all shards were there"))
    if head.provenance is None or head.plan is None:
        what = f"{files.PROVENANCE} or {files.PLAN}"
        problems.append(Problem(f"{storage.location} lacks an intact {what}, without which no shard can be checked"))
    return head, problems


def check(storage: Storage, checked: Counter[str]) -> Iterator[Problem]:
    """Yield everything that is wrong with a store, complete or begun. UserError if there is no store.

    `checked` counts intact shards, tokens and bytes, shards still to come, and consumed ones. Its `complete` is 1 for a
    complete store."""
    head, problems = inspect(storage)
    yield from problems
    if head.plan is None or head.provenance is None:
        return
    if head.manifest is not None:
        checked["complete"] = 1
    else:
        checked["coming"] = len(head.plan.shards) - len(head.lines)
    for name in big_files(storage):
        coming = name == files.TARGET and head.manifest is None and storage.size(files.line_name(name)) is None
        if coming:
            continue
        try:
            read_tensors(storage, name, head.provenance)
        except DamagedError as error:  # without its line it is made anew, even if only sizes are compared
            yield Problem(str(error), files.line_name(name) if storage.size(name) is not None else None)
    yield from _shards(head, head.plan, head.provenance, checked)


def _shards(head: Head, plan: Plan, provenance: dict[str, Any], checked: Counter[str]) -> Iterator[Problem]:
    """Open every committed shard, and count those that are used up."""
    storage = head.storage
    gone = {name for name in head.consumed if storage.size(name) is None}
    checked["consumed"] = len(gone)
    shards = [shard for shard in plan.shards if shard.name in head.lines and shard.name not in gone]
    uses = [Use(turn, shard.name, head.lines[shard.name].size) for turn, shard in enumerate(shards)]
    storage.prefetch(uses)
    with Progress(total=sum(use.bytes for use in uses), unit="B", unit_scale=True, desc="verify", leave=False) as bar:
        for turn, shard in enumerate(shards):
            line, where = head.lines[shard.name], f"{storage.location}/{shard.name}"
            try:
                file = open_shard(storage, plan, shard, line, provenance["states"])
                if bad := [str(shard.first + index) for index in file.not_finite()]:
                    text = f"{where} holds states that are not finite, in sample {', '.join(bad)} of {shard.split}"
                    yield Problem(text, shard.name)
                else:
                    checked.update(shards=1, tokens=shard.tokens, bytes=line.size)
            except FileNotFoundError:
                # A training may have removed it meanwhile.
                if shard.name in read_consumed(storage, provenance["fingerprint"]).shards:
                    checked["consumed"] += 1
                else:
                    yield Problem(f"{where} ({shard.samples()}) is missing")
            except DamagedError as error:
                yield Problem(str(error), shard.name)
            storage.passed(turn)
            bar.update(line.size)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 for a damaged store, 2 for what the user can mend."""
    words = parser(__doc__, prog="eagle31 store")
    words.add_argument("command", choices=["verify", "info"])
    words.add_argument("store", help="its folder, or its URL, such as s3://bucket/store")
    words.add_argument("--cache-dir", type=Path, help="where copies of a remote store's files lie for a while")
    words.add_argument("--cache-bytes", default="8GB", help="most that these copies may take (default: 8GB)")
    words.add_argument(
        "--remove", action="store_true", help="with verify: remove damaged shards, so that extraction makes them again"
    )
    options = words.parse_args(arguments)
    try:
        most = byte_count(options.cache_bytes, "--cache-bytes")
        # A cache folder of its own, so that the store is checked, and not earlier copies of it.
        with tidy(), tempfile.TemporaryDirectory(prefix="eagle31-", dir=options.cache_dir) as folder:
            storage = open_storage(options.store, Path(folder), most)
            try:
                if options.command == "verify":
                    return _verify(storage, options.remove)
                note(_describe(storage))
                return 0
            finally:
                storage.close()
    except (UserError, FileNotFoundError) as error:  # the latter if --cache-dir does not exist
        note(f"error: {error}", error=True)
        return 2


def _verify(storage: Storage, remove: bool) -> int:
    """Print what is wrong, a line each, and a summary. Return the exit status."""
    checked, problems = Counter[str](), []
    for problem in check(storage, checked):
        note(problem.text)
        problems.append(problem)
    state = "complete and intact" if checked["complete"] else "unfinished, but intact so far"
    note(
        f"{storage.location}: {f'problems: {len(problems)}' if problems else state}; shards checked: "
        f"{checked['shards']:,} ({checked['tokens']:,} tokens, {checked['bytes']:,} bytes), used up by a training: "
        f"{checked['consumed']:,}, still to come: {checked['coming']:,}"
    )
    if problems and remove:
        damaged = [problem.file for problem in problems if problem.file]
        if damaged:
            storage.remove(artifacts.MANIFEST)  # else extraction finds the store complete, and does not look further
        for name in damaged:
            storage.remove(name)
        note(f"removed: {len(damaged)} files; {files.REMAKE}")
    elif problems:
        advice = f"remove the damaged files with `eagle31 store verify {storage.location} --remove`, then "
        note((advice if any(problem.file for problem in problems) else "") + files.REMAKE)
    return 1 if problems else 0


def _describe(storage: Storage) -> str:
    """Describe a store in some twenty lines. UserError if there is none, or if its small files are damaged."""
    head, problems = inspect(storage)
    verify = f"see `eagle31 store verify {storage.location}`"
    if head.plan is None or head.provenance is None:
        raise UserError(f"{problems[0].text}: {verify}")
    done = [shard for shard in head.plan.shards if shard.name in head.lines]
    state = f"{len(done)} of {len(head.plan.shards)} committed, {len(head.consumed)} of them used up by a training"
    rows: dict[str, Any] = {
        "store": f"{storage.location}, fingerprint {head.provenance['fingerprint']}",
        "shards": state if head.manifest else f"{state}; unfinished, `{files.EXTRACT}` continues it",
    }
    for split, lengths in head.plan.lengths.items():
        rows[split] = f"{len(lengths):,} samples, {sum(lengths):,} tokens"
        if lengths:
            rows[split] += f"; of a sample: {min(lengths):,} to {max(lengths):,}, median {median(lengths):,.0f}"
    there = [shard for shard in done if shard.name not in head.consumed]
    if tokens := sum(shard.tokens for shard in there):
        size = sum(head.lines[shard.name].size for shard in there)
        rows["bytes"] = f"{tqdm.format_sizeof(size, 'B')}, {size / tokens:,.0f} per token"
    rows |= {**head.provenance["inputs"], **head.provenance["states"]}
    rows |= {"fidelity": (head.manifest or {}).get("fidelity"), "damaged": verify if problems else None}
    return "\n".join(f"{name:<17}  {_shown(value)}" for name, value in rows.items() if value not in (None, {}))


def _shown(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return ", ".join(f"{name} {_shown(one)}" for name, one in value.items() if one not in (None, {}))


if __name__ == "__main__":
    sys.exit(main())
