"""Regeneration through a server on loopback: what it is asked, what is made of its answers, and its failures."""

import http.server
import json
import threading
from collections import Counter

import pytest
from regenerating import make_config, run

from data_prep import regenerate as module
from data_prep.journal import Answered, Journal
from data_prep.regenerate import OUTPUT
from data_prep.server import NotAnsweredError, Server
from eagle31_train.schema import UserError

YES = {"role": "assistant", "content": "yes"}


@pytest.fixture
def config(tmp_path, tiny_target):
    return make_config(tmp_path, tiny_target)


class Fake(http.server.BaseHTTPRequestHandler):
    """Answers with what it was asked; `failures` are HTTP statuses given first; objects to one text."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        failure = self.server.failures.pop(0) if self.server.failures else None
        filtered = body["messages"] and body["messages"][-1]["content"] == self.server.objection
        if filtered and self.server.objects_by == "status":
            failure = 400
        self.send_response(failure or 200)
        self.end_headers()
        text = "answer to " + body["messages"][-1]["content"]
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        if filtered:
            choice = {"message": {"role": "assistant", "content": None}, "finish_reason": "content_filter"}
        usage = {"completion_tokens": 3}
        reply = self.server.reply or json.dumps({"choices": [choice], "usage": usage}).encode()
        self.wfile.write(b"busy" if failure else reply)

    def log_message(self, *_):
        pass


@pytest.fixture
def fake():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    server.requests, server.failures, server.reply = [], [], None
    server.objection, server.objects_by = None, None
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(server, **options):
    waits = []
    client = Server(server.url, "m", wait=waits.append, **options)
    return client.answer([{"role": "user", "content": "hi", "finish_reason": "x"}], 0.5, 0.9, 7, 11), waits


def test_server_answers_whole_conversations(config, fake):
    config.data.generate.server, config.data.generate.model = fake.url, "smol"
    config.data.generate.samples, config.data.generate.temperature = 2, 0.7
    rows = run(config)
    assert [m["content"] for m in rows[2]["messages"]] == [
        "the fox", "answer to the fox", "and?", "answer to and?", "so?", "answer to so?",
    ]  # fmt: skip
    assert len(fake.requests) == 10
    assert {path for path, _ in fake.requests} == {"/v1/chat/completions"}
    bodies = [body for _, body in fake.requests]
    assert {body["model"] for body in bodies} == {"smol"}
    assert Counter(body["temperature"] for body in bodies) == {0.0: 5, 0.7: 5}
    assert all(set(message) == {"role", "content"} for body in bodies for message in body["messages"])
    assert len({body["seed"] for body in bodies}) == 10


def test_server_request_and_reply(fake):
    reply, waits = ask(fake)
    assert (reply.text, reply.finish_reason, reply.tokens) == ("answer to hi", "stop", 3)
    assert waits == []
    ((_, body),) = fake.requests
    assert body == {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5,
                    "top_p": 0.9, "max_tokens": 7, "seed": 11}  # fmt: skip


def test_busy_server_is_asked_again_with_growing_waits(fake):
    fake.failures += [503, 429, 500]
    reply, waits = ask(fake)
    assert reply.text == "answer to hi"
    assert waits == [1.0, 2.0, 4.0]


def test_server_that_stays_away(fake):
    fake.failures += [503] * 9
    with pytest.raises(UserError, match=r"gives no answer \(HTTP 503 busy\): check data\.generate\.server"):
        ask(fake, attempts=3)
    assert len(fake.requests) == 3


def test_server_that_refuses_is_not_asked_again(fake):
    fake.failures += [404]
    with pytest.raises(UserError, match="HTTP 404"):
        ask(fake)
    assert len(fake.requests) == 1


def test_no_server_there():
    with pytest.raises(UserError, match="gives no answer"):
        Server("http://127.0.0.1:1/v1", "m", attempts=2, wait=lambda _: None).answer([], 0.0, 1.0, 1, 0)


@pytest.mark.parametrize("reply", [b"<html>", b"{}", b'{"choices": []}', b"[]"])
def test_reply_that_is_no_chat_completion(fake, reply):
    fake.reply = reply
    with pytest.raises(UserError, match="answered no chat completion"):
        ask(fake)


def reply_of(message, reason):
    return json.dumps({"choices": [{"message": message, "finish_reason": reason}]}).encode()


@pytest.mark.parametrize(
    ("content", "reason", "told"),
    [(None, "tool_calls", "ended the answer with 'tool_calls'"), ("x", "content_filter", "'content_filter'"),
     (None, "stop", "without text")],
)  # fmt: skip
def test_reply_that_cannot_be_learnt_from(fake, content, reason, told):
    fake.reply = reply_of({"content": content}, reason)
    with pytest.raises(NotAnsweredError, match=told):
        ask(fake)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_server_that_takes_the_thinking_out(fake, key):
    fake.reply = reply_of({"content": "x", key: "hm"}, "stop")
    with pytest.raises(UserError, match="start it without a reasoning parser"):
        ask(fake)
    fake.reply = reply_of({"content": "x", key: None}, "stop")
    assert ask(fake)[0].text == "x"


@pytest.mark.parametrize("how", ["filter", "status"])
def test_one_prompt_that_the_server_refuses_does_not_stop_the_others(config, fake, tmp_path, how):
    config.data.generate.server, config.data.generate.concurrency = fake.url, 1
    fake.objection = "hello"
    fake.objects_by = how
    assert [row["id"] for row in run(config)] == ["two", "three"]
    (entry,) = module.answered(tmp_path / "run")["refused"]
    assert (entry["id"], entry["where"]) == ("one", "prompts.jsonl:1")
    assert (
        entry["reason"]
        == {
            "filter": "the server ended the answer with 'content_filter', not with stop or length",
            "status": "the server refuses it: HTTP 400 busy",
        }[how]
    )
    assert len(fake.requests) == 5


def test_failing_server_ends_the_run_and_keeps_the_answers(config, fake, tmp_path):
    config.data.generate.server, config.data.generate.concurrency = fake.url, 1
    with Journal(tmp_path / "j") as journal:
        journal.add("k", Answered(YES, "stop", 1))
        assert (tmp_path / "j").read_bytes().endswith(b"\n")  # flushed before anything can fail
    fake.failures += [404]
    with pytest.raises(UserError, match="HTTP 404"):
        run(config)
    assert not (tmp_path / "run" / OUTPUT).exists()
