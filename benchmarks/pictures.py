"""Draw every picture of docs/ again, from the numbers beside it.

python -m benchmarks.pictures                   # all of docs/results/*.png and docs/pictures/*.svg
python -m benchmarks.pictures study-gain gain   # some of them
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import peers, plot, run_main
from benchmarks.speedrun.measure import KINDS
from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.reporting import figures
from eagle31_train.reporting.evaluation_page import pictures

RESULTS, README = Path("docs/results"), Path("docs/pictures")
# Picture of the study → the result, and which of its pictures.
STUDY = {
    "study-acceptance": ("study-comparison", "heldout-acceptance"),
    "study-gain": ("study-comparison", "heldout-gain"),
    "study-rms": ("study-comparison", "heldout-rms"),
    "study-own": ("study-comparison", "heldout-own"),
    "study-passes2": ("study-passes2", "heldout-acceptance"),
    "study-more": ("study-more", "heldout-acceptance"),
    "study-perturbed": ("study-forms-seed1", "workloads-gain-3.1"),
    "study-kept": ("study-forms-seed1", "workloads-kept"),
    "study-serving": ("study-serving-seed1", "serving-eagle-3.1"),
}
# Names of the study's runs → what its page calls them.
CALLED = {"one-pass": "TTT length 5", "two-passes": "5, two passes", "unroll-3": "TTT length 3"}
CALLED |= {"unroll-7": "TTT length 7", "study-3.1-u5-s1": "EAGLE 3.1"}
GITHUB = {"light": ("#ffffff", "#1f2328", "#d1d9e0"), "dark": ("#0d1117", "#f0f6fc", "#3d444d")}  # page, text, lines
RACE = {  # of a speedrun's contenders: on the light page, on the dark one
    "ours": {"light": "#2563c9", "dark": "#6cb0ff"},
    "speculators": {"light": "#b45309", "dark": "#f0a04b"},
    "specforge": {"light": "#5d6873", "dark": "#9198a1"},
}
GAIN = {"light": ("#5d6873", "#2563c9"), "dark": ("#9198a1", "#6cb0ff")}  # of EAGLE 3 and 3.1


def read(name: str) -> dict[str, Any]:
    """Read the numbers docs/results/NAME.json; UserError if there are none."""
    return artifacts.read_json(RESULTS / f"{name}.json", "its benchmark (benchmarks/README.md)")


def draw(name: str) -> None:
    if name not in DRAWN:
        raise UserError(f"there is no picture {name}: choose one of {', '.join(DRAWN)}")
    DRAWN[name](RESULTS / f"{name}.png")


def study(source: str, which: str, path: Path) -> None:
    result = renamed(read(source))
    result = {"serving": result} if "rows" in result else result
    (chosen,) = [picture for picture in pictures(result) if picture.name == which]
    artifacts.write_bytes(path, chosen.png())


def renamed(value: Any) -> Any:
    """Rename runs in a JSON value by CALLED, both as keys and as whole texts."""
    if isinstance(value, dict):
        return {CALLED.get(name, name): renamed(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [renamed(inner) for inner in value]
    return CALLED.get(value, value) if isinstance(value, str) else value


@contextmanager
def themed(theme: str, size: tuple[float, float], path: Path) -> Iterator[Any]:
    """Yield a figure of `size` inches for GitHub's light or dark page, and save it at the end."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    page, text, lines = GITHUB[theme]
    colours = dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor", "axes.labelcolor"), text)
    colours |= dict.fromkeys(("grid.color", "axes.edgecolor", "xtick.color", "ytick.color"), lines)
    style = {**figures.STYLE, **colours, "font.size": 10, "axes.facecolor": page, "svg.hashsalt": "gain"}
    with rc_context(style):
        figure = Figure(size, layout="constrained", facecolor=page)
        yield figure
        figure.savefig(path, metadata={"Date": None})


def gain(_: Path) -> None:
    """Draw the README's picture: acceptance length of EAGLE 3 and 3.1 by draft tokens, on a light and a dark page."""
    of = read("lead")["workloads"][0]["drafters"]
    for theme, (*_page, lines) in GITHUB.items():
        with themed(theme, (7, 3.3), README / f"gain-{theme}.svg") as figure:
            axes = figure.subplots()
            titles = {"3.0": ("EAGLE 3", "top"), "3.1": ("EAGLE 3.1", "bottom")}
            for (name, (title, side)), colour in zip(titles.items(), GAIN[theme], strict=True):
                rows = of[name]["by_depth"]
                values, low, high = figures.columns(row["acceptance_length"] for row in rows.values())
                tokens = [int(depth) for depth in rows]
                axes.fill_between(tokens, low, high, color=colour, alpha=0.18, linewidth=0)
                axes.plot(tokens, values, "o-", color=colour, linewidth=2, markersize=5)
                at = (tokens[-1], values[-1])
                axes.annotate(f"{title}  {values[-1]:.2f}", at, (10, 0), color=colour, weight="bold", va=side,
                              textcoords="offset points", annotation_clip=False)  # fmt: skip
            axes.axhline(1, color=lines)
            axes.annotate("without a drafter", (8, 1), (10, 0), va="center", textcoords="offset points")
            axes.set(xlabel="draft tokens", ylim=(0.9, None), xlim=(0.8, 8.1), xticks=tokens)
            axes.grid(visible=False, axis="x")
            axes.set_title(
                "135M target, 160 prompts of MT-Bench and Alpaca, greedy; 95 % intervals over prompts", fontsize=8.5
            )
            figure.suptitle("Tokens per pass of the target (acceptance length)", x=0.01, ha="left")


