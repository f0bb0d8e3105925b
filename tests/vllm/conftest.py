"""A finished run, and what real vLLM makes of it with and without its drafter.

EAGLE31_RUN=runs/NAME takes a run of yours; else runs/smollm2 is taken if the demo has been run;
else a drafter is trained for a minute with the stages' own commands.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
CONVERSATIONS = ROOT / "data_prep" / "prompts" / "smollm2_conversations.jsonl"
STAGES = (
    ["-m", "data_prep"],
    ["-m", "eagle31_train.extract"],
    ["train.py"],
    ["-m", "eagle31_train.evaluate"],
    ["-m", "eagle31_train.export"],
)
# Enough held-out prompts, and little else.
SHORT = [
    "name=served",
    "data.max_length=384",
    "data.heldout=0.25",
    "train.max_steps=60",
    "train.wandb=disabled",
    "evaluate.max_new_tokens=64",
]


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, real_target) -> Path:
    """A run folder with train/, evaluate/ and export/."""
    if wanted := os.environ.get("EAGLE31_RUN"):
        return Path(wanted).resolve()
    demo = ROOT / "runs" / "smollm2"
    if (demo / "export.json").is_file():
        return demo
    folder = tmp_path_factory.mktemp("served")
    some = folder / "conversations.jsonl"
    some.write_text("\n".join(one_answer_each(CONVERSATIONS, 110)) + "\n", encoding="utf-8")
    options = ["+experiment=smollm2", f"run_dir={folder / 'run'}", f"data.conversations={some}", *SHORT]
    for stage in STAGES:
        subprocess.run([sys.executable, *stage, *options], cwd=ROOT, check=True)
    return folder / "run"


def one_answer_each(file: Path, count: int) -> list[str]:
    """The first line of each of the first `count` prompts."""
    lines = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        lines.setdefault(json.dumps([m["content"] for m in messages if m["role"] != "assistant"]), line)
    return list(lines.values())[:count]


@pytest.fixture(scope="session")
def evaluated(finished_run) -> dict:
    """The evaluator's manifest, checked to be of the exported drafter and comparable with vLLM in float32."""
    manifest = json.loads((finished_run / "evaluate" / "manifest.json").read_text())
    exported = json.loads((finished_run / "export.json").read_text())
    assert manifest["inputs"]["train"] == exported["inputs"]["train"], "evaluated and exported are different drafters"
    assert manifest["report"]["dtype"] == "float32", "evaluate with evaluate.dtype=float32"
    assert manifest["report"]["draft_tokens"] == 3, "evaluate with evaluate.draft_tokens=3"
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
def vllm_python() -> Path:
    """The python of vLLM's own environment."""
    python = ROOT / os.environ.get("VLLM_VENV", ".venv-vllm") / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"{python} is missing: make test-vllm installs it")
    return python


@pytest.fixture(scope="session")
def serve(tmp_path_factory, vllm_python, finished_run, evaluated, requests):
    """Run vLLM in a process of its own, with the exported drafter or without."""
    folder = tmp_path_factory.mktemp("vllm")

    def run(with_drafter: bool) -> dict:
        name = "speculative" if with_drafter else "plain"
        asked, answer, log = (folder / f"{name}.{kind}" for kind in ("request.json", "answer.json", "log"))
        request = {
            "target": yaml.safe_load((finished_run / "train" / "config.yaml").read_text())["target"]["path"],
            "draft": str(finished_run / "export") if with_drafter else None,
            "draft_tokens": 3,
            "requests": requests,
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
def speculative(serve) -> dict:
    """vLLM's answers with the drafter."""
    return serve(True)


@pytest.fixture(scope="session")
def plain(serve) -> dict:
    """vLLM's answers without it."""
    return serve(False)
