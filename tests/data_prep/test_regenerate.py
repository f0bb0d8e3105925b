"""Regeneration: in rounds, resumable, by the target in process or by a server, with thoughts and tools."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from answering import completion
from datasets import load_from_disk
from families import write_rows
from made import message_of
from planting import interrupt, watched

from data_prep import client
from data_prep import regenerate as module
from data_prep.answers import Local
from data_prep.dataset import place
from data_prep.journal import Answer, Journal
from data_prep.regenerate import regenerate
from data_prep.self_prompts import write_prompts
from data_prep.stage import prepare
from eagle31_train.common import artifacts
from eagle31_train.common.console import Progress
from eagle31_train.common.errors import UserError
from eagle31_train.config import ANSWERED, Config, DataConfig, GenerateConfig, TargetConfig
from eagle31_train.rows.formats import TEMPLATE
from eagle31_train.targets.chat import ChatTemplate

JOURNAL, MANIFEST = f"{ANSWERED}.partial", "conversations.manifest.json"
PROMPTS = [
    {"id": "one", "category": "chat", "turns": ["hello"]},
    {"id": "two", "category": "chat", "turns": ["the fox", "and?", "so?"]},
    {"id": "three", "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"},
                                 {"role": "assistant", "content": "someone else's words"}]},
]  # fmt: skip


@pytest.fixture
def config(tmp_path, tiny_target):
    generate = GenerateConfig(max_new_tokens=6, batch_size=2)
    data = DataConfig(prompts=write_rows(tmp_path / "prompts.jsonl", PROMPTS), heldout=0.0, generate=generate)
    target = TargetConfig(path=str(tiny_target), dtype="float32", device="cpu")
    return Config(name="t", run_dir=str(tmp_path / "run"), regenerate=True, target=target, data=data)


def run(config):
    path, _ = regenerate(config, ChatTemplate.load(config.target))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_what_cannot_be_met_is_refused_before_a_prompt_is_answered(config, monkeypatch):
    monkeypatch.setattr(Local, "answers", lambda *_: pytest.fail("asked"))
    asked = [[{"role": "user", "content": text}] for text in ("hello", "the fox")]
    asked.append(PROMPTS[2]["messages"])
    assert [sum(place(each) < share for each in asked) for share in (0.05, 0.408)] == [0, 1]
    config.data.heldout = 0.05
    assert re.search(r"holds out none of 3 prompts.*data\.heldout=0\.408 would hold out one", message_of(run, config))
    config.data.heldout = 0.999
    assert "holds out every prompt" in message_of(run, config)
    config.data.generate.samples = 2
    assert "set data.generate.temperature above 0" in message_of(run, config)
    config.data.generate.temperature = 0.9
    write_rows(Path(config.data.prompts), [{"messages": [{"role": "assistant", "content": "x"}]}] * 2)
    assert "no prompt can be answered (2 × no user turn)" in message_of(run, config)


def test_a_row_has_variables_of_the_template_of_its_own(config, tmp_path):
    """In its prompt, in its record, and wherever its answers are read again."""
    template = "{% if brief is defined and brief %}short {% endif %}"
    template += ChatTemplate.load(config.target).template
    (tmp_path / "own.jinja").write_text(template)
    config.target.chat_template = str(tmp_path / "own.jinja")
    config.target.template_args = {"brief": True}
    kinds = {"plain": {}, "brief": {"brief": True}, "long": {"brief": False}, "other": {"size": 3}}
    rows = [{"id": id, "prompt": "hello", "chat_template_kwargs": args} for id, args in kinds.items()]
    config.data.prompts = write_rows(Path(config.data.prompts), rows)
    prepare(config)
    samples = load_from_disk(str(Path(config.run_dir) / "data" / "dataset"))["train"].to_list()
    read = ChatTemplate.load(config.target)
    asked = {row["id"]: read.decode(row["input_ids"])[:5] for row in samples}
    assert asked == {"plain": "short", "brief": "short", "long": "<|im_", "other": "short"}
    manifest = json.loads((Path(config.run_dir) / "data" / "manifest.json").read_text())
    assert (manifest["args_unread"], manifest["repeated"], manifest["refused"]) == (1, 0, [])
    again = replace(config, name="again", run_dir=str(tmp_path / "again"), regenerate=False)
    again.data = replace(config.data, conversations=str(Path(config.run_dir) / ANSWERED))
    prepare(again)
    assert load_from_disk(str(tmp_path / "again" / "data" / "dataset"))["train"].to_list() == samples


def test_prompts_of_several_turns_are_held_out_as_their_answers_will_be(config, monkeypatch):
    """By the first turn alone: the target answers between the others."""
    rows = [{"turns": [f"question {n}", f"and then {n}"]} for n in range(9)]
    config.data.prompts = write_rows(Path(config.data.prompts), rows)
    told = []
    monkeypatch.setattr(module, "check_shares", lambda places, _: told.append(places))
    answered = run(config)
    assert told == [{place(row["messages"]) for row in answered}]


def test_greedy_answers_are_those_of_the_model_step_by_step(config, tiny_target):
    import torch
    from transformers import AutoModelForCausalLM

    template = ChatTemplate.load(config.target)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    rows = run(config)
    assert [row["id"] for row in rows] == ["one", "two", "three"]
    roles = [[m["role"] for m in row["messages"]] for row in rows]
    assert roles == [["user", "assistant"], ["user", "assistant"] * 3, ["system", "user", "assistant"]]
    assert "someone else" not in json.dumps(rows)
    assert set(rows[0]) == {"id", "source", "sample", "temperature", "finish_reason", "messages", TEMPLATE}
    for row in rows:
        assert row["finish_reason"] == row["messages"][-1]["finish_reason"]
        for i in [i for i, message in enumerate(row["messages"]) if message["role"] == "assistant"]:
            ids, answer = template.prompt_ids(row["messages"][:i]), []
            while len(answer) < 6:
                with torch.no_grad():
                    token = int(model(torch.tensor([ids + answer])).logits[0, -1].argmax())
                if token in template.end_ids:
                    break
                answer.append(token)
            assert row["messages"][i]["content"] == template.tokenizer.decode(answer, skip_special_tokens=True)
            assert row["messages"][i]["finish_reason"] == ("length" if len(answer) == 6 else "stop")


def test_samples_first_greedy_then_sampled_and_reproducible(config, tmp_path):
    config.data.generate.samples, config.data.generate.temperature = 3, 0.9
    rows = run(config)
    drawn = [(row["id"], row["sample"], row["temperature"]) for row in rows[:3]]
    assert drawn == [("one", 0, 0.0), ("one", 1, 0.9), ("one", 2, 0.9)]
    assert len({row["messages"][-1]["content"] for row in rows[:3]}) == 3
    config.run_dir, config.data.generate.batch_size = str(tmp_path / "again"), 7
    assert run(config) == rows  # other batches, same draws
    config.run_dir, config.seed = str(tmp_path / "other"), 1
    other = run(config)
    for one, another in zip(rows, other, strict=True):
        assert (one["messages"] == another["messages"]) == (one["sample"] == 0)
    config.run_dir, config.data.generate.samples = str(tmp_path / "alone"), 1
    assert {row["temperature"] for row in run(config)} == {0.9}, "of one answer none is greedy"


def test_finished_answers_are_not_made_again_and_not_replaced_unasked(config, tmp_path, monkeypatch, capsys):
    output, manifest, journal = (tmp_path / "run" / name for name in (ANSWERED, MANIFEST, JOURNAL))
    interrupt(artifacts, "write_json", run, config)  # after the answers, and before their manifest
    left = output.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(Local, "answers", lambda _, jobs: iter(()) if not jobs else pytest.fail("asked"))
        rows = run(config)
        assert output.read_text() == left
        patch.setattr(module, "answer_all", lambda *_: pytest.fail("answered again"))
        journal.write_text("another's\n")
        assert run(config) == rows
        assert journal.read_text() == "another's\n"
        journal.unlink()
        assert "up to date" in capsys.readouterr().out
        config.data.generate.max_new_tokens = 5
        assert re.search(r"s\.jsonl was made .*tokens: 6 there, 5 here.*overwrite=true", message_of(run, config))
        config.data.generate.max_new_tokens, config.data.generate.top_k = 6, 20
        assert "(data.generate.top_k: unset there, 20 here)" in message_of(run, config)
        config.data.generate.top_k, config.target.revision = None, "v2"
        assert "(target.revision: null there, v2 here)" in message_of(run, config)
    config.target.revision = None
    output.write_text("spoilt")
    interrupt(Journal, "__enter__", run, config)
    interrupt(artifacts, "write_json", run, config)
    interrupt(Path, "unlink", run, config, when=lambda path: path == journal)  # behind the manifest
    assert manifest.is_file()
    assert journal.is_file()
    assert run(config) == rows
    assert not journal.exists()
    manifest.unlink()
    journal.unlink(missing_ok=True)
    output.write_text("mine\n")
    assert "move it, or replace it with overwrite=true" in message_of(run, config)
    assert output.read_text() == "mine\n"


def test_the_rate_is_of_this_runs_answers(config, monkeypatch):
    interrupt(artifacts, "write_json", run, config)
    begun = watched(monkeypatch, Progress, "__init__")
    run(config)
    ((bar,),) = begun
    assert bar.initial == bar.n == bar.total == 5  # all were in the journal
    assert not bar.smoothing  # of which a moving average would take notice


@pytest.mark.parametrize("itself", [False, True])
def test_answers_under_way_are_not_thrown_away_for_other_options(config, tmp_path, itself):
    if itself:
        config.data.prompts, config.data.self_prompts.count = "self", 2
        ask = lambda config: write_prompts(config, ChatTemplate.load(config.target))  # noqa: E731
        interrupt(artifacts, "write_text", ask, config)
        (journal,) = tmp_path.rglob("prompts.jsonl.partial")
        config.data.self_prompts.temperature = 0.5
    else:
        ask, journal = run, tmp_path / "run" / JOURNAL
        interrupt(artifacts, "write_text", run, config)
        for more in ({"tools": TOOLS}, {"chat_template_kwargs": {"brief": True}}):
            write_rows(Path(config.data.prompts), [{**row, **more} for row in PROMPTS])
            assert "answers of an unfinished run with other prompts, options" in message_of(run, config)
        write_rows(Path(config.data.prompts), PROMPTS)
        config.data.generate.max_new_tokens = 5
    there = journal.read_bytes()
    said = message_of(ask, config)
    assert re.search(rf"{journal.name} holds \d+ answers of an unfinished run with other prompts, options", said)
    assert journal.read_bytes() == there
    config.overwrite = True
    ask(config)
    assert not journal.exists()


def test_for_the_data_of_another_run_no_prompt_is_answered_anew(config, tmp_path, monkeypatch, capsys):
    prepare(config)
    monkeypatch.setattr(Local, "answers", lambda *_: pytest.fail("asked"))
    other = replace(config, name="other", run_dir=str(tmp_path / "other"), data_dir=str(tmp_path / "run" / "data"))
    prepare(other)
    assert capsys.readouterr().out.endswith(f"{other.data_dir} is up to date\n")
    (more := tmp_path / "more").mkdir()
    changed = {
        "prompts.prompts.jsonl": {"prompts": write_rows(more / "prompts.jsonl", PROMPTS[:2])},
        "data.generate.max_new_tokens": {"generate": GenerateConfig(max_new_tokens=5)},
        "data.max_length": {"max_length": 64},
    }
    for what, options in changed.items():
        with pytest.raises(UserError, match=rf"run/data was made from other inputs \({what}: "):
            prepare(replace(other, data=replace(config.data, **options)))
    (tmp_path / "run" / MANIFEST).unlink()  # the data set alone is there, and its own records decide
    prepare(other)
    assert "max_length: " in message_of(prepare, replace(other, data=replace(config.data, max_length=64)))


def test_the_journal_is_of_one_run_at_a_time(tmp_path):
    path = tmp_path / JOURNAL
    with Journal(tmp_path / ANSWERED) as journal:
        journal.add("key", Answer({"role": "assistant", "content": "yes"}, "stop", 1))
        assert path.read_bytes().count(b"\n") == 1, "no kill loses an answer"
        journal.file.write(b'{"key": "half a li')
        journal.file.flush()
        with pytest.raises(UserError, match="being written by another run"), Journal(tmp_path / ANSWERED):
            pass
        assert path.read_text().endswith("half a li"), "what the other is writing is left alone"


def test_a_full_disk_is_named_by_the_journal_on_it(tmp_path):
    named = f"No space left on device: '{tmp_path / JOURNAL}'"
    with Journal(tmp_path / ANSWERED) as journal:
        journal.file.close()
        with Path("/dev/full").open("ab", buffering=0) as journal.file, pytest.raises(OSError, match=named):
            journal.add("key", Answer({"role": "assistant", "content": "yes"}, "stop", 1))


OWN_TEMPLATE = """\
{%- if brief %}brief {% endif %}{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments if
 c.function.arguments is string else c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


def user(content):
    return {"role": "user", "content": content}


def recorded(name):
    """Somebody else's call, and the result that it had."""
    call = {"id": "theirs", "type": "function", "function": {"name": name, "arguments": '{"city": "Rome"}'}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "theirs"},
        {"role": "assistant", "content": "someone else's words"},
    ]


