"""What is learnt of conversations in the formats of seven families, piece by piece, as golden/*.yaml has it."""

from dataclasses import replace

import pytest
from families import FAMILIES, by_pieces, load, row_of

from data_prep import masks, stage
from data_prep.masks import samples
from eagle31_train.common.errors import Refused
from eagle31_train.config import DataConfig, GenerateConfig
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.description import TargetDescription

CASES = [
    pytest.param(f, i, id=f"{f}-{i}") for f, family in sorted(FAMILIES.items()) for i in range(len(family["cases"]))
]


def learn(template: ChatTemplate, case: dict):
    row = row_of(case)
    return samples(template, row.messages, 10_000, row.tools)


@pytest.mark.core
@pytest.mark.parametrize(("family", "number"), CASES)
def test_golden(family, number):
    case = FAMILIES[family]["cases"][number]
    template = load(FAMILIES[family], case.get("args", {}))
    found = learn(template, case)
    assert found.refused == []
    assert len(found.samples) == len(case["samples"])
    for (_, sample), pieces in zip(found.samples, case["samples"], strict=True):
        learnt = template.decode(sample.input_ids[sample.loss_mask].tolist())
        assert (sample.input_ids.tolist(), sample.loss_mask.tolist()) == by_pieces(template, pieces), learnt
    assert found.inserted == case.get("inserted", 0)
    assert found.split == (len(case["samples"]) > 1)


THINK = {"gpt_oss", "kimi", "qwen3"}


def test_targets_that_may_think_are_told_of_short_answers(capsys):
    assert not any(load(FAMILIES[family], {}).thinks for family in FAMILIES.keys() - THINK)

    def told(family: str, args: dict[str, object], positions: int = 6144, **generate: int) -> str:
        template, data = load(FAMILIES[family], args), DataConfig(generate=GenerateConfig(**generate))
        target = TargetDescription("llama", 16, 40, 4, 32, 2, 1, 8, 1e-5, 1e4, {}, positions)
        stage._tell_of_thoughts(template, data, target)
        return capsys.readouterr().out

    texts = {family: text for family in FAMILIES if (text := told(family, {}))}
    assert texts.keys() == THINK
    assert all("may think, and answers are cut after 320 tokens" in text for text in texts.values())
    switches = {family: text.partition("target.template_args.")[2].strip() for family, text in texts.items()}
    assert switches == {"gpt_oss": "", "kimi": "thinking=false", "qwen3": "enable_thinking=false"}
    assert not told("qwen3", {"enable_thinking": False})
    given = "cut after 2048 tokens: set data.generate.max_new_tokens=4096 data.max_length=6144, or switch"
    assert given in told("qwen3", {}, max_new_tokens=4096)  # data.max_length
    assert "data.generate.max_new_tokens=5000 data.max_length=7048" in told("qwen3", {}, 8192, max_new_tokens=5000)
    assert "cut after 320 tokens: switch thinking off" in told("qwen3", {}, 6143)
    assert told("gpt_oss", {}, 6143).endswith("cut after 320 tokens\n")
    qwen3 = load(FAMILIES["qwen3"], {})
    for end in ("</think>", "<|channel>thought\n<channel|>"):  # DeepSeek V4's, Gemma 4's
        text = qwen3.template.replace("<|im_start|>assistant\\n", f"<|im_start|>assistant\\n{end}")
        assert text != qwen3.template
        assert not replace(qwen3, template=text).thinks


CHAIN = ("kimi", 6)  # thoughts, two calls at once, results, an answer, and a further turn


def from_the_first_call(template, ids, first, last):
    """Everything since the first call is taken for the target's: results and earlier thoughts with it."""
    call = template.encode("<|tool_calls_section_begin|>")[0]
    return min(first, ids.index(call) if call in ids else first), last


PLANTED = {
    "early": lambda template, ids, first, last: (first - 1, last),
    "late": lambda template, ids, first, last: (first + 1, last),
    "no end of turn": lambda template, ids, first, last: (first, last - 1),
    "past the end": lambda template, ids, first, last: (first, last + 1),
    "tool results": from_the_first_call,
    "earlier thoughts": lambda template, ids, _, last: (ids.index(template.encode("<think>")[0]) + 1, last),
}


@pytest.mark.core
@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_masks_differ_from_the_golden_ones(monkeypatch, mistake):
    right, wrong = masks.supervised, PLANTED[mistake]
    plant = lambda template, tokens, *span: wrong(template, tokens.ids, *right(template, tokens, *span))  # noqa: E731
    monkeypatch.setattr(masks, "supervised", plant)
    with pytest.raises((AssertionError, Refused, IndexError)):
        test_golden(*CHAIN)


@pytest.mark.parametrize(
    ("case", "old", "new", "reason"),
    [
        (CHAIN, "given if given is string else given | tojson", "'{}'", "the template alters the tool calls"),
        (CHAIN, "given | tojson)", "(given | tojson | upper))", "the template alters the tool calls"),
        (CHAIN, "~ call.id ~", "~ call.id | replace('weather', 'time') ~", "the template alters the tool calls"),
        (CHAIN, "~ call.id ~", "~ 'call_1' ~", "the id of a tool call is 'call_1'"),
        (CHAIN, "m.tool_calls -%}\n    {{- '", "m.tool_calls -%}\n    {{- 'Hm.", "the template alters the answer"),
        (CHAIN, "m.reasoning_content or ''", "(m.reasoning_content or '') | upper", "the template alters the thought"),
        (("qwen3", 3), "'}\\n</tool_call>'", "'}'", "a damaged tool call"),
        (("llama3", 1), '"name": "', '"name": "_', "the template alters the tool calls"),
        (("gpt_oss", 1), "to=functions.", "to=functions.my_", "the template alters the tool calls"),
    ],
)
def test_templates_that_say_something_else_are_refused(case, old, new, reason):
    family, number = case
    golden = FAMILIES[family]["cases"][number]
    template = load(FAMILIES[family], golden.get("args", {}))
    assert old in template.template
    template.template = template.template.replace(old, new)
    try:
        reasons = [refused for _, refused in learn(template, golden).refused]
    except Refused as error:
        reasons = [str(error)]
    assert any(found.startswith(reason) for found in reasons)
