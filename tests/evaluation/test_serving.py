"""Serving measured against an imitation of vLLM's server, whose tokens and counts are known; and the report's sums."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import imitating
import pytest
import torch
from configured import configured
from made import message_of
from safetensors.torch import save_file

from eagle31_train.common.errors import UserError
from eagle31_train.evaluation import serving
from eagle31_train.evaluation.prompts import Prompt
from eagle31_train.evaluation.serving import measure_serving, report, server
from eagle31_train.evaluation.serving.engine import Installation, answering_arguments, check, server_arguments
from eagle31_train.evaluation.serving.server import Answer
from eagle31_train.reporting.recipe import serve_command, sglang_command

END = 40
# Of the second answer, token 5 is an end token.
PROMPTS = [Prompt("a", "chat", [1, 2, 3]), Prompt("b", "code", [30, 5]), Prompt("b", "code", [50])]
LIMIT = 9
ENGINE = Installation("0.0", "some GPU")
SPECULATORS = "export_format=speculators"


@pytest.fixture
def config(tmp_path):
    """A configuration that serves one number of draft tokens to one user."""

    def load(*options):
        return configured(
            f"run_dir={tmp_path / 'run'}", f"evaluate.vllm_python={sys.executable}",
            "evaluate.serve_speculative_tokens=[3]", "evaluate.concurrency=[1]", f"evaluate.max_new_tokens={LIMIT}",
            *options,
        )  # fmt: skip

    return load


@pytest.fixture
def launch(asked, config, tmp_path):
    """Measure a server that is a process of its own."""

    def run(*options, prompts=PROMPTS):
        return measure_serving(config(*options), {"ours": drafter(tmp_path)}, prompts, [END], ENGINE)

    return run


@pytest.mark.usefixtures("asked")
def test_vllm_on_a_cpu_is_not_asked_to_sample(config, monkeypatch):
    """0.32 divides logits by memory that nobody wrote: its answers to a drafter were token 0, again and again."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check(config()).device
    with pytest.raises(UserError, match=r"evaluate.temperature: vLLM 0.32 on a CPU samples wrong tokens"):
        check(config("evaluate.temperature=0.7"))


def test_a_report_names_all_devices_of_a_server(config, tmp_path):
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '["0.32.0", "H200"]'\n""")
    python.chmod(0o755)
    several = "evaluate.vllm_args={tensor-parallel-size: 4, data_parallel_size: 2}"
    for options, device in ((["evaluate.temperature=0.7"], "H200"), ([several], "8 × H200")):
        assert check(config(f"evaluate.vllm_python={python}", *options)) == Installation("0.32.0", device)


def drafter(folder, *tensors, **fields):
    """An exported drafter's folder, as far as the server's arguments depend on it."""
    (draft := folder / "ours").mkdir(exist_ok=True)
    (draft / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    save_file({name: torch.zeros(1, 6) for name in ("fc.weight", *tensors)}, draft / "model.safetensors")
    return draft


@pytest.mark.parametrize(("kind", "told"), [("llama", []), ("gemma3_text", ["--model-impl", "transformers"])])
def test_a_target_whose_own_class_takes_no_draft_is_served_by_transformers(config, tmp_path, kind, told):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    words = shlex.split(serve_command(config(f"target.path={tmp_path}"), "draft"))
    assert words[:3] == ["vllm", "serve", str(tmp_path)]
    assert words[3:-2] == told
    given = server_arguments(config(f"target.path={tmp_path}", "evaluate.vllm_args={model-impl: vllm}"), None, 0, 1)
    assert given["model_impl"] == "vllm", "what the user asks for"


@pytest.mark.parametrize(
    ("devices", "given", "copies"),
    [
        (1, "{}", None),
        (8, "{}", 8),
        (8, "{tensor-parallel-size: 4}", 2),
        (8, "{tensor_parallel_size: 8}", None),
        (8, "{data-parallel-size: 2}", 2),
        (8, "{data_parallel_size_local: 4}", None),
    ],
)
def test_stage_1_has_copies_of_the_target_on_all_devices(config, devices, given, copies):
    arguments = answering_arguments(config(f"evaluate.vllm_args={given}"), devices, 1)
    assert arguments.get("data_parallel_size") == copies


def test_a_drafter_that_names_its_target_needs_no_more_only_if_the_target_is_on_the_hub(config, tmp_path):
    """From 0.33 on, vLLM refuses a name that is a folder."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    there, here = config("target.path=a/b", SPECULATORS), config(f"target.path={tmp_path}", SPECULATORS)
    assert serve_command(there, "draft") == "vllm serve draft"
    assert serve_command(here, "draft") == serve_command(config(f"target.path={tmp_path}"), "draft")


