"""Answers: what a server is asked, what is made of its token ids, and whom it is asked of."""

import shutil
from dataclasses import replace
from threading import Event
from threading import enumerate as enumerate_threads
from types import SimpleNamespace

import pytest
from answering import answering, completion
from made import message_of
from pipeline import flip_bit

from data_prep import client, written
from data_prep.answers import Job, Remote, target_inputs
from data_prep.client import NoAnswer, Server
from data_prep.dialogue import turns_of
from eagle31_train.common.errors import Refused
from eagle31_train.config import Config, DataConfig, GenerateConfig, SelfPromptsConfig, TargetConfig
from eagle31_train.rows.formats import Row
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.completions import Request, Sampling

ASK = {"role": "user", "content": "hi"}
REMOTE = DataConfig(generate=GenerateConfig(server="http://127.0.0.1:1/v1,http://127.0.0.1:2/v1", concurrency=2))
ASKED, UP_TO = Request([1, 2], 0.5, 11), Sampling(7, 0.9, [5])
IDS = [7, 8, 5]


def ask(server, longest=7):
    return Server(server.url, "m", longest).complete(ASKED, UP_TO)


def test_a_request_is_sent_again_until_there_is_a_whole_answer_as_late_as_the_server_asks(monkeypatch, capsys):
    waits, (_, content) = [], completion(IDS)
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
        assert ask(server) == (IDS, "stop")
    assert waits == [1.0, 2.0, 7.0, client.LONGEST_WAIT]
    (said,) = capsys.readouterr().err.splitlines()  # once, since it may be waited for
    assert said.endswith(" (HTTP 503 busy): retrying, 8 attempts in all")
    body = {"model": "m", "prompt": [1, 2], "temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 11}
    # And nothing of the target's generation_config.json.
    body |= {
        "return_token_ids": True,
        "stop_token_ids": [5],
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    assert server.bodies == [body] * 5
    # Nothing comes before an answer is whole; a wait that ends sooner would end the run, at each try again.
    assert [Server(server.url, "m", tokens).timeout for tokens in (512, 16384)] == [600, 8192]


@pytest.mark.parametrize(
    "reply",
    [
        completion([7], reason="abort"),
        completion([7], reason=None),
        (424, b"failed"),
        (200, b"<html>no backend</html>"),
    ],
)
def test_what_is_no_whole_answer_is_asked_again(server, monkeypatch, reply):
    """vLLM ends what is under way with "abort" when it is stopped; proxies answer with pages of their own."""
    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    asking, whole = Server(server.url, "m", 7), completion(IDS)
    replies = [whole, reply, reply, whole]
    server.reply = lambda _: replies.pop(0)
    assert [asking.complete(ASKED, UP_TO) for _ in range(2)] == [(IDS, "stop")] * 2
    assert replies == []
    server.reply = lambda _: (200, b"<html>no backend</html>")
    assert "(not a completion: <html>no backend" in message_of(ask, server)
    assert len(server.bodies) == 5, "one that has never answered is named at once"


def test_our_own_server_that_dies_amid_an_answer_is_given_the_time_to_end(monkeypatch):
    """Its last words say why, and not that an answer was incomplete."""
    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    (_, content), checked = completion(IDS), []
    sent, own = [content[:20], content], SimpleNamespace(check=lambda dying: checked.append(dying))
    with answering(lambda handler, _: handler.send(200, sent.pop(0), Content_Length=str(len(content)))) as server:
        assert Server(server.url, "m", 7, own).complete(ASKED, UP_TO) == (IDS, "stop")
    assert checked == [True]


def test_a_server_without_token_ids_is_named(server):
    """Its words would have to be made into tokens again, perhaps into others than the target wrote."""
    server.reply = lambda _: (200, b'{"choices": [{"text": "yes", "finish_reason": "stop"}]}')
    assert "returns no token ids, though return_token_ids asks for them" in message_of(ask, server)


def test_a_server_that_hangs_is_left_for_one_that_answers(chatml, monkeypatch, capsys):
    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    remote, asked = Remote(Config(name="t", target=TargetConfig(path="m"), data=REMOTE), chatml), []

    def post(self, *_):
        asked.append(self.url)
        if self is hangs:
            raise TimeoutError("timed out")
        return completion(IDS)[1]

    hangs, _ = remote.servers
    monkeypatch.setattr(Server, "_post", post)
    assert dict(remote.complete({"a": ASKED}, UP_TO)) == {"a": (IDS, "stop")}
    assert asked.count(hangs.url) == client.HANGS
    assert capsys.readouterr().err.count("the other servers take over") == 1
    assert (hangs.given_up, [server.under_way for server in (hangs, *remote.servers)]) == (True, [0, 0])
    hangs = remote.servers[0]  # alone, it is waited for
    assert "timed out" in message_of(lambda: dict(remote.complete({"b": ASKED}, UP_TO)))
    assert asked.count(hangs.url) == 1 + client.TRIES


def test_after_ctrl_c_nobody_waits_for_the_answers_under_way(chatml, monkeypatch):
    remote, asked, release = Remote(Config(name="t", target=TargetConfig(path="m"), data=REMOTE), chatml), [], Event()

    def complete(_, request, __):
        asked.append(request)
        if request.seed != 0:
            release.wait(60)
        return IDS, "stop"

    monkeypatch.setattr(Server, "complete", complete)
    outcomes = remote.complete({str(n): Request([1], 0.0, n) for n in range(9)}, UP_TO)
    assert next(outcomes)[0] == "0"
    with pytest.raises(KeyboardInterrupt):
        outcomes.throw(KeyboardInterrupt)
    assert all(server.given_up for server in remote.servers)
    assert all(one.daemon for one in enumerate_threads() if one.name.endswith("(work)"))
    release.set()
    assert len(asked) <= 3


@pytest.mark.parametrize("status", [429, 503])
def test_a_full_server_is_waited_for_as_long_as_it_answers_others(server, monkeypatch, status):
    asking, waits = Server(server.url, "m", 7), []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) <= 20:
            assert asking.complete(ASKED._replace(seed=0), UP_TO) == (IDS, "stop"), "another request"

    monkeypatch.setattr(client.time, "sleep", wait)
    server.reply = lambda body: completion(IDS) if body["seed"] == 0 or len(waits) == 20 else (status, b"full")
    assert asking.complete(ASKED, UP_TO) == (IDS, "stop")
    assert len(waits) == 20
    server.reply = lambda _: (status, b"full")
    with pytest.raises(NoAnswer, match="full"):
        asking.complete(ASKED, UP_TO)
    assert len(waits) == 20 + client.TRIES - 1


@pytest.mark.parametrize("failure", [(500, b"broken"), completion([7], reason="error")])
def test_a_server_that_fails_on_some_prompts_each_time_is_asked_the_others(server, monkeypatch, failure):
    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    asking, answers = Server(server.url, "m", 7), server.reply
    outcomes = []
    for fails in [True, False, True, False, *[True] * (client.FAILURES + 1)]:
        server.reply = (lambda _: failure) if fails else answers
        try:
            outcomes.append(type(asking.complete(ASKED, UP_TO)))
        except (NoAnswer, Refused) as error:
            outcomes.append(type(error))
    assert outcomes == [NoAnswer, tuple, Refused, tuple, *[Refused] * client.FAILURES, NoAnswer]


def test_what_one_of_several_servers_refuses_or_fails_on_is_asked_of_the_others(chatml, monkeypatch):
    """Until then it was lost for good, though the others would answer it."""
    remote = Remote(Config(name="t", target=TargetConfig(path="m"), data=REMOTE), chatml)
    hard, easy, asked = Request([1], 0.0, 0), Request([2], 0.0, 0), []

    def complete(server, request, _):
        asked.append((request, remote.servers.index(server)))
        if request == hard or server is remote.servers[0]:
            raise Refused("HTTP 400")
        return IDS, "stop"

    monkeypatch.setattr(Server, "complete", complete)
    outcomes = dict(remote.complete({"hard": hard, "easy": easy}, UP_TO))
    assert outcomes["easy"] == (IDS, "stop")
    assert type(outcomes["hard"]) is Refused
    assert {index for request, index in asked if request == hard} == {0, 1}
    assert len(remote.servers) == 2


@pytest.mark.parametrize(
    ("model", "said"), [("another", ["answers as another, but m was requested"]), ("m", []), (None, [])]
)
def test_a_server_of_another_model_is_named_once(server, capsys, model, said):
    server.reply = lambda _: completion(IDS, model=model)
    asking = Server(server.url, "m", 7)
    for _ in range(2):
        asking.complete(ASKED, UP_TO)
    lines = capsys.readouterr().err.splitlines()
    assert [words in line for words, line in zip(said, lines, strict=True)] == [True] * len(said)


def answered(chatml, server, ids, reason):
    """What becomes of these tokens of the target."""
    server.reply = lambda _: completion(ids, reason)
    data = DataConfig(generate=GenerateConfig(server=server.url))
    remote = Remote(Config(name="t", target=TargetConfig(path="t"), data=data), chatml)
    job = Job(Row("hi", "s", "f:1", [ASK]), 0, 0.0, turns_of([ASK]), [ASK])
    ((_, outcome),) = remote.answers({"hi": job})
    return str(outcome) if isinstance(outcome, Refused) else outcome


@pytest.mark.parametrize(
    ("ids", "reason", "said"),
    [
        (lambda t: t.encode("hello<|im_end|>"), "stop", "hello"),
        (lambda t: t.encode("hello"), "length", "hello"),
        (lambda t: t.encode("hello 🦊")[:-1], "length", "hello \ufffd"),  # cut inside a character
        (lambda t: [*t.encode("🦊")[:-1], *t.encode("the<|im_end|>")], "stop", "\ufffdthe"),  # no text at all
        (lambda t: [t.encode("q")[0], *t.encode("u"), *t.encode("ick<|im_end|>")], "stop", "quick"),  # not as read
        (lambda t: t.encode("hi<|im_start|>you<|im_end|>"), "stop", "hi<|im_start|>you"),
        (lambda t: t.end_ids, "stop", "an empty answer"),
        (lambda t: [], "stop", "an empty answer"),
        (lambda t: [100_000, *t.end_ids], "stop", "token 100000, which has no row in the target's embedding"),
    ],
)
def test_what_the_target_wrote_is_learnt_token_by_token(chatml, server, ids, reason, said):
    """Also what its words would not become again."""
    chatml.rows, ids = len(chatml.tokenizer), ids(chatml)
    answer = answered(chatml, server, ids, reason)
    if isinstance(answer, str):
        assert answer.startswith(said)
        return
    assert answer.message == {"role": "assistant", "content": said, "token_ids": ids}
    chat = [ASK, {**answer.message, "finish_reason": reason}]
    ((_, sample),) = written.samples(chatml, chat, 100, None).samples
    assert sample.input_ids.tolist() == [*chatml.prompt_ids([ASK]), *ids]
    assert sample.input_ids[sample.loss_mask].tolist() == ids
    assert sample.open_turns == (reason == "length")


def test_a_server_that_ends_answers_otherwise_than_the_target_is_named_at_once(chatml, server):
    """Its other answers would end so, too, hours later."""
    said = message_of(answered, chatml, server, chatml.encode("hello"), "stop")
    assert said.startswith("an answer ends with 'llo', not with one of the target's end tokens ([2], eos_token_id of")
    assert " its generation_config.json): " in said


def test_a_server_is_asked_as_the_options_say(chatml, server):
    data = DataConfig(generate=GenerateConfig(server=server.url, max_new_tokens=9, top_p=0.8, top_k=20))
    remote = Remote(Config(name="t", target=TargetConfig(path="t"), data=data), chatml)
    for temperature in (0.7, 0.0):
        list(remote.answers({"hi": Job(Row("hi", "s", "f:1", [ASK]), 1, temperature, turns_of([ASK]), [ASK])}))
    assert [one.longest for one in remote.servers] == [256], "of answers and of what users say the longer"
    how = SelfPromptsConfig(max_new_tokens=11, top_p=0.6)
    for end_text in (None, "User:"):
        list(remote.write(how, [4], end_text, {"a": ASKED}))
    names = ("temperature", "top_p", "top_k", "max_tokens", "stop_token_ids", "stop", "skip_special_tokens")
    assert [[body.get(name) for name in names] for body in server.bodies] == [
        [0.7, 0.8, 20, 9, chatml.end_ids, None, None],
        [0.0, 1.0, -1, 9, chatml.end_ids, None, None],
        [0.5, 0.6, -1, 11, [4], None, None],
        [0.5, 0.6, -1, 11, [4], "User:", False],  # which may be made of special tokens
    ]


def test_after_an_error_that_ends_the_run_no_more_is_asked(chatml, server, monkeypatch):
    given_up = Event()
    server.reply = lambda _: (404, b"no such model") if len(server.bodies) == 1 or given_up.wait(60) else None
    data = DataConfig(generate=GenerateConfig(server=server.url, concurrency=1))
    remote = Remote(Config(name="t", target=TargetConfig(path="t"), data=data), chatml)
    monkeypatch.setattr(remote, "_give_up", given_up.set)
    requests = {str(number): ASKED for number in range(9)}
    assert "HTTP 404 no such model" in message_of(list, remote.complete(requests, UP_TO))
    assert len(server.bodies) <= 2, "but what was under way"


def test_answers_are_of_one_target_and_one_seed(tiny_target, tmp_path):
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    config = Config(name="t", target=TargetConfig(path=str(folder)))
    template = ChatTemplate.load(config.target)
    before = target_inputs(config, template, "model")
    assert target_inputs(replace(config, seed=1), template, "model") != before
    flip_bit(folder / "model.safetensors")
    assert target_inputs(config, template, "model") != before
    servers = [GenerateConfig(server="http://127.0.0.1:1/v1", model=model) for model in ("a", "b")]
    one, other = (target_inputs(replace(config, data=DataConfig(generate=g)), template, "model") for g in servers)
    assert one != other


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_prompt_that_a_server_refuses_ends_no_run(server, status):
    server.reply = lambda _: (status, b"longer than the context")
    with pytest.raises(Refused, match=f"the server refuses the request: HTTP {status} longer than the context"):
        Server(server.url, "m", 7).complete(ASKED, UP_TO)
    assert len(server.bodies) == 1
