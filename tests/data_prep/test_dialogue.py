"""Prompts as turns: recorded results under the target's own calls."""

import pytest

from data_prep.dialogue import following, turns_of


def say(role, content="x", **more):
    return {"role": role, "content": content, **more}


def call(name, identity=None, **arguments):
    whole = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {**whole, "id": identity} if identity else whole


def answer(*calls, content=""):
    return say("assistant", content, **({"tool_calls": list(calls)} if calls else {}))


@pytest.fixture
def results():
    """The turn after an answer that called weather and map."""
    recorded = answer(call("weather", "1"), call("map", "2"))
    messages = [say("user"), recorded, say("tool", "W", tool_call_id="1"), say("tool", "M", tool_call_id="2")]
    return turns_of(messages)[1]


def test_results_go_to_the_answers_own_calls_in_their_order(results):
    told = following(results, answer(call("map", "m:0", zoom=3), call("weather", "w:1", city="elsewhere")))
    assert told == [say("tool", "M", tool_call_id="m:0"), say("tool", "W", tool_call_id="w:1")]
    without_ids = following(results, answer(call("weather"), call("map")))
    assert without_ids == [say("tool", "W"), say("tool", "M")], "no id of somebody else's call"
