"""Loss masks of whole conversations: refused wherever they cannot be exact. Those that are: test_golden.py."""

import unicodedata
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from families import FAMILIES, by_pieces, load, make_tokenizer, says
from made import message_of
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from data_prep import masks, written
from data_prep.masks import one_sample, samples
from eagle31_train.common.errors import Refused
from eagle31_train.config import TargetConfig
from eagle31_train.targets.chat import ChatTemplate

ASK = {"role": "user", "content": "hello, how are you?"}
REPLY = says("the quick brown fox")
CHAT = [{"role": "system", "content": "be kind"}, ASK, REPLY, {"role": "user", "content": "and?"}, says("héllo 🦊\n")]


def with_template(tokenizer: PreTrainedTokenizerFast, text: str) -> ChatTemplate:
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id], text)


@pytest.mark.core
@pytest.mark.parametrize("mistake", [-2, -1, 1, 2, "characters off by one", "another end-of-turn token"])
def test_planted_mistakes_are_caught(chatml, monkeypatch, mistake):
    """The verification must see a mask that is off by one, whoever made it."""
    assert one_sample(chatml, CHAT, 1000).loss_mask.any()
    if mistake == "another end-of-turn token":
        # Stopping at the token of " brown" would leave " fox" and the real end of turn without supervision.
        (brown,) = [i for i in chatml.encode("the quick brown fox") if chatml.decode([i]) == " brown"]
        chatml.end_ids = [brown]
    elif mistake == "characters off by one":
        spans = masks.prefix_spans
        late = lambda *given: [replace(span, start=span.start + 1) for span in spans(*given)]  # noqa: E731
        monkeypatch.setattr(masks, "prefix_spans", late)
    else:
        place, boundary = chatml.render(CHAT).index("the quick"), masks.Tokens.boundary
        shifted = lambda self, char: boundary(self, char) + (mistake if char == place else 0)  # noqa: E731
        monkeypatch.setattr(masks.Tokens, "boundary", shifted)
    with pytest.raises(Refused):
        one_sample(chatml, CHAT, 1000)


SAID = "{{ m['content'] }}"


@pytest.mark.parametrize(
    ("changes", "messages", "reason"),
    [
        ({}, [ASK, says("")], "an empty answer"),
        ({}, [ASK, says("a<|im_end|>\n<|im_start|>assistant\nb")], "an end-of-turn token inside the answer"),
        # As templates of reasoning models do.
        ({SAID: "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"},
         [ASK, says("hm</think>yes"), ASK, REPLY], "the template rewrites history"),
        ({"<|im_end|>": ""}, [ASK, REPLY], "no end-of-turn token after the answer"),
        # The space at the end of the prompt becomes one token with the answer's first word.
        ({"\n" + SAID: ": " + SAID, "assistant\n": "assistant: "}, [ASK, says("hello")], "a boundary inside a token"),
        ({"{% for": "{{ raise_exception('roles must alternate') }}{% for"}, [ASK, REPLY], "roles must alternate"),
        ({SAID: "{{ m.content | upper }}"}, [ASK, REPLY], "the template alters the answer"),
        ({SAID: "{{ m.content | replace('²', '2') }}"}, [ASK, says("x²")], "the template alters the answer"),
        ({"<|im_end|>": "<|im_end|>junk"}, [ASK, REPLY], "text after the answer's end-of-turn token"),
    ],
)  # fmt: skip
def test_what_cannot_be_exact_is_refused(chatml, changes, messages, reason):
    for old, new in changes.items():
        chatml.template = chatml.template.replace(old, new)
    with pytest.raises(Refused, match=reason):
        one_sample(chatml, messages, 1000)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"<|im_end|>": "<|im_start|>"}, r"end with <\|im_start\|>, which is not in eos"),
        ({SAID: SAID + "<|im_start|>"}, r"end with <\|im_start\|>, which is not in eos"),
        ({"<|im_end|>": ""}, "no end-of-turn token after the answer"),
        ({"<|im_end|>": "### END"}, "no end-of-turn token after the answer"),
        ({"<|im_end|>": "<|im_end|>junk"}, "the template alters the answer"),
    ],
)
def test_an_end_at_which_the_target_does_not_stop_is_named(chatml, changes, reason):
    for old, new in changes.items():
        chatml.template = chatml.template.replace(old, new)
    with pytest.raises(Refused, match=reason):
        samples(chatml, [ASK, REPLY], 1000)


