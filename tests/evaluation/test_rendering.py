"""Messages become tokens and messages again, whatever the family; and prompts lose their system turn."""

import pytest
from talking import FAMILIES, make_rendering

from eagle31_train.evaluation.rendering import Rendering

ASKED = {"role": "user", "content": "How tall\nis it?  (Größe)"}
SYSTEM = {"role": "system", "content": "Be kind.\n\nBe short."}


@pytest.fixture(scope="module", params=FAMILIES)
def rendering(request):
    return make_rendering(request.param)


def test_messages_are_read_off_their_tokens(rendering):
    for messages in ([ASKED], [SYSTEM, ASKED]):
        assert rendering.messages_of(rendering.ids(messages)) == messages


def test_what_is_no_single_question_is_not_read(rendering):
    """Several turns would pass for one question with markup in it; half a prompt is none."""
    answered = [ASKED, {"role": "assistant", "content": "Two metres."}, ASKED]
    assert rendering.messages_of(rendering.ids(answered)) is None
    assert rendering.messages_of(rendering.ids([ASKED])[:-1]) is None
    assert rendering.messages_of(rendering.encode("How tall is it?")) is None


@pytest.mark.parametrize(
    ("template", "text", "known"),
    [
        ("{% for m in messages %}{{ m.content | trim }}{% endfor %}|", "hello|", True),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}|", "HELLO|", False),  # the mark is not found
        ("{% for m in messages %}{{ m.content }}/{{ m.content }}{% endfor %}|", "hello/hello|", False),
        ("{{ raise_exception('no') }}", "hello|", False),
    ],
)
def test_what_is_read_renders_to_the_same_tokens(template, text, known):
    rendering = Rendering(make_rendering().tokenizer, template)
    found = rendering.messages_of(rendering.encode(text))
    assert found == ([{"role": "user", "content": "hello"}] if known else None)


WITHOUT = {
    "smollm2": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "chatml": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "llama3": (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "inside": "<s>[INST] {} [/INST]",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_without_any_system_turn(family):
    """Neither the conversation's own nor the template's, and with the token that begins every text."""
    rendering = make_rendering(family)
    assert rendering.without_system([ASKED]) == WITHOUT[family].format(ASKED["content"])
    assert rendering.without_system([SYSTEM, ASKED]) == WITHOUT[family].format(ASKED["content"])
