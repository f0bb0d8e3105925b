"""Finished runs, and what real vLLM makes of each with and without its drafter.

EAGLE31_RUN=runs/NAME takes a run of yours instead. runs/smollm2 is taken if the demo has been run; the others are
trained for less than a minute each with the stages' own commands.
"""

import json
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import serving
import yaml
from serving import DEPTH, YOURS

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


def pytest_collection_modifyitems(items):
    """What is marked with some runs is of no other; yours may be of any kind."""
    some = ((item, item.get_closest_marker("runs")) for item in items)
    items[:] = [item for item, of in some if of is None or item.callspec.params["finished_run"] in (*of.args, YOURS)]


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
    """Requests → answers of vLLM, in a process that nothing else has run in."""
    with asking(vllm_python, tmp_path_factory) as run:
        yield run


@pytest.fixture(scope="session")
def ask_second_runner(vllm_python, tmp_path_factory):
    """The same of vLLM's second model runner, which GPUs have by default; its kernels run in Triton's interpreter."""
    with asking(vllm_python, tmp_path_factory, TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1") as run:
        yield run


@contextmanager
def asking(vllm_python, tmp_path_factory, **of_process):
    """Run a process of vLLM's environment (see inside.py) that forks for every task."""
    inherited = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
    log_of_all = tmp_path_factory.mktemp("vllm") / "log"

    def run(task: str, requests: list[dict], **environment: str) -> list:
        folder = tmp_path_factory.mktemp(task)
        files = {name: folder / name for name in ("requests", "answers", "log")}
        files["requests"].write_text(json.dumps(requests), encoding="utf-8")
        named = {name: str(file) for name, file in files.items()}
        print(json.dumps({"task": task, **named, "environment": environment}), file=process.stdin, flush=True)
        status = process.stdout.readline().strip()
        said = "".join(file.read_text()[-4000:] for file in (log_of_all, files["log"]) if file.is_file())
        assert status == "0", f"vLLM failed ({status or 'it ended'}):\n{said}"
        return json.loads(files["answers"].read_text(encoding="utf-8"))

    with (
        log_of_all.open("w") as said,
        subprocess.Popen(
            [str(vllm_python), str(Path(__file__).with_name("inside.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env=inherited | of_process,
            text=True,
        ) as process,
    ):
        yield run


@pytest.fixture(scope="session", params=[YOURS] if YOURS in os.environ else serving.RUNS)
def finished_run(request, tmp_path_factory) -> Path:
    """A run folder with train/, evaluate/ and export/."""
    if request.param == YOURS:
        return Path(os.environ[YOURS]).resolve()
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


class Answers(dict):
    """Draft tokens, or 0 for none → what vLLM answers with so many; it is asked when a test first looks."""

    def __init__(self, ask, finished_run: Path, target: str, requests: list[dict]) -> None:
        super().__init__()
        self.ask, self.target, self.requests = ask, target, requests
        self.export = finished_run / "export"

    def __missing__(self, depth: int) -> dict:
        """A draft that names its target, and how many tokens it drafts, is served by its folder alone at that depth."""
        some = self.requests if depth == DEPTH else self.requests[: serving.AT_OTHER_DEPTHS]
        models = {"target": self.target, "draft": str(self.export) if depth else None}
        if depth == DEPTH and "speculators_config" in json.loads((self.export / "config.json").read_text()):
            models = {"target": str(self.export), "draft": None}
        [self[depth]] = self.ask("decode", [{**models, "draft_tokens": depth, "requests": some}])
        return self[depth]


@pytest.fixture(scope="session")
def answers(ask, finished_run, target, requests) -> Answers:
    return Answers(ask, finished_run, target, requests)
