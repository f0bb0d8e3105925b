"""The results of gpu.py as tables."""

from typing import Any

from benchmarks.gpu_step import GROUPS

GIB = 2**30


def table(results: dict[str, Any]) -> str:
    """Everything measured, as plain text."""
    return "\n\n".join([steps(results), shares(results["steps"]), top(results["steps"]), lengths(results)])


def label(step: dict[str, Any]) -> str:
    """Case and variant."""
    return f"{step['case']}, {step['variant']}"


def steps(results: dict[str, Any]) -> str:
    """Time, throughput, utilisation and memory; failures by name."""
    nominal = results["device"]["nominal_peak"]
    peak = f"{nominal / 1e12:.0f}e12 of the data sheet" if nominal else "unknown for this device"
    lines = [
        f"MFU: necessary FLOPs / (time × peak). Peak: {peak}; "
        f"measured by a large product: {results['device']['measured_rate'] / 1e12:.3g}e12",
        f"{'':44s} {'s/step':>8s} {'tokens/s':>9s} {'assist./s':>9s} {'TFLOP/s':>8s} {'MFU':>6s} {'of meas.':>8s} "
        f"{'GiB':>6s} {'reserved':>8s}",
    ]
    for step in results["steps"]:
        if "error" in step:
            lines.append(f"{label(step):44s} {step['error']}")
            continue
        memory = step["memory"] or {}
        used, taken = (f"{memory[key] / GIB:.1f}" if memory else "-" for key in ("allocated", "reserved"))
        mfu = "-" if step["mfu"] is None else f"{step['mfu']:.1%}"
        lines.append(
            f"{label(step):44s} {step['seconds']:8.3f} {step['tokens_per_second']:9.0f} "
            f"{step['assistant_tokens_per_second']:9.0f} {step['flops_per_second'] / 1e12:8.3g} {mfu:>6s} "
            f"{step['of_measured']:8.1%} {used:>6s} {taken:>8s}"
        )
    return "\n".join(lines)


def shares(measured: list[dict[str, Any]]) -> str:
    """Share of each group of kernels in the device's busy time."""
    heads = ["gemm", "attn", "elem/red", "index", "copy", "optim", "other", "busy"]
    lines = [f"{'kernels, share of their time':44s} " + " ".join(f"{head:>8s}" for head in heads)]
    for step in measured:
        if "error" not in step:
            seen = step["kernels"]
            values = [*(seen["groups"][name] for name in GROUPS), seen["seconds"] / seen["window"]]
            lines.append(f"{label(step):44s} " + " ".join(f"{value:8.1%}" for value in values))
    return "\n".join(lines)


def top(measured: list[dict[str, Any]]) -> str:
    """The longest kernels of each case, in its fastest variant."""
    lines = []
    good = [step for step in measured if "error" not in step]
    for case in dict.fromkeys(step["case"] for step in good):
        best = min((step for step in good if step["case"] == case), key=lambda step: step["seconds"])
        lines.append(f"{label(best)}: longest kernels")
        for kernel in best["kernels"]["top"]:
            share = kernel["seconds"] / best["kernels"]["seconds"]
            lines.append(f"  {share:6.1%} {kernel['calls']:6d} calls  {kernel['group']:22s} {kernel['name'][:90]}")
    return "\n".join(lines)


def lengths(results: dict[str, Any]) -> str:
    """The longest documents."""
    memory = results["device"]["memory"]
    where = f"{memory / GIB:.1f} GiB ({memory / 1e9:.0f} GB)" if memory else "a CPU's memory (a dry run)"
    lines = [f"longest document of one step, recompute, in {where}"]
    for found in results["longest"]:
        name = f"{found['shape']}, share {found['share']:g}"
        if "error" in found:
            lines.append(f"  {name:30s} {found['error']}")
            continue
        lines.append(f"  {name:30s} {found['tokens']:>8d} tokens, {_search(found)}")
    return "\n".join(lines)


def _search(found: dict[str, Any]) -> str:
    """How the search for the longest document ended."""
    best = next((t for t in reversed(found["tries"]) if t["fits"] and t["tokens"] == found["tokens"]), None)
    if best is None:
        return f"since not even {found['tries'][0]['tokens']} fit"
    used = f"{best['memory']['allocated'] / GIB:.1f} GiB in use, " if best["memory"] else ""
    end = f"{found['step']} more do not fit" if found["step"] else "longer ones were not tried"
    return f"{used}{best['seconds']:.1f} s, {end}"