def test_the_target_is_served_with_the_chat_template_that_the_drafter_knows(config):
    given = config("target.path=a/b", "target.chat_template=/mine/own.jinja", "target.template_args={thinking: false}")
    told = ["--chat-template", "/mine/own.jinja", "--default-chat-template-kwargs", '{"thinking": false}']
    assert shlex.split(serve_command(given, "draft"))[3:-2] == told
    assert shlex.split(sglang_command(given, "draft", None))[-4:] == told
    assert "--chat-template /path/to/own.jinja " in serve_command(given, "draft", published=True)


def test_vllm_is_told_that_a_drafter_drafts_in_parallel(config, tmp_path):
    """By the weights that lie there: the options of the measurement need not be those of training, and config.json may
    name a mask token, the tokenizer's, for a chain."""
    meant = {"method": "eagle3", "model": str(tmp_path / "ours"), "num_speculative_tokens": 3}
    for fields in ({}, {"mask_token_id": 4}, {"pard_token": 4}):
        for tensors, more in (((), {}), (("mask_hidden",), {"parallel_drafting": True})):
            draft = drafter(tmp_path, *tensors, **fields)
            assert server_arguments(config(), draft, 3, 1)["speculative_config"] == meant | more


def test_a_server_is_told_what_target_and_drafter_need(config, tmp_path):
    target = ["target.revision=abc", "target.trust_remote_code=true", "target.dtype=float16", "seed=7"]
    engine = ["extract.engine=vllm", "extract.engine_args={tensor_parallel_size: 2, quantization: awq}"]
    told = server_arguments(config(*target, *engine, "evaluate.draft_sampling=probabilistic"), drafter(tmp_path), 3, 1)
    wanted = {"revision": "abc", "trust_remote_code": True, "dtype": "float16", "seed": 7}
    wanted |= {"tensor_parallel_size": 2, "quantization": "awq", "enable_prefix_caching": False}
    assert wanted.items() <= told.items()
    assert told["speculative_config"]["draft_sample_method"] == "probabilistic"
    cached = config("evaluate.vllm_args={enable-prefix-caching: true}")  # every prompt is sent again and again
    assert "enable_prefix_caching" in message_of(server_arguments, cached, None, 0, 1)


@pytest.fixture
def started(monkeypatch):
    """The draft tokens of each server that was started. With more users each answer takes longer; a drafter halves
    that."""
    depths = []

    def serve(self, draft, depth, what, log):
        def answer(one, users):
            return asdict(replace(one, last=one.first + (one.last - one.first) * users / (2 if depth else 1)))

        depths.append(depth)
        answers = {str(users): [answer(one, users) for one in ANSWERS] for users in self.sent}
        counted = {**NONE, report.DRAFTS: 9.0, f"{report.PER_POSITION}[0]": 6.0}
        return {"answers": answers, "counted": dict.fromkeys(answers, counted)}

    monkeypatch.setattr(serving._Servers, "_serve", serve)
    return depths


@pytest.mark.usefixtures("started")
def test_a_speedup_is_over_the_target_alone_with_as_many_users(launch):
    served = launch("evaluate.concurrency=[1,4]", "evaluate.vllm_args={dtype: float16}")
    assert [row["speedup"][0] for row in served["rows"][2:]] == pytest.approx([2.0, 2.0])
    assert served["dtype"] == "float16", "of the server, and not of target.dtype"


