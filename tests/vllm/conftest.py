"""Finished runs, and what real vLLM makes of each with and without its drafter: a Llama draft, one as Qwen3's with two
layers, and two of MLA.

EAGLE31_RUN=runs/NAME takes a run of yours instead. runs/smollm2 is taken if the demo has been run; the others are
trained for a minute each with the stages' own commands.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eagle31_train.targets import toy

ROOT = Path(__file__).resolve().parent.parent.parent
CONVERSATIONS = ROOT / "data_prep" / "prompts" / "smollm2_conversations.jsonl"
PROMPTS = ROOT / "data_prep" / "prompts" / "prompts.jsonl"
STAGES = (
    ["-m", "data_prep"],
    ["-m", "eagle31_train.extract"],
    ["train.py"],
    ["-m", "eagle31_train.evaluate"],
    ["-m", "eagle31_train.export"],
)
# Enough held-out prompts, and little else.
SMOLLM2 = [
    "+experiment=smollm2",
    "data.max_length=256",
    "data.heldout=0.37",
    "train.optimizer=adamw",  # the surer one in so few steps
    "train.lr=1e-3",
    "train.max_steps=60",
    "train.batch_tokens=512",
    "evaluate.max_new_tokens=36",
    "target.dtype=float32",  # bf16 is ten times as slow on a CPU without it
    "train.precision=no",
    "extract.trajectories=0",  # evaluation leaves these prompts out, and twenty are wanted
]
TOY = [
    "+experiment=kimi_toy",
    "data.sources.chinese=null",
    "data.sources.agent=null",
    "data.heldout=0.4",
    "data.generate.samples=1",
    "data.generate.temperature=0",
    "data.generate.max_new_tokens=64",
    "train.epochs=20",
    "train.precision=no",  # bf16 is ten times as slow on a CPU without it
    "evaluate.max_new_tokens=48",
    "extract.trajectories=0",
]
EAGLE_3 = ["drafter.fc_norm=false", "drafter.norm_output=false", "drafter.norm_before_residual=true"]
# Run → its options: EAGLE 3.1 on the whole vocabulary, and EAGLE 3 on some of it.
TOYS = {"MLA": TOY, "MLA, EAGLE 3, pruned": [*TOY, *EAGLE_3, "data.draft_vocab_size=120"]}

DEEP = ["drafter.num_layers=2", "drafter.qk_norm=true", "drafter.norm_before_fc=true", "drafter.fc_norm=false"]
SMALL = {"Llama": SMOLLM2, "Qwen3, two layers, self-describing": [*SMOLLM2, *DEEP, "export_format=speculators"]}

# vLLM binds its threads to cores: of several tests at a time each has a core of its own.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(cores[int(worker.removeprefix("gw")) % len(cores)])


def pytest_itemcollected(item):
    """What shares a run goes to one process, whatever its file; else what shares a file.

    Here, and not when all are collected: by then xdist has looked for the groups.
    """
    run = item.callspec.params.get("finished_run") if hasattr(item, "callspec") else None
    item.add_marker(pytest.mark.xdist_group(run or item.path.stem))


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


@pytest.fixture(scope="session", params=[*SMALL, *TOYS])
def finished_run(request, tmp_path_factory) -> Path:
    """A run folder with train/, evaluate/ and export/."""
    if wanted := os.environ.get("EAGLE31_RUN"):
        if request.param != "Llama":
            pytest.skip("EAGLE31_RUN is served alone")
        return Path(wanted).resolve()
    folder = tmp_path_factory.mktemp("served")
    some = folder / "some.jsonl"
    if request.param in SMALL:
        demo = ROOT / "runs" / "smollm2"
        if request.param == "Llama" and (demo / "export.json").is_file():
            return demo
        request.getfixturevalue("real_target")
        lines = one_answer_each(CONVERSATIONS, 64)
        options = [*SMALL[request.param], f"data.conversations={some}"]
    else:
        lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:64]
        options = [*TOYS[request.param], f"target.path={toy.make(folder / 'target')}", f"data.sources.chat.path={some}"]
    some.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for stage in STAGES:
        command = [sys.executable, *stage, *options, "name=served", "train.wandb=disabled"]
        subprocess.run([*command, f"run_dir={folder / 'run'}"], cwd=ROOT, check=True)
    return folder / "run"


def one_answer_each(file: Path, count: int) -> list[str]:
    """The first line of each of the first `count` prompts."""
    lines = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        lines.setdefault(json.dumps([m["content"] for m in messages if m["role"] != "assistant"]), line)
    return list(lines.values())[:count]


@pytest.fixture(scope="session")
def llama_run(finished_run) -> Path:
    """The run of the Llama draft; what asks for it is skipped for the others."""
    if config_of(finished_run)["architectures"] != ["LlamaForCausalLMEagle3"]:
        pytest.skip("a server takes a minute to start: one draft says it")
    return finished_run


def config_of(run: Path) -> dict:
    """The exported config.json."""
    return dict(json.loads((run / "export" / "config.json").read_text()))


@pytest.fixture(scope="session")
def evaluated(finished_run) -> dict:
    """The evaluator's manifest, checked to be of the exported drafter and comparable with vLLM in float32."""
    manifest = json.loads((finished_run / "evaluate" / "manifest.json").read_text())
    exported = json.loads((finished_run / "export.json").read_text())
    assert manifest["inputs"]["train"] == exported["inputs"]["train"], "evaluated and exported are different drafters"
    assert manifest["report"]["dtype"] == "float32", "evaluate with evaluate.dtype=float32"
    assert manifest["report"]["draft_tokens"] == 3, "evaluate with evaluate.num_speculative_tokens=3"
    assert manifest["report"]["prompts"] >= 20, "evaluate with evaluate.num_prompts=20 or more"
    return manifest


