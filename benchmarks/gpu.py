"""The training step on a GPU: `make bench-gpu`.

Tokens per second, memory, model FLOP utilisation and the kernels' share of the time, at the shapes of a drafter for
Llama-8B and for Kimi, in bf16; and the longest document that a step takes. The
step is the trainer's, optimizer included. See README.md; `--device cpu --quick` is a dry run of the same code.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import gpu_step, machine, run_main
from benchmarks.gpu_step import GROUPS, VARIANTS
from benchmarks.shapes import Case
from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.planning.devices import sheet
from eagle31_train.reporting.tables import aligned

GIB = 2**30

# Defaults, and those of --quick. first, ceiling: tokens at which the search for the longest document begins and ends.
FULL: dict[str, Any] = {"cases": ["llama8b:2x4096:1", "llama8b:2x4096:0.35", "llama8b:1x32768:1", "kimi:4x4096:0.35"]}
FULL |= {"longest": ["llama8b:0.35"], "first": 2**14, "ceiling": 2**18}
QUICK = {"cases": ["tiny:2x64:1", "tiny:1x128:0.35"], "longest": ["tiny:1"], "first": 64, "ceiling": 256}
VARIED = {"cuda": ["fused", "plain", "fused+recompute"], "cpu": ["plain", "plain+recompute"]}


def look(device: str, size: int) -> dict[str, Any]:
    """Describe the device: name, memory in bytes, peaks in FLOP/s, versions."""
    cuda = device == "cuda"
    properties = torch.cuda.get_device_properties(0) if cuda else None
    name = properties.name if properties else "cpu"
    rate = gpu_step.matrix_rate(device, size, repeats=100 if cuda else 3)
    return {
        "name": name,
        "memory": properties.total_memory if properties else None,
        "nominal_peak": known[0] * 1e12 if (known := sheet(name)) else None,
        "measured_rate": rate,
        "cuda": torch.version.cuda,
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    }


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements, and write the results so far after each. UserError for an invalid case."""
    cases = [Case.parse(text) for text in chosen.cases]
    searches = [Case.parse(text.replace(":", ":64:")) for text in chosen.longest]  # of any length
    if chosen.gib is not None:  # as if the GPU had only so much
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, chosen.gib * 2**30 / total))
    here, device = machine.describe(), look(chosen.device, 256 if chosen.quick else 8192)
    if chosen.gib is not None:
        device["memory"] = min(device["memory"], int(chosen.gib * 2**30))
    device["summary"] = f"{device['name']}, CUDA {device['cuda']}, {machine.summary(here)}"
    results: dict[str, Any] = {"machine": here, "device": device, "steps": [], "longest": []}
    file = chosen.out.with_suffix(".json")
    with tqdm(total=len(cases) * len(chosen.variants) + len(searches), unit="case", desc="gpu") as progress:
        for case in cases:
            for variant in chosen.variants:
                progress.set_postfix_str(f"{case}, {variant}")
                step = guarded(gpu_step.measure, case, variant, chosen.device, chosen.repeats)
                results["steps"].append({"case": str(case), "variant": variant, **with_limits(step, device)})
                artifacts.write_json(file, results)
                progress.update()
        for end in searches:
            progress.set_postfix_str(f"longest, {end.shape}, {end.share:g}")
            found = guarded(gpu_step.longest, end, chosen.device, chosen.first, chosen.ceiling)
            results["longest"].append({"shape": end.shape, "share": end.share, **found})
            artifacts.write_json(file, results)
            progress.update()
    return results


def guarded(measure: Callable[..., dict[str, Any]], *words: Any) -> dict[str, Any]:
    """Return `measure(*words)`, or {"error": one line}."""
    try:
        answer = measure(*words)
    except torch.OutOfMemoryError:
        answer = {"error": "out of memory"}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    gpu_step.free()  # only here is the exception gone, and with it the tensors of its frames
    return answer


def with_limits(step: dict[str, Any], device: dict[str, Any]) -> dict[str, Any]:
    """Add a measurement's share of the data sheet's peak (None if unknown) and of the measured product's rate."""
    if "error" in step:
        return step
    nominal, reached = device["nominal_peak"], step["flops_per_second"]
    return {**step, "mfu": reached / nominal if nominal else None, "of_measured": reached / device["measured_rate"]}


