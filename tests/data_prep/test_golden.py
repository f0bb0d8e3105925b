"""What is learnt of conversations in the formats of five families, piece by piece, as golden/*.yaml has it."""

import pytest
from families import FAMILIES, load, row_of

from data_prep.template import ChatTemplate, RefusedError
from data_prep.turns import samples

CASES = [
    pytest.param(f, i, id=f"{f}-{i}") for f, family in sorted(FAMILIES.items()) for i in range(len(family["cases"]))
]


def learn(template: ChatTemplate, case: dict):
    row = row_of(case)
    return samples(template, row.messages, 10_000, row.tools)


def by_pieces(template: ChatTemplate, pieces: list) -> tuple[list[int], list[bool]]:
    ids, mask = [], []
    for learnt, text in pieces:
        piece = template.encode(text)
        ids += piece
        mask += [bool(learnt)] * len(piece)
    return ids, mask


def in_pieces(template: ChatTemplate, sample) -> list:
    """A sample as readable pieces: what pytest shows when one differs."""
    pieces = []
    for token, learnt in zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if not pieces or pieces[-1][0] != learnt:
            pieces.append([learnt, []])
        pieces[-1][1].append(token)
    return [[int(learnt), template.decode(ids)] for learnt, ids in pieces]


def joined(pieces: list) -> list:
    """Pieces with neighbours of one kind put together."""
    whole = []
    for learnt, text in pieces:
        if whole and whole[-1][0] == learnt:
            whole[-1][1] += text
        else:
            whole.append([learnt, text])
    return whole


@pytest.mark.parametrize(("family", "number"), CASES)
def test_golden(family, number):
    case = FAMILIES[family]["cases"][number]
    template = load(FAMILIES[family], case.get("args", {}))
    found = learn(template, case)
    assert found.refused == []
    assert [in_pieces(template, sample) for _, sample in found.samples] == [joined(p) for p in case["samples"]]
    for (_, sample), pieces in zip(found.samples, case["samples"], strict=True):
        ids, mask = by_pieces(template, pieces)
        assert sample.input_ids.tolist() == ids
        assert sample.loss_mask.tolist() == mask
    assert found.inserted == case.get("inserted", 0)
    assert found.split == (len(case["samples"]) > 1)


# ---------------------------------------------------------------- planted mistakes


CHAIN = ("kimi", 6)  # thoughts, two calls at once, results, an answer, and a further turn


def shifted(by_first, by_last):
    learnt = ChatTemplate.learnt

    def plant(self, tokens, start, end, content):
        first, last = learnt(self, tokens, start, end, content)
        return first + by_first, last + by_last

    return plant


def from_the_first_call(self, tokens, start, end, content):
    """Everything since the first call is taken for the target's: results and earlier thoughts with it."""
    first, last = ChatTemplate.original(self, tokens, start, end, content)
    call = self.encode("<|tool_calls_section_begin|>")[0]
    return min(first, tokens.ids.index(call) if call in tokens.ids else first), last


def earlier_thoughts(self, tokens, start, end, content):
    _, last = ChatTemplate.original(self, tokens, start, end, content)
    return tokens.ids.index(self.encode("<think>")[0]) + 1, last


@pytest.mark.parametrize(
    "plant",
    [shifted(-1, 0), shifted(1, 0), shifted(0, -1), shifted(0, 1), from_the_first_call, earlier_thoughts],
    ids=["early", "late", "no end of turn", "past the end", "tool results", "earlier thoughts"],
)
def test_planted_masks_differ_from_the_golden_ones(monkeypatch, plant):
    monkeypatch.setattr(ChatTemplate, "original", ChatTemplate.learnt, raising=False)
    monkeypatch.setattr(ChatTemplate, "learnt", plant)
    with pytest.raises((AssertionError, RefusedError, IndexError)):
        test_golden(*CHAIN)