@pytest.fixture(scope="session")
def requests(evaluated) -> list[dict]:
    """What vLLM is asked, and what the evaluator says of it.

    First the evaluation itself; then its first accepted drafts again, with a limit or an end token
    placed so that the output ends inside what was accepted.
    """
    end_ids, limit = evaluated["end_ids"], evaluated["report"]["max_new_tokens"]
    whole = [request_of(p, limit, end_ids, len(p["output_ids"]), p["drafts"], "whole") for p in evaluated["per_prompt"]]
    inside = []
    for prompt in evaluated["per_prompt"]:
        output, start = prompt["output_ids"], 1
        for draft, accepted in enumerate(prompt["accepted"]):
            if accepted and start + accepted < len(output):
                inside.append(request_of(prompt, start + 1, end_ids, start + 1, draft + 1, "limit"))
                if output[start] not in output[:start]:
                    inside.append(request_of(prompt, limit, [*end_ids, output[start]], start + 1, draft + 1, "end"))
            start += accepted + 1
    chosen = [one for kind in ("limit", "end") for one in [i for i in inside if i["kind"] == kind][:6]]
    return [*whole, *chosen, request_of(evaluated["per_prompt"][0], 1, end_ids, 1, 0, "one token")]


def request_of(prompt: dict, limit: int, end_ids: list[int], length: int, drafts: int, kind: str) -> dict:
    accepted = prompt["accepted"][:drafts]
    return {
        "kind": kind,
        "id": prompt["id"],
        "prompt": prompt["prompt_ids"],
        "max_new_tokens": limit,
        "end_ids": end_ids,
        "output": prompt["output_ids"][:length],
        "counters": {
            "drafts": drafts,
            "proposed": 3 * drafts,
            "accepted": sum(accepted),
            "accepted_per_position": [sum(count > position for count in accepted) for position in range(3)],
        },
    }


@pytest.fixture(scope="session")
def target(finished_run) -> str:
    """The folder of the run's target."""
    path: str = yaml.safe_load((finished_run / "train" / "config.yaml").read_text())["target"]["path"]
    return path


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The python of vLLM's own environment."""
    python = ROOT / os.environ.get("VLLM_VENV", ".venv-vllm") / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"{python} is missing: make test-vllm installs it")
    return python


@pytest.fixture(scope="session")
def answers_of(tmp_path_factory, vllm_python):
    """Run vLLM in a process of its own, with so many tokens of a drafter's at a time, or none (see run_vllm.py)."""

    def run(target: str, draft: str | None, draft_tokens: int, asked_for: list[dict]) -> dict:
        folder = tmp_path_factory.mktemp("vllm")
        asked, answer, log = (folder / name for name in ("request.json", "answer.json", "log"))
        request = {
            "target": target,
            "draft": draft if draft_tokens else None,
            "draft_tokens": draft_tokens,
            "requests": asked_for,
        }
        asked.write_text(json.dumps(request))
        with log.open("w") as output:
            done = subprocess.run(
                [str(vllm_python), str(Path(__file__).with_name("run_vllm.py")), str(asked), str(answer)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"},
                check=False,
            )
        assert done.returncode == 0, f"vLLM failed:\n{log.read_text()[-4000:]}"
        return json.loads(answer.read_text())

    return run


@pytest.fixture(scope="session")
def serve(answers_of, finished_run, target, requests):
    """What vLLM answers with the exported drafter, or without; one that names its target is all that vLLM is told."""
    export = str(finished_run / "export")

    def answers(draft_tokens: int, asked_for: list[dict] = requests) -> dict:
        if draft_tokens and "speculators_config" in config_of(finished_run):
            return answers_of(export, None, draft_tokens, asked_for)
        return answers_of(target, export, draft_tokens, asked_for)

    return answers


@pytest.fixture(scope="session")
def speculative(serve) -> dict:
    """vLLM's answers with the drafter."""
    return serve(3)


@pytest.fixture(scope="session")
def plain(serve) -> dict:
    """vLLM's answers without it."""
    return serve(0)
