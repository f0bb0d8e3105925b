"""Rows in the formats that people keep, prompts as turns, and answers read back from their text."""

import json

import pytest
from families import says

from data_prep.dialogue import following, turns_of
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.rows.formats import BESIDE_QUESTIONS, detect, parse
from eagle31_train.targets.markup import Parts, meant

ASKED = [{"role": "user", "content": "hi"}]
ANSWERED = [*ASKED, says("yes")]
NOT_LEARNT = [*ASKED, says("no", weight=0)]
SYSTEM = {"role": "system", "content": "be brief"}


def thought(text):
    return [*ASKED, says("yes", reasoning_content=text)]


FORMATS = [
    ("messages", {"messages": ANSWERED}, ANSWERED),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, ANSWERED[1]]}, ANSWERED),
    ("sharegpt", {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, ANSWERED),
    ("sharegpt", {"conversations": ANSWERED}, ANSWERED),
    ("messages", {"messages": [*NOT_LEARNT, *ASKED, says("yes", weight=1)]}, [*NOT_LEARNT, *ANSWERED]),
    ("alpaca", {"instruction": "hi", "input": "", "output": "yes"}, ANSWERED),
    ("alpaca", {"instruction": "Sum:", "input": "1 2"}, [{"role": "user", "content": "Sum:\n\n1 2"}]),
    ("alpaca", {"instruction": "Sum:", "context": "1 2"}, [{"role": "user", "content": "Sum:\n\n1 2"}]),
    ("alpaca", {"instruction": "", "input": "hi"}, ASKED),
    # LLaMA-Factory's earlier turns, in CSV as JSON text.
    ("alpaca", {"instruction": "hi", "output": "yes", "history": [["hi", "yes"]]}, [*ANSWERED, *ANSWERED]),
    ("alpaca", {"instruction": "hi", "output": "yes", "history": '[["hi", "yes"]]'}, [*ANSWERED, *ANSWERED]),
    ("alpaca", {"instruction": "hi", "output": "yes", "history": [], "images": []}, ANSWERED),
    # axolotl's and ms-swift's turns that are not learnt.
    ("messages", {"messages": [*ASKED, says("no", train=False)]}, NOT_LEARNT),
    ("messages", {"messages": [*ASKED, says("no", loss="false")]}, NOT_LEARNT),
    ("messages", {"messages": [*ASKED, says("yes", loss=None, channel="final")]}, ANSWERED),
    ("turns", {"turns": ["hi"]}, ASKED),
    ("prompt", {"prompt": "hi"}, ASKED),
    ("prompt", {"prompt": "hi", "instruction": None, "messages": None}, ASKED),
    # Columns by the names of public data sets: Dolly, TRL (text and messages), OpenOrca, GSM8K, LMSYS.
    ("alpaca", {"instruction": "hi", "context": "", "response": "yes"}, ANSWERED),
    ("prompt", {"prompt": "hi", "completion": "yes"}, ANSWERED),
    ("prompt", {"prompt": ASKED, "completion": ANSWERED[1:]}, ANSWERED),
    ("prompt", {"system_prompt": "be brief", "question": "hi", "response": "yes"}, [SYSTEM, *ANSWERED]),
    ("prompt", {"question": "hi", "answer": "yes"}, ANSWERED),
    # The thought before an answer, under another name, or in a column of its own.
    ("messages", {"messages": [*ASKED, says("yes", thinking="a b")]}, thought("a b")),
    ("prompt", {"prompt": "hi", "thinking": "a b", "response": "yes"}, thought("a b")),
    ("alpaca", {"instruction": "hi", "reasoning": "a b", "output": "yes"}, thought("a b")),
    ("prompt", {"prompt": "hi", "reasoning": "let me see"}, ASKED),
    ("prompt", {"prompt": "hi", "thinking": "on", "response": "yes"}, ANSWERED),  # a label
    (
        "prompt",
        {"prompt": "hi", "reasoning_content": "", "thinking": "二加二。", "response": "yes"},
        thought("二加二。"),
    ),
    (
        "prompt",
        {"prompt": "hi", "reasoning": "a b", "response": "<think>a b</think>yes"},
        [*ASKED, says("<think>a b</think>yes")],
    ),
    ("prompt", {"prompt": "hi", "response": "yes", "history": [["hi", "yes"]], "images": [None]}, [*ANSWERED] * 2),
    ("prompt", {"prompt": [SYSTEM, *ASKED], "history": [["hi", "yes"]]}, [SYSTEM, *ANSWERED, *ASKED]),
    ("prompt", {"question": "", "answer": "yes"}, [{"role": "user", "content": ""}, ANSWERED[1]]),
    ("sharegpt", {"conversation": ANSWERED, "conversations": None}, ANSWERED),
    # What was read before aliases were is read as it was.
    ("prompt", {"prompt": "hi", "conversation": ANSWERED, "question": "who?", "answer": 4}, ASKED),
    ("prompt", {"prompt": ANSWERED, "answer": "no"}, ANSWERED),
    ("alpaca", {"instruction": "hi", "output": "yes", "response": "no"}, ANSWERED),
]

