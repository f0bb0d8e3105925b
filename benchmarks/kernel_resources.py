"""What our Triton kernels take on GPUs of several generations, compiled for each without one: registers and memory.

    python -m benchmarks.kernel_resources        # the table of docs/benchmarks.md; needs triton

They are those of the compiled program, and do not say how fast it is.
"""

import argparse
import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benchmarks import run_main
from eagle31_train.common import artifacts
from eagle31_train.kernels import divergence, own_keys, rms_norm, swiglu, triton_kernels

ARCHITECTURES = (80, 90, 100)  # Ampere, Hopper, Blackwell
TYPES = {"supervised": "*i64", "best_out": "*i64", "weights": "*fp32", "weight": "*fp32"}
TYPES |= dict.fromkeys(("width", "rows", "row_stride", "count", "slots"), "i32")
TYPES |= dict.fromkeys(("eps", "lk", "scale"), "fp32")
LOW = {"logits", "teacher", "x", "out", "dout", "dx", "gate", "up", "dgate", "dup"}  # 16 bits; the rest are fp32
LOW |= {"q", "keys", "values", "merged", "dq", "dq_out", "dkeys", "dvalues"}


@dataclass(frozen=True)
class Resources:
    """Of one compiled kernel: registers per thread, bytes of its stack (spills included), bytes of shared memory."""

    registers: int
    stack: int
    shared: int


def variants() -> Iterator[tuple[str, Any, dict[str, Any], int]]:
    """Yield name, kernel, constants and warps of what a step launches, at Llama-8B's and Kimi's widths."""
    block = {"BLOCK": divergence.BLOCK}
    yield "teacher_kernel", triton_kernels.teacher_kernel, block, divergence.WARPS
    for lk in (False, True):
        constants = {"KL": True, "LK": lk, **block}
        yield f"divergence_kernel{', lk' * lk}", triton_kernels.divergence_kernel, constants, divergence.WARPS
    for name in ("silu_times_kernel", "silu_times_backward_kernel"):
        yield name, getattr(triton_kernels, name), {"BLOCK": swiglu.BLOCK}, 4
    for heads, (h, g, d, dv) in {"32/8 heads": (32, 8, 128, 128), "64 MLA heads": (64, 64, 192, 128)}.items():
        _, how = own_keys.launch_options((1, h, d), (6, 1, g, d), (6, 1, g, dv))
        warps = how.pop("num_warps")
        for name in ("merge_kernel", "merge_backward_kernel"):
            yield f"{name}, {heads}", getattr(triton_kernels, name), how, warps
    for width in (512, 4096, 7168):
        how = rms_norm.launch_options(width)
        warps = how.pop("num_warps")
        yield f"norm_kernel, {width} wide", triton_kernels.norm_kernel, how, warps
        yield f"norm_backward_kernel, {width} wide", triton_kernels.norm_backward_kernel, {"DX": True, **how}, warps


def compiled(kernel: Any, constants: dict[str, Any], warps: int, architecture: int) -> Resources:
    """Compile a kernel, even if interpreted in this process, for an architecture that need not be present."""
    function = JITFunction(kernel.fn)
    types = {name: TYPES.get(name, "*bf16" if name in LOW else "*fp32") for name in function.arg_names}
    signature = types | dict.fromkeys(constants, "constexpr")
    places = {name: (place,) for place, name in enumerate(function.arg_names)}
    # As in a launch, addresses and widths are multiples of 16, so that loads are of several values.
    even = [name for name, kind in signature.items() if kind.startswith("*") or name in ("width", "row_stride")]
    source = ASTSource(
        function,
        signature,
        {places[name]: value for name, value in constants.items()},
        {places[name]: [["tt.divisibility", 16]] for name in even},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Triton's future defaults
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
    return Resources(*_usage(made.asm["cubin"]), made.metadata.shared)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and stack, as reported by NVIDIA's tool that comes with triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout)
    assert found is not None, said.stdout
    return int(found[1]), int(found[2])


def measure(architectures: Sequence[int]) -> dict[str, Any]:
    kernels = {}
    for name, kernel, constants, warps in variants():
        one = {str(sm): asdict(compiled(kernel, constants, warps, sm)) for sm in architectures}
        kernels[name] = {"warps": warps, **one}
    return {"triton": triton.__version__, "dtype": "bf16", "kernels": kernels}


def table(results: dict[str, Any], architectures: Sequence[int]) -> str:
    heads = " | ".join(f"sm_{sm}" for sm in architectures)
    lines = [f"| kernel | warps | {heads} |", "| --- | --- |" + " --- |" * len(architectures)]
    for name, found in results["kernels"].items():
        cells = " | ".join("{registers}, {stack}, {shared}".format(**found[str(sm)]) for sm in architectures)
        lines.append(f"| {name} | {found['warps']} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--architectures", nargs="+", type=int, default=ARCHITECTURES, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/kernels"), help="without .json")
    chosen = parser.parse_args()
    results = measure(chosen.architectures)
    artifacts.write_json(chosen.out.with_suffix(".json"), results)
    print("registers of a thread, bytes of stack (what is spilled), bytes of shared memory")
    print(table(results, chosen.architectures))
    print(f"written: {chosen.out}.json")


if __name__ == "__main__":
    run_main(main)
