"""Exact loss masks of conversations given as text: the tokens that the target itself would generate. For answers whose
token ids are known, see written.py.

The mask is exact or the turn is refused. The answers are located as text, by rendering the conversation up to each and
comparing. Then the masked tokens are decoded, and compared with the answer.

Most conversations are one sample: they are rendered as a whole, and every prompt is a prefix of that. But templates of
thinking models rewrite earlier turns, so no single sequence holds what the target saw and wrote at every turn. Each
turn by itself does (turn.py): the prompt as rendered in serving, and the answer as the target writes it. Turns whose
prompt continues exactly where the previous turn ended (e.g. a chain of tool calls) share one sample.

All that the target generates after the generation prompt is supervised: thought, answer, tool calls with all their
markup, the end-of-turn token. An empty thought in the generation prompt (thinking switched off) belongs to the prompt.
One that the template writes into a plain answer is supervised, and counted as `inserted`.
"""

import unicodedata
from contextlib import suppress

from data_prep.sample import EMPTY, ENDED, Sample, Samples, of_turns
from data_prep.tokens import INSIDE, Tokens
from data_prep.turn import NO_END, UNCLOSED, Span, Turn, read_turn
from eagle31_train.common.errors import Refused
from eagle31_train.rows.messages import Message, Tools, is_cut, is_learnt
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.markup import CLOSE, opens_thought

NO_ANSWER = "no assistant turn"
UNWEIGHTED = "every answer has weight 0"


def samples(template: ChatTemplate, messages: list[Message], max_length: int, tools: Tools = None) -> Samples:
    """Return the conversation as one sample or, if the template rewrites it or a turn has no exact mask, as several;
    Refused if no turn has an exact mask."""
    if not any(map(is_learnt, messages)):
        raise Refused(UNWEIGHTED if any(message["role"] == "assistant" for message in messages) else NO_ANSWER)
    with suppress(Refused):
        return Samples.whole(one_sample(template, messages, max_length, tools))
    return _by_turn(template, messages, max_length, tools)


# ---------------------------------------------------------------- the whole conversation


def one_sample(template: ChatTemplate, messages: list[Message], max_length: int, tools: Tools = None) -> Sample:
    """Return the whole conversation as it is rendered; Refused as by `masked`. The end-of-turn token of an answer with
    `finish_reason` "length" is not supervised; if such an answer is the last message, the sample ends with it."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if any(m.get("reasoning_content") or m.get("tool_calls") for m in template.history(answers)):
        raise Refused("answers of several parts are taken turn by turn")
    text = template.render(messages, tools=tools)
    spans = prefix_spans(template, messages, text, tools)
    ends_open = is_learnt(messages[-1]) and is_cut(messages[-1])
    return masked(template, text, spans, max_length, keep_rest=not ends_open)


def prefix_spans(template: ChatTemplate, messages: list[Message], text: str, tools: Tools) -> list[Span]:
    """Find the answers to learn in `text` by what each adds to the rendered conversation."""
    spans = []
    for i, message in enumerate(messages):
        if not is_learnt(message):
            continue
        before = template.render(messages[:i], add_generation_prompt=True, tools=tools)
        after = template.render(messages[: i + 1], tools=tools)
        if not text.startswith(after) or not text.startswith(before):
            raise Refused("the template rewrites history")
        if opens_thought(before) and CLOSE not in message["content"]:
            raise Refused(UNCLOSED)  # or it is cut inside its thought, which `read_turn` can tell
        if len(after) < len(before):
            raise Refused("the generation prompt is longer than the turn")
        spans.append(Span(len(before), len(after), message["content"], is_cut(message)))
    return spans


# ---------------------------------------------------------------- turn by turn


def _by_turn(template: ChatTemplate, messages: list[Message], max_length: int, tools: Tools) -> Samples:
    def read(i: int) -> Turn:
        return read_turn(template, messages[: i + 1], tools)

    def sample(turns: list[Turn]) -> Sample:
        return masked(template, turns[-1].text, [turn.answer for turn in turns], max_length, keep_rest=False)

    return of_turns(messages, read, sample)


# ---------------------------------------------------------------- from answers in a text to a mask


def masked(template: ChatTemplate, text: str, answers: list[Span], max_length: int, keep_rest: bool) -> Sample:
    """Return token ids and loss mask of a text with answers in it; without `keep_rest`, it ends with the last answer.
    Refused if the mask cannot be known exactly, or would be empty."""
    tokens = Tokens(template, text)
    mask = [False] * len(tokens.ids)
    end = 0
    for answer in answers:
        first, end_of_turn = supervised(template, tokens, answer.start, answer.end, answer.content)
        if not tokens.is_prompt(first, answer.start):
            raise Refused(INSIDE)  # serving tokenizes the prompt alone
        end = end_of_turn if answer.cut else end_of_turn + 1
        if answer.cut and answer.content == answer.content.rstrip():
            # White space that the template puts before its end-of-turn token (Llama 2) is not the answer's.
            while end > first and not template.decode([tokens.ids[end - 1]]).strip():
                end -= 1
        mask[first:end] = [True] * (end - first)
    length = len(tokens.ids) if keep_rest else end
    open_turns, inserted = sum(answer.cut for answer in answers), sum(answer.inserted for answer in answers)
    return Sample.within(max_length, tokens.ids[:length], mask[:length], open_turns, inserted)


def supervised(template: ChatTemplate, tokens: Tokens, start: int, end: int, content: str) -> tuple[int, int]:
    """Return the tokens [first, last) of an answer at characters [start, end); `last` is its end-of-turn token."""
    first, stop = tokens.boundary(start), tokens.boundary(end)
    ends = [i for i in range(first, stop) if tokens.ids[i] in template.end_ids]
    if not ends:  # the next turn's first token may end it (GLM), which only `read_turn` finds
        raise Refused(NO_END)
    last = ends[0]
    # A template may close the conversation with one more (Phi).
    if template.decode([i for i in tokens.ids[last + 1 : stop] if i not in template.end_ids]).strip():
        raise Refused(ENDED if len(ends) > 1 else "text after the answer's end-of-turn token")
    body = tokens.text_between(first, last)
    # Use offsets if the tokenizer has them: a text that it normalised has another length.
    before_end = start + len(body) if tokens.offsets is None else tokens.offsets[last][0]
    if not _same(tokens.text[start:before_end], body):
        raise Refused(INSIDE)
    if not _same(body.strip(), content.strip()):
        raise Refused("the template alters the answer")
    if not body:
        raise Refused(EMPTY)
    return first, last


def _same(left: str, right: str) -> bool:
    # Tokenizers may normalise to NFC; nothing else is forgiven.
    return unicodedata.normalize("NFC", left) == unicodedata.normalize("NFC", right)
