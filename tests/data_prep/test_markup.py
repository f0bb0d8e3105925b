"""Answers read back from their text."""

import pytest

from data_prep.formats import Refused
from data_prep.markup import Parts, meant, parse

SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
CALL = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"


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
