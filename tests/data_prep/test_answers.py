"""Answers: what a server is asked and what is made of it, and what in this process is no text."""

import json
from dataclasses import replace
from threading import Event
from threading import enumerate as enumerate_threads
from types import SimpleNamespace

import pytest
from answering import answering, completion
from made import message_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_prep import client
from data_prep.answers import BROKEN, Job, Local, Remote
from data_prep.client import Failed, NoAnswer, Server
from data_prep.dialogue import turns_of
from data_prep.journal import Answer
from eagle31_train.common.errors import Refused
from eagle31_train.config import Config, DataConfig, GenerateConfig, TargetConfig
from eagle31_train.rows.formats import Row
from eagle31_train.targets.chat import ChatTemplate

ASK = {"role": "user", "content": "hi"}
REMOTE = DataConfig(generate=GenerateConfig(server="http://127.0.0.1:1/v1,http://127.0.0.1:2/v1", concurrency=2))


def ask(server, template, messages=(ASK,)):
    return Server(server.url, "m", template, max_tokens=7, top_p=0.9).answer(list(messages), 0.5, 11)


def test_a_request_is_sent_again_until_there_is_a_whole_answer_as_late_as_the_server_asks(chatml, monkeypatch, capsys):
    waits, (_, content) = [], completion("answer", usage=3)
    monkeypatch.setattr(client.time, "sleep", waits.append)
    replies = [
        (503, b"busy", {}),
        (200, content[:20], {"Content_Length": str(len(content))}),
        (429, b"", {"Retry_After": "7"}),
        (500, b"", {"Retry_After": "99999"}),
        (200, content, {}),
    ]

    def reply(handler, _):
        status, sent, headers = replies.pop(0)
        handler.send(status, sent, **headers)

    with answering(reply) as server:
        answer = ask(server, chatml, [{**ASK, "finish_reason": "x"}])
    message = {"role": "assistant", "content": "answer", "tokens": 3}
    assert (answer.message, answer.finish_reason, answer.tokens) == (message, "stop", 3)
    assert waits == [1.0, 2.0, 7.0, client.LONGEST_WAIT]
    (said,) = capsys.readouterr().err.splitlines()  # once, since it may be waited for
    assert said.endswith("gives no answer (HTTP 503 busy): asking again, 8 times in all")
    body = {"model": "m", "messages": [ASK], "temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 11}
    assert server.bodies == [body] * 5
    replies.append((200, content, {}))
    replies.append((200, content, {}))
    effort = {"reasoning_effort": "high"}
    with answering(reply) as server:  # of gpt-oss vLLM reads it beside the template's variables alone
        for comment in ("", "{# <|channel|> #}"):
            ask(server, replace(chatml, template=chatml.template + comment, template_args=effort))
    args = {"chat_template_kwargs": effort}
    assert server.bodies == [body | args, body | args | effort]
    # Nothing comes before an answer is whole; a wait that ends sooner would end the run, at each try again.
    assert [Server(server.url, "m", chatml, tokens).timeout for tokens in (512, 16384)] == [600, 8192]


@pytest.mark.parametrize(
    "reply",
    [
        completion("ans", reason="abort"),
        completion("ans", reason=None),
        (424, b"failed"),
        (200, b"<html>no backend</html>"),
        (200, b'{"error": "out of memory"}'),
    ],
)
def test_what_is_no_whole_answer_is_asked_again(server, chatml, monkeypatch, reply):
    """vLLM ends what is under way with "abort" when it is stopped; proxies answer with pages of their own."""
    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    asking, whole = Server(server.url, "m", chatml, 7), completion("answer")
    replies = [whole, reply, reply, whole]
    server.reply = lambda _: replies.pop(0)
    answers = [asking.answer([ASK], 0.5, 11).message["content"] for _ in range(2)]
    assert (answers, replies) == (["answer"] * 2, [])
    server.reply = lambda _: (200, b"<html>no backend</html>")
    assert "gives no answer (no chat completion: <html>no backend" in message_of(ask, server, chatml)
    assert len(server.bodies) == 5, "one that has never answered is named at once"


def test_a_server_that_hangs_is_left_for_one_that_answers(chatml, monkeypatch, capsys):
    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    remote, asked = Remote(Config(name="t", target=TargetConfig(path="m"), data=REMOTE), chatml), []

    def post(self, *_):
        asked.append(self.base)
        if self is hangs:
            raise TimeoutError("timed out")
        return completion("answer")[1]

    hangs, _ = remote.servers
    monkeypatch.setattr(Server, "_post", post)
    outcomes = dict(remote._all({"a": [ASK]}, lambda server, messages: server.answer(messages, 0.5, 11)))
    assert outcomes["a"].message["content"] == "answer"
    assert asked.count(hangs.base) == client.HANGS
    assert capsys.readouterr().err.count("the other servers answer in its place") == 1
    assert (hangs.given_up, [server.under_way for server in (hangs, *remote.servers)]) == (True, [0, 0])
    hangs = remote.servers[0]  # alone, it is waited for
    assert "timed out" in message_of(lambda: dict(remote._all({"b": [ASK]}, lambda one, m: one.answer(m, 0.5, 11))))
    assert asked.count(hangs.base) == 1 + client.TRIES


def test_after_ctrl_c_nobody_waits_for_the_answers_under_way(chatml):
    remote, asked, release = Remote(Config(name="t", target=TargetConfig(path="m"), data=REMOTE), chatml), [], Event()

    def ask_it(_, request):
        asked.append(request)
        if request != 0:
            release.wait(60)
        return Answer(ASK, "stop", 1)

    outcomes = remote._all({str(n): n for n in range(9)}, ask_it)
    assert next(outcomes)[0] == "0"
    with pytest.raises(KeyboardInterrupt):
        outcomes.throw(KeyboardInterrupt)
    assert all(server.given_up for server in remote.servers)
    assert all(one.daemon for one in enumerate_threads() if one.name.endswith("(work)"))
    release.set()
    assert len(asked) <= 3


@pytest.mark.parametrize("failure", [(500, b"broken"), completion("ans", reason="error")])
def test_a_server_that_fails_on_some_prompts_each_time_is_asked_the_others(server, chatml, monkeypatch, failure):
    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    asking, answers = Server(server.url, "m", chatml, 7), server.reply
    outcomes = []

    def ask_it(fails):
        server.reply = (lambda _: failure) if fails else answers
        try:
            outcomes.append(type(asking.answer([ASK], 0.5, 11)))
        except (NoAnswer, Refused) as error:
            outcomes.append(type(error))

    for fails in [True, False, True, False, *[True] * (client.FAILURES + 1)]:
        ask_it(fails)
    assert outcomes == [NoAnswer, Answer, Failed, Answer, *[Failed] * client.FAILURES, NoAnswer]


def test_what_one_of_several_servers_fails_on_is_asked_of_the_others(chatml):
    """Until then it was lost for good, though the others would answer it."""
    remote = Remote(Config(name="t", target=TargetConfig(path="m"), data=REMOTE), chatml)
    asked = []

    def ask_it(server, request):
        asked.append((request, remote.servers.index(server)))
        if request == "hard" or server is remote.servers[0]:
            raise Failed("HTTP 500")
        return Answer(ASK, "stop", 1)

    outcomes = dict(remote._all({"hard": "hard", "easy": "easy"}, ask_it))
    assert type(outcomes["easy"]) is Answer
    assert type(outcomes["hard"]) is Failed
    assert {index for request, index in asked if request == "hard"} == {0, 1}
    assert len(remote.servers) == 2


@pytest.mark.parametrize(
    ("model", "prompt", "said"),
    [
        ("another", 0, ["answers as another, and m was asked for"]),
        ("m", 99, ["makes 99 tokens of a prompt that has"]),
        ("m", 0, []),
        (None, 0, []),
    ],
)
def test_a_server_of_another_model_or_template_is_named_once(server, chatml, capsys, model, prompt, said):
    status, body = completion("yes", prompt=prompt)
    server.reply = lambda _: (status, json.dumps({**json.loads(body), "model": model}).encode())
    asking = Server(server.url, "m", chatml, 7)
    for _ in range(2):
        asking.answer([ASK], 0.5, 11)
    lines = capsys.readouterr().err.splitlines()
    assert [words in line for words, line in zip(said, lines, strict=True)] == [True] * len(said)


def test_thoughts_that_the_template_does_not_read_are_refused(server, chatml):
    server.reply = lambda _: completion("yes", reasoning="hm")
    assert "start it without a reasoning parser" in message_of(ask, server, chatml)


FOX = "hello 🦊"


def locally(chatml, ids, finish_reason):
    """What becomes of these tokens of the target: the content of the message, or the reason of the refusal."""
    draws = SimpleNamespace(refusal=lambda *_: None, answer=lambda *_: iter([(0, ids, finish_reason)]))
    local = Local(Config(name="t", target=TargetConfig(path="t")), chatml, draws)
    job = Job(Row("hi", "s", "f:1", [ASK]), 0, 0.0, turns_of([ASK]), [ASK])
    ((_, result),) = local.answers({"hi": job})
    if isinstance(result, Refused):
        return str(result)
    assert result.message["tokens"] == result.tokens + (finish_reason == "stop")
    return result.message["content"]


def test_a_space_before_the_answer_is_the_targets_own():
    """Decoders of SentencePiece's kind take it from the beginning of a text (Llama 2, Mistral 7B)."""
    words = ["<s>", "</s>", "[/INST]", *(f"\u2581{word}" for word in ("hello,", "how", "are", "you?", "I", "am")), "I"]
    pieces = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "I"))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    pieces.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, eos_token="</s>", additional_special_tokens=["[/INST]"]
    )
    chat = "{% for m in messages %}{{ m.content }}{{ '[/INST]' if m.role == 'user' else '</s>' }}{% endfor %}"
    template = ChatTemplate(tokenizer, [tokenizer.eos_token_id], chat)
    ids = template.encode(" I am")
    assert template.decode(ids) == "I am"
    assert locally(template, ids, "stop") == " I am"
    spaced = replace(
        template, template=chat.replace("{{ m.content }}", "{{ ' ' if m.role == 'assistant' }}{{ m.content }}")
    )
    assert locally(spaced, ids, "stop") == "I am", "the template's own (Mistral 7B v0.2)"


def test_an_answer_cut_inside_a_character_ends_before_it(chatml):
    ids = chatml.encode(FOX)
    kept = len(chatml.encode("hello "))
    assert len(ids) > kept + 2
    for end in range(kept + 1, len(ids)):
        assert chatml.decode(ids[:end]).endswith("\ufffd")
        assert locally(chatml, ids[:end], "length") == "hello "
    assert locally(chatml, ids, "length") == FOX
    assert locally(chatml, [*ids[:-1], *chatml.encode("the")], "stop") == BROKEN
    assert locally(chatml, ids[:-1], "stop") == BROKEN
    assert locally(chatml, chatml.encode("a\ufffdb"), "stop") == "a\ufffdb"