ASKED = {
    "whole": [user("weather?"), *recorded("weather"), user("thanks")],
    "no-result": [user("weather?"), user("thanks")],
    "last": [user("weather?")],
    "other-tool": [user("weather?"), *recorded("map"), user("thanks")],
    "no-call": [user("hello"), *recorded("weather")],
}
TOOL_PROMPTS = [{"id": name, "tools": TOOLS, "messages": messages} for name, messages in ASKED.items()]
TOOL_PROMPTS += [
    {"id": "plain", "messages": [user("hello")]},
    {"id": "orphan", "messages": [{"role": "tool", "content": "rain"}, user("hello")]},
    {"id": "blank", "messages": [user("hello"), user(" \n\t")]},
]


CALLING, ANSWERING = "<think>look it up</think>" + CALL, "<think>the tool says so</think>It is rain."


@pytest.fixture
def served(config, tmp_path, server, tokenizer):
    """A target with tools, which thinks before it calls one, and before it tells of the result."""

    def reply(body):
        role, said = tokenizer.decode(body["prompt"]).split("<|im_start|>")[-2].removesuffix("<|im_end|>\n").split("\n")
        answer = ANSWERING if role == "tool" else CALLING if "weather" in said else f"answer to {said}"
        return completion(tokenizer.encode(answer + "<|im_end|>"))

    server.reply = reply
    (tmp_path / "own.jinja").write_text(OWN_TEMPLATE)
    write_rows(tmp_path / "prompts.jsonl", TOOL_PROMPTS)
    config.data.heldout, config.data.max_length = 0.0, 1000
    config.target.chat_template, config.target.template_args = str(tmp_path / "own.jinja"), {"brief": True}
    config.data.generate = GenerateConfig(max_new_tokens=50, server=server.url, model="m", concurrency=3)
    return config


