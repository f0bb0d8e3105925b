"""What the benchmarks of the store share: contenders in turns, clocks on functions, tables."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

from tqdm import tqdm

Measured = TypeVar("Measured")


def in_turns(
    contenders: dict[str, Callable[[], Measured]], rounds: int, what: str, warm: int = 1, first: int = 0
) -> dict[str, list[Measured]]:
    """Every contender once, A B C, `rounds` times after `warm` rounds that are not kept.

    Who begins goes round, from number `first` on.
    """
    found: dict[str, list[Measured]] = {name: [] for name in contenders}
    names = list(contenders)
    with tqdm(total=len(names) * (warm + rounds), unit="turn", desc=what, leave=False) as progress:
        for turn in range(warm + rounds):
            begin = (first + turn) % len(names)
            for name in names[begin:] + names[:begin]:
                progress.set_postfix_str(name)
                measured = contenders[name]()
                if turn >= warm:
                    found[name].append(measured)
                progress.update()
    return found


@contextmanager
def clocked(**functions: tuple[Any, str]) -> Iterator[dict[str, float]]:
    """While it lasts, the seconds spent in functions: clocked(encode=(extract, "encode")) clocks `extract.encode`.

    A function is looked up where it is called from, so that what is timed is the stage's own code, unchanged.
    """
    seconds: dict[str, float] = defaultdict(float)

    def timed(part: str, inner: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                seconds[part] += time.perf_counter() - began

        return call

    patches = [
        mock.patch.object(owner, name, timed(part, getattr(owner, name))) for part, (owner, name) in functions.items()
    ]
    for patch in patches:
        patch.start()
    try:
        yield seconds
    finally:
        for patch in patches:
            patch.stop()


def seconds_of(call: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each entry over rounds that all have the same ones."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]} if rounds else {}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; all but the first column to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(head), f"| {' | '.join(rule)} |", *map(line, rows)])
