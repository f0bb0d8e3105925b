"""Answers that think and call tools: asked of a server on loopback, kept whole, gone on with, and learnt."""

import http.server
import json
import threading

import pytest
from datasets import load_from_disk

from data_prep import regenerate as module
from data_prep.journal import Answered, Journal
from data_prep.regenerate import JOURNAL, regenerate
from data_prep.stage import prepare
from data_prep.template import ChatTemplate
from eagle31_train.schema import Config, DataConfig, GenerateConfig, TargetConfig, UserError

TEMPLATE = """\
{%- if brief %}brief {% endif %}{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments if
 c.function.arguments is string else c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


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


PROMPTS = [
    {"id": "whole", "tools": TOOLS, "messages": [user("weather?"), *recorded("weather"), user("thanks")]},
    {"id": "no-result", "tools": TOOLS, "messages": [user("weather?"), user("thanks")]},
    {"id": "last", "tools": TOOLS, "messages": [user("weather?")]},
    {"id": "other-tool", "tools": TOOLS, "messages": [user("weather?"), *recorded("map"), user("thanks")]},
    {"id": "no-call", "tools": TOOLS, "messages": [user("hello"), *recorded("weather")]},
    {"id": "plain", "messages": [user("hello")]},
    {"id": "orphan", "messages": [{"role": "tool", "content": "rain"}, user("hello")]},
]


def reply_to(messages):
    """What a target with tools says, as a server with both parsers hands it on."""
    last = messages[-1]
    if last["role"] == "tool":
        return {"content": f"It is {last['content']}.", "reasoning_content": "the tool says so"}, "stop"
    if "weather" in last["content"]:
        call = {"id": "functions.weather:0", "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}  # fmt: skip
        return {"content": None, "reasoning_content": "look it up", "tool_calls": [call]}, "tool_calls"
    return {"content": "answer to " + last["content"]}, "stop"


says = reply_to


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        message, reason = says(body["messages"])
        choice = {"message": {"role": "assistant", **message}, "finish_reason": reason}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [choice], "usage": {"completion_tokens": 5}}).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.bodies = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def config(tmp_path, tiny_target, server):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    generate = GenerateConfig(max_new_tokens=50, server=url, model="m", concurrency=3)
    data = DataConfig(prompts=str(tmp_path / "prompts.jsonl"), generate=generate, heldout=0.0, max_length=1000)
    target = TargetConfig(path=str(tiny_target), chat_template=str(tmp_path / "own.jinja"))
    return Config(name="t", run_dir=str(tmp_path / "run"), regenerate=True, target=target, data=data)


def run(config):
    path = regenerate(config, ChatTemplate.load(config.target))
    return {row["id"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def test_thoughts_calls_and_results_make_one_conversation(config, server):
    rows = run(config)
    first, called, result, told, second, thanks = rows["whole"]["messages"]
    assert (first["content"], second["content"]) == ("weather?", "thanks")
    assert called["reasoning_content"] == "look it up"
    assert called["finish_reason"] == "tool_calls"
    assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert result == {"role": "tool", "content": "rain", "tool_call_id": "functions.weather:0"}, "not their call's id"
    assert (told["content"], told["reasoning_content"]) == ("It is rain.", "the tool says so")
    assert thanks["content"] == "answer to thanks"
    assert rows["whole"]["tools"] == TOOLS
    assert "tools" not in rows["plain"]
    text = json.dumps(rows)
    assert "someone else" not in text
    assert "Rome" not in text
    assert "theirs" not in text
    with_tools = [body for body in server.bodies if "tools" in body]
    assert len(with_tools) == len(server.bodies) - 1
    assert all(body["tools"] == TOOLS for body in with_tools)


def test_a_conversation_ends_where_its_prompt_no_longer_fits(config, tmp_path, capsys):
    rows = run(config)
    roles = {name: [m["role"] for m in row["messages"]] for name, row in rows.items()}
    assert roles["no-result"] == roles["last"] == roles["other-tool"] == roles["no-call"] == ["user", "assistant"]
    manifest = module.answered(tmp_path / "run")
    ended = {entry["id"]: (entry["turns_left"], entry["reason"]) for entry in manifest["ended"]}
    assert ended == {
        "no-result": (1, "the answer calls a tool, and the prompt has no result for it"),
        "other-tool": (2, "the answer calls other tools than the prompt has results of"),
        "no-call": (1, "the prompt goes on with a tool's result, and the answer calls no tool"),
    }
    (refused,) = manifest["refused"]
    assert (refused["id"], refused["reason"]) == ("orphan", "a tool result that follows no answer")
    assert manifest["answers"] == sum(r.count("assistant") for r in roles.values()) == 8
    assert manifest["tokens"] == 40
    assert manifest["sources"] == {"prompts": {"read": 7, "taken": 7}}
    assert "1 conversations end before their prompts do, since the answer calls a tool, and" in capsys.readouterr().out


def test_the_bar_tells_rate_and_requests_at_once_and_ends_full(config, capsys):
    run(config)
    *_, last = capsys.readouterr().err.replace("\r", "\n").strip().splitlines()
    assert "100%" in last, "turns that are not asked any more are not waited for"
    assert "8/8" in last
    assert "tokens/s" in last
    assert "at once" in last


def test_a_stopped_run_goes_on_with_whole_messages(config, tmp_path, server, monkeypatch):
    whole = run(config)
    config.run_dir = str(tmp_path / "resumed")
    add, added = Journal.add, []

    def interrupted(self, key, answer):
        if len(added) == 6:  # all of the first round
            raise KeyboardInterrupt
        added.append(key)
        add(self, key, answer)

    monkeypatch.setattr(Journal, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    lines = [json.loads(line) for line in (tmp_path / "resumed" / JOURNAL).read_text().splitlines()]
    assert len(lines) == 6
    assert any(line["message"].get("reasoning_content") and line["message"].get("tool_calls") for line in lines)
    monkeypatch.setattr(Journal, "add", add)
    server.bodies.clear()
    assert run(config) == whole
    assert len(server.bodies) == 2, "the second and third answer of one conversation"


def test_a_journal_that_forgets_thoughts_or_calls_is_caught(config, tmp_path, server, monkeypatch):
    plain = {"role": "assistant", "content": "yes"}
    monkeypatch.setattr(
        Journal, "add", lambda self, key, answer: self.answers.update({key: Answered(plain, "stop", 5)})
    )
    with pytest.raises(AssertionError):
        test_a_conversation_ends_where_its_prompt_no_longer_fits(config, tmp_path, None)


def test_a_journal_of_the_first_layout_is_read(tmp_path):
    path = tmp_path / JOURNAL
    path.write_text('["a", "yes", "stop", 1]\n')
    answered = Answered({"role": "assistant", "content": "yes"}, "stop", 1)
    with Journal(path) as journal:
        assert journal.answers == {"a": answered}
        journal.add("b", answered)
    with Journal(path) as journal:
        assert journal.answers == {"a": answered, "b": answered}


@pytest.mark.parametrize(
    "line", ['{"key": "a"}', '{"key": "a", "message": {"role": "user"}, "finish_reason": "stop"}', "3"]
)
def test_a_damaged_line_of_a_journal_is_named(tmp_path, line):
    (tmp_path / JOURNAL).write_text(line + "\n")
    with pytest.raises(UserError, match=":1 is damaged: remove this line"), Journal(tmp_path / JOURNAL):
        pass


@pytest.mark.parametrize(("space", "apart"), [("", True), ("  ", False)])
def test_a_call_in_plain_text_is_taken_apart_where_nothing_of_it_is_lost(config, tmp_path, monkeypatch, space, apart):
    """Of a server without parsers. With white space that the template would not write, the text stays as it is."""
    call = f'<tool_call>{{"name": "weather",{space} "arguments": {{"city": "Oslo"}}}}</tool_call>'

    def plain(messages):
        text = reply_to(messages)[0]["content"] or f"<think>look it up</think>{call}"
        return {"content": text}, "stop"

    monkeypatch.setitem(globals(), "says", plain)
    rows = run(config)
    ended = {entry["id"]: entry["reason"] for entry in module.answered(tmp_path / "run")["ended"]}
    called = rows["whole"]["messages"][1]
    if apart:
        assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
        assert called["reasoning_content"] == "look it up"
        roles = [m["role"] for m in rows["whole"]["messages"]]
        assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    else:
        assert called["content"] == f"<think>look it up</think>{call}"
        assert ended["whole"] == "the answer calls a tool in its text, in a form that cannot be taken apart"


def test_another_tool_is_another_question(config, tmp_path, server):
    """A journal's answer belongs to the tools that the target was told of."""
    keys = []
    for name in ("weather", "map"):
        row = {"id": "a", "messages": [user("hello")], "tools": [{"type": "function", "function": {"name": name}}]}
        (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
        config.run_dir = str(tmp_path / name)
        with pytest.MonkeyPatch.context() as patch:
            add = Journal.add
            patch.setattr(Journal, "add", lambda self, key, answer, a=add: (keys.append(key), a(self, key, answer)))
            run(config)
    assert len(set(keys)) == 2


def test_what_the_template_is_told_goes_with_the_request(config, server):
    config.target.template_args = {"brief": True}
    run(config)
    assert all(body["chat_template_kwargs"] == {"brief": True} for body in server.bodies)


def test_thoughts_and_calls_are_learnt_and_results_are_not(config, tmp_path):
    prepare(config)
    template = ChatTemplate.load(config.target)
    rows = load_from_disk(str(tmp_path / "run" / "data" / "dataset"))["train"].to_list()
    learnt = {
        row["id"]: template.decode([i for i, on in zip(row["input_ids"], row["loss_mask"], strict=True) if on])
        for row in rows
    }
    call = (
        '<think>look it up</think><tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>'
    )
    assert set(learnt) == {"whole", "no-result", "last", "other-tool", "no-call", "plain"}
    assert learnt["whole"] == call + "<think>the tool says so</think>It is rain.<|im_end|>answer to thanks<|im_end|>"
    assert learnt["last"] == learnt["no-result"] == call
    manifest = json.loads((tmp_path / "run" / "data" / "manifest.json").read_text())
    assert [entry["id"] for entry in manifest["refused"]] == ["orphan"]
    assert manifest["sources"]["prompts"] == {"read": 7, "taken": 7, "refused": 1, "cut": 0, "no_end_of_turn": 0}