def table(results: dict[str, Any]) -> str:
    """Return everything measured as plain text, with failures by name."""
    device, measured = results["device"], results["steps"]
    nominal, memory = device["nominal_peak"], device["memory"]
    peak = f"{nominal / 1e12:.0f}e12 of the data sheet" if nominal else "unknown for this device"
    where = f"{memory / GIB:.1f} GiB ({memory / 1e9:.0f} GB)" if memory else "a CPU's memory (a dry run)"
    good = {f"{step['case']}, {step['variant']}": step for step in measured if "error" not in step}
    heads = ["", "s/step", "tokens/s", "assist./s", "TFLOP/s", "MFU", "of meas.", "GiB", "reserved"]
    return "\n".join(
        [
            "MFU: necessary FLOPs / (time × peak). Peak: "
            f"{peak}; measured by a large product: {device['measured_rate'] / 1e12:.3g}e12",
            *aligned(heads, [[name, *_numbers(step)] for name, step in good.items()]),
            *(f"{step['case']}, {step['variant']}: {step['error']}" for step in measured if "error" in step),
            "",
            *aligned(["kernels, share of their time", *GROUPS, "busy"], [_shares(*step) for step in good.items()]),
            "",
            *_top(good),
            "",
            f"longest document of one step, recompute, in {where}",
            *(f"  {one['shape']}, share {one['share']:g}: {_length(one)}" for one in results["longest"]),
        ]
    )


def _numbers(step: dict[str, Any]) -> list[str]:
    memory = [f"{step['memory'][key] / GIB:.1f}" if step["memory"] else "-" for key in ("allocated", "reserved")]
    rates = [step["tokens_per_second"], step["assistant_tokens_per_second"]]
    used = ["-" if step[key] is None else f"{step[key]:.1%}" for key in ("mfu", "of_measured")]
    tera = f"{step['flops_per_second'] / 1e12:.3g}"
    return [f"{step['seconds']:.3f}", *(f"{rate:.0f}" for rate in rates), tera, *used, *memory]


def _shares(name: str, step: dict[str, Any]) -> list[str]:
    """Return each kernel group's share of the device's busy time, and the share of that in the step's."""
    seen = step["kernels"]
    return [name, *(f"{share:.1%}" for share in [*map(seen["groups"].get, GROUPS), seen["seconds"] / seen["window"]])]


def _top(steps: dict[str, dict[str, Any]]) -> list[str]:
    """Return the longest kernels of each case, in its fastest variant."""
    lines = []
    for case in dict.fromkeys(step["case"] for step in steps.values()):
        name = min((n for n in steps if steps[n]["case"] == case), key=lambda name: steps[name]["seconds"])
        kernels = steps[name]["kernels"]
        lines.append(f"{name}: longest kernels")
        for one in kernels["top"]:
            share = one["seconds"] / kernels["seconds"]
            lines.append(f"  {share:6.1%} {one['calls']:6d} calls  {one['group']:22s} {one['name'][:90]}")
    return lines


def _length(found: dict[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])
    best = next((t for t in reversed(found["tries"]) if t["fits"] and t["tokens"] == found["tokens"]), None)
    if best is None:
        return f"not even {found['tries'][0]['tokens']} tokens fit"
    used = f"{best['memory']['allocated'] / GIB:.1f} GiB in use, " if best["memory"] else ""
    end = f"{found['step']} more do not fit" if found["step"] else "longer ones were not tried"
    return f"{found['tokens']} tokens, {used}{best['seconds']:.1f} s, {end}"


def options(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. UserError if there is no GPU, and the CPU was not asked for."""
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="*", metavar="SHAPE:DOCUMENTSxLENGTH:SHARE", help="[%(default)s]")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help=f"[{' '.join(VARIED['cuda'])}]")
    parser.add_argument("--longest", nargs="*", metavar="SHAPE:SHARE", help="[%(default)s]")
    parser.add_argument("--first", type=int, help="tokens that the search begins with [%(default)s]")
    parser.add_argument("--ceiling", type=int, help="tokens that the search ends with [%(default)s]")
    parser.add_argument("--gib", type=float, help="use no more than so many GiB of the GPU's memory")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each, after two that warm up")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/gpu"), help="without .json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, with --quick")
    parser.add_argument("--quick", action="store_true", help="a smoke test at tiny shapes")
    parser.set_defaults(**(QUICK if "--quick" in words else FULL))
    chosen = parser.parse_args(words)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device: run this where there is one, or try the code with --device cpu --quick")
    if chosen.device == "cpu" and (not chosen.quick or chosen.gib is not None):
        raise UserError("--device cpu is a dry run: add --quick, and remove --gib")
    chosen.variants = chosen.variants or VARIED[chosen.device]
    return chosen


def main() -> None:
    chosen = options()
    results = run(chosen)
    print(results["device"]["summary"])
    print(table(results))
    print(f"written: {chosen.out}.json")


if __name__ == "__main__":
    run_main(main)
