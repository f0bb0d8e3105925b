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

from eagle31_train.place import Place, open_place
from eagle31_train.schema import UserError, byte_count
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
            place = open_place(options.store, Path(folder), most)
            try:
                if options.command == "info":
                    print(describe(place))
                    return 0
                return _verify(place, options.remove)
            finally:
                place.close()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FileNotFoundError:
        print(f"error: there is no folder {options.cache_dir}: give another --cache-dir", file=sys.stderr)
        return 2


def _verify(place: Place, take_away: bool) -> int:
    began, checked, found = time.perf_counter(), Checked(), []
    for problem in check(place, checked):
        print(problem.text, flush=True)
        found.append(problem)
    print(_summary(place, checked, len(found), time.perf_counter() - began))
    if not found:
        return 0
    print(remove(place, found) if take_away else _advice(place))
    return 1


def _summary(place: Place, checked: Checked, wrong: int, seconds: float) -> str:
    verdict = "complete and whole" if checked.complete else "unfinished, and whole as far as it goes"
    if wrong:
        verdict = "1 problem" if wrong == 1 else f"{wrong:,} problems"
    parts = [
        f"{place.location}: {verdict}; {checked.shards:,} shards checked, {checked.samples:,} samples, "
        f"{checked.tokens:,} tokens, {human(checked.bytes)} at {human(checked.bytes / max(seconds, 1e-9))}/s"
    ]
    if checked.consumed:
        parts.append(f"{checked.consumed:,} shards used up by a training")
    if checked.coming:
        parts.append(f"{checked.coming:,} shards still to come")
    return "; ".join(parts)


def _advice(place: Place) -> str:
    return (
        f"`python -m eagle31_train.store verify {place.location} --remove` takes away what is damaged, "
        "and the extraction's own command then makes it anew"
    )


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
