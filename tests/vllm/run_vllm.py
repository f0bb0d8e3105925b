"""Decode prompts with vLLM and write what it gave and counted. Run by the python of vLLM's own environment:

    .venv-vllm/bin/python tests/vllm/run_vllm.py REQUEST.json ANSWER.json

REQUEST: {"target", "draft" (null for none, or where "target" is a draft that names its own), "draft_tokens",
          "requests": [{"prompt": [token ids], "max_new_tokens", "end_ids"}]}
ANSWER: {"outputs": [[token ids]], "seconds": [of each request], "async_scheduling",
         "counters": [{"drafts", "proposed", "accepted", "accepted_per_position"}]}
One request at a time, in float32: what others are in the batch then cannot change a number.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "proposed": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "accepted_per_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
}


def counters(llm, draft_tokens):
    """All that vLLM has counted since it started."""
    found = {"drafts": 0, "proposed": 0, "accepted": 0, "accepted_per_position": [0] * draft_tokens}
    for metric in llm.get_metrics():
        for ours, theirs in COUNTERS.items():
            if metric.name == theirs:
                found[ours] = list(metric.values) if ours == "accepted_per_position" else metric.value
    return found


def since(before, now):
    """What was counted between two readings."""
    return {
        name: [a - b for a, b in zip(now[name], before[name], strict=True)]
        if isinstance(now[name], list)
        else now[name] - before[name]
        for name in now
    }


def main(request_file, answer_file):
    from vllm import LLM, SamplingParams

    request = json.loads(Path(request_file).read_text())
    draft_tokens = request["draft_tokens"]
    speculation = None
    if request["draft"]:
        speculation = {"method": "eagle3", "model": request["draft"], "num_speculative_tokens": draft_tokens}
    llm = LLM(
        model=request["target"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        max_num_seqs=1,
        # Room for the last drafts: vLLM shortens drafts that would pass max_model_len, and takes those of the step
        # that is still under way for accepted.
        max_model_len=max(len(one["prompt"]) + one["max_new_tokens"] for one in request["requests"])
        + 2 * (draft_tokens + 1),
        speculative_config=speculation,
        seed=0,
    )

    def decode(one):
        sampling = SamplingParams(
            temperature=0.0, max_tokens=one["max_new_tokens"], stop_token_ids=one["end_ids"], detokenize=False
        )
        prompt = {"prompt_token_ids": one["prompt"]}
        return list(llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0].token_ids)

    decode(request["requests"][0])  # the first request also pays for what vLLM sets up lazily
    answer = {
        "outputs": [],
        "seconds": [],
        "counters": [],
        "async_scheduling": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
    }
    before = counters(llm, draft_tokens)
    for number, one in enumerate(request["requests"], 1):
        began = time.perf_counter()
        answer["outputs"].append(decode(one))
        answer["seconds"].append(time.perf_counter() - began)
        now = counters(llm, draft_tokens)
        answer["counters"].append(since(before, now))
        before = now
        print(f"{number}/{len(request['requests'])} requests, {sum(answer['seconds']):.1f} s", flush=True)
    Path(answer_file).write_text(json.dumps(answer))


if __name__ == "__main__":  # vLLM starts its engine in a process that imports this file again
    main(*sys.argv[1:])
