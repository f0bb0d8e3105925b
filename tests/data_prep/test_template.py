"""Loss masks: exact on golden cases, and refused wherever they cannot be exact."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from data_prep import template as module
from data_prep.template import ChatTemplate, RefusedError
from eagle31_train.schema import TargetConfig, UserError

SYSTEM = {"role": "system", "content": "be kind"}
ASK = {"role": "user", "content": "hello, how are you?"}
REPLY = {"role": "assistant", "content": "the quick brown fox"}
CHAT = [SYSTEM, ASK, REPLY, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "héllo 🦊\n"}]


@pytest.fixture
def chatml(tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id], tokenizer.chat_template)


def with_template(tokenizer: PreTrainedTokenizerFast, text: str) -> ChatTemplate:
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id], text)


def by_pieces(template: ChatTemplate, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
    """Ids and mask of text whose learnt pieces are told by hand."""
    ids, mask = [], []
    for text, learnt in pieces:
        piece = template.encode(text)
        ids += piece
        mask += [learnt] * len(piece)
    return ids, mask


GOLDEN = [
    ("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhello, how are you?<|im_end|>\n", False),
    ("<|im_start|>assistant\n", False),
    ("the quick brown fox<|im_end|>", True),
    ("\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n", False),
    ("héllo 🦊\n<|im_end|>", True),
    ("\n", False),
]


def test_several_turns_are_masked_exactly(chatml):
    sample = chatml.sample(CHAT, 1000)
    ids, mask = by_pieces(chatml, GOLDEN)
    assert sample.input_ids.tolist() == ids
    assert sample.loss_mask.tolist() == mask
    assert sample.input_ids.dtype == np.int32
    assert not sample.cut
    assert sample.open_turns == 0


def test_markers_and_prefixes_agree(tokenizer, chatml, marked):
    template = with_template(tokenizer, marked)
    assert template.has_markers(None)
    assert not chatml.has_markers(None)
    one, other = template.sample(CHAT, 1000), chatml.sample(CHAT, 1000)
    assert one.input_ids.tolist() == other.input_ids.tolist()
    assert one.loss_mask.tolist() == other.loss_mask.tolist()


def test_markers_around_the_content_alone_still_teach_the_end_of_turn(tokenizer, chatml, marked):
    inner = marked.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    assert inner != marked
    mask = with_template(tokenizer, inner).sample(CHAT, 1000).loss_mask
    assert mask.tolist() == chatml.sample(CHAT, 1000).loss_mask.tolist()


def test_tokenizer_without_offsets_gives_the_same_mask(chatml, monkeypatch):
    expected = chatml.sample(CHAT, 1000).loss_mask.tolist()
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", property(lambda _: False))
    assert module.Tokens(chatml, "hello").offsets is None
    assert chatml.sample(CHAT, 1000).loss_mask.tolist() == expected


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
def test_a_planted_shift_of_the_first_token_is_caught(chatml, monkeypatch, shift):
    """The verification must see a mask that is off by one, whoever made it."""
    text = chatml.render(CHAT)
    boundary = module.Tokens.boundary

    def shifted(self, char):
        return boundary(self, char) + (shift if char == text.index("the quick") else 0)

    monkeypatch.setattr(module.Tokens, "boundary", shifted)
    with pytest.raises(RefusedError):
        chatml.sample(CHAT, 1000)


def test_a_wrong_end_of_turn_token_is_caught(chatml):
    """Stopping at the token of " brown" would leave " fox" and the real end of turn unlearnt."""
    (brown,) = [i for i in chatml.encode("the quick brown fox") if chatml.decode([i]) == " brown"]
    chatml.end_ids = [brown]
    with pytest.raises(RefusedError):
        chatml.sample(CHAT, 1000)


def test_characters_off_by_one_are_caught(chatml, monkeypatch):
    spans = ChatTemplate._prefix_spans

    def shifted(self, messages, text, tools):
        return [(start + 1, end) for start, end in spans(self, messages, text, tools)]

    monkeypatch.setattr(ChatTemplate, "_prefix_spans", shifted)
    with pytest.raises(RefusedError):
        chatml.sample(CHAT, 1000)


# ---------------------------------------------------------------- refusals


def refusal(template: ChatTemplate, messages: list, max_length: int = 1000) -> str:
    with pytest.raises(RefusedError) as caught:
        template.sample(messages, max_length)
    return str(caught.value)


def test_no_assistant_turn(chatml):
    assert refusal(chatml, [ASK]) == "no assistant turn"


def test_template_that_rewrites_history(tokenizer):
    # Keeps only what follows </think> of earlier answers, as reasoning models' templates do.
    rewriting = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = with_template(tokenizer, rewriting)
    thought = {"role": "assistant", "content": "hm</think>yes"}
    assert refusal(template, [ASK, thought, ASK, REPLY]) == "the template rewrites history"
    assert template.sample([ASK, thought], 1000).loss_mask.any()  # one turn is not rewritten


def test_template_that_alters_the_answer(tokenizer, chatml):
    upper = chatml.template.replace("m['content'] }}", "(m['content'] | upper) }}")
    assert refusal(with_template(tokenizer, upper), [ASK, REPLY]) == "the template alters the answer"


def test_template_that_strips_the_answer_is_accepted(tokenizer, chatml):
    trim = with_template(tokenizer, chatml.template.replace("m['content'] }}", "(m['content'] | trim) }}"))
    sample = trim.sample([ASK, {"role": "assistant", "content": "  hello \n"}], 1000)
    assert trim.decode(sample.input_ids[sample.loss_mask].tolist()) == "hello<|im_end|>"


def test_end_of_turn_token_inside_the_answer(chatml):
    forged = {"role": "assistant", "content": "a<|im_end|>\n<|im_start|>assistant\nb"}
    assert refusal(chatml, [ASK, forged]) == "an end-of-turn token inside the answer"


def test_template_without_end_of_turn(tokenizer):
    bare = (
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    assert refusal(with_template(tokenizer, bare), [ASK, REPLY]) == "no end-of-turn token after the answer"


def test_boundary_inside_a_token(tokenizer):
    # "assistant: " ends with a space that the tokenizer joins to the first word of the answer.
    spaced = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    template = with_template(tokenizer, spaced)
    reply = {"role": "assistant", "content": "hello"}
    assert "Ġhello" in tokenizer.tokenize("assistant: hello")
    assert refusal(template, [ASK, reply]) == "a boundary inside a token"


def test_a_prompt_that_has_other_tokens_by_itself(breaks_tokenizer, chatml):
    """Serving tokenizes the generation prompt alone: there its two line breaks are one token."""
    text = chatml.template.replace("\n{{ m['content'] }}", "\n\n{{ m['content'] }}").replace(
        "assistant\n", "assistant\n\n"
    )
    template = with_template(breaks_tokenizer, text)
    whole, prompt = template.encode(template.render([ASK, REPLY])), template.prompt_ids([ASK])
    assert whole[: len(prompt) - 1] == prompt[:-1]
    assert whole[len(prompt) - 1] != prompt[-1]
    assert refusal(template, [ASK, REPLY]) == "a boundary inside a token"


def test_template_that_raises(tokenizer):
    strict = "{{ raise_exception('roles must alternate') }}"
    assert "roles must alternate" in refusal(with_template(tokenizer, strict), [ASK, REPLY])


def test_empty_answer(chatml):
    assert refusal(chatml, [ASK, {"role": "assistant", "content": ""}]) == "an empty answer"


# ---------------------------------------------------------------- cut answers, long conversations


def test_a_cut_last_answer_ends_with_its_content(chatml):
    sample = chatml.sample([ASK, {**REPLY, "finish_reason": "length"}], 1000)
    assert chatml.decode(sample.input_ids.tolist()).endswith("the quick brown fox")
    assert chatml.decode(sample.input_ids[sample.loss_mask].tolist()) == "the quick brown fox"
    assert sample.open_turns == 1


def test_a_cut_middle_answer_does_not_teach_its_end_of_turn(chatml):
    cut = [ASK, {**REPLY, "finish_reason": "length"}, ASK, REPLY]
    whole = [ASK, {**REPLY, "finish_reason": "stop"}, ASK, REPLY]
    one, other = chatml.sample(cut, 1000), chatml.sample(whole, 1000)
    assert one.input_ids.tolist() == other.input_ids.tolist()
    (missing,) = np.flatnonzero(one.loss_mask != other.loss_mask)
    assert one.input_ids[missing] == chatml.end_ids[0]
    assert other.loss_mask[missing]


def test_long_conversations_are_cut_and_said_to_be(chatml):
    whole = chatml.sample([ASK, REPLY], 1000)
    first = int(np.flatnonzero(whole.loss_mask)[0])
    cut = chatml.sample([ASK, REPLY], first + 1)
    assert cut.cut
    assert cut.input_ids.tolist() == whole.input_ids.tolist()[: first + 1]
    assert cut.loss_mask.tolist() == [False] * first + [True]
    assert refusal(chatml, [ASK, REPLY], first) == "nothing of the answers lies within max_length"


# ---------------------------------------------------------------- identity


def test_fingerprints_know_tokenizer_and_template(tokenizer, fresh_tokenizer, chatml, marked):
    same = ChatTemplate(fresh_tokenizer, chatml.end_ids, chatml.template)
    assert same.fingerprints() == chatml.fingerprints()
    chatml.tokenizer("hello", padding="max_length", truncation=True, max_length=4)  # leaves state in the backend
    assert same.fingerprints() == chatml.fingerprints()
    other = with_template(tokenizer, marked).fingerprints()
    assert other["template"] != same.fingerprints()["template"]
    assert other["tokenizer"] == same.fingerprints()["tokenizer"]
    fresh_tokenizer.add_tokens(["newword"])
    assert same.fingerprints()["tokenizer"] != other["tokenizer"]


def test_conversations_with_tools_have_the_template_that_the_tokenizer_names_for_them(fresh_tokenizer, tmp_path):
    """As transformers and vLLM choose it."""
    plain = fresh_tokenizer.chat_template
    with_tools = "{% if tools %}{{ tools | tojson }}{% endif %}{% if terse %}terse{% endif %}" + plain
    fresh_tokenizer.chat_template = {"default": plain, "tool_use": with_tools}
    fresh_tokenizer.save_pretrained(tmp_path)
    template = ChatTemplate.load(TargetConfig(path=str(tmp_path), template_args={"terse": True}))
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    for given in (None, tools):
        served = fresh_tokenizer.apply_chat_template([ASK], tools=given, tokenize=False, terse=True)
        assert template.render([ASK], tools=given) == served
        assert template.sample([ASK, REPLY], 1000, given).loss_mask.any()
    assert "find" in served
    assert template.reads_tools
    assert not with_template(fresh_tokenizer, plain).reads_tools
    marks = with_tools.replace("{{ m['content'] }}", "{% generation %}{{ m['content'] }}{% endgeneration %}")
    other = ChatTemplate(fresh_tokenizer, template.end_ids, plain, {}, marks)
    assert (other.has_markers(None), other.has_markers(tools)) == (False, True)
    found = {str(one.fingerprints()) for one in (other, template, with_template(fresh_tokenizer, plain))}
    assert len(found) == 3


# ---------------------------------------------------------------- the real target


@pytest.mark.real_target
def test_golden_mask_of_smollm2(real_target):
    from eagle31_train.schema import TargetConfig

    target = TargetConfig(path=str(real_target))
    template = ChatTemplate.load(target)
    assert template.end_ids == [2]
    assert template.vocabulary(target) == 49152
    assert template.special_ids() == list(range(17))
    chat = [
        {"role": "user", "content": "Count to 3."},
        {"role": "assistant", "content": "1, 2, 3"},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "You're welcome!"},
    ]
    sample = template.sample(chat, 1000)
    system = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nCount to 3.<|im_end|>\n<|im_start|>assistant\n"
    )
    between = "\n<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n"
    pieces = [(system, False), ("1, 2, 3<|im_end|>", True), (between, False)]
    pieces += [("You're welcome!<|im_end|>", True), ("\n", False)]
    ids, mask = by_pieces(template, pieces)
    assert sample.input_ids.tolist() == ids
    assert sample.loss_mask.tolist() == mask


def test_an_argument_that_the_template_does_not_read(fresh_tokenizer, tmp_path):
    fresh_tokenizer.save_pretrained(tmp_path)
    thinks = tmp_path / "thinks.jinja"
    thinks.write_text("{% if enable_thinking %}think{% endif %}")
    target = {"path": str(tmp_path), "chat_template": str(thinks)}
    ChatTemplate.load(TargetConfig(**target, template_args={"enable_thinking": False}))
    with pytest.raises(UserError, match=r"template_args\.enable_thinkng .*did you mean 'enable_thinking'"):
        ChatTemplate.load(TargetConfig(**target, template_args={"enable_thinkng": False}))
    with pytest.raises(UserError, match=r"template_args\.thinking is nothing .*leave it out"):
        ChatTemplate.load(TargetConfig(**target, template_args={"thinking": False}))
