"""Answers read back from their text."""

import pytest

from data_prep.formats import Refused
from data_prep.markup import Parts, meant, parse

SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
CALL = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"


def parts(text, opened=False, calls=True):
    turn = parse(text, opened, calls)
    return turn.reasoning, turn.content, turn.calls


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("plain", False, ("", "plain", [])),
        ("<think>hm</think>yes", False, ("hm", "yes", [])),
        (" hm \n</think>\n\nyes ", True, ("hm", "yes", [])),
        ("I say </think>", False, ("", "I say </think>", [])),
        ("hm, no end", True, ("", "hm, no end", [])),
        ("<think></think>see <tool_call>", False, ("", "see <tool_call>", [])),
    ],
)
def test_thoughts(text, opened, expected):
    assert parts(text, opened, calls=False) == expected


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Wait." + SECTION.format(CALL.format("find", 0, '{"a": 1}') + CALL.format("a.b", 1, "{}")), "Wait.",
         [("find", {"a": 1}), ("a.b", {})]),
        (SECTION.format(CALL.format("find", 0, '\n{"a": "<|x|>"} ')), "", [("find", {"a": "<|x|>"})]),
        ('Hm.\n<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>\n'
         '<tool_call>{"name": "g", "arguments": {}}</tool_call>', "Hm.", [("f", {"a": [1]}), ("g", {})]),
        ('{"name": "f", "parameters": {"a": "}"}}', "", [("f", {"a": "}"})]),
        ('<|python_tag|>{"name": "f", "arguments": {}}; {"name": "g", "parameters": {}}', "", [("f", {}), ("g", {})]),
        (" to=functions.f<|channel|>commentary json<|message|>{}", "", [("f", {})]),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", "", [("f", {})]),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
         "<|message|>{}<|call|>", "I look.", [("f", {})]),
    ],
)  # fmt: skip
def test_tool_calls(text, content, calls):
    assert parts(text) == ("", content, calls)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no call at all", "in a form that cannot be read back"),
        ("find(a=1)", "in a form that cannot be read back"),
        (SECTION.format("and so on"), "a damaged tool call"),
        (SECTION.format(CALL.format("f", 0, "{}") + " then"), "a damaged tool call"),
        (SECTION.format(CALL.format("f", "", "{}")), r"'functions\.f:'.* functions\.NAME:INDEX"),
        (SECTION.format(CALL.format("f", 0, "[]")), "without an object of arguments"),
        (SECTION.format(CALL.format("f", 0, "{'a'}")), "no JSON"),
        ('<tool_call>{"name": "f"}</tool_call>', "without name and arguments"),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "without name and arguments"),
        ('{"name": "f", "parameters": {}} and more', "no JSON"),
        ("<|channel|>final<|message|>a<|end|>b", "a channel that cannot be read back"),
    ],
)
def test_calls_that_are_not_read(text, told):
    with pytest.raises(Refused, match=told):
        parse(text, calls=True)


def test_values_are_compared_and_not_their_spelling():
    said = {"content": " x ", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":1, "b" : [2.0]}'}}]}
    assert meant(said).difference(Parts("", "x", [("f", {"b": [2.0], "a": 1})])) is None
    for other in ({"a": 1, "b": [2]}, {"a": True, "b": [2.0]}, {"a": 1}):
        assert meant(said).difference(Parts("", "x", [("f", other)])) == "tool calls"
    assert meant(said).difference(Parts("", "y", [])) == "answer"
    assert meant(said).difference(Parts("hm", "x", [])) == "thought"