def speedrun(_: Path) -> None:
    """Draw acceptance length over minutes of training, of every contender with its defaults and at its best."""
    draw_speedrun(read("speedrun-long"), README)


def draw_speedrun(result: dict[str, Any], folder: Path) -> None:
    """Draw a speedrun's result as FOLDER/speedrun-light.svg and -dark.svg, with a panel for each kind of prompts."""
    for theme, (_, _, lines) in GITHUB.items():
        with themed(theme, (9, 3.6), folder / f"speedrun-{theme}.svg") as figure:
            panels = figure.subplots(1, len(result["prompts"]), sharey=True, squeeze=False)[0]
            for axes, (kind, prompts) in zip(panels, result["prompts"].items(), strict=True):
                for row in result["trainings"]:
                    best, default = row["name"] == result["best"][row["contender"]], not row["options"]
                    if best or default:
                        values, low, high = figures.columns(row["acceptance"][kind])
                        minutes = [point["minutes"] for point in row["points"]]
                        colour = RACE[row["contender"]][theme]
                        axes.fill_between(minutes, low, high, color=colour, alpha=0.15, linewidth=0)
                        line, label = "o-" if default else "o--", " ".join([row["contender"], *row["options"]])
                        axes.plot(minutes, values, line, color=colour, linewidth=2, markersize=4, label=label)
                for level in map(float, result["levels"]):
                    axes.axhline(level, color=lines, linewidth=0.8)
                axes.set(xlabel="minutes of training", xlim=(0, None))
                axes.set_title(f"{KINDS[kind]} ({prompts})", fontsize=8.5)
            panels[0].set_ylabel("acceptance length")
            panels[0].legend(loc="upper left", fontsize=8)
            what = (
                f"Tokens per pass of the target with {result['draft_tokens']} draft tokens; 95 % intervals over prompts"
            )
            figure.suptitle(what, x=0.01, ha="left", fontsize=10)


def codecs(path: Path) -> None:
    """Draw what smaller stored states cost: a drafter trained on each, beside the one of bf16."""
    found = read("codecs")
    pairs = {name: {**pair, **next(iter(pair["runs"].values()))} for name, pair in found["pairs"].items()}
    plain = pairs["bf16:bf16"]
    with plot.drawn(7, 2.4, "Drafters trained on smaller states, beside bf16", found["machine"], path) as figure:
        axes = figure.subplots()
        for at, (key, label) in enumerate({"tau": "acceptance estimate", "acceptance": "acceptance length"}.items()):
            shares = [pair[key] / plain[key] for pair in pairs.values()]
            axes.plot(shares, range(len(pairs)), figures.MARKERS[at], color=f"C{at}", label=label)
        names = [f"{name}, {pair['bytes']['wide'] / 1024:.1f} KiB per token" for name, pair in pairs.items()]
        axes.set_yticks(range(len(pairs)), names)
        axes.set_ylim(len(pairs) - 0.5, -0.5)
        figures.Kind(percent=True).scale(axes, "x")
        axes.set_xlabel("of bf16's; one training each")
        figure.legend(loc="outside right upper")


def contexts(path: Path) -> None:
    """Draw acceptance length by tokens of context, of a drafter that sees all positions or the last few."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found = read("contexts")
    lengths = {"0" if "context" not in of["name"] else of["name"].split("_")[-2]: of for of in found["workloads"]}
    prompts = found["workloads"][0]["prompts"]
    title = f"Acceptance length at 3 draft tokens, {prompts} prompts after other texts"
    with rc_context(figures.STYLE):
        figure = Figure((7, 3), layout="constrained")
        axes = figure.subplots()
        for at, name in enumerate(found["trainings"]):
            rows = [of["drafters"][name]["by_depth"]["3"]["acceptance_length"] for of in lengths.values()]
            values, low, high = figures.columns(rows)
            places = [int(length) for length in lengths]
            axes.fill_between(places, low, high, color=f"C{at}", alpha=0.15, linewidth=0)
            axes.plot(places, values, f"{figures.MARKERS[at]}-", color=f"C{at}", label=f"attention to {name}")
        axes.set(xlabel="tokens of context (0: the prompts alone)", xticks=places, ylim=(1, None))
        axes.set_title(title)
        axes.legend(loc="lower left")
        figure.savefig(path, dpi=150)


def measured(source: str, how: Callable[..., None], path: Path) -> None:
    """Draw a benchmark's own picture; `how` draws its result."""
    found = read(source)
    how(found, found["machine"], path)


DRAWN: dict[str, Callable[[Path], None]] = {
    **{name: partial(study, *of) for name, of in STUDY.items()},
    "gain": gain,
    "speedrun": speedrun,
    "codecs": codecs,
    "contexts": contexts,
    "peers": partial(measured, "peers", lambda found, *where: plot.peers(peers.rows(found["cases"]), *where)),
    "growth": partial(measured, "growth", lambda found, *where: plot.growth(found["points"], *where)),
    "mla": partial(measured, "mla", lambda found, *where: plot.peers(peers.rows(found["lengths"]), *where)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=DRAWN, metavar="NAME", help=f"{', '.join(DRAWN)} [all]")
    for name in parser.parse_args().names:
        draw(name)


if __name__ == "__main__":
    run_main(main)