TOOL = {"type": "function", "function": {"name": "find", "parameters": {}}}
CALLS = [{"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}]
NO_CALLS = "tool_calls is not a list of calls with function.name"
HALF = "text with half of a surrogate pair, which is not valid Unicode"


def called(arguments):
    return [says(None, tool_calls=[{"type": "function", "function": {"name": "find", "arguments": arguments}}])]


def row(messages, **more):
    return parse({"messages": messages, **more}, "auto", "f:1", "f-1")


@pytest.mark.parametrize(("form", "value", "messages"), FORMATS)
@pytest.mark.parametrize("forced", [False, True])
def test_formats(form, value, messages, forced):
    assert detect(value) == form
    assert parse(value, form if forced else "auto", "f:1", "f-1").messages == messages


def test_ids_are_given_or_told_by_place_and_sample():
    for given, identity in [(0, "0"), ("a", "a"), (None, "f-1"), ("", "f-1")]:
        assert row(ASKED, id=given).id == identity
    assert row(ANSWERED, id="a", sample="1").id == row(ANSWERED, id="a", sample=1).id == "a#1"  # CSV has text only


def test_rows_carry_tools_and_calls():
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": CALLS},
        {"role": "tool", "content": "red", "tool_call_id": "c", "name": "find"},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": []},
    ]
    found = row(chat, tools=[TOOL])
    assert found.problem is None
    assert found.tools == [TOOL]
    assert found.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": CALLS},
        {"role": "tool", "content": "red", "tool_call_id": "c", "name": "find"},
        {"role": "assistant", "content": "a"},
    ]
    assert row(chat, tools=json.dumps([TOOL])).tools == [TOOL]
    assert row(chat, tools=[]).tools is row(chat, tools="").tools is None
    assert row(chat, tools=[{"type": "function", "name": "find", "parameters": {}}]).tools == [TOOL]


def test_a_variable_of_the_template_that_is_null_is_not_given():
    """Parquet's rows have the names of all of them, and a switch that is none is off to a template."""
    for given in ({"size": 3, "enable_thinking": None}, '{"size": 3, "enable_thinking": null}'):
        assert row(ASKED, chat_template_kwargs=given).template_args == {"size": 3}
    assert row(ASKED, chat_template_kwargs="").template_args == row(ASKED).template_args == {}


def test_a_function_call_turn_is_an_answer_that_calls_tools():
    """LLaMA-Factory's: tools bare, and a call as a turn of its own."""
    one, two = {"name": "find", "arguments": {"a": 1}}, {"name": "find", "arguments": {}}
    for value, calls in [(json.dumps(one), [one]), (json.dumps([one, two]), [one, two])]:
        turns = [{"from": "human", "value": "hi"}, {"from": "function_call", "value": value}]
        found = parse({"conversations": turns, "tools": json.dumps([TOOL["function"]])}, "auto", "f:1", "f-1")
        whole = [{"type": "function", "function": call} for call in calls]
        assert found.messages == [*ASKED, {"role": "assistant", "content": "", "tool_calls": whole}]
        assert found.tools == [TOOL]


