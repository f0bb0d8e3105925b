"""What a training step should take on a GPU, estimated without one: `make bench-gpu-model`.

A whole step runs on fake CUDA tensors (fake_cuda.py), which counts operators, FLOPs of products and attention, bytes
that everything else reads and writes, and memory. Rates that a device is taken to reach make a time of them. Nothing is
measured: an estimate of `make bench-gpu`, and a way to see what a change saves or adds. See README.md.
"""

import argparse
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import fake_cuda, run_main
from benchmarks.fake_cuda import FLASH, PRODUCTS, Count, FakeStep, Options, Sums
from benchmarks.gpu_step import drafter_of
from benchmarks.shapes import Case
from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.config import DrafterShape
from eagle31_train.model.packing import Layout
from eagle31_train.planning.work import count_work, training_flops
from eagle31_train.reporting.tables import aligned

GIB = 2**30
# Case → whether activations are recomputed, each in turn.
CASES = {
    "llama8b:2x4096:1": (False,),
    "llama8b:2x4096:0.35": (False,),
    "llama8b:1x32768:1": (False, True),
    "llama8b:1x65536:1": (False, True),
    "kimi:1x20480:0.35": (False, True),
}


@dataclass(frozen=True)
class Rates:
    """Assumed rates of a device: FLOP/s in products, and in attention forward and backward; bytes/s; and the maker's
    FLOP/s, of which utilisation is a share.

    Rates of FlashAttention 3 are those of torch's own kernel times 1.75 and 1.625: its authors measured it 1.5 to 2.0
    times as fast forward and 1.5 to 1.75 times backward, on an H100 (arXiv 2407.08608, section 4.1).
    """

    products: float = 720e12
    forward: float = 330e12
    backward: float = 270e12
    memory: float = 4.0e12
    nominal: float = 989e12
    fa3_forward: float = 577.5e12
    fa3_backward: float = 438.75e12


