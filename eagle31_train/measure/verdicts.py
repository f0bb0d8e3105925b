"""Which of two drafters is better, in one line that says no more than prompts and trainings show."""

from collections.abc import Mapping, Sequence
from typing import Any

from eagle31_train.measure.intervals import FEW, Interval

Lengths = Mapping[str, float | None]  # of one training: acceptance length by number of draft tokens


def verdict(
    first: str,
    other: str,
    differences: Mapping[str, Any],
    prompts: int,
    trainings: Mapping[str, Sequence[Lengths]],
    draft_tokens: int,
) -> dict[str, Any]:
    """Which of two drafters is better at which number of draft tokens.

    One wins where the interval of their difference has no 0 and each of its trainings is ahead of each of the other's:
    an interval is one over prompts, and does not know that the next training may turn out otherwise.

    Args:
        differences: other - first and other / first, by number of draft tokens; see `acceptance.py`.
        trainings: of both, by name.
        draft_tokens: that of the headline, for which it is told what a perturbation leaves.
    """
    depths = list(differences)
    better = {depth: _better(first, other, differences[depth]["difference"], trainings, depth) for depth in depths}
    parts = []
    for name in (other, first):
        won = [depth for depth in depths if better[depth] == name]
        if won:
            at = f" at {won[0]}" if len(won) > 1 else ""
            parts.append(f"{name} wins {_where(won, depths)}, {_gain(differences[won[0]], name == first)}{at}")
    if not parts:
        last = depths[-1]
        ahead, pairs = _ahead(trainings[other], trainings[first], last)
        count = f" ({other} ahead in {ahead} of {pairs} pairs of trainings)" if pairs > 1 else ""
        parts.append(f"no difference shown at any number of draft tokens, {_gain(differences[last])} at {last}{count}")
    if kept := _kept(differences[str(draft_tokens)].get("kept_ratio")):
        parts.append(f"{other} keeps {kept} at {draft_tokens}")
    parts.append(_sizes(first, other, len(trainings[first]), len(trainings[other])))
    if prompts < FEW:
        parts.append(f"only {prompts} prompt{'s' * (prompts != 1)}, which is too few to rely on")
    return {"text": "; ".join(parts), "better": better}


def _better(
    first: str, other: str, difference: Interval, trainings: Mapping[str, Sequence[Lengths]], depth: str
) -> str | None:
    _, low, high = difference
    if low is None or high is None or low <= 0 <= high:
        return None
    winner, loser = (other, first) if low > 0 else (first, other)
    ahead, pairs = _ahead(trainings[winner], trainings[loser], depth)
    return winner if ahead == pairs else None


def _ahead(these: Sequence[Lengths], those: Sequence[Lengths], depth: str) -> tuple[int, int]:
    """In how many pairs of trainings, one of either, that of `these` is ahead; and how many pairs there are."""
    pairs = [(one[depth], another[depth]) for one in these for another in those]
    return sum(a is not None and b is not None and a > b for a, b in pairs), len(pairs)


def _sizes(first: str, other: str, of_first: int, of_other: int) -> str:
    if of_first == of_other:
        return "one training each" if of_first == 1 else f"{of_first} trainings each"
    counts = {other: of_other, first: of_first}
    return "trainings: " + ", ".join(f"{'one' if count == 1 else count} of {name}" for name, count in counts.items())


def _where(won: list[str], depths: list[str]) -> str:
    if won == depths:
        return "at every number of draft tokens"
    if won == depths[-len(won) :]:
        return f"from {won[0]} draft tokens on" if len(won) > 1 else f"at {won[0]} draft tokens"
    numbers = won[0] if len(won) == 1 else f"{', '.join(won[:-1])} and {won[-1]}"
    return f"at {numbers} draft token{'s' * (won != ['1'])}"


def _gain(found: Mapping[str, Any], inverse: bool = False) -> str:
    """The ratio's interval in per cent, of the first over the other if `inverse`."""
    value, low, high = found["ratio"]
    if value is None:
        return "nothing was drafted"
    if low is None:
        return f"{100 * (value - 1):+.1f} %"
    if inverse:
        value, low, high = 1 / value, 1 / high, 1 / low
    return f"{100 * (value - 1):+.1f} % [{100 * (low - 1):.1f}, {100 * (high - 1):.1f}]"


def _kept(ratio: Interval | None) -> str:
    """How much more, or less, of its plain form's acceptance length the other keeps than the first does of its own."""
    if ratio is None or ratio[0] is None:
        return ""
    more = [None if part is None else 100 * (part - 1) for part in ratio]
    value, low, high = more
    assert value is not None
    word = "more"
    if value < 0:
        value, word = -value, "less"
        low, high = (None, None) if low is None or high is None else (-high, -low)
    return f"{value:.1f} % {word} of its plain form" + ("" if low is None else f" [{low:.1f}, {high:.1f}]")