@pytest.mark.parametrize(
    "value",
    [{"question": "hi"}, {"question": "hi", "answer": 3}, {"conversation": "hi"}, {"system_prompt": "hi"}]
    + [{"question": "hi", "answer": "b", beside: ["a", "b"]} for beside in ("choices", "options", "context")],
)
def test_what_would_lose_a_part_of_the_prompt_or_the_answer_is_no_known_format(value):
    with pytest.raises(UserError, match=rf"the row's format is unknown \(it has {', '.join(value)}\)") as error:
        parse(value, "auto", "f:1", "f-1")
    *_, beside = value
    a_part = f"its question may be only a part of the prompt, beside {beside}: write both into a column prompt"
    assert (a_part in str(error.value)) == (beside in BESIDE_QUESTIONS), "it has a question and an answer"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "unknown role 'wizard'"),
        ({"messages": [{"role": "user", "content": None}]}, "a turn of role user without text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content is not only text"),
        ({"messages": [says([{"type": "reasoning", "text": "hm"}])]}, "content has a part of type reasoning"),
        ({"messages": [says("let me look", function_call={"name": "f", "arguments": "{}"})]}, "a function_call, which"),
        ({"messages": [{"role": "user", "content": "hi \ud83d"}]}, HALF),
        ({"messages": called(r'{"a": "\ud83d"}')}, HALF),
        ({"messages": [says("a", tool_calls=[{"name": "f"}])]}, NO_CALLS),
        ({"messages": called("{")}, "not a JSON object"),
        ({"messages": [{"role": "function_call", "content": "find()"}]}, "a function_call turn that is not JSON"),
        ({"messages": [{"role": "function_call", "content": "3"}]}, NO_CALLS),
        ({"messages": [says("a", weight=0.5)]}, "weight of a turn is neither 0 nor 1"),
        ({"messages": ANSWERED, "images": ["a.png"]}, "a row with images, but"),
        ({"messages": ANSWERED, "documents": [{"text": "a"}]}, "documents beside the messages: put them into chat_"),
        ({"conversations": ANSWERED, "documents": '[{"text": "a"}]'}, "documents beside the messages: put them into"),
        ({"messages": [{**ASKED[0], "images": ["a.png"]}]}, "a turn with images, but"),
        ({"messages": [*ASKED, says("hm", channel="analysis"), says("yes", channel="final")]}, "a turn of channel"),
        ({"messages": ASKED, "functions": [{"name": "f"}]}, "functions, which OpenAI's API has replaced"),
        ({"instruction": "hi", "output": "yes", "history": ["a", "b"]}, "history is not a list of [question, answer]"),
        ({"instruction": "hi", "output": "yes", "history": "earlier"}, "history is not JSON"),
        ({"messages": ASKED, "tools": [{"name": "f"}]}, "tools is not a list of tools with function.name"),
        (
            {"messages": ASKED, "tools": [{"name": "f", "parameters": {"properties": {"a": {}, "of_another": None}}}]},
            "a tool has properties that are null",
        ),
        *(
            ({"input_ids": ids, "loss_mask": mask, "conversations": ANSWERED}, problem)
            for ids, mask, problem in [
                ([1, -2], [0, 1], "input_ids are not a list of token ids"),
                ([1, 2], [0, 1, 1], "loss_mask does not have a 0 or 1 for each of the input_ids"),
                ([1, 2], [0, 2], "loss_mask does not have a 0 or 1 for each of the input_ids"),
                ([1, 2], [0, 0], "loss_mask has no 1, or no 0 before the first"),
                ([1, 2], [1, 1], "loss_mask has no 1, or no 0 before the first"),
            ]
        ),
        ({"instruction": None, "input": "hi"}, "an instruction or input without text"),
        ({"instruction": "hi", "input": ["a"]}, "an instruction or input without text"),
    ],
)
def test_rows_of_no_use_say_why(value, problem):
    assert problem in parse(value, "auto", "f:1", "f-1").problem