def by_id(rows):
    return {row["id"]: row for row in rows}


def test_thoughts_calls_and_results_make_one_conversation(served, server, tmp_path):
    prepare(served)
    lines = (tmp_path / "run" / ANSWERED).read_text(encoding="utf-8").splitlines()
    rows = by_id(json.loads(line) for line in lines)
    first, called, result, answer, second, thanks = rows["whole"]["messages"]
    assert (first["content"], second["content"]) == ("weather?", "thanks")
    assert (called["content"], called["reasoning_content"]) == ("", "look it up")
    assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert result == {"role": "tool", "content": "rain"}, "not with their call's id"
    assert (answer["content"], thanks["content"]) == (ANSWERING, "answer to thanks")
    assert (rows["whole"]["tools"], rows["plain"].get("tools")) == (TOOLS, None)
    assert not any(words in json.dumps(rows) for words in ("someone else", "Rome", "theirs"))
    template = ChatTemplate.load(served.target)
    prompts = [template.decode(body["prompt"]) for body in server.bodies]
    assert all(prompt.startswith("brief <|im_start|>") for prompt in prompts)
    assert sum('"name": "weather", "parameters"' in prompt for prompt in prompts) == len(prompts) - 1
    assert len({body["seed"] for body in server.bodies}) == 8
    # In the data set thoughts and calls are supervised, and results are not.
    samples = load_from_disk(str(tmp_path / "run" / "data" / "dataset"))["train"].to_list()
    supervised = {
        row["id"]: template.decode([i for i, on in zip(row["input_ids"], row["loss_mask"], strict=True) if on])
        for row in samples
    }
    asked = [body["prompt"] for body in server.bodies]
    assert all(row["input_ids"][: row["loss_mask"].index(True)] in asked for row in samples), "with its tools"
    call, rest = f"{CALLING}<|im_end|>", f"{ANSWERING}<|im_end|>answer to thanks<|im_end|>"
    assert set(supervised) == set(rows) == {"whole", "no-result", "last", "other-tool", "no-call", "plain"}
    assert supervised["whole"] == call + rest
    assert supervised["last"] == supervised["no-result"] == call
    # The file by itself gives the same samples, and under another template none.
    again = replace(served, name="again", run_dir=str(tmp_path / "again"), regenerate=False)
    again.data = replace(served.data, conversations=str(tmp_path / "run" / ANSWERED))
    prepare(again)
    both = [load_from_disk(str(tmp_path / name / "data" / "dataset"))["train"].to_list() for name in ("run", "again")]
    assert both[0] == both[1]
    again.target = replace(served.target, template_args={"brief": False})
    again.run_dir = str(tmp_path / "other")
    assert "6 × its token ids come from another chat template" in message_of(prepare, again)
    manifest = json.loads((tmp_path / "run" / "data" / "manifest.json").read_text())
    counts = {"read": 8, "taken": 8, "refused": 2, "repeated": 3, "cut": 0, "no_end_of_turn": 0}
    assert manifest["sources"]["prompts"] == counts