def test_a_prompt_that_has_other_tokens_by_itself_is_refused(breaks_tokenizer, chatml):
    """Serving tokenizes the generation prompt alone: there its two line breaks are one token."""
    text = chatml.template.replace("\n" + SAID, "\n\n" + SAID).replace("assistant\n", "assistant\n\n")
    template = with_template(breaks_tokenizer, text)
    whole, prompt = template.encode(template.render([ASK, REPLY])), template.prompt_ids([ASK])
    assert whole[: len(prompt) - 1] == prompt[:-1]
    assert whole[len(prompt) - 1] != prompt[-1]
    with pytest.raises(Refused, match="a boundary inside a token"):
        one_sample(template, [ASK, REPLY], 1000)


def test_the_end_of_turn_after_a_cut_answer_is_not_supervised(chatml):
    last = one_sample(chatml, [ASK, {**REPLY, "finish_reason": "length"}], 1000)
    assert chatml.decode(last.input_ids.tolist()).endswith("the quick brown fox")
    assert chatml.decode(last.input_ids[last.loss_mask].tolist()) == "the quick brown fox"
    assert last.open_turns == 1
    one, other = (
        one_sample(chatml, [ASK, {**REPLY, "finish_reason": reason}, ASK, REPLY], 1000) for reason in ("length", "stop")
    )
    assert one.input_ids.tolist() == other.input_ids.tolist()
    (missing,) = np.flatnonzero(one.loss_mask != other.loss_mask)
    assert one.input_ids[missing] == chatml.end_ids[0]
    assert other.loss_mask[missing]


def test_an_answer_of_weight_0_is_read_and_not_learnt(chatml, thinking):
    zero, one = {**REPLY, "weight": 0}, {**says("lazy dog"), "weight": 1}
    for chat, learnt in [([ASK, zero, ASK, one], "lazy dog"), ([ASK, one, ASK, zero], "lazy dog")]:
        ((_, sample),) = samples(chatml, chat, 1000).samples
        assert chatml.decode(sample.input_ids.tolist()) == chatml.render(chat)
        assert chatml.decode(sample.input_ids[sample.loss_mask].tolist()) == f"{learnt}<|im_end|>"
    turns = samples(thinking, [ASK, one, ASK, zero, ASK, one], 1000)
    assert ([suffix for suffix, _ in turns.samples], turns.refused) == (["~turn1", "~turn3"], [])
    ids = [{**answer, "token_ids": chatml.encode(f"{answer['content']}<|im_end|>")} for answer in (zero, one)]
    for chat in ([ASK, ids[0], ASK, ids[1]], [ASK, zero, ASK, ids[1]]):
        assert written.known(chat)
        ((_, sample),) = written.samples(chatml, chat, 1000, None).samples
        assert chatml.decode(sample.input_ids[sample.loss_mask].tolist()) == "lazy dog<|im_end|>"
    with pytest.raises(Refused, match="every answer has weight 0"):
        samples(chatml, [ASK, zero], 1000)


def test_a_template_may_strip_answers(tokenizer, chatml):
    trim = with_template(tokenizer, chatml.template.replace("m['content'] }}", "(m['content'] | trim) }}"))
    sample = one_sample(trim, [ASK, says("  hello \n")], 1000)
    assert trim.decode(sample.input_ids[sample.loss_mask].tolist()) == "hello<|im_end|>"


def test_white_space_before_the_end_of_turn_is_not_of_a_cut_answer(tokenizer, chatml):
    """Llama 2 writes " </s>"."""
    spaced = with_template(tokenizer, chatml.template.replace("<|im_end|>", " <|im_end|>"))
    cut, whole = (one_sample(spaced, [ASK, {**REPLY, "finish_reason": why}], 1000) for why in ("length", "stop"))
    learnt = [spaced.decode(sample.input_ids[sample.loss_mask].tolist()) for sample in (cut, whole)]
    assert learnt == ["the quick brown fox", "the quick brown fox <|im_end|>"]
    own = one_sample(chatml, [ASK, says("the fox ", finish_reason="length")], 1000)
    assert chatml.decode(own.input_ids[own.loss_mask].tolist()) == "the fox ", "what it wrote itself is"
    ((_, by_turn),) = samples(spaced, [REPLY, ASK, {**REPLY, "finish_reason": "length"}], 1000).samples
    assert spaced.decode(by_turn.input_ids[by_turn.loss_mask].tolist()) == "the quick brown fox"
    with pytest.raises(Refused, match="no part of an answer"):
        one_sample(spaced, [ASK, says("", finish_reason="length")], 1000)
    asked = one_sample(spaced, [ASK, says("", finish_reason="length"), ASK, REPLY], 1000)
    assert asked.loss_mask.sum() == len(spaced.encode("the quick brown fox <|im_end|>"))


