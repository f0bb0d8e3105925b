"""Templates that rewrite history: each turn by itself, as serving would have it, or refused."""

import numpy as np
import pytest

from data_prep.template import ChatTemplate, RefusedError
from data_prep.turns import samples

# In the manner of thinking models: thoughts after the last user turn alone, and an empty one for plain answers.
THINKING = """\
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set thought = m.reasoning_content or '' -%}{%- set said = m.content -%}
{%- if '</think>' in said -%}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.last -%}{{- '<think>\n' + thought + '\n</think>\n\n' -}}{%- endif -%}
{{- said + '<|im_end|>\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
# The kind whose generation prompt opens the thought.
OPENED = THINKING.replace("assistant\n' -}}{%- endif -%}", "assistant\n<think>\n' -}}{%- endif -%}")

ASK = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "and?"}
ASKED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
EMPTY = "<think>\n\n</think>\n\n"


def says(content, **more):
    return {"role": "assistant", "content": content, **more}


@pytest.fixture
def thinking(tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id], THINKING)


@pytest.fixture
def opened(tokenizer) -> ChatTemplate:
    assert OPENED != THINKING
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id], OPENED)


def pieces(template, sample):
    """The sample as (prompt, learnt) texts; the learnt part is one stretch at the end."""
    (first, *_) = np.flatnonzero(sample.loss_mask)
    assert sample.loss_mask[first:].all()
    ids = sample.input_ids.tolist()
    return template.decode(ids[:first]), template.decode(ids[first:])


def refusal(template, messages, max_length=1000):
    with pytest.raises(RefusedError) as caught:
        samples(template, messages, max_length)
    return str(caught.value)


def test_a_plain_answer_is_learnt_with_the_empty_thought_that_the_template_gives_it(thinking):
    found = samples(thinking, [ASK, says("the fox")], 1000)
    ((suffix, sample),) = found.samples
    assert (suffix, found.split, found.inserted, found.refused) == ("", False, 1, [])
    assert pieces(thinking, sample) == (ASKED, EMPTY + "the fox<|im_end|>")
    assert (sample.cut, sample.open_turns) == (False, 0)


def test_one_turn_with_its_thought_needs_no_splitting(thinking):
    found = samples(thinking, [ASK, says("<think>\nhm\n</think>\n\nthe fox")], 1000)
    ((suffix, _),) = found.samples
    assert (suffix, found.split, found.inserted) == ("", False, 0)


def test_two_turns_with_thinking_are_what_serving_saw_at_each(thinking):
    chat = [ASK, says("<think>\nhm\n</think>\n\nthe fox"), MORE, says("<think>\nwell\n</think>\n\nlazy dog")]
    found = samples(thinking, chat, 1000)
    assert (found.split, found.inserted, found.refused) == (True, 0, [])
    (one, first), (two, second) = found.samples
    assert (one, two) == ("~turn1", "~turn2")
    assert pieces(thinking, first) == (ASKED, "<think>\nhm\n</think>\n\nthe fox<|im_end|>")
    history = ASKED + "the fox<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert pieces(thinking, second) == (history, "<think>\nwell\n</think>\n\nlazy dog<|im_end|>")
    for i, sample in ((1, first), (3, second)):
        ids = thinking.prompt_ids(chat[:i])
        assert sample.input_ids.tolist()[: len(ids)] == ids
        assert not sample.loss_mask[: len(ids)].any()


def test_an_answer_cut_inside_its_thought_is_its_own_tokens_alone(thinking, opened):
    """The template would put an empty thought before it, or close it: the target did neither."""
    found = samples(thinking, [ASK, says("<think>\nhm the", finish_reason="length")], 1000)
    ((_, sample),) = found.samples
    assert pieces(thinking, sample) == (ASKED, "<think>\nhm the")
    assert (sample.open_turns, found.inserted) == (1, 0)
    found = samples(opened, [ASK, says("hm the", finish_reason="length")], 1000)
    ((_, sample),) = found.samples
    assert pieces(opened, sample) == (ASKED + "<think>\n", "hm the")
    assert found.inserted == 0


def test_a_prompt_that_opens_the_thought(opened):
    chat = [ASK, says("hm\n</think>\n\nthe fox"), MORE, says("lazy dog")]
    found = samples(opened, chat, 1000)
    (_, first), (_, second) = found.samples
    assert pieces(opened, first) == (ASKED + "<think>\n", "hm\n</think>\n\nthe fox<|im_end|>")
    assert pieces(opened, second)[1] == "\n</think>\n\nlazy dog<|im_end|>"  # the rest of an empty thought
    assert found.inserted == 1


def test_thoughts_that_the_template_would_tidy_stay_as_the_target_wrote_them(thinking):
    untidy = "<think>\n\n\nhm</think>the fox"
    ((_, sample),) = samples(thinking, [ASK, says(untidy)], 1000).samples
    assert pieces(thinking, sample) == (ASKED, untidy + "<|im_end|>")


def test_thoughts_kept_apart_from_the_answer(thinking, opened):
    ((_, sample),) = samples(thinking, [ASK, says("the fox", reasoning_content="hm")], 1000).samples
    assert pieces(thinking, sample) == (ASKED, "<think>\nhm\n</think>\n\nthe fox<|im_end|>")
    # A template may drop the thought even of the last answer: it goes where the empty one is.
    forgetful = ChatTemplate(thinking.tokenizer, thinking.end_ids, THINKING.replace("m.reasoning_content or ''", "''"))
    ((_, sample),) = samples(forgetful, [ASK, says("the fox", reasoning_content="hm")], 1000).samples
    assert pieces(forgetful, sample) == (ASKED, "<think>\nhm\n</think>\n\nthe fox<|im_end|>")
    changed = ChatTemplate(thinking.tokenizer, thinking.end_ids, THINKING.replace("+ thought +", "+ thought | upper +"))
    assert refusal(changed, [ASK, says("the fox", reasoning_content="hm")]) == "the template alters the thought"


def test_thoughts_dropped_from_every_answer(opened):
    """A template that renders no thought at all, after a prompt that opens one."""
    bare = ChatTemplate(opened.tokenizer, opened.end_ids, OPENED.replace("loop.index0 > ns.last", "false"))
    ((_, sample),) = samples(bare, [ASK, says("hm\n</think>\n\nthe fox")], 1000).samples
    assert pieces(bare, sample) == (ASKED + "<think>\n", "hm\n</think>\n\nthe fox<|im_end|>")
    assert (
        refusal(bare, [ASK, says("the fox")]) == "the generation prompt opens a thought that the answer does not close"
    )
    with_reasoning = [ASK, says("the fox", reasoning_content="hm")]
    assert refusal(bare, with_reasoning) == "the template rewrites more of the turn than its text"


def test_other_insertions_and_alterations_are_refused(tokenizer, thinking):
    named = ChatTemplate(
        tokenizer, thinking.end_ids, THINKING.replace("said + '<|im_end|>", "'Fox: ' + said + '<|im_end|>")
    )
    assert refusal(named, [ASK, says("the fox")]) == "the template alters the answer"
    assert refusal(thinking, [ASK, says("a<|im_end|>b")]) == "an end-of-turn token inside the answer"


def test_a_template_that_marks_the_last_answer_alone(tokenizer, thinking):
    """As some do since earlier answers have lost their thoughts; each answer is the last of its own sample."""
    said = "{{- said + '<|im_end|>\n' -}}"
    marked = "{%- if loop.last -%}{% generation %}{{- said + '<|im_end|>' -}}{% endgeneration %}{{- '\n' -}}"
    assert said in THINKING
    template = ChatTemplate(
        tokenizer, thinking.end_ids, THINKING.replace(said, f"{marked}{{%- else -%}}{said}{{%- endif -%}}")
    )
    assert template.has_markers(None)
    chat = [ASK, says("the fox"), MORE, says("<think>\nwell\n</think>\n\nlazy dog")]
    plain, other = samples(thinking, chat, 1000), samples(template, chat, 1000)
    assert len(plain.samples) == 2
    for (name, one), (same_name, same) in zip(plain.samples, other.samples, strict=True):
        assert name == same_name
        assert one.input_ids.tolist() == same.input_ids.tolist()
        assert one.loss_mask.tolist() == same.loss_mask.tolist()


def test_turns_that_fail_are_refused_by_name_and_the_others_kept(thinking):
    chat = [ASK, says("the fox"), MORE, says(" "), ASK, says("lazy dog")]
    found = samples(thinking, chat, 1000)
    assert [suffix for suffix, _ in found.samples] == ["~turn1", "~turn3"]
    assert found.refused == [("~turn2", "an empty answer")]
    assert found.inserted == 2
    length = len(found.samples[0][1].input_ids)
    short = samples(thinking, chat, length - 1)
    assert [(suffix, sample.cut, len(sample.input_ids)) for suffix, sample in short.samples] == [
        ("~turn1", True, length - 1)
    ]
    assert short.refused[-1] == ("~turn3", "nothing of the answers lies within max_length")


def test_a_prompt_that_has_other_tokens_by_itself(breaks_tokenizer, thinking):
    """Serving tokenizes the generation prompt alone: there its two line breaks are one token."""
    broken = ChatTemplate(breaks_tokenizer, thinking.end_ids, THINKING.replace("assistant\n'", "assistant\n\n'"))
    assert refusal(broken, [ASK, says("the fox", reasoning_content="hm")]) == "a boundary inside a token"


def test_a_conversation_that_begins_with_an_answer_is_refused(thinking):
    assert refusal(thinking, [says("the fox")]) == "no turn before the answer"
