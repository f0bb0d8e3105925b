"""What perturbations make of a prompt, and that each does what its name says."""

from dataclasses import replace

import pytest
from talking import make_template

from eagle31_train.common.errors import Refused
from eagle31_train.evaluation.perturb import KNOWN, TEXTS, Context, Filler, find
from eagle31_train.evaluation.prompts import Prompt

TEMPLATE = make_template()
LENGTH = 300  # data.max_length
WORDS = [
    "the quick brown fox jumps over the lazy dog " * 3,
    "hello world, how are you? " * 4,
    "你好，世界。" * 9,
]
AROUND = Context(TEMPLATE, LENGTH, [Filler((), text) for text in WORDS])


def make_prompt(words="What is the question here?", name="p1"):
    messages = [{"role": "user", "content": words}]
    return Prompt(name, "made", TEMPLATE.prompt_ids(messages), messages)


PROMPT = make_prompt()


@pytest.mark.parametrize("name", KNOWN)
def test_the_question_is_the_same_and_the_rest_is_told_apart(name):
    """Every perturbation keeps id, source and the words; it is a pure function, and does something."""
    perturbed = find(name).apply(PROMPT, AROUND)
    assert (perturbed.id, perturbed.source, perturbed.messages) == (PROMPT.id, PROMPT.source, PROMPT.messages)
    assert "What is the question here?" in TEMPLATE.decode(perturbed.ids)
    assert find(name).apply(PROMPT, AROUND) == perturbed
    assert (perturbed.ids == PROMPT.ids) == (find(name).temperature is not None)


def test_markup_in_a_system_message_is_text():
    """The target's own special tokens are not smuggled in, which would be another conversation and no odd text."""
    special = set(TEMPLATE.tokenizer.all_special_ids)

    def markup(ids):
        return [token for token in ids if token in special]

    plain = markup(TEMPLATE.prompt_ids([{"role": "system", "content": "x"}, *PROMPT.messages]))
    as_it_is = TEMPLATE.prompt_ids([{"role": "system", "content": TEXTS["adversarial"]}, *PROMPT.messages])
    assert markup(as_it_is) != plain  # the text does hold some
    assert markup(find("system_adversarial").apply(PROMPT, AROUND).ids) == plain


def test_tools_are_not_lost_with_the_template_nor_a_system_message_before_another():
    for name in ("no_template", "template_llama3"):
        with pytest.raises(Refused, match="its tools would be lost"):
            find(name).apply(replace(PROMPT, tools=[{"type": "function", "function": {"name": "f"}}]), AROUND)
    own = replace(PROMPT, messages=[{"role": "system", "content": "be brief"}, *PROMPT.messages])
    assert "be brief<|im_end|>" in TEMPLATE.decode(find("system_long").apply(own, AROUND).ids)


@pytest.mark.parametrize("name", [name for name in KNOWN if "template" not in name])
def test_tools_and_earlier_turns_are_kept(name):
    named = "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    around = replace(AROUND, template=replace(TEMPLATE, template=TEMPLATE.template + named))
    earlier = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "an answer"}]
    tools = [{"type": "function", "function": {"name": "find_fox"}}]
    messages = [*earlier, *PROMPT.messages]
    prompt = Prompt("p1", "made", around.template.prompt_ids(messages, tools), messages, tools)
    text = TEMPLATE.decode(find(name).apply(prompt, around).ids)
    assert "find_fox" in text
    assert "hello<|im_end|>\n<|im_start|>assistant\nan answer<|im_end|>" in text


def test_without_a_template_all_turns_are_there():
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "an answer"}, *PROMPT.messages]
    ids = find("no_template").apply(replace(PROMPT, messages=turns), AROUND).ids
    assert TEMPLATE.decode(ids).endswith("hello\n\nan answer\n\nWhat is the question here?")


def test_another_familys_template_is_given_none_of_the_targets_arguments():
    ours = replace(TEMPLATE, template="{{ thinking }}", template_args={"thinking": "deep"})
    assert ours.render(PROMPT.messages) == "deep"
    assert ours.render(PROMPT.messages, template="{{ thinking is defined }}") == "False"


@pytest.mark.parametrize(
    ("length", "wanted"), [(0.7, 210), (1, LENGTH), (2.5, 750), (7, 2100), ("211_tokens", 211), ("999_tokens", 999)]
)
def test_a_context_has_the_length_that_was_asked_for(length, wanted):
    for words in ("What is the question here?", "hello", "你好吗？", "a b c " * 5):
        for name in ("p1", "p2", "p3", "p4"):
            ids = find(f"context_{length}").apply(make_prompt(words, name=name), AROUND).ids
            assert abs(len(ids) - wanted) <= 2  # a cut within a character of three tokens
            assert TEMPLATE.decode(ids).endswith(f"\n\n{words}<|im_end|>\n<|im_start|>assistant\n")
            assert "\ufffd" not in TEMPLATE.decode(ids)


def test_contexts_begin_with_another_text_for_other_prompts():
    contexts = {tuple(find("context_1").apply(make_prompt(name=f"p{n}"), AROUND).ids) for n in range(9)}
    assert len(contexts) == len(WORDS)
