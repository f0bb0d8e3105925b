"""Finished runs, and what real vLLM makes of each with and without its drafter.

EAGLE31_RUN=runs/NAME takes a run of yours instead. runs/smollm2 is taken if the demo has been run; the others are
trained for less than a minute each with the stages' own commands.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import serving
import yaml
from serving import DEPTH, OTHER_DEPTHS

ROOT = Path(__file__).resolve().parent.parent.parent

# vLLM binds its threads to cores: of several tests at a time each has a core of its own.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(cores[int(worker.removeprefix("gw")) % len(cores)])


def pytest_itemcollected(item):
    """What shares a run or target goes to one process, whatever its file; else what shares a file.

    Here, and not when all are collected: by then xdist has looked for the groups.
    """
    chosen = item.callspec.params if hasattr(item, "callspec") else {}
    item.add_marker(pytest.mark.xdist_group(chosen.get("finished_run") or chosen.get("case") or item.path.stem))


def pytest_terminal_summary(terminalreporter):
    """What was measured on the way, from whichever process."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "measured" and report.when == "call":
                terminalreporter.write_line(f"\n{text}")


@pytest.fixture
def tell(record_property):
    """Lines that the summary shows."""
    return lambda *lines: record_property("measured", "\n".join(lines))


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The python of vLLM's own environment."""
    python = ROOT / os.environ.get("VLLM_VENV", ".venv-vllm") / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"{python} is missing: make test-vllm installs it")
    return python


@pytest.fixture(scope="session")
def ask(vllm_python, tmp_path_factory):
    """Requests → answers of one process of vLLM's environment (see inside.py)."""

    def run(task: str, requests: list[dict], **environment: str) -> list:
        folder = tmp_path_factory.mktemp(task)
        asked, answers, log = (folder / name for name in ("requests.json", "answers.json", "log"))
        asked.write_text(json.dumps(requests), encoding="utf-8")
        inherited = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "WORLD_SIZE")}
        with log.open("w") as output:
            done = subprocess.run(
                [str(vllm_python), str(Path(__file__).with_name("inside.py")), task, str(asked), str(answers)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**inherited, **environment},
                check=False,
            )
        assert done.returncode == 0, f"vLLM failed:\n{log.read_text()[-4000:]}"
        return json.loads(answers.read_text(encoding="utf-8"))

    return run


@pytest.fixture(scope="session", params=serving.RUNS)
def finished_run(request, tmp_path_factory) -> Path:
    """A run folder with train/, evaluate/ and export/."""
    if wanted := os.environ.get("EAGLE31_RUN"):
        if request.param != "Llama":
            pytest.skip("EAGLE31_RUN is served alone")
        return Path(wanted).resolve()
    demo = ROOT / "runs" / "smollm2"
    if request.param == "Llama" and (demo / "export.json").is_file():
        return demo
    real_target = request.getfixturevalue("real_target") if request.param == "Llama" else None
    return serving.make_run(request.param, tmp_path_factory.mktemp("served"), real_target)


@pytest.fixture(scope="session")
def evaluated(finished_run) -> dict:
    """The evaluator's manifest, checked to be of the exported drafter and comparable with vLLM in float32."""
    manifest = json.loads((finished_run / "evaluate" / "manifest.json").read_text())
    exported = json.loads((finished_run / "export.json").read_text())
    assert manifest["inputs"]["train"] == exported["inputs"]["train"], "evaluated and exported are different drafters"
    assert manifest["result"]["dtype"] == "float32", "evaluate with evaluate.dtype=float32"
    assert manifest["result"]["draft_tokens"] == DEPTH, f"evaluate with evaluate.num_speculative_tokens={DEPTH}"
    assert manifest["result"]["workloads"][0]["prompts"] >= 20, "evaluate with evaluate.num_prompts=20 or more"
    return manifest


@pytest.fixture(scope="session")
def requests(evaluated) -> list[dict]:
    """What vLLM is asked, and what the evaluator says of it."""
    return serving.requests_of(evaluated)


@pytest.fixture(scope="session")
def target(finished_run) -> str:
    """The folder of the run's target."""
    path: str = yaml.safe_load((finished_run / "train" / "config.yaml").read_text())["target"]["path"]
    return path


@pytest.fixture(scope="session")
def answers(ask, finished_run, target, requests) -> dict[int, dict]:
    """What vLLM answers with so many draft tokens, or none.

    A draft that names its target, and how many tokens it drafts, is served by its folder alone at this depth.
    """
    export = str(finished_run / "export")
    asked = {}
    for depth in (0, DEPTH, *OTHER_DEPTHS):
        some = requests if depth == DEPTH else requests[: serving.AT_OTHER_DEPTHS]
        asked[depth] = {"target": target, "draft": export if depth else None, "draft_tokens": depth, "requests": some}
    if "speculators_config" in json.loads((finished_run / "export" / "config.json").read_text()):
        asked[DEPTH] |= {"target": export, "draft": None}
    return dict(zip(asked, ask("decode", list(asked.values())), strict=True))
