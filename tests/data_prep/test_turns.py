"""Templates that rewrite history: each turn by itself, as serving would have it, or refused."""

import numpy as np
import pytest
from families import FAMILIES, load, says

from data_prep.masks import samples
from eagle31_train.errors import Refused
from eagle31_train.targets.chat import ChatTemplate

ASK = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "and?"}
ASKED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def thinking() -> ChatTemplate:
    return load(FAMILIES["qwen3"], {})


@pytest.fixture
def opened(thinking) -> ChatTemplate:
    """The kind whose generation prompt opens the thought."""
    begin, _, end = thinking.template.rpartition("<|im_start|>assistant\\n")
    return ChatTemplate(thinking.tokenizer, thinking.end_ids, f"{begin}<|im_start|>assistant\\n<think>\\n{end}")


def only(template, answer):
    """The one sample of an answer, in pieces."""
    result = samples(template, [ASK, answer], 1000)
    ((_, sample),) = result.samples
    assert result.inserted == 0
    return pieces(template, sample)


def pieces(template, sample):
    """The sample as (prompt, supervised) texts; the supervised part is one stretch at the end."""
    (first, *_) = np.flatnonzero(sample.loss_mask)
    assert sample.loss_mask[first:].all()
    ids = sample.input_ids.tolist()
    return template.decode(ids[:first]), template.decode(ids[first:])


def refusal(template, messages, max_length=1000):
    with pytest.raises(Refused) as caught:
        samples(template, messages, max_length)
    return str(caught.value)


def test_an_answer_cut_inside_its_thought_is_its_own_tokens_alone(thinking, opened):
    """The template would put an empty thought before it, or close it: the target did neither."""
    assert only(thinking, says("<think>\nhm the", finish_reason="length")) == (ASKED, "<think>\nhm the")
    assert only(opened, says("hm the", finish_reason="length")) == (ASKED + "<think>\n", "hm the")


def test_turns_that_fail_are_refused_by_name_and_the_others_kept(thinking):
    chat = [ASK, says("the fox"), MORE, says(" "), ASK, says("lazy dog")]
    result = samples(thinking, chat, 1000)
    assert [suffix for suffix, _ in result.samples] == ["~turn1", "~turn3"]
    assert result.refused == [("~turn2", "an empty answer")]
    assert result.inserted == 2
    length = len(result.samples[0][1].input_ids)
    short = samples(thinking, chat, length - 1)
    ((suffix, sample),) = short.samples
    assert (suffix, sample.cut, len(sample.input_ids)) == ("~turn1", True, length - 1)
    assert short.refused[-1] == ("~turn3", "nothing of the answers lies within max_length")
    assert refusal(thinking, [says("the fox")]) == "no turn before the answer"
