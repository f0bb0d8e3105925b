"""Answers read back from their text."""

from data_prep.markup import Parts, meant


def test_values_are_compared_and_not_their_spelling():
    said = {"content": " x ", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":1, "b" : [2.0]}'}}]}
    assert meant(said).difference(Parts("", "x", [("f", {"b": [2.0], "a": 1})])) is None
    for other in ({"a": 1, "b": [2]}, {"a": True, "b": [2.0]}, {"a": 1}):
        assert meant(said).difference(Parts("", "x", [("f", other)])) == "tool calls"
    assert meant(said).difference(Parts("", "y", [])) == "answer"
    assert meant(said).difference(Parts("hm", "x", [])) == "thought"