def test_a_conversation_ends_where_its_prompt_no_longer_fits(served, tmp_path):
    rows = by_id(run(served))
    for name in ("no-result", "last", "other-tool", "no-call"):
        assert [message["role"] for message in rows[name]["messages"]] == ["user", "assistant"]
    manifest = json.loads((tmp_path / "run" / MANIFEST).read_text())
    assert {entry["id"]: (entry["turns_left"], entry["reason"]) for entry in manifest["ended"]} == {
        "no-result": (1, "the answer calls a tool, but the prompt has no result for it"),
        "other-tool": (2, "the answer calls other tools than the prompt has results for"),
        "no-call": (1, "the prompt continues with a tool's result, but the answer calls no tool"),
    }
    reasons = ["a tool result that follows no answer", "a blank user turn"]
    assert [entry["reason"] for entry in manifest["refused"]] == reasons
    answers = [m for row in rows.values() for m in row["messages"] if m["role"] == "assistant"]
    assert {m["finish_reason"] for m in answers} == {"stop"}
    assert (manifest["answers"], manifest["tokens"]) == (8, sum(len(m["token_ids"]) for m in answers))
    assert manifest["sources"] == {"prompts": {"read": 8, "taken": 8}}


def test_an_answer_that_no_prompt_repeats_ends_its_conversation(served, tokenizer, server):
    server.reply = lambda _: completion(tokenizer.encode("yes <|pad|> no<|im_end|>"))
    rows = by_id(run(served))
    assert len(rows["no-result"]["messages"]) == 2, "its second question is not asked"
    assert len(server.bodies) == len(rows)


