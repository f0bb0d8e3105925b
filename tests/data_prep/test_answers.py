"""Who answers: what is kept when a server fails, and answers whose bytes are no text."""

import threading
import time
from types import SimpleNamespace

import pytest

from data_prep.answers import BROKEN, Job, Local, Refused, Remote
from data_prep.dialogue import turns_of
from data_prep.messages import Row
from data_prep.server import NotAnsweredError, Reply, Server
from data_prep.template import ChatTemplate
from eagle31_train.schema import Config, DataConfig, GenerateConfig, TargetConfig, UserError

FOX = "hello 🦊"


@pytest.fixture
def template(tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id], tokenizer.chat_template)


@pytest.fixture
def config():
    generate = GenerateConfig(server="http://localhost:1/v1", concurrency=2, max_new_tokens=6)
    return Config(name="t", target=TargetConfig(path="t"), data=DataConfig(generate=generate))


def asked(*texts):
    """Jobs by key, each with the first turn of its prompt."""
    jobs = {}
    for text in texts:
        messages = [{"role": "user", "content": text}]
        jobs[text] = Job(Row(text, "s", "f:1", messages), 0, 0.0, turns_of(messages), list(messages))
    return jobs


# ---------------------------------------------------------------- a server that fails


def test_answers_under_way_are_kept_when_one_request_fails_for_good(config, template, monkeypatch, capsys):
    begun, failed, got = [], threading.Event(), {}

    def answer(self, messages, *_):
        text = messages[-1]["content"]
        begun.append(text)
        if text == "bad":
            failed.set()
            raise UserError("no such model")
        failed.wait(10)
        time.sleep(0.2)
        return Reply({"role": "assistant", "content": f"to {text}"}, "stop", 3)

    monkeypatch.setattr(Server, "answer", answer)
    remote = Remote(config, template)
    with pytest.raises(UserError, match="no such model"):
        got.update(remote.answers(asked("good", "bad", *map(str, range(20)))))
    assert got["good"].message["content"] == "to good"
    assert set(got) == set(begun) - {"bad"}
    assert len(begun) < 10, "what had not begun is not asked"
    assert "no such model; waiting for the answers under way (" in capsys.readouterr().err


def test_a_server_that_was_given_up_is_not_asked_again(monkeypatch):
    posted = []

    def post(self, body):
        posted.append(body)
        raise OSError("away")

    monkeypatch.setattr(Server, "_post", post)
    server = Server("http://localhost:1/v1", "m", wait=lambda _: None)
    server.given_up = True
    with pytest.raises(UserError, match="gives no answer"):
        server.answer([], 0.0, 1.0, 1, 0)
    assert len(posted) == 1


# ---------------------------------------------------------------- bytes that are no text


def locally(config, template, ids, finish_reason):
    """What becomes of these tokens of the target."""
    local = Local(config, template)
    answer = SimpleNamespace(ids=ids, finish_reason=finish_reason)
    local.generator = SimpleNamespace(refusal=lambda *_: None, answer=lambda *_: [answer])
    ((_, found),) = local.answers(asked("hi"))
    return found


def test_an_answer_cut_inside_a_character_ends_before_it(config, template):
    ids = template.encode(FOX)
    kept = len(template.encode("hello "))
    assert len(ids) > kept + 2
    for end in range(kept + 1, len(ids)):
        assert template.decode(ids[:end]).endswith("\ufffd")
        found = locally(config, template, ids[:end], "length")
        assert (found.message["content"], found.message["tokens"], found.tokens) == ("hello ", kept, kept)
    assert locally(config, template, ids, "length").message["content"] == FOX


def test_bytes_that_are_no_text_are_refused_elsewhere(config, template):
    ids = template.encode(FOX)
    assert locally(config, template, [*ids[:-1], *template.encode("the")], "stop") == Refused(BROKEN)
    assert locally(config, template, ids[:-1], "stop") == Refused(BROKEN)
    assert locally(config, template, template.encode("a\ufffdb"), "stop").message["content"] == "a\ufffdb"


@pytest.mark.parametrize("part", ["content", "reasoning_content"])
def test_a_servers_answer_cut_inside_a_character_ends_before_it(config, template, monkeypatch, part):
    def answered(text, finish_reason):
        message = {"role": "assistant", "content": "", part: text}
        monkeypatch.setattr(Server, "answer", lambda *_: Reply(message, finish_reason, 3))
        ((_, found),) = Remote(config, template).answers(asked("hi"))
        return found

    assert answered("hello \ufffd", "length").message == {"role": "assistant", "content": "", part: "hello "}
    assert answered("hello", "length").message == {"role": "assistant", "content": "", part: "hello"}
    assert answered("hel\ufffdlo", "length") == Refused(BROKEN)
    assert answered("hello \ufffd", "stop") == Refused(BROKEN)


def test_half_a_surrogate_pair_of_a_server_is_refused(monkeypatch):
    reply = rb'{"choices": [{"message": {"content": "hi \ud83d"}, "finish_reason": "stop"}]}'
    monkeypatch.setattr(Server, "_post", lambda *_: reply)
    with pytest.raises(NotAnsweredError, match="cannot be used: text with half of a surrogate pair"):
        Server("http://localhost:1/v1", "m").answer([], 0.0, 1.0, 1, 0)