def call(name, identity=None, **arguments):
    whole = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {**whole, "id": identity} if identity else whole


def result(content, identity=None):
    return {"role": "tool", "content": content, **({"tool_call_id": identity} if identity else {})}


def test_results_go_to_the_answers_own_calls_in_their_order():
    recorded = says("", tool_calls=[call("weather", "1"), call("map", "2")])
    turn = turns_of([*ASKED, recorded, result("W", "1"), result("M", "2")])[1]
    own = says("", tool_calls=[call("map", "m:0", zoom=3), call("weather", "w:1", city="elsewhere")])
    assert following(turn, own) == [result("M", "m:0"), result("W", "w:1")]
    without_ids = following(turn, says("", tool_calls=[call("weather"), call("map")]))
    assert without_ids == [result("W"), result("M")], "no id of somebody else's call"
    recorded = says("", tool_calls=[call("weather"), call("map")])  # and results that do not say of which they are
    turn = turns_of([*ASKED, recorded, result("W"), result("M")])[1]
    assert following(turn, says("", tool_calls=[call("map"), call("weather")])) == [result("M"), result("W")]
    unknown = turns_of([*ASKED, says("let me look"), result("W")])[1]
    assert following(unknown, says("", tool_calls=[call("weather")])) == [result("W")]


def test_values_are_compared_and_not_their_spelling():
    said = {"content": " x ", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":1, "b" : [2.0]}'}}]}
    assert meant(said).difference(Parts("", "x", [("f", {"b": [2.0], "a": 1})])) is None
    for other in ({"a": 1, "b": [2]}, {"a": True, "b": [2.0]}, {"a": 1}):
        assert meant(said).difference(Parts("", "x", [("f", other)])) == "tool calls"
    assert meant(said).difference(Parts("", "y", [])) == "answer"
    assert meant(said).difference(Parts("hm", "x", [])) == "thought"


def test_what_no_longer_fits_the_answer_is_refused():
    recorded = says("", tool_calls=[call("weather"), call("map")])
    turn, plain = turns_of([*ASKED, recorded, result("W"), result("M")])[1], turns_of(ASKED)[0]
    for calls in (["weather"], ["weather", "map", "map"], ["weather", "find"]):
        with pytest.raises(Refused, match="the answer calls other tools than the prompt has results for"):
            following(turn, says("", tool_calls=[call(name) for name in calls]))
    for text in ("<tool_call>find()", "to=functions.find"):
        with pytest.raises(Refused, match="calls a tool in its text"):
            following(plain, says(text), [TOOL])
        assert following(plain, says(text)) == ASKED, "without tools they are words"
    with pytest.raises(Refused, match="a system turn with nothing to answer after it"):
        turns_of([*ASKED, {"role": "system", "content": "be brief"}])


ALIASES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}


@pytest.mark.parametrize("name", ALIASES)
def test_roles_have_other_names_and_the_parts_of_a_text_are_one(name):
    parts = [{"type": "text", "text": part} for part in ("h", "i")]
    assert row([{"role": name, "content": parts}]).messages == [{"role": ALIASES[name], "content": "hi"}]


def test_what_a_message_says_goes_before_what_its_row_says():
    assert row([SYSTEM, *ASKED], system="be kind").messages == [SYSTEM, *ASKED]
    for name in ("system", "system_prompt"):
        assert row(ASKED, **{name: "be brief"}).messages == [SYSTEM, *ASKED]
    cut = {**ANSWERED[1], "finish_reason": "length"}
    assert row([*ASKED, cut], finish_reason="stop").messages[-1] == cut
    for reason in ("LENGTH", "MAX_TOKENS", "content_filter"):  # Gemini's name; the beginning alone came through
        assert row(ANSWERED, finish_reason=reason).messages[-1] == cut
        assert row([*ASKED, {**ANSWERED[1], "finish_reason": reason}]).messages[-1] == cut
    assert row(ASKED, finish_reason="stop").messages == ASKED