@pytest.mark.usefixtures("started")
def test_no_speedup_is_over_a_target_whose_own_tokens_were_held_up(launch, monkeypatch):
    serve = serving._Servers._serve

    def held_up(self, draft, *others):
        record = serve(self, draft, *others)
        record["counted"]["4"] = record["counted"]["4"] | ({} if draft else {report.DECODING: 1000.0})
        return record

    monkeypatch.setattr(serving._Servers, "_serve", held_up)
    served = launch("evaluate.concurrency=[1,4]")
    assert [row["speedup"] is not None for row in served["rows"]] == [False, False, True, False]
    assert [one["concurrency"] for one in served["best"]] == [1]


def test_a_server_is_started_again_for_other_weights_or_prompts_alone(launch, started, tmp_path, monkeypatch):
    launch()
    launch()
    assert started == [0, 3]
    monkeypatch.setattr(torch, "zeros", torch.ones)  # other weights in the same folder
    launch()
    assert started == [0, 3, 3]
    launch(prompts=[replace(PROMPTS[0], ids=[1, 2, 4]), *PROMPTS[1:]])
    assert started == [0, 3, 3, 0, 3]


@pytest.mark.parametrize("offline", [False, True])
def test_a_server_asks_for_no_key_and_is_offline_where_the_hub_is(tmp_path, monkeypatch, offline):
    monkeypatch.setenv("VLLM_API_KEY", "of the shell")
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    ends = server.serving(command, server.pick_port(), tmp_path / "log", offline=offline)
    with pytest.raises(UserError), ends:
        pass
    told = json.loads((tmp_path / "log").read_text().splitlines()[1])
    assert told.get("HF_HUB_OFFLINE") == ("1" if offline else None)
    assert (told.get("VLLM_API_KEY"), told["VLLM_NO_USAGE_STATS"]) == (None, "1")


def test_counts_are_the_servers_without_its_warming(launch, capsys):
    served = launch("evaluate.serve_speculative_tokens=[1,3]", "evaluate.concurrency=[1,2]")
    # Three prompts for one user, each twice for two.
    assert "serve: 3 servers in turn; 9 requests to each" in capsys.readouterr().out
    assert [(r["drafter"], r["draft_tokens"], r["concurrency"]) for r in served["rows"]] == [
        (None, 0, 1), (None, 0, 2), ("ours", 1, 1), ("ours", 1, 2), ("ours", 3, 1), ("ours", 3, 2),
    ]  # fmt: skip
    assert len(imitating.target(PROMPTS[1].ids, LIMIT, [END])) == 6  # an end token ends one of them
    for row in served["rows"]:
        depth = row["draft_tokens"]
        answers = [imitating.target(p.ids, LIMIT, [END]) for p in PROMPTS] * row["concurrency"]
        totals = {"requests": len(answers), "output_tokens": sum(map(len, answers))}
        assert {name: row[name] for name in totals} == totals
        assert row["counted"].items() >= totals.items()
        assert row["different"] == 0
        assert (row["acceptance"] is None) == (row["speedup"] is None) == (depth == 0)
        if depth:
            steps = [accepted for answer in answers for accepted in imitating.verifications(len(answer), depth)]
            positions = [sum(accepted > i for accepted in steps) for i in range(depth)]
            assert row["acceptance"]["accepted_per_position"] == positions
            assert row["acceptance"]["acceptance_length"] == 1 + sum(steps) / len(steps)
            assert row["acceptance"]["drafts"] == len(steps)
    assert served["notes"] == []
    assert json.loads(json.dumps(served)) == served
    for row in served["rows"]:
        assert 0 < row["ttft"]["p50"] <= row["ttft"]["p95"] <= row["seconds"]