def refusals(family: str, number: int, old: str, new: str) -> set[str]:
    """Why the turns of a golden case are refused where the template has been changed."""
    case = FAMILIES[family]["cases"][number]
    template = load(FAMILIES[family], case.get("args", {}))
    assert old in template.template
    template.template = template.template.replace(old, new)
    try:
        return {reason for _, reason in learn(template, case).refused}
    except RefusedError as error:
        return {str(error)}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("given if given is string else given | tojson", "'{}'", "the template alters the tool calls"),
        ("given | tojson)", "(given | tojson | upper))", "the template alters the tool calls"),
        ("~ call.id ~", "~ call.id | replace('weather', 'time') ~", "the template alters the tool calls"),
        (
            "~ call.id ~",
            "~ 'call_1' ~",
            "the id of a tool call is 'call_1', and the target writes functions.NAME:INDEX",
        ),
        ("'<|tool_call_begin|>'", "'<|tool_call_end|>'", "a damaged tool call"),
        ("m.tool_calls -%}\n    {{- '", "m.tool_calls -%}\n    {{- 'Hm.", "the template alters the answer"),
        ("m.reasoning_content or ''", "(m.reasoning_content or '') | upper", "the template alters the thought"),
    ],
)
def test_templates_that_say_something_else_are_refused(old, new, reason):
    assert reason in refusals(*CHAIN, old, new)


def test_arguments_in_another_order_are_the_same_arguments():
    assert refusals(*CHAIN, "given | tojson)", "given | tojson(sort_keys=true, indent=1))") == set()


@pytest.mark.parametrize(
    ("family", "number", "old", "new", "reason"),
    [
        ("qwen3", 3, '"arguments": ', '"parameters": ', "a tool call without name and arguments"),
        ("qwen3", 3, "'}\\n</tool_call>'", "'}'", "a damaged tool call"),
        ("qwen3", 3, "<tool_call>", "<call>", "tool calls in a form that cannot be read back"),
        ("llama3", 1, '"name": "', '"name": "_', "the template alters the tool calls"),
        ("llama3", 1, "tojson ~ '}'", "tojson", "a tool call that is no JSON"),
        ("gpt_oss", 1, "to=functions.", "to=functions.my_", "the template alters the tool calls"),
        ("gpt_oss", 1, "json<|message|>", "json", "a channel that cannot be read back"),
    ],
)
def test_calls_that_cannot_be_read_back_are_refused(family, number, old, new, reason):
    assert any(found.startswith(reason) for found in refusals(family, number, old, new))


def test_a_generation_prompt_that_leaves_the_thought_to_the_target():
    """As that of K2-Thinking: the tag is the target's own then."""
    family = FAMILIES["kimi"]
    template = load(family, {})
    template.template = template.template.replace(
        "<|im_middle|><think>' ~ ('</think>' if instant else '')", "<|im_middle|>'"
    )
    found = learn(template, family["cases"][0])
    ((_, sample),) = found.samples
    assert in_pieces(template, sample)[-1] == [1, "<think>a greeting</think>Hello!<|im_end|>"]
    found = learn(template, family["cases"][2])
    assert found.inserted == 2
    ((_, sample),) = found.samples
    assert in_pieces(template, sample)[1] == [1, "<think></think>你好，世界！🦊<|im_end|>"]


def reason(family: str, args: dict, *messages: dict) -> str:
    template = load(FAMILIES[family], args)
    with pytest.raises(RefusedError) as caught:
        samples(template, [{"role": "user", "content": "Hi"}, *messages], 1000)
    return str(caught.value)


def test_turns_that_no_serving_has_are_refused():
    says = {"role": "assistant", "content": "yes"}
    call = {"type": "function", "function": {"name": "find", "arguments": {}}}
    off = {"enable_thinking": False}
    told = "the prompt switches thinking off, and the answer has a thought"
    assert reason("qwen3", off, {**says, "reasoning_content": "hm"}) == told
    assert reason("kimi", {"thinking": False}, {**says, "content": "<think>hm</think>yes"}) == told
    told = "a thought within the answer, and another beside it"
    assert reason("kimi", {}, {**says, "content": "<think>a</think>b", "reasoning_content": "hm"}) == told
    told = "an answer that was cut off among its tool calls"
    assert reason("qwen3", {}, {**says, "tool_calls": [call], "finish_reason": "length"}) == told
    assert "one tool call at a time" in reason("llama3", {}, {**says, "tool_calls": [call, call]})
    # What is said beside the call, this template leaves out.
    assert reason("llama3", {}, {**says, "tool_calls": [call]}) == "the template alters the answer"
    assert reason("smollm2", {}, {**says, "tool_calls": [call]}).startswith("tool calls in a form that cannot be read")