def test_a_run_that_a_failing_server_ends_goes_on_with_whole_messages(served, tmp_path, server):
    whole = run(served)
    served.run_dir = str(tmp_path / "resumed")
    reply, asked = server.reply, []
    # It answers the six prompts of the first round.
    server.reply = lambda body: (404, b"gone") if asked.append(body) or len(asked) > 6 else reply(body)
    assert "HTTP 404" in message_of(run, served)
    server.reply = reply
    journal = tmp_path / "resumed" / JOURNAL
    assert len(journal.read_text().splitlines()) == 6
    assert [path.name for path in journal.parent.iterdir()] == [JOURNAL]
    with journal.open("a") as file:
        file.write('{"key": "a line that was being writ')
    server.bodies.clear()
    assert run(served) == whole
    assert len(server.bodies) == 2, "the second and third answer of one conversation"
    assert not journal.exists()


def test_what_a_server_failed_on_is_asked_again_and_nothing_else(served, tmp_path, server, monkeypatch, capsys):
    whole = run(served)
    served.run_dir, served.data.generate.concurrency = str(tmp_path / "failed"), 1
    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    reply, template = server.reply, ChatTemplate.load(served.target)

    def failing(body):
        asked = template.decode(body["prompt"])
        return (500, b"lost") if "thanks" in asked or "weather" not in asked else reply(body)

    server.reply = failing
    lacking = run(served)
    assert (len(lacking), by_id(lacking)["last"]) == (len(whole) - 1, by_id(whole)["last"])
    assert len(by_id(lacking)["whole"]["messages"]) < len(by_id(whole)["whole"]["messages"])
    assert run(served) == lacking
    assert "lacks 2 prompts that the server failed on: set overwrite=true to ask" in capsys.readouterr().out
    server.reply, served.overwrite = reply, True
    server.bodies.clear()
    assert run(served) == whole
    assert len(server.bodies) == 2, "what was answered stays"
    assert run(served) == whole
    assert len(server.bodies) == 2


def test_a_prompt_that_leaves_no_room_for_an_answer_is_not_asked(config, capsys):
    template, asked = ChatTemplate.load(config.target), [{"turns": ["hello"]}, {"turns": ["hello " * 9]}]
    write_rows(Path(config.data.prompts), asked)
    config.data.max_length = len(template.prompt_ids([{"role": "user", "content": "hello"}]))
    assert "no prompt was answered (2 × it leaves no room" in message_of(run, config)
    config.data.max_length += 1
    assert [row["messages"][0]["content"] for row in run(config)] == ["hello"]
    told = f"1 × it leaves no room for an answer within data.max_length={config.data.max_length}"
    assert told in capsys.readouterr().out
    config.data.max_length = 1000
    assert len(run(config)) == 1
    assert "lacks 1 prompts that left no room for an answer in data.max_length=" in capsys.readouterr().out
    config.overwrite = True
    assert [row["messages"][0]["content"] for row in run(config)] == ["hello", "hello " * 9]
    assert len(run(config)) == 2
    assert "up to date" in capsys.readouterr().out
