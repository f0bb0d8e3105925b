"""A server of answers that is slow, endless, of another kind, or answers nonsense."""

import json
from contextlib import suppress

import pytest
from answering import answering
from hypothesis import strategies as st
from mutating import cases, documents, outcome, texts
from talking import make_tokenizer

from data_prep import client, written
from data_prep.answers import Job, Remote
from data_prep.client import Server
from data_prep.dialogue import turns_of
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.config import Config, DataConfig, GenerateConfig, TargetConfig
from eagle31_train.rows.formats import Row
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.completions import Request, Sampling

GOOD = {"model": "m", "choices": [{"index": 0, "text": "hello", "token_ids": [5, 9, 2], "finish_reason": "stop"}]}
CUT = {**GOOD, "choices": [{"token_ids": [5, 9], "finish_reason": "length"}]}
ASK = [{"role": "user", "content": "hi"}]
TOKENIZER = make_tokenizer()
READS = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}<|im_end|>{% endfor %}"
TEMPLATES = [ChatTemplate(TOKENIZER, [TOKENIZER.eos_token_id], text) for text in (TOKENIZER.chat_template, READS)]
SAID = ["error", "object", "length", "content_filter", "\ud800", 10**15, -1, [], [TOKENIZER.eos_token_id], {"a": {}}]


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    with answering(lambda handler, _: handler.server.reply(handler)) as server:
        yield server


def ask(server, template=TEMPLATES[0], timeout=None):
    """One answer and what is learned of it; a prompt that is refused is passed over."""
    remote = Remote(Config(name="t", target=TargetConfig(path="m"), data=served(server.url)), template)
    remote.servers[0].timeout = timeout or remote.servers[0].timeout
    ((_, answer),) = remote.answers({"hi": Job(Row("hi", "s", "f:1", ASK), 0, 0.7, turns_of(ASK), list(ASK))})
    if isinstance(answer, Refused):
        return None
    json.dumps(answer.message)
    with suppress(Refused):
        written.samples(template, [*ASK, answer.message], 512, None)
    return answer


def served(url):
    return DataConfig(generate=GenerateConfig(server=url, max_new_tokens=8, concurrency=1))


@st.composite
def replies(draw):
    """Statuses and bodies in the order in which a server gives them; then it repeats the last."""
    bodies = texts(documents([GOOD, CUT], ["token_ids", "finish_reason", "model"], SAID))
    statuses = st.sampled_from([200, 200, 200, 200, 429, 500, 503, 400, 404, 302, 204])
    return draw(st.lists(st.tuples(statuses, bodies), min_size=1, max_size=4)), draw(st.sampled_from([0, 1]))


@cases(replies(), quick=100, thorough=10_000)
def test_answers(case, server):
    queue, template = case
    queue = list(queue)

    def reply(handler):
        status, body = queue.pop(0) if len(queue) > 1 else queue[0]
        handler.send(status, b"" if status == 204 else body, Location=f"{server.url}/elsewhere")

    server.reply = reply
    outcome(lambda: ask(server, TEMPLATES[template]))


def gives(content, status=200, endless=False):
    def reply(handler):
        handler.send(status, content)
        while endless:
            handler.wfile.write(content)

    return reply


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (gives(b" " * 65536, endless=True), "sends an endless answer"),
        (gives(b"x" * 65536, 500, endless=True), "(HTTP 500 xxx"),
        (gives(b'{"choices":' * 5000), "(not a completion"),
        (gives(b"[" * 200 + b"]" * 200), "(not a completion"),
    ],
)
def test_what_has_no_end_is_no_answer(server, reply, said):
    server.reply = reply
    assert said in str(outcome(lambda: ask(server)))


def test_an_answer_that_trickles_is_given_up(server, monkeypatch):
    now = iter(range(10**9))
    monkeypatch.setattr(client.time, "monotonic", lambda: float(next(now)))
    server.reply = gives(b" ", endless=True)
    assert "(timed out): check data.generate.server" in str(outcome(lambda: ask(server, timeout=5)))


@pytest.mark.parametrize(
    ("key", "asked", "said"),
    [
        ("secret", 1, "(HTTP 302"),
        ("secret\n", 0, "its address, or the key in OPENAI_API_KEY, has characters that HTTP"),
        ("secret ü€", 0, "its address, or the key in OPENAI_API_KEY, has characters that HTTP"),
    ],
)
def test_a_key_is_not_shown_and_goes_nowhere_else(server, monkeypatch, key, asked, said):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    server.reply = lambda handler: handler.send(302, b"", Location=f"{server.url}/elsewhere")
    found = str(outcome(lambda: ask(server)))
    assert said in found
    assert "secret" not in found
    assert len(server.bodies) == asked


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "localhost:8000/v1", "", "ftp://a/v1", "http://a..b/v1", "http://[a/v1", "http://a/ü"]
)
def test_what_is_no_address_is_asked_nothing(url):
    assert isinstance(
        outcome(lambda: Server(url, "m", 8).complete(Request([1], 0.0, 0), Sampling(8, 1.0, [2]))), UserError
    )
