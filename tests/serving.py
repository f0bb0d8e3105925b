"""Short runs that real vLLM serves, what it is asked of each, and what the evaluator says that it must answer."""

import json
from pathlib import Path

import speaking

from eagle31_train.evaluation.measurement import rounds
from eagle31_train.targets import toy

PROMPTS = Path(__file__).resolve().parent.parent / "data_prep" / "prompts"
# In float32, in which speculation must change nothing, and whose products every CPU has.
EXACT = ["name=served", "target.dtype=float32", "train.precision=no", "train.wandb=disabled", "extract.trajectories=0"]
# Enough held-out prompts, and little else.
SMOLLM2 = [
    *EXACT,
    "+experiment=smollm2",
    "data.max_length=192",
    "data.heldout=0.37",
    "train.optimizer=adamw",  # the surer one in so few steps
    "train.lr=1e-3",
    "train.max_steps=40",
    "train.batch_tokens=512",
    "evaluate.max_new_tokens=24",
    "evaluate.timed_prompts=1",
]
TOY = [
    *EXACT,
    "+experiment=kimi_toy",
    "data.sources.chinese=null",
    "data.sources.agent=null",
    "data.heldout=0.4",
    "data.generate.samples=1",
    "data.generate.temperature=0",
    "data.generate.max_new_tokens=40",
    "train.epochs=8",
    "evaluate.max_new_tokens=24",
    "evaluate.timed_prompts=1",
]
FAMILY = [*speaking.SMALL, *EXACT, "data.self_prompts.count=60", "evaluate.num_prompts=20"]
FAMILY += ["evaluate.max_new_tokens=24", "evaluate.max_speculative_tokens=8", "train.max_steps=80", "train.epochs=80"]
FAMILY += ["drafter.train_lm_head=true"]  # these toys accept more with it, so that a mistake shows
EAGLE_3 = ["drafter.fc_norm=false", "drafter.norm_output=false", "drafter.norm_before_residual=true"]
# Shorter than the prompts.
WINDOW = ["drafter.sliding_window=12", "drafter.attention_bias=true"]
DEEP = ["drafter.num_layers=2", "drafter.qk_norm=true", "drafter.norm_before_fc=true", "drafter.fc_norm=false", *WINDOW]
# Run → its target (SmolLM2, the toy or one of tests/speaking.py) and options.
RUNS = {
    "Llama": ("SmolLM2", SMOLLM2),
    "Llama, tied embeddings": ("llama-tied", FAMILY),
    # Of these seeds' prompts some have a draft that one position of the window decides.
    "Llama, a window, biases": ("llama-tied", [*FAMILY, *WINDOW, "drafter.mlp_bias=true", "seed=1"]),
    "Qwen3, two layers, a window, self-describing": ("qwen3", [*FAMILY, *DEEP, "export_format=speculators"]),
    "Llama, parallel": ("llama-tied", [*FAMILY, "drafter.parallel=true", "train.ttt_length=5"]),
    "Qwen3, parallel, two layers": ("qwen3", [*FAMILY, *DEEP, "drafter.parallel=true", "train.ttt_length=5", "seed=2"]),
    "MLA": ("toy", TOY),
    "MLA, EAGLE 3, pruned": ("toy", [*TOY, *EAGLE_3, "data.draft_vocab_size=120"]),
}
YOURS = "EAGLE31_RUN"  # the variable that names a run to be served in place of all of these
DEPTH = 3  # draft tokens of the evaluator's own speculation
OTHER_DEPTHS = (1, 5, 8)  # of which it tells the counts from one output of the target
AT_OTHER_DEPTHS = 8  # prompts; and without the drafter


def make_run(name: str, folder: Path, smollm2: Path | None) -> Path:
    """Take a run of RUNS through all stages in `folder`; returns its folder."""
    kind, options = RUNS[name]
    some = folder / "some.jsonl"
    if kind == "SmolLM2":
        target, lines = smollm2, one_answer_each(PROMPTS / "smollm2_conversations.jsonl", 64)
        options = [*options, f"data.conversations={some}"]
    elif kind == "toy":
        target, lines = toy.make(folder / "target"), lines_of(PROMPTS / "prompts.jsonl")[:64]
        options = [*options, f"data.sources.chat.path={some}"]
    else:
        target, lines = speaking.make(kind, folder / "target"), []
    some.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return speaking.run_stages(folder, *options, f"target.path={target}") / "served"


def lines_of(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def one_answer_each(file: Path, count: int) -> list[str]:
    """The first line of each of the first `count` prompts."""
    lines: dict[str, str] = {}
    for line in lines_of(file):
        messages = json.loads(line)["messages"]
        lines.setdefault(json.dumps([m["content"] for m in messages if m["role"] != "assistant"]), line)
    return list(lines.values())[:count]


def requests_of(evaluated: dict) -> list[dict]:
    """What vLLM is asked, and what the evaluator's manifest says of it.

    First the evaluation itself; then its first accepted drafts again, with a limit or an end token
    placed so that the output ends inside what was accepted.
    """
    end_ids, limit = evaluated["end_ids"], evaluated["result"]["max_new_tokens"]
    whole, inside = [], []
    for prompt in evaluated["per_prompt"]:
        output, start = prompt["output_ids"], 1
        whole.append(request(prompt, "whole", limit, end_ids, len(output), prompt["accepted"]))
        for drafts, accepted in enumerate(prompt["accepted"], 1):
            if accepted and start + accepted < len(output):
                cut = start + 1, prompt["accepted"][:drafts]
                inside.append(request(prompt, "limit", start + 1, end_ids, *cut))
                if output[start] not in output[:start]:
                    inside.append(request(prompt, "end", limit, [*end_ids, output[start]], *cut))
            start += accepted + 1
    chosen = [one for kind in ("limit", "end") for one in [i for i in inside if i["kind"] == kind][:6]]
    return [*whole, *chosen, request(evaluated["per_prompt"][0], "one token", 1, end_ids, 1, [])]


def request(prompt: dict, kind: str, limit: int, end_ids: list[int], length: int, accepted: list[int]) -> dict:
    return {
        "kind": kind,
        "id": prompt["id"],
        "prompt": prompt["prompt_ids"],
        "max_new_tokens": limit,
        "end_ids": end_ids,
        "output": prompt["output_ids"][:length],
        "counters": counters(accepted, DEPTH),
    }


def counters(accepted: list[int], draft_tokens: int) -> dict:
    """vLLM's, where of each draft so many tokens were accepted."""
    return {
        "drafts": len(accepted),
        "proposed": draft_tokens * len(accepted),
        "accepted": sum(accepted),
        "accepted_per_position": [sum(count > position for count in accepted) for position in range(draft_tokens)],
    }


def counters_told(prompt: dict, draft_tokens: int) -> dict:
    """vLLM's for one prompt at any depth, as the evaluator tells them from one output of the target."""
    return counters(rounds(prompt["reach"], draft_tokens), draft_tokens)