def attention_pairs(layout: Layout) -> int:
    """Return the pairs of a query and a key that the flash kernel computes for one head, at one step."""
    segments = layout.segments
    if segments is None:
        return 0
    if segments.query_rows is not None:  # whole documents, for the slots in them
        return sum((end - start) * (end - start + 1) // 2 for start, end in layout.documents)
    lengths = [(run.end - run.first, run.keys.stop - run.keys.start) for run in layout.runs]
    return sum(n * (m - n) + n * (n + 1) // 2 for n, m in lengths)


def estimate(shape: DrafterShape, masks: list[torch.Tensor], options: Options, rates: Rates) -> dict[str, Any]:
    step = FakeStep(shape, masks, options)
    count = step.run()
    products = count.total(lambda *key: key[2] in PRODUCTS)
    between = count.total(lambda *key: key[2] not in PRODUCTS | FLASH)
    # All are as wide as the wider of a key and a value; 2 products forward, 5 backward.
    width = max(shape.head_dim, shape.v_head_dim or 0)
    one = 2.0 * attention_pairs(step.layout) * shape.num_attention_heads * width
    calls = {name: count.total(lambda *key, name=name: key[2] == name).operations for name in FLASH}
    flash = {
        "forward": 2 * one * calls["_flash_attention_forward"],
        "backward": 5 * one * calls["_flash_attention_backward"],
    }
    fa3 = options.kernels == "fused+FA3"
    forward, backward = (rates.fa3_forward, rates.fa3_backward) if fa3 else (rates.forward, rates.backward)
    seconds = {
        "products": products.flops / rates.products,
        "attention": flash["forward"] / forward + flash["backward"] / backward,
        "memory": between.bytes / rates.memory,
    }
    work = count_work([mask.numpy() for mask in masks], options.ttt_length)
    necessary = sum(training_flops(shape, work, options.train_lm_head).values())
    total = sum(seconds.values())
    return {
        "operations": count.total().operations,
        "product_flops": products.flops,
        "attention_flops": sum(flash.values()),
        "bytes": between.bytes,
        "memory": count.before + count.peak,
        "before": count.before,
        "seconds": {**seconds, "total": total},
        "necessary_flops": necessary,
        "utilisation": necessary / (total * rates.nominal),
        "places": places(count),
    }


def places(count: Count) -> dict[str, dict[str, float]]:
    """Return operators and bytes between products by file and function of ours, the most bytes first."""
    sums: dict[str, Sums] = defaultdict(Sums)
    for (phase, place, name), one in count.sums.items():
        if name not in PRODUCTS | FLASH:
            sums[f"{phase}, {place}"].add(one)
    ordered = sorted(sums.items(), key=lambda item: -item[1].bytes)
    return {place: {"operations": one.operations, "bytes": one.bytes} for place, one in ordered}


def table(results: dict[str, Any], top: int) -> str:
    """Return all cases as text, and where the bytes between the products are moved."""
    r = Rates(**results["rates"])
    lines = [
        f"Estimated, not measured. Rates: products {r.products / 1e12:g} TFLOP/s, attention {r.forward / 1e12:g} "
        f"forward and {r.backward / 1e12:g} backward (FA3: {r.fa3_forward / 1e12:g} and {r.fa3_backward / 1e12:g}), "
        f"memory {r.memory / 1e12:g} TB/s; all in turn, no wait for the host. Utilisation: necessary FLOPs over time × "
        f"{r.nominal / 1e12:g} TFLOP/s.",
    ]
    head = ["", "operators", "TFLOP", "attn.", "GB", "GiB", "ms", "= products", "+ attn.", "+ memory", "util."]
    rows = []
    for name, one in results["cases"].items():
        ms = [one["seconds"][part] * 1e3 for part in ("total", "products", "attention", "memory")]
        work = [one["product_flops"] / 1e12, one["attention_flops"] / 1e12, one["bytes"] / 1e9, one["memory"] / GIB]
        numbers = [f"{number:.1f}" for number in (*work, *ms)]
        rows.append([name, str(one["operations"]), *numbers, f"{one['utilisation']:.1%}"])
    lines += aligned(head, rows)
    for name, one in results["cases"].items() if top else ():
        lines.append(f"\n{name}: GB, operators")
        for place, sums in list(one["places"].items())[:top]:
            lines.append(f"  {sums['bytes'] / 1e9:8.2f} {sums['operations']:6.0f}  {place}")
    return "\n".join(lines)


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    rates = Rates(*(getattr(chosen, name) * 1e12 for name in Rates.__dataclass_fields__))
    results: dict[str, Any] = {"rates": asdict(rates), "torch": torch.__version__, "cases": {}}
    every = [
        (text, again, how) for text in chosen.cases for again in CASES.get(text, (False,)) for how in chosen.kernels
    ]
    for text, recompute, kernels in tqdm(every, unit="case", desc="gpu model"):
        case = Case.parse(text)
        options = Options(case.unroll, recompute=recompute, kernels=kernels)
        name = f"{text}, {kernels}{'+recompute' * recompute}"
        results["cases"][name] = estimate(drafter_of(case), case.masks, options, rates)
    return results


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="SHAPE:DOCUMENTSxLENGTH:SHARE")
    for name, rate in asdict(Rates()).items():
        unit = "TB/s" if name == "memory" else "TFLOP/s"
        parser.add_argument(f"--{name}", type=float, default=rate / 1e12, help=f"{unit}, default %(default)g")
    variants = ("plain", "fused", "fused+FA3")
    parser.add_argument("--kernels", nargs="+", default=variants, choices=variants)
    parser.add_argument("--top", type=int, default=12, help="places listed of each case, default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/gpu_model"), help="without .json")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    try:
        fake_cuda.enter()
    except fake_cuda.UnavailableError as error:
        raise UserError(f"this needs a torch without CUDA, and a C++ compiler: {error}") from None
    results = run(chosen)
    artifacts.write_json(chosen.out.with_suffix(".json"), results)
    print(table(results, chosen.top))
    print(f"written: {chosen.out}.json")


if __name__ == "__main__":
    run_main(main)
