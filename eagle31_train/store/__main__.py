"""Look into a store of hidden states: is it whole, and what does it hold?

eagle31 store verify runs/smollm2/store
eagle31 store info s3://bucket/store

verify compares every byte with the checksums that were written with it, and reads every shard. It works for a store
that is still being written, too: what is committed is checked. It prints what was checked and exits with 0, or
everything that is wrong, a line each, and exits with 1.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from eagle31_train.config import byte_count
from eagle31_train.console import note, tidy
from eagle31_train.errors import UserError
from eagle31_train.store.backends import Storage, open_storage
from eagle31_train.store.format import EXTRACT, REMAKE
from eagle31_train.store.verify import check, inspect


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 for a damaged store, 2 for what the user can mend."""
    options = _parser().parse_args(arguments)
    try:
        most = byte_count(options.cache_bytes, "--cache-bytes")
        # A folder of its own: what is checked is the store, and not copies that were made of it earlier.
        with tidy(), tempfile.TemporaryDirectory(prefix="eagle31-", dir=options.cache_dir) as folder:
            storage = open_storage(options.store, Path(folder), most)
            try:
                if options.command == "verify":
                    return _verify(storage, options.remove)
                note(_describe(storage))
                return 0
            finally:
                storage.close()
    except (UserError, FileNotFoundError) as error:  # the latter where there is no --cache-dir
        note(f"error: {error}", error=True)
        return 2


def _verify(storage: Storage, remove: bool) -> int:
    """Print what is wrong, a line each, and a summary; returns the exit status."""
    checked, problems = Counter[str](), []
    for problem in check(storage, checked):
        note(problem.text)
        problems.append(problem)
    state = "complete and whole" if checked["complete"] else "unfinished, and whole as far as it goes"
    note(
        f"{storage.location}: {f'problems: {len(problems)}' if problems else state}; shards checked: "
        f"{checked['shards']:,} of {checked['tokens']:,} tokens and {checked['bytes']:,} bytes, used up by a training: "
        f"{checked['consumed']:,}, still to come: {checked['coming']:,}"
    )
    if problems and remove:
        files = [problem.file for problem in problems if problem.file]
        for name in files:
            storage.remove(name)
        note(f"removed: {len(files)} files; {REMAKE}")
    elif problems:
        note(f"remove what is damaged by `eagle31 store verify {storage.location} --remove`, then {REMAKE}")
    return 1 if problems else 0


def _describe(storage: Storage) -> str:
    """What a store holds, some twenty lines.

    Raises:
        UserError: there is no store, or its small files are damaged.
    """
    head, problems = inspect(storage)
    verify = f"see `eagle31 store verify {storage.location}`"
    if head.plan is None or head.provenance is None:
        raise UserError(f"{problems[0].text}: {verify}")
    done = [shard for shard in head.plan.shards if shard.name in head.lines]
    state = f"{len(done)} of {len(head.plan.shards)} committed, {len(head.consumed)} of them used up by a training"
    rows: dict[str, Any] = {
        "store": f"{storage.location}, fingerprint {head.provenance['fingerprint']}",
        "shards": state if head.manifest else f"{state}; unfinished, `{EXTRACT}` goes on with it",
    }
    for split, lengths in head.plan.lengths.items():
        rows[split] = f"{len(lengths):,} samples, {sum(lengths):,} tokens"
        if lengths:
            rows[split] += f"; of a sample: {min(lengths):,} to {max(lengths):,}, median {median(lengths):,.0f}"
    if tokens := sum(shard.tokens for shard in done):
        size = sum(head.lines[shard.name].size for shard in done)
        rows["bytes"] = f"{tqdm.format_sizeof(size, 'B')}, {size / tokens:,.0f} per token"
    rows |= {**head.provenance["inputs"], **head.provenance["states"]}
    rows |= {"fidelity": (head.manifest or {}).get("fidelity"), "damaged": verify if problems else None}
    return "\n".join(f"{name:<17}  {value}" for name, value in rows.items() if value not in (None, {}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eagle31 store",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["verify", "info"])
    parser.add_argument("store", help="its folder, or its URL, such as s3://bucket/store")
    parser.add_argument("--cache-dir", type=Path, help="where copies of a remote store's files lie for a while")
    parser.add_argument("--cache-bytes", default="8GB", help="most that these copies may take (default: 8GB)")
    parser.add_argument(
        "--remove", action="store_true", help="verify takes damaged shards away, so that extraction makes them anew"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
