"""Whatever is said: every learnt turn stands after the prompt that serving would have, and reads as it was meant."""

import json
import re
from contextlib import nullcontext

import pytest
from families import FAMILIES, load, row_of, says
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep import written
from data_prep.masks import samples
from data_prep.turn import read_turn
from eagle31_train.common.errors import Refused
from eagle31_train.targets.markup import apart, meant, parse

TEXT = st.text(alphabet='ab {}"\\\n<>/|:,；你好🦊é', min_size=1, max_size=12).filter(lambda text: text.strip())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=2)


@st.composite
def conversations(draw, most_calls):
    messages, made = [], 0
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(TEXT)})
        for calls in [*draw(st.lists(st.integers(1, most_calls), max_size=2)), 0]:
            message = {"role": "assistant", "content": draw(TEXT) if not calls else ""}
            if thought := draw(st.none() | TEXT):
                message["reasoning_content"] = thought
            if calls:
                message["tool_calls"] = []
            for _ in range(calls):
                given_object = draw(OBJECT)
                spelt = draw(st.sampled_from([None, (",", ":"), (", ", ": ")]))
                arguments = json.dumps(given_object, separators=spelt) if spelt else given_object
                function = {"name": "find", "arguments": arguments}
                message["tool_calls"].append({"id": f"functions.find:{made}", "type": "function", "function": function})
                made += 1
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "name": "find", "content": draw(TEXT)}
                for call in message.get("tool_calls", [])
            ]
    return messages


def check(template, messages, tools=None):
    """Each answer is learnt once: right after its prompt, to its end-of-turn token and no further."""
    exact = written.samples if written.known(messages) else samples
    found = exact(template, messages, 100_000, tools)
    assert found.refused == []
    learnt = 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template.prompt_ids(messages[:i], tools)
        ((ids, mask),) = [
            (sample.input_ids[len(prompt) :].tolist(), sample.loss_mask[len(prompt) - 1 :])
            for _, sample in found.samples
            if sample.input_ids[: len(prompt)].tolist() == prompt and sample.loss_mask[len(prompt)]
        ]
        assert not mask[0]
        end = len(ids) if mask[1:].all() else int(mask[1:].argmin())
        learnt += end
        if message.get("finish_reason") == "length":
            continue
        assert [token in template.end_ids for token in ids[:end]] == [False] * (end - 1) + [True]
        opened = template.decode(prompt).rstrip().endswith("<think>")
        turn = parse(template.decode(ids[: end - 1]), opened, bool(message.get("tool_calls")))
        said = apart(message) if turn.thought else message
        assert turn.difference(meant(said)) is None
    assert learnt == sum(sample.loss_mask.sum() for _, sample in found.samples)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_golden_answers_stand_after_their_prompts_and_are_learnt_as_their_text(family):
    """From their words, and from the ids that a target writes, of which the same words come."""
    apart_of_them = 0
    for case in FAMILIES[family]["cases"]:
        template, row = load(FAMILIES[family], case.get("args", {})), row_of(case)
        check(template, row.messages, row.tools)
        answered = []
        for i, message in enumerate(row.messages):
            if message["role"] != "assistant":
                answered.append(message)
                continue
            turn, reason = read_turn(template, row.messages[: i + 1], row.tools), message.get("finish_reason", "stop")
            prompt = template.prompt_ids(answered, row.tools)
            ids = template.encode(turn.text[turn.answer.start :] if reason != "length" else turn.answer.content)
            found = written.message_of(template, prompt, ids, row.tools or message.get("tool_calls"))
            answered.append({**found, "token_ids": ids, "finish_reason": reason})
            if message.get("tool_calls") and found.get("tool_calls"):
                apart_of_them += 1
                assert meant(found).difference(meant(message)) is None
                names = [call["id"] if family == "kimi" else None for call in message["tool_calls"]]
                assert [call.get("id") for call in found["tool_calls"]] == names
        check(template, answered, row.tools)
    assert apart_of_them >= {"smollm2": 0, "mistral": 0, "glm": 0, "phi": 0, "llama3": 2, "qwen3": 2}.get(family, 1)


ASK = {"role": "user", "content": "hi"}


def wrote(template, text, *before, tools=None):
    """An answer of the target with its token ids."""
    ids = template.encode(text)
    return {**written.message_of(template, template.prompt_ids([*before]), ids, tools), "token_ids": ids}


SPELT = "spell another text than its content"
CHANGES = {
    "one id more": (lambda ids: {"token_ids": [*ids[:-1], 9, *ids[-1:]]}, SPELT),
    "one id less": (lambda ids: {"token_ids": ids[1:]}, SPELT),
    "another id": (lambda ids: {"token_ids": [9, *ids[1:]]}, SPELT),
    "other words": (lambda ids: {"content": "hello moon"}, SPELT),
    "no row": (lambda ids: {"token_ids": [*ids[:-1], 100_000, *ids[-1:]]}, "token 100000, which has no row"),
}


