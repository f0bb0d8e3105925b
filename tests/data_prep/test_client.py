"""A server of answers: what it is asked and what is made of its answers."""

import pytest

from data_prep.client import Server
from data_prep.masks import samples
from data_prep.template import ChatTemplate
from eagle31_train.errors import UserError

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
def thinking(tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id], THINKING, {"thinking": True})


def ask(server, template, messages=(ASK,), tools=None, attempts=5):
    waits = []
    client = Server(server.url, "m", template, max_tokens=7, top_p=0.9, attempts=attempts, wait=waits.append)
    return client.answer(list(messages), 0.5, 11, tools), waits


def test_request_and_reply(server, chatml):
    failures, reply = [503, 429, 500], server.reply
    server.reply = lambda body: (failures.pop(0), b"busy") if failures else reply(body)
    answer, waits = ask(server, chatml, [{**ASK, "finish_reason": "x"}])
    message = {"role": "assistant", "content": "answer to hi", "tokens": 3}
    assert (answer.message, answer.finish_reason, answer.tokens) == (message, "stop", 3)
    assert waits == [1.0, 2.0, 4.0]
    body = {"model": "m", "messages": [ASK], "temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 11}
    assert server.bodies == [body] * 4
    # Nothing comes before an answer is whole; a wait that ends sooner would end the run, at each try again.
    assert [Server(server.url, "m", chatml, tokens).timeout for tokens in (512, 16384)] == [600, 8192]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_an_answer_taken_apart_is_put_together_as_the_target_wrote_it(server, thinking, chatml, completion, key):
    server.reply = lambda _: completion(None, "tool_calls", tool_calls=CALLS, **{key: "hm"})
    answer, _ = ask(server, thinking, tools=TOOLS)
    assert server.bodies[0]["tools"] == TOOLS
    assert server.bodies[0]["chat_template_kwargs"] == {"thinking": True}
    assert answer.finish_reason == "tool_calls"
    assert answer.message == {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": CALLS}
    ((_, sample),) = samples(thinking, [ASK, answer.message], 1000, TOOLS).samples
    text = thinking.decode(sample.input_ids[sample.loss_mask].tolist())
    assert text == 'hm</think><tool_call>{"name": "find", "arguments": {"a": 1}}</tool_call><|im_end|>'
    with pytest.raises(UserError, match="start it without a reasoning parser"):
        ask(server, chatml)