@pytest.mark.parametrize("text", ["cafe\u0301 the fox", "the \u0958 fox", "the fox"])
def test_a_text_that_the_tokenizer_composes_keeps_its_mask(text):
    """NFC makes it shorter or longer."""
    tokenizer = make_tokenizer(FAMILIES["smollm2"])
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    template = with_template(tokenizer, tokenizer.chat_template)
    sample = one_sample(template, [ASK, says(text)], 1000)
    learnt = template.decode(sample.input_ids[sample.loss_mask].tolist())
    assert learnt == unicodedata.normalize("NFC", text) + "<|im_end|>"


ASKED = "<|im_start|>user\nhello, how are you?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def thinking() -> ChatTemplate:
    return load(FAMILIES["qwen3"], {})


@pytest.mark.parametrize(("opened", "said"), [("", "<think>\nhm the"), ("<think>\n", "hm the")])
def test_an_answer_cut_inside_its_thought_is_its_own_tokens_alone(thinking, opened, said):
    """The template would put an empty thought before it, or close one that its prompt opens: the target did neither."""
    begin, header, end = thinking.template.rpartition("<|im_start|>assistant\\n")
    template = with_template(thinking.tokenizer, f"{begin}{header}{opened}{end}")
    result = samples(template, [ASK, says(said, finish_reason="length")], 1000)
    ((_, sample),) = result.samples
    assert result.inserted == 0
    (first, *_) = np.flatnonzero(sample.loss_mask)
    assert sample.loss_mask[first:].all()
    ids = sample.input_ids.tolist()
    assert (template.decode(ids[:first]), template.decode(ids[first:])) == (ASKED + opened, said)


def test_turns_that_fail_are_refused_by_name_and_the_others_kept(thinking):
    chat = [ASK, says("the fox"), ASK, says(" "), ASK, says("lazy dog")]
    result = samples(thinking, chat, 1000)
    assert [suffix for suffix, _ in result.samples] == ["~turn1", "~turn3"]
    assert result.refused == [("~turn2", "an empty answer")]
    assert result.inserted == 2
    with pytest.raises(Refused, match=r"^no turn before the answer$"):
        samples(thinking, [says("the fox")], 1000)


def test_a_greeting_or_a_turn_without_a_mask_costs_no_other_turn(chatml):
    """ShareGPT's conversations often begin with the assistant, and targets write an empty answer now and then."""
    ended = "an end-of-turn token inside the answer"
    for chat, refused in [
        ([REPLY, ASK, REPLY, ASK, REPLY], ("~turn1", "no turn before the answer")),
        ([ASK, says(""), ASK, REPLY, ASK, REPLY], ("~turn1", "an empty answer")),
        ([ASK, says("a<|im_end|>b"), ASK, REPLY, ASK, REPLY], ("~turn1", ended)),
    ]:
        result = samples(chatml, chat, 1000)
        assert result.refused == [refused]
        whole = one_sample(chatml, [ASK, REPLY, ASK, REPLY], 1000)
        assert sum(sample.loss_mask.sum() for _, sample in result.samples) == whole.loss_mask.sum()
    with pytest.raises(Refused, match=r"^no assistant turn$"):
        samples(chatml, [ASK], 1000)


@pytest.mark.real_target
def test_golden_mask_of_smollm2(real_target):
    target = TargetConfig(path=str(real_target))
    template = ChatTemplate.load(target)
    assert template.end_ids == [2]
    template.check_fits(target, 49152)
    assert template.kept_ids() == [1, 2]  # of 17 special tokens those that the template names
    case = FAMILIES["smollm2"]["cases"][0]
    sample = one_sample(template, case["messages"], 1000)
    assert (sample.input_ids.tolist(), sample.loss_mask.tolist()) == by_pieces(template, case["samples"][0])
    assert sample.input_ids.dtype == np.int32


def test_special_tokens_that_the_target_has_no_row_for_are_let_be_and_texts_with_them_are_refused(tokenizer):
    tokenizer, rows = deepcopy(tokenizer), len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<beyond>"]})
    template, target = with_template(tokenizer, tokenizer.chat_template), TargetConfig(path="t")
    template.check_fits(target, rows)
    assert template.prompt_ids([ASK])
    with pytest.raises(Refused, match=f"token {rows}, which has no row"):
        template.prompt_ids([{"role": "user", "content": "what is <beyond>?"}])
    with pytest.raises(Refused, match=f"token {rows}, which has no row"):
        one_sample(template, [{"role": "user", "content": "what is <beyond>?"}, REPLY], 1000)
    fits = with_template(tokenizer, tokenizer.chat_template).check_fits
    assert f"has token {rows - 1}, but its model only {rows - 1} rows" in message_of(fits, target, rows - 1)


