"""Look into a store of hidden states: is it whole, and what does it hold?

python -m eagle31_train.store verify runs/smollm2/store
python -m eagle31_train.store info s3://bucket/store
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from eagle31_train.config import byte_count
from eagle31_train.errors import UserError
from eagle31_train.store.backends import Storage, open_storage
from eagle31_train.store.info import describe, human
from eagle31_train.store.verify import Checked, check, remove

VERIFY = """\
Compare every byte of a store with the checksums that were written with it, and read every shard.
Works for a store that is still being written, too: what is committed is checked.
Prints what was checked and exits with 0, or everything that is wrong, a line each, and exits with 1."""
INFO = "Say what a store holds: samples, tokens, bytes per token, how it was made, and how long the samples are."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 for a damaged store, 2 for what the user can mend."""
    options = _parser().parse_args(arguments)
    try:
        most = byte_count(options.cache_bytes, "--cache-bytes")
        # A folder of its own: what is checked is the store, and not copies that were made of it earlier.
        with tempfile.TemporaryDirectory(prefix="eagle31-", dir=options.cache_dir) as folder:
            storage = open_storage(options.store, Path(folder), most)
            try:
                if options.command == "info":
                    print(describe(storage))
                    return 0
                return _verify(storage, options.remove)
            finally:
                storage.close()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FileNotFoundError:
        print(f"error: there is no folder {options.cache_dir}: give another --cache-dir", file=sys.stderr)
        return 2


def _verify(storage: Storage, take_away: bool) -> int:
    """Print what is wrong, a line each, and a summary; returns the exit status."""
    began, checked, problems = time.perf_counter(), Checked(), []
    for problem in check(storage, checked):
        print(problem.text, flush=True)
        problems.append(problem)
    state = "complete and whole" if checked.complete else "unfinished, and whole as far as it goes"
    if problems:
        state = f"{len(problems):,} problem{'s' if len(problems) > 1 else ''}"
    rate = human(checked.bytes / max(time.perf_counter() - began, 1e-9))
    summary = (
        f"{storage.location}: {state}; {checked.shards:,} shards checked, {checked.samples:,} samples, "
        f"{checked.tokens:,} tokens, {human(checked.bytes)} at {rate}/s"
    )
    if checked.consumed:
        summary += f"; {checked.consumed:,} shards used up by a training"
    if checked.coming:
        summary += f"; {checked.coming:,} shards still to come"
    print(summary)
    if not problems:
        return 0
    advice = (
        f"`python -m eagle31_train.store verify {storage.location} --remove` takes away what is damaged, "
        "and the extraction's own command then makes it anew"
    )
    print(remove(storage, problems) if take_away else advice)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eagle31_train.store",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="verify|info")
    for name, text in (("verify", VERIFY), ("info", INFO)):
        command = commands.add_parser(
            name,
            help=text.split(".")[0].split(":")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("store", help="its folder, or its URL, such as s3://bucket/store")
        command.add_argument("--cache-dir", type=Path, help="where copies of a remote store's files lie for a while")
        command.add_argument("--cache-bytes", default="8GB", help="most that these copies may take (default: 8GB)")
        if name == "verify":
            command.add_argument(
                "--remove", action="store_true", help="take damaged shards away, so that extraction makes them anew"
            )
    return parser


if __name__ == "__main__":
    sys.exit(main())
