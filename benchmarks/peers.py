"""Our training step beside others: parity, then time and memory (`make bench-peers`, `make bench-mla`).

Prints a table and writes OUT.json (every raw number, and what it ran on) and OUT.png. The file is written anew after
each case; `--keep` leaves the cases of an earlier run in it, so that long lists can be measured in pieces.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import contenders, machine, parity, plot, run_main
from benchmarks.race import race
from benchmarks.shapes import Case
from eagle31_train.common import artifacts
from eagle31_train.reporting.tables import aligned

SHARES = (1.0, 0.5, 0.35, 0.25)
LENGTHS = {"smollm2": (512, 1024, 2048, 4096), "mid": (512, 1024, 4096), "llama8b": (512,)}
CASES = [f"{shape}:{length}:{share:g}" for shape in LENGTHS for length in LENGTHS[shape] for share in SHARES]
QUICK = ["tiny:256:1", "tiny:256:0.35"]
# Each peer is compared with the variant of ours that trains the same parameters: speculators freezes its head.
OURS = {name: "ours, frozen head" if name.startswith("speculators") else "ours" for name in contenders.NAMES}
DEFAULT = ["ours", "ours, frozen head", "speculators", "specforge"]


def numbers(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per contender of a case: median seconds, memory above the built model and data, and times slower
    (speed) and larger (size) than ours with the same trained parameters. None if `error` says why, or ours has none."""
    rows: dict[str, dict[str, Any]] = {}
    for name, measured in result["contenders"].items():
        error = measured.get("error")
        rows[name] = {
            "name": name,
            "error": error,
            "seconds": None if error else statistics.median(measured["seconds"]),
            "spread": None if error else max(measured["seconds"]) / min(measured["seconds"]) - 1,
            "memory": None if error else max(measured["peak"]) - statistics.median(measured["base"]),
        }
    for name, row in rows.items():
        own = rows.get(OURS[name])
        usable = own is not None and own["error"] is None and row["error"] is None
        row["speed"] = row["seconds"] / own["seconds"] if own and usable else None
        row["size"] = row["memory"] / own["memory"] if own and usable else None
    return list(rows.values())


def rows(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return every case's numbers, by its title in the picture."""
    return {f"{one['shape']}, {one['length']} tokens, share {one['share']:g}": numbers(one) for one in results}


def table(results: list[dict[str, Any]]) -> str:
    lines = []
    for result in results:
        for row in numbers(result):
            ratio, size = (f"{row[key]:.2f}" if row[key] else "" for key in ("speed", "size"))
            measured = ["", "", "", "", "", row["error"]]
            if not row["error"]:
                spread, gib = f"{row['spread']:.1%}", f"{row['memory'] / 2**30:.3f}"
                measured = [f"{row['seconds']:.3f}", spread, ratio, gib, size, ""]
            lines.append([f"{result['case']}, {row['name']}", *measured])
    what = "median seconds of a step, peak memory above model and data; x ours: over that of ours that trains the same"
    return "\n".join([what, *aligned(["", "seconds", "spread", "x ours", "GiB", "x ours", ""], lines)])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="SHAPE:LENGTH:SHARE", help="default: all of them")
    parser.add_argument("--contenders", nargs="+", default=DEFAULT, choices=contenders.NAMES, metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each, each after one that warms up")
    parser.add_argument("--limit", type=float, default=900, help="seconds that one step may take")
    parser.add_argument("--memory", type=float, help="GiB that a worker may use; default: 90 %% of what is free")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/peers"), help="without .json and .png")
    parser.add_argument("--keep", action="store_true", help="keep the cases of an earlier run that this one leaves out")
    parser.add_argument("--quick", action="store_true", help="a minute's smoke test at a tiny shape")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.cases = QUICK
    return chosen


def main() -> None:
    chosen = options()
    cases = [Case.parse(text) for text in chosen.cases]
    here, file = machine.describe(), chosen.out.with_suffix(".json")
    peers = [name for name in parity.RULES if name in chosen.contenders]
    checked = parity.run(peers) if peers else []
    results: list[dict[str, Any]] = []
    if chosen.keep and file.exists():
        earlier = json.loads(file.read_text())
        checked = checked or earlier["parity"]
        results = [r for r in earlier["cases"] if r["case"] not in {str(case) for case in cases}]

    memory = int(chosen.memory * 2**30) if chosen.memory else None
    with tqdm(cases, unit="case", desc="cases") as progress:
        for case in progress:
            progress.set_postfix_str(str(case))
            result = race(case, chosen.contenders, chosen.repeats, chosen.limit, memory)
            results.append({**result, "machine": here})
            tqdm.write(table([result]).partition("\n")[2])
            artifacts.write_json(file, {"machine": here, "parity": checked, "cases": results})
    plot.peers(rows(results), here, chosen.out.with_suffix(".png"))
    print(machine.summary(here))
    print(table(results))
    print(f"written: {chosen.out}.json and .png")


if __name__ == "__main__":
    run_main(main)