@pytest.mark.parametrize("top_k", [None, 20])
def test_requests_say_all_that_matters(launch, asked, top_k):
    options = ["evaluate.temperature=0.8", *([f"evaluate.top_k={top_k}"] if top_k else [])]
    served = launch("seed=7", "evaluate.concurrency=[1,2]", *options, prompts=PROMPTS[:2])
    assert served.get("top_k") == top_k
    requests = [json.loads(line) for line in asked.read_text().splitlines()]
    assert {(tuple(one["prompt"]), one["seed"]) for one in requests} == {((1, 2, 3), 7), ((30, 5), 8)}
    wanted = {"max_tokens": LIMIT, "stop_token_ids": [END], "temperature": 0.8, "top_p": 1.0}
    wanted |= {"top_k": top_k or 0, "min_p": 0.0}
    for one in requests:
        assert wanted.items() <= one.items()
    # One warm-up at one user and two at two; one turn of two prompts, then two.
    assert len(requests) == 2 * (1 + 2 + 2 + 4)


def test_a_server_that_never_answers_is_given_up_and_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "START_SECONDS", 0.5)
    monkeypatch.setattr(server, "GRACE_SECONDS", 0.2)
    started, make = [], server.Server
    monkeypatch.setattr(server, "Server", lambda *known: started.append(make(*known)) or started[-1])
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    loading = server.serving(command, server.pick_port(), tmp_path / "log")
    with pytest.raises(UserError, match="does not answer after 0 s"), loading:
        pass
    assert started[0].keeper.poll() is not None


@pytest.mark.parametrize(
    ("imitate", "said"),
    [
        ("dies", r"ended with exit status 3 \(.*MemoryError: no room\): see .*/run/servers/none-0.log"),
        ("silent", "was silent for 0 s on prompt b"),
        ("'breaks off'", "broke the connection on prompt b"),
        ("aborts", "ended its answer to prompt [abc] with 'abort'"),
        ("'dies uncounted'", "ended with exit status 3"),
        ("uncounted", "this vLLM does not report vllm:spec_decode_num_drafts_total: use vLLM 0.32"),
    ],
)
def test_an_answer_that_cannot_be_had_ends_the_run(launch, tmp_path, monkeypatch, imitate, said):
    if imitate == "silent":
        monkeypatch.setattr(server, "SILENCE_SECONDS", 0.3)
    assert re.search(said, message_of(launch, f"evaluate.vllm_args.imitate={imitate}"))
    assert imitating.left(tmp_path) == []


WARNED = (
    "(APIServer pid=1) WARNING 12-01 [system_utils.py:255] This can cause errors like `OSError: [Errno 24] Too many`"
)
DEAD = "(APIServer pid=1) ERROR 12-01 [async_llm.py:906] EngineDeadError: EngineCore encountered an issue."


@pytest.mark.parametrize(
    ("log", "said"),
    [([WARNED, DEAD], DEAD), ([WARNED], "the end"), (["MemoryError: no room", DEAD], "MemoryError: no room")],
)
def test_the_last_words_of_a_server_are_its_error_and_no_warning(tmp_path, log, said):
    (tmp_path / "log").write_text("\n".join(["$ vllm", *log, "the end"]))
    assert server.last_words(tmp_path / "log") == said


HOLDS = """
import sys, time
from pathlib import Path
from eagle31_train.evaluation.serving import server
server.GRACE_SECONDS = 0.2
port = server.pick_port()
command = [sys.executable, "-m", server.MODULE, "--model", "m", "--port", str(port)]
with server.serving(command, port, Path(sys.argv[1])):
    print("serving", flush=True)
    time.sleep(3600)
"""