@pytest.mark.core
@pytest.mark.parametrize(("change", "why"), CHANGES.values(), ids=CHANGES)
def test_ids_that_are_not_of_their_words_or_the_target_are_refused(chatml, change, why):
    chatml.rows = len(chatml.tokenizer)
    message = wrote(chatml, "hello world<|im_end|>", ASK)
    assert written.samples(chatml, [ASK, message], 100, None).samples
    with pytest.raises(Refused, match=why):
        written.samples(chatml, [ASK, {**message, **change(message["token_ids"])}], 100, None)


def test_a_turn_that_is_refused_costs_no_other_turn(chatml):
    """As where the words alone are known."""
    one, end = wrote(chatml, "the fox<|im_end|>", ASK), chatml.end_ids
    for bad, why in [
        ({"content": "", "token_ids": end}, "an empty answer"),
        ({"content": "a", "token_ids": [*chatml.encode("a"), *end, *end]}, "an end-of-turn token inside the answer"),
    ]:
        chat = [ASK, one, ASK, {"role": "assistant", **bad}, ASK, one]
        found = written.samples(chatml, chat, 1000, None)
        ((turns, sample),) = found.samples
        assert (turns, found.refused, sample.open_turns) == ("~turn1-3", [("~turn2", why)], 0)
        assert sample.input_ids[sample.loss_mask].tolist() == 2 * one["token_ids"]
    ((_, cut),) = written.samples(chatml, [ASK, wrote(chatml, "the fox", ASK)], 1000, None).samples
    assert cut.open_turns == 1, "whatever its finish_reason says"


def test_an_answer_in_parts_may_be_given_as_servers_give_it(chatml):
    """A thought in a field of its own, and the arguments of calls as text."""
    qwen = load(FAMILIES["qwen3"], {})
    thought = wrote(qwen, "<think>\nhm\n</think>\n\nyes<|im_end|>", ASK)
    asked = [ASK, {**thought, "content": "yes", "reasoning_content": "hm"}]
    assert written.samples(qwen, asked, 100, None).samples
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    called = wrote(qwen, text, ASK, tools=tools)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert called["tool_calls"]
    assert written.samples(qwen, [ASK, {**called, "tool_calls": [call]}], 100, tools).samples
    assert "tool_calls" not in wrote(qwen, '{"name": "Bob", "parameters": {"age": 3}}<|im_end|>', ASK)


@pytest.mark.parametrize(
    ("text", "tools", "why"),
    [
        ("the fox", None, ""),
        ("hi<|im_start|>you", None, r"the answer's text has <|im_start|>, a special token"),
        ("<think>\nhi<|im_start|>\n</think>\n\nyes", None, r"the answer's text has <|im_start|>, a special token"),
        ('{"name": "f", "parameters": {}}', [{"type": "function", "function": {"name": "f"}}], "writes no tool calls"),
    ],
)
def test_what_no_prompt_would_repeat_ends_the_conversation(chatml, text, tools, why):
    answer = wrote(chatml, f"{text}<|im_end|>", ASK, tools=tools)
    with pytest.raises(Refused, match=re.escape(why)) if why else nullcontext():
        written.check_goes_on(chatml, answer, tools)


@pytest.mark.parametrize("deep", [3000, 96])
def test_a_call_that_no_file_could_hold_is_words(chatml, deep):
    """The journal would not be read again."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = '{"name": "f", "parameters": ' + '{"a":' * deep + "1" + "}" * deep + "}"
    assert wrote(chatml, f"{text}<|im_end|>", ASK, tools=tools)["content"] == text


TEMPLATES = {family: load(FAMILIES[family], {}) for family in ("kimi", "qwen3", "gpt_oss")}


@pytest.mark.parametrize("family", sorted(TEMPLATES))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_any_conversation_is_learnt_whole(family, data):
    check(TEMPLATES[family], data.draw(conversations(1 if family == "gpt_oss" else 2)))


@pytest.mark.parametrize("known", [True, False])
def test_answers_beyond_max_length_are_cut_or_refused(chatml, known):
    answer = wrote(chatml, "the quick brown fox<|im_end|>", ASK)
    chat = [ASK, answer if known else says(answer["content"])]

    def one_of(max_length):
        ((_, sample),) = (written.samples if known else samples)(chatml, chat, max_length, None).samples
        return sample

    whole = one_of(1000)
    ids, first = whole.input_ids.tolist(), int(whole.loss_mask.argmax())
    assert not one_of(len(ids)).cut
    cut = one_of(first + 1)
    assert (cut.cut, cut.input_ids.tolist()) == (True, ids[: first + 1])
    assert cut.loss_mask.tolist() == [False] * first + [True]
    with pytest.raises(Refused, match=r"no part of an answer lies within data\.max_length: raise it"):
        one_of(first)


def test_ids_are_known_where_every_answer_has_them(chatml):
    one = wrote(chatml, "the fox<|im_end|>", ASK)
    chats = ([ASK, one, ASK, one], [ASK, one, ASK, says("the fox")], [ASK])
    assert [written.known(chat) for chat in chats] == [True, False, False]