def edited(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


def test_after_a_prompt_that_opens_a_thought_an_answer_closes_it_or_is_refused(thinking, chatml):
    """And a target with such a prompt may answer, though the template refuses plain words."""
    begin, header, end = thinking.template.rpartition("<|im_start|>assistant\\n")
    opens = with_template(thinking.tokenizer, f"{begin}{header}<think>\\n{end}")
    thought = "{{ m['role'] }}\n{{ '<think>\n' if m['role'] == 'assistant' else '' }}"
    edits = {"{{ m['role'] }}\n": thought, "assistant\n{% endif": "assistant\n<think>\n{% endif"}
    both = with_template(chatml.tokenizer, edited(chatml.template, edits))
    steps = edited(chatml.template, {"assistant\n{% endif": "assistant\nMy steps:\n{% endif"})
    words = with_template(chatml.tokenizer, steps)
    for template, why in ((both, masks.UNCLOSED), (words, "the generation prompt ends with")):
        with pytest.raises(Refused, match=why):
            samples(template, [ASK, REPLY], 1000)
    for template in (opens, both):
        ((_, sample),) = samples(template, [ASK, says("hm\n</think>\n\nyes")], 1000).samples
        assert template.decode(sample.input_ids[sample.loss_mask].tolist()) == "hm\n</think>\n\nyes<|im_end|>"
    assert samples(words, [ASK, {**REPLY, "tokens": 0}], 1000).samples, "the target's own"
    # What begins no answer: a thought that is closed at once, also where the template writes half of it; white space.
    half = "{{ m['role'] }}\n{{ '</think>' if m['role'] == 'assistant' else '' }}"
    closed = {"assistant\n{% endif": "assistant\n<think></think>{% endif"}
    for edits in (closed, {"{{ m['role'] }}\n": half, **closed}, {"assistant\n{% endif": "assistant \n\n{% endif"}):
        template = with_template(chatml.tokenizer, edited(chatml.template, edits))
        assert len(samples(template, [ASK, REPLY], 1000).samples) == 1


def test_a_thought_with_which_an_answer_begins_is_learnt_as_it_stands(thinking):
    """Though the template would write it with other white space, and an empty one before a plain answer."""
    ((_, sample),) = samples(thinking, [ASK, says("<think>hm</think>yes")], 1000).samples
    assert thinking.decode(sample.input_ids[sample.loss_mask].tolist()) == "<think>hm</think>yes<|im_end|>"


def test_an_answer_about_tags_is_no_thought_where_the_template_writes_something_before_it():
    template = load(FAMILIES["gpt_oss"], {})
    ((_, sample),) = samples(template, [ASK, says("use <think> and </think>")], 1000).samples
    learnt = template.decode(sample.input_ids[sample.loss_mask].tolist())
    assert learnt == "<|channel|>final<|message|>use <think> and </think><|return|>"


def test_a_channel_that_the_template_would_put_into_another_one_is_refused():
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    with pytest.raises(Refused, match="a channel within another one"):
        samples(load(FAMILIES["gpt_oss"], {}), [ASK, says(call)], 1000)


def test_arguments_as_text_do_not_end_a_turn_whose_template_wants_an_object(thinking):
    calls = "{%- for call in m.tool_calls or [] -%}"
    keys = {calls: calls + "{%- for key in call.function.arguments.items() -%}{%- endfor -%}"}
    picky = with_template(thinking.tokenizer, edited(thinking.template, keys))
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ((_, sample),) = samples(picky, [ASK, says("", tool_calls=[call])], 1000).samples
    assert sample.loss_mask.any()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_without_a_system_turn_a_conversation_begins_with_the_users(family):
    template = load(FAMILIES[family], {})
    said = [{"role": "system", "content": "be kind"}, ASK, REPLY, {"role": "user", "content": "and?"}]
    text = template.without_system(said)
    bare = template.render(said[1:], add_generation_prompt=True)
    assert "be kind" not in text
    assert bare.endswith(text.removeprefix(template.tokenizer.bos_token or ""))


CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("args", "answer", "why"),
    [
        ({}, says("", tool_calls=[CALL], finish_reason="length"), "cut off within its tool calls"),
        (
            {},
            says("<think>\na\n</think>\n\nb", reasoning_content="hm"),
            "a thought within the answer's content, and another",
        ),
        ({"enable_thinking": False}, says("yes", reasoning_content="hm"), "the prompt switches thinking off"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(args, answer, why):
    with pytest.raises(Refused, match=why):
        samples(load(FAMILIES["qwen3"], args), [ASK, answer], 1000)
