"""What the stages of scripts/gpu_day.sh came to, as JSON, and beside the estimates of gpu_model.py.

python -m benchmarks.gpu_day stage OUT NAME STATUS SECONDS     # OUT/NAME.json
python -m benchmarks.gpu_day summary OUT                       # OUT/summary.json, and a table
"""

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import machine
from eagle31_train.common import artifacts

TIMED_OUT = (124, 137)  # exit statuses of timeout(1)
LAST = 20  # lines of a failed stage's log


def stage(out: Path, name: str, status: int, seconds: int) -> dict[str, Any]:
    """Return a stage's outcome: how it ended, its tests or measurements, and the end of its log if it failed."""
    result: dict[str, Any] = {"stage": name, "status": status, "timed_out": status in TIMED_OUT, "seconds": seconds}
    if (xml := out / f"{name}.xml").is_file():
        result["tests"] = tests(xml)
    if (measured := out / f"{name}_measured.json").is_file():
        result["measured"] = json.loads(measured.read_text(encoding="utf-8"))
    if status:
        result["log"] = (out / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-LAST:]
    return result


def tests(xml: Path) -> dict[str, Any]:
    """Return how many tests passed, and the names of the others, from pytest's report."""
    found: dict[str, Any] = {"passed": 0, "failed": [], "skipped": []}
    for case in ElementTree.parse(xml).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            found["failed"].append(name)
        elif case.find("skipped") is not None:
            found["skipped"].append(name)
        else:
            found["passed"] += 1
    return found


def summary(out: Path) -> dict[str, Any]:
    """Return all stages, and each measured step beside its estimate."""
    stages = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(out.glob("*.json"))]
    stages = [one for one in stages if "stage" in one]
    file = out / "model.json"
    estimates = json.loads(file.read_text(encoding="utf-8"))["cases"] if file.is_file() else {}
    steps = []
    for step in (step for one in stages for step in one.get("measured", {}).get("steps", [])):
        name, variant = step["case"], step["variant"]
        flash = "fused+FA3" if "attention by FA3" in step.get("uses", "") else "fused"
        model = estimates.get(f"{name}, {variant.replace('fused', flash)}")
        steps.append({"case": name, "variant": variant, **compared(step, model)})
    return {"machine": machine.describe(), "stages": stages, "steps": steps}


def compared(step: dict[str, Any], model: dict[str, Any] | None) -> dict[str, Any]:
    """Return seconds, utilisation and memory of a step, and their estimates."""
    if "error" in step:
        return {"error": step["error"]}
    measured = {"seconds": step["seconds"], "utilisation": step["mfu"], "memory": step["memory"]}
    if model is None:
        return measured
    estimate = {"seconds": model["seconds"]["total"], "utilisation": model["utilisation"], "memory": model["memory"]}
    return {**measured, "estimated": estimate, "times_the_estimate": step["seconds"] / estimate["seconds"]}


def table(results: dict[str, Any]) -> str:
    lines = []
    for one in results["stages"]:
        end = "out of time" if one["timed_out"] else "failed" if one["status"] else "done"
        counts = one.get("tests")
        some = f", {counts['passed']} passed, {len(counts['failed'])} failed" if counts else ""
        some += f", {len(counts['skipped'])} skipped" if counts else ""
        lines.append(f"{one['stage']:12s} {end} after {one['seconds']} s{some}")
    for step in results["steps"]:
        said = step.get("error") or f"{step['seconds']:.4f} s"
        if "estimated" in step:
            said += f", {step['times_the_estimate']:.2f} times the estimate"
        lines.append(f"{step['case']}, {step['variant']}: {said}")
    return "\n".join(lines)


def main(words: list[str]) -> int:
    """Run the command; return the exit status, 1 if a stage failed."""
    command, out = words[0], Path(words[1])
    if command == "stage":
        result = stage(out, words[2], int(words[3]), int(words[4]))
        artifacts.write_json(out / f"{words[2]}.json", result)
        return int(result["status"] != 0)
    results = summary(out)
    artifacts.write_json(out / "summary.json", results)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
