"""The results of gpu.py as tables."""

from typing import Any

from benchmarks.gpu_step import GROUPS
from eagle31_train.reporting.tables import aligned

GIB = 2**30


def table(results: dict[str, Any]) -> str:
    """Everything measured, as plain text; failures by name."""
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
    """Time, throughput, utilisation and memory."""
    memory = [f"{step['memory'][key] / GIB:.1f}" if step["memory"] else "-" for key in ("allocated", "reserved")]
    rates = [step["tokens_per_second"], step["assistant_tokens_per_second"]]
    used = ["-" if step[key] is None else f"{step[key]:.1%}" for key in ("mfu", "of_measured")]
    tera = f"{step['flops_per_second'] / 1e12:.3g}"
    return [f"{step['seconds']:.3f}", *(f"{rate:.0f}" for rate in rates), tera, *used, *memory]


def _shares(name: str, step: dict[str, Any]) -> list[str]:
    """Share of each group of kernels in the device's busy time, and of that in the step's."""
    seen = step["kernels"]
    return [name, *(f"{share:.1%}" for share in [*map(seen["groups"].get, GROUPS), seen["seconds"] / seen["window"]])]


def _top(steps: dict[str, dict[str, Any]]) -> list[str]:
    """The longest kernels of each case, in its fastest variant."""
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
    """How the search for the longest document ended."""
    if "error" in found:
        return str(found["error"])
    best = next((t for t in reversed(found["tries"]) if t["fits"] and t["tokens"] == found["tokens"]), None)
    if best is None:
        return f"not even {found['tries'][0]['tokens']} tokens fit"
    used = f"{best['memory']['allocated'] / GIB:.1f} GiB in use, " if best["memory"] else ""
    end = f"{found['step']} more do not fit" if found["step"] else "longer ones were not tried"
    return f"{found['tokens']} tokens, {used}{best['seconds']:.1f} s, {end}"