@pytest.mark.parametrize("number", [9, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 15))])
def test_the_server_ends_with_us_whichever_way_we_end(asked, tmp_path, number):
    """A process that serves is killed: nothing is left of its server."""
    environment = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{Path(__file__).parents[2]}"}
    how = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "log")], **how) as holder:
        assert holder.stdout.readline() == "serving\n"
        assert len(imitating.left(tmp_path)) == 2
        holder.send_signal(number)
        holder.wait()
    deadline = time.monotonic() + 20
    while imitating.left(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert imitating.left(tmp_path) == []


NONE = Counter({report.FINISHED: 4.0, report.TOKENS: 15.0})
# Two prompts, each sent twice; of the last answer there is but one token.
ANSWERS = [
    Answer(0, [7] * 5, 10.0, 11.0, 13.0),
    Answer(1, [7] * 5, 10.0, 12.0, 13.0),
    Answer(0, [7] * 4, 13.0, 13.5, 15.0),
    Answer(1, [7] * 1, 13.0, 13.5, 13.5),
]


def test_times_and_speeds_are_what_they_are_called():
    row = report.row(None, 0, 2, ANSWERS, NONE, None, None)
    assert [one.ttft for one in ANSWERS] == [1.0, 2.0, 0.5, 0.5]
    assert [one.tpot for one in ANSWERS] == [0.5, 0.25, 0.5, None]
    assert row["ttft"] == {"mean": 1.0, "p50": 0.75, "p95": pytest.approx(1.85)}
    assert row["tpot"] == {"mean": pytest.approx(1.25 / 3), "p50": 0.5, "p95": 0.5}
    assert row["seconds"] == pytest.approx(5.0)
    assert row["total"] == pytest.approx(15 / 5)
    assert row["per_user"][0] == pytest.approx((4 + 4 + 3 + 0) / (2.0 + 1.0 + 1.5 + 0.0))
    assert row["speedup"] is None
    assert report.notes([row]) == []


def test_other_answers_other_counts_and_preemptions_are_noted():
    other = [replace(ANSWERS[0], tokens=[7, 7, 7, 7, 8]), *ANSWERS[1:]]
    for change, lines in (({}, 1), ({report.TOKENS: 14.0}, 2), ({report.FINISHED: 3.0, report.PREEMPTIONS: 2.0}, 3)):
        row = report.row(None, 0, 2, other, Counter({**NONE, **change}), None, ANSWERS[:2])
        assert row["different"] == 3, "one of them as long as the reference's, and two shorter"
        assert len(report.notes([row])) == lines


def test_no_speedup_is_claimed_where_a_busy_machine_held_tokens_up():
    """Tokens that all arrive at the end of an answer seem to take no time."""
    took = sum(answer.last - answer.first for answer in ANSWERS)
    for seconds, told in ((0.0, 0), (took, 0), (took * 1.1, 0), (took * 2, 1)):
        counted = Counter({**NONE, report.DECODING: seconds, report.DRAFTS: 5.0, f"{report.PER_POSITION}[0]": 2.0})
        row = report.row("d", 1, 2, ANSWERS, counted, ANSWERS, None)
        assert [("in 50% of the time" in line) for line in report.notes([row])] == [True] * told
        assert len(report.best([row])) == (row["speedup"] is not None) == 1 - told


def test_a_speedup_is_paired_by_prompt():
    """Everything twice as fast: no prompt drawn again changes that, though the prompts themselves differ much."""
    counted = Counter({f"{report.PER_POSITION}[0]": 0.0, report.DRAFTS: 0.0})
    slow = [replace(one, prompt=one.prompt + 2 * copy) for copy in range(3) for one in ANSWERS]
    fast = [replace(one, last=(one.first + one.last) / 2) for one in slow]
    row = report.row("ours", 3, 2, fast, counted, slow, slow)
    assert row["speedup"] == [pytest.approx(2.0), None, None]  # all alike
    assert row["per_user"][1] < row["per_user"][0] < row["per_user"][2]
    assert row["acceptance"]["acceptance_length"] is None


def test_one_that_pays_is_better_than_one_that_may_not():
    tried = {"drafter": "ours", "concurrency": 1}
    rows = [{**tried, "draft_tokens": 1, "speedup": [1.1, 1.05, 1.15]}]
    rows += [{**tried, "draft_tokens": 3, "speedup": [1.12, 0.98, 1.26]}]
    assert [one["draft_tokens"] for one in report.best(rows)] == [1]
    assert [one["draft_tokens"] for one in report.best(rows[1:])] == [0]
    too_few = {**rows[0], "speedup": [1.4, None, None]}  # prompts for an interval
    assert [one["draft_tokens"] for one in report.best([too_few])] == [0]
    (line,) = report.verdict(report.best(rows[1:]))
    assert "1: no gain shown, best with num_speculative_tokens=3, 1.12 [0.98, 1.26] × the tokens/s/user" in line
