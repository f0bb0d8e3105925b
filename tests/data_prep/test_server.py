"""Answers that a server takes apart, and what it is asked for a target that thinks and calls tools."""

import json

import pytest

from data_prep.answers import Remote
from data_prep.server import NotAnsweredError, Server
from data_prep.template import ChatTemplate
from data_prep.turns import samples
from eagle31_train.cli import load_config
from eagle31_train.schema import UserError

# Thoughts in their own field, tool calls as Qwen writes them.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
CALLS = [{"id": "c1", "type": "function", "index": 0, "function": {"name": "find", "arguments": '{"a":1}'}}]
ASK = {"role": "user", "content": "hi"}


@pytest.fixture
def template(tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id], THINKING, {"thinking": True})


def ask(monkeypatch, template, message, reason="stop", asked=(ASK,), tools=None, usage=None):
    """One exchange with a server that answers so; the reply, and the body that it was sent."""
    sent = []

    def post(self, body):
        sent.append(body)
        return json.dumps({"choices": [{"message": message, "finish_reason": reason}], "usage": usage}).encode()

    monkeypatch.setattr(Server, "_post", post)
    client = Server("http://localhost/v1", "m", template=template)
    return client.answer(list(asked), 0.0, 1.0, 7, 11, tools), sent[0]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_an_answer_taken_apart_is_put_together_as_the_target_wrote_it(monkeypatch, template, key):
    said = {"role": "assistant", "content": None, key: "hm", "tool_calls": CALLS}
    reply, body = ask(monkeypatch, template, said, "tool_calls", tools=TOOLS)
    assert body["tools"] == TOOLS
    assert body["chat_template_kwargs"] == {"thinking": True}
    assert reply.finish_reason == "tool_calls"
    assert reply.text == ""
    assert reply.message == {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": CALLS}
    ((_, sample),) = samples(template, [ASK, reply.message], 1000, TOOLS).samples
    learnt = template.decode(sample.input_ids[sample.loss_mask].tolist())
    assert learnt == 'hm</think><tool_call>{"name": "find", "arguments": {"a": 1}}</tool_call><|im_end|>'


def test_history_goes_back_as_servers_take_it(monkeypatch, template):
    """A thought that stands in front of an answer goes where the server's template looks for it, to drop or to keep."""
    call = [{"id": "c", "type": "function", "function": {"name": "find", "arguments": {"a": "狐"}}}]
    asked = [
        ASK,
        {"role": "assistant", "content": "<think>hm</think>", "tool_calls": call, "finish_reason": "tool_calls"},
        {"role": "tool", "content": "red", "tool_call_id": "c", "name": "find"},
    ]
    _, body = ask(monkeypatch, template, {"content": "yes"}, asked=asked)
    assert body["messages"][1] == {
        "role": "assistant", "content": "", "reasoning_content": "hm", "reasoning": "hm",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"a": "狐"}'}}],
    }  # fmt: skip
    assert body["messages"][2] == asked[2]
    assert "tools" not in body


def test_special_tokens_are_asked_for_where_markup_is_made_of_them(monkeypatch, fresh_tokenizer, template):
    _, body = ask(monkeypatch, template, {"content": "yes"})
    assert "skip_special_tokens" not in body
    fresh_tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    special = ChatTemplate(fresh_tokenizer, template.end_ids, THINKING)
    _, body = ask(monkeypatch, special, {"content": "yes"})
    assert body["skip_special_tokens"] is False
    assert "chat_template_kwargs" not in body


def test_a_thought_that_the_template_cannot_write_ends_the_run(monkeypatch, tokenizer, template):
    said = {"content": "x", "reasoning_content": "hm"}
    plain = ChatTemplate(tokenizer, template.end_ids, tokenizer.chat_template)
    with pytest.raises(UserError, match="start it without a reasoning parser"):
        ask(monkeypatch, plain, said)
    reply, _ = ask(monkeypatch, template, {"content": None, "reasoning_content": "hm"}, "length")
    assert reply.message == {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert reply.finish_reason == "length"


@pytest.mark.parametrize(
    ("message", "reason", "told"),
    [
        ({"content": None, "tool_calls": []}, "tool_calls", "'tool_calls', and gives none"),
        ({"content": None}, "stop", "without text"),
        (
            {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "tool_calls",
            "no JSON object",
        ),
    ],
)
def test_answers_that_cannot_be_used(monkeypatch, template, message, reason, told):
    with pytest.raises(NotAnsweredError, match=told):
        ask(monkeypatch, template, message, reason)


def test_answers_in_other_tokens_than_the_target_wrote_are_counted(monkeypatch, template):
    said = {"content": "yes", "reasoning_content": "hm"}
    wrote = len(template.encode("hm</think>yes<|im_end|>"))
    for tokens, respelt in ((wrote, 0), (wrote + 1, 1), (None, 0)):
        reply, _ = ask(monkeypatch, template, said, usage={"completion_tokens": tokens})
        found = samples(template, [ASK, reply.message], 1000)
        assert (reply.tokens, found.respelt) == (tokens or 0, respelt)
    plain = ChatTemplate(template.tokenizer, template.end_ids, template.tokenizer.chat_template)
    for tokens, respelt in ((len(plain.encode("yes<|im_end|>")), 0), (1, 1)):
        chat = [ASK, {"role": "assistant", "content": "yes", "tokens": tokens}]
        assert samples(plain, chat, 1000).respelt == respelt


def test_a_server_with_another_template_is_told_of_once(monkeypatch, template, capsys):
    ours = len(template.prompt_ids([ASK]))
    ask(monkeypatch, template, {"content": "yes"}, usage={"prompt_tokens": ours})
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(Server, "_post", lambda *_: json.dumps(
        {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": ours + 2}}
    ).encode())  # fmt: skip
    client = Server("http://localhost/v1", "m", template=template)
    for _ in range(3):
        client.answer([ASK], 0.0, 1.0, 7, 11)
    assert client.other_prompts == 3
    err = capsys.readouterr().err
    assert err.count("compare its chat template") == 1
    assert f"{ours + 2} tokens of a prompt that has {ours} here" in err


def test_a_prompt_that_the_template_refuses_is_not_asked(monkeypatch, tokenizer, template):
    strict = ChatTemplate(tokenizer, template.end_ids, "{{ raise_exception('no greetings') }}")
    with pytest.raises(NotAnsweredError, match="no greetings"):
        ask(monkeypatch, strict, {"content": "yes"})


@pytest.mark.parametrize(("tokens", "seconds"), [(512, 600), (16384, 8192)])
def test_a_long_answer_is_waited_for(tokens, seconds):
    """Nothing comes before an answer is whole; a wait that ends sooner would end the run, at each try again."""
    generate = [f"data.generate.max_new_tokens={tokens}", "data.generate.server=http://localhost:1/v1"]
    assert Remote(load_config(["+experiment=smollm2", *generate]), None).server.timeout == seconds
