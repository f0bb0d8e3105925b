"""How our step's cost grows, and how far it is from the machine's limit: `make bench`.

From a base case, one thing grows at a time: length, TTT length, vocabulary, share of supervised tokens; in fp32 and in
bf16 autocast. "Of the limit" is the necessary FLOPs (planning/work.py) over the median time times the machine's matrix
rate: the best of the products that occur in the step, by any library in torch, timed in the same process before each.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import contenders, machine, plot, run_main
from benchmarks.contenders.ours import Ours
from benchmarks.shapes import Case, make_material, turns
from eagle31_train.common import artifacts
from eagle31_train.config import DrafterShape
from eagle31_train.planning.work import count_work, training_flops
from eagle31_train.reporting.tables import aligned

AXES: dict[str, list[float]] = {
    "length": [512, 1024, 2048, 4096],
    "unroll": [1, 3, 5, 7],
    "vocab": [8192, 32000, 128000],
    "share": [1.0, 0.5, 0.35, 0.25],
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = 1024  # of the timed products: enough for the full rate


def points(base: Case, axis: str) -> Iterator[tuple[float, Case]]:
    """Yield values of an axis, each with the base case so changed. The base is among them if its value is."""
    for value in AXES[axis]:
        changed: Any = {axis: float(value) if axis == "share" else int(value)}
        yield value, replace(base, **changed)


def products(shape: DrafterShape) -> dict[str, tuple[int, int, int]]:
    """Return the large matrix products of a step: rows, columns in, columns out."""
    D, inner = shape.hidden_size, shape.intermediate_size
    heads = shape.num_attention_heads * shape.head_dim
    return {
        "queries": (ROWS, 2 * D, heads),
        "mlp up": (ROWS, D, inner),
        "mlp down": (ROWS, inner, D),
        "lm_head": (ROWS, D, min(shape.draft_vocab_size, 32000)),
    }


# Every library in torch that can multiply: which one is fast depends on the processor and the precision.
LIBRARIES = {
    "torch's own": lambda left, right: left @ right.T,
    "oneDNN": lambda left, right: torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], ""),
}


def rates(operands: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the FLOP/s of each product [n, a] @ [b, a]^T, by name and library."""
    found = {}
    for name, (left, right) in operands.items():
        for library, multiply in LIBRARIES.items():
            start = time.perf_counter()
            multiply(left, right)
            found[f"{name}, {library}"] = 2 * left.numel() * len(right) / (time.perf_counter() - start)
    return found


def measure(case: Case, precision: str, repeats: int) -> dict[str, Any]:
    """Time products and steps in turns, after one of each to warm up."""
    dtype, shape = DTYPES[precision], case.drafter()
    material = make_material(shape, turns(case.length, case.share))
    ours = Ours(material, case.unroll, low=dtype)
    operands = {
        name: (torch.randn(rows, a).to(dtype), torch.randn(b, a).to(dtype))
        for name, (rows, a, b) in products(shape).items()
    }
    parts = training_flops(shape, count_work([material.document.loss_mask.numpy()], case.unroll))
    del material

    seconds, measured = [], []
    for _ in range(1 + repeats):
        measured.append(rates(operands))
        start = time.perf_counter()
        with torch.autocast("cpu", dtype) if precision == "bf16" else nullcontext():
            loss = ours.loss()
        loss.backward()
        contenders.drop_gradients(ours)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[1:])
    by_product = {name: statistics.median(m[name] for m in measured[1:]) for name in measured[0]}
    best = max(by_product.values())
    return {
        "precision": precision,
        "length": case.length,
        "unroll": case.unroll,
        "vocab": shape.draft_vocab_size,
        "share": case.share,
        "seconds": median,
        "all_seconds": seconds[1:],
        "flops": parts,
        "rates": by_product,
        "rate": best,
        "of_limit": sum(parts.values()) / (median * best),
        "loss": float(loss.detach()),
    }


def table(results: list[dict[str, Any]]) -> str:
    rows = []
    for r in results:
        flops = sum(r["flops"].values())
        rates = [f"{rate / 1e9:.1f}" for rate in (flops / r["seconds"], r["rate"])]
        measured = [f"{r['seconds']:.3f}", f"{flops / 1e12:.3f}", *rates, f"{r['of_limit']:.1%}"]
        rows.append([r["axis"], f"{r['value']:g}", r["precision"], *measured])
    return "\n".join(aligned(["axis", "value", "", "seconds", "TFLOP", "GFLOP/s", "machine", "of limit"], rows))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", default="mid:1024:1", metavar="SHAPE:LENGTH:SHARE")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each, after one that warms up")
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=list(AXES))
    parser.add_argument("--precisions", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--out", type=Path, default=Path("runs/bench/growth"), help="without .json and .png")
    parser.add_argument("--quick", action="store_true", help="a smoke test at a tiny shape")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.base = "tiny:512:1"
    return chosen


def main() -> None:
    chosen = options()
    base = Case.parse(chosen.base)
    base = replace(base, vocab=base.drafter().draft_vocab_size)
    here = machine.describe()
    wanted = [
        (axis, value, case, precision)
        for axis in chosen.axes
        for precision in chosen.precisions
        for value, case in points(base, axis)
    ]
    done: dict[tuple[Case, str], dict[str, Any]] = {}
    results = []
    with tqdm(wanted, unit="point", desc="growth") as progress:
        for axis, value, case, precision in progress:
            progress.set_postfix_str(f"{axis} {value:g} {precision}")
            if (case, precision) not in done:
                done[case, precision] = measure(case, precision, chosen.repeats)
            results.append({"axis": axis, "value": value, "base": str(base), **done[case, precision]})
    artifacts.write_json(chosen.out.with_suffix(".json"), {"machine": here, "points": results})
    plot.growth(results, here, chosen.out.with_suffix(".png"))
    print(machine.summary(here))
    print(table(results))
    print(f"written: {chosen.out}.json and .png")


if __name__ == "__main__":
    run_main(main)
