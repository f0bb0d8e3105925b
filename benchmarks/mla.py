"""Our MLA step beside the same step with eager attention, as documents grow: `python -m benchmarks.mla`.

Eager attention is what public trainers of MLA drafters have: all scores of a step in one tensor, kept for the gradient
(`contenders/eager.py`). All else is the same. Both take turns in processes of their own (`race.py`); before that, their
losses and gradients are compared. Quote the ratios: times are this machine's.
"""

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import contenders, machine, plot
from benchmarks.race import Race
from benchmarks.shapes import Case, make_material, turns
from eagle31_train import artifacts
from eagle31_train.errors import UserError

OURS, EAGER = "ours", "ours, eager attention"
LENGTHS = [512, 1024, 2048, 4096, 8192]


def difference(case: Case) -> float:
    """The largest distance of a gradient from the other's, as a share of its norm; the loss's too."""
    material = make_material(case.drafter(), turns(case.length, case.share))
    found = []
    for name in (OURS, EAGER):  # in this order: eager attention stays in this process
        contender = contenders.build(name, material, case.unroll)
        loss = contender.loss()
        loss.backward()
        found.append({"loss": loss.detach()} | {key: p.grad for key, p in contender.parameters().items()})
        contenders.drop_gradients(contender)
    ours, eager = found
    return max(float(torch.norm(ours[key] - eager[key]) / torch.norm(eager[key])) for key in ours)


def ratios(result: dict[str, Any]) -> dict[str, float | None]:
    """Eager over ours: median seconds, and peak memory above what the built model takes. None where one has failed."""
    seconds, memory = [], []
    for name in (EAGER, OURS):
        measured = result["contenders"][name]
        if "error" in measured:
            return {"time": None, "memory": None}
        seconds.append(statistics.median(measured["seconds"]))
        memory.append(max(measured["peak"]) - measured["base"][0])
    return {"time": seconds[0] / seconds[1], "memory": memory[0] / memory[1]}


def table(results: list[dict[str, Any]]) -> str:
    """The results as plain text."""
    lines = [
        f"{'tokens':>8s} {'ours s':>9s} {'eager s':>9s} {'ours MiB':>9s} {'eager MiB':>9s} {'time':>7s} {'memory':>7s}"
    ]
    for result in results:
        cells = [f"{result['length']:8d}"]
        both = [result["contenders"][name] for name in (OURS, EAGER)]
        cells += ["   failed" if "error" in m else f"{statistics.median(m['seconds']):9.3f}" for m in both]
        cells += ["   failed" if "error" in m else f"{(max(m['peak']) - m['base'][0]) / 2**20:9.0f}" for m in both]
        cells += [f"{'–':>7s}" if ratio is None else f"{ratio:6.2f}x" for ratio in result["ratios"].values()]
        lines.append(" ".join(cells) + "".join(f"  {m['error']}" for m in both if "error" in m))
    return "\n".join(lines)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="mla", help="one of shapes.py's with MLA")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="tokens of the one document")
    parser.add_argument("--share", type=float, default=1.0, help="share of them that the assistant wrote")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each, after one that warms up")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one step")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/mla.json"))
    parser.add_argument("--quick", action="store_true", help="a smoke test at a tiny shape")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.shape, chosen.lengths, chosen.repeats = "tiny-mla", [64, 128], 1
    return chosen


def main() -> None:
    """Compare, measure each length, print the table, write the file and its picture."""
    chosen = options()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # neither compiles anything
    cases = [Case(chosen.shape, length, chosen.share) for length in chosen.lengths]
    cases = [Case.parse(str(case)) for case in cases]  # refuses what cannot be
    here, results = machine.describe(), []
    apart = difference(cases[0])
    if apart > 1e-4:
        raise UserError(f"the two differ by {apart:.1e} of a gradient: they do not compute the same")
    with tqdm(cases, unit="length", desc="mla") as progress:
        for case in progress:
            progress.set_postfix_str(f"{case.length} tokens")
            result = Race(case, [OURS, EAGER], chosen.repeats, chosen.limit).run()
            results.append({**result, "ratios": ratios(result)})
            artifacts.write_json(chosen.out, {"machine": here, "difference": apart, "lengths": results})
    print(machine.summary(here))
    print(f"losses and gradients agree to {apart:.1e}")
    print(table(results))
    plot.lengths(results, [OURS, EAGER], here, chosen.out.with_suffix(".png"))
    print(f"written: {chosen.out} and .png")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
