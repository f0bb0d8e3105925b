"""Conversations that the template rewrites as they grow: one sample for each assistant turn.

Templates of thinking models drop the thoughts of earlier turns, and give a plain answer an empty
one, so no single sequence holds what the target saw and wrote at every turn. Each turn by itself
does: the prompt exactly as serving renders it, then the answer and its end of turn.
"""

import re
from dataclasses import dataclass, field

import numpy as np

from data_prep.messages import Message, Tool
from data_prep.template import ChatTemplate, RefusedError, RewrittenError, Sample, Tokens, same

OPEN, CLOSE = "<think>", "</think>"
# A whole thought, or the rest of one that the generation prompt has opened.
THOUGHT = re.compile(rf"\s*(?:{OPEN})?(.*?){CLOSE}\s*", re.DOTALL)


@dataclass
class Samples:
    """What a conversation gives: samples and refused turns, each with what its id gets as a suffix."""

    samples: list[tuple[str, Sample]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    split: bool = False  # one sample per turn
    inserted: int = 0  # answers before which the template put an empty thought


def samples(
    template: ChatTemplate, messages: list[Message], max_length: int, tools: list[Tool] | None = None
) -> Samples:
    """The conversation as one sample or, where the template rewrites it, one for each assistant turn.

    Raises:
        RefusedError: no turn of it has an exact mask.
    """
    try:
        return Samples([("", template.sample(messages, max_length, tools))])
    except RewrittenError:
        result = Samples(split=True)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for number, turn in enumerate(turns, start=1):
        suffix = f"~turn{number}"
        try:
            sample, inserted = turn_sample(template, messages[: turn + 1], max_length, tools)
        except RefusedError as error:
            result.refused.append((suffix, str(error)))
            continue
        result.samples.append((suffix, sample))
        result.inserted += inserted
    if not result.samples:
        raise RefusedError(result.refused[0][1])
    return result


def turn_sample(
    template: ChatTemplate, messages: list[Message], max_length: int, tools: list[Tool] | None = None
) -> tuple[Sample, bool]:
    """The last turn as the target writes it in serving; also whether the template put an empty thought first.

    Raises:
        RefusedError: its text or its mask cannot be known exactly.
    """
    message = messages[-1]
    prompt = template.render(messages[:-1], add_generation_prompt=True, tools=tools)
    whole = template.render(messages, tools=tools).rstrip()
    end = _end_of_turn(template, whole)
    answer, inserted = _answer(prompt, whole.removesuffix(end), message)
    tokens = Tokens(template, prompt + answer + end)
    first, last = template.learnt(tokens, len(prompt), len(tokens.text), answer)
    if tokens.ids[:first] != template.encode(prompt):
        raise RefusedError("a boundary inside a token")  # serving tokenizes the prompt alone
    open_turn = message.get("finish_reason") == "length"
    ids = tokens.ids[: last if open_turn else last + 1]
    mask = np.arange(len(ids)) >= first
    if not mask[:max_length].any():
        raise RefusedError("nothing of the answers lies within max_length")
    input_ids = np.asarray(ids, dtype=np.int32)
    sample = Sample(input_ids[:max_length], mask[:max_length], len(ids) > max_length, int(open_turn))
    return sample, inserted


def _end_of_turn(template: ChatTemplate, whole: str) -> str:
    """The text of the token with which the template ends the last turn."""
    ids = template.encode(whole)
    if not ids or ids[-1] not in template.end_ids:
        raise RefusedError("no end-of-turn token after the answer")
    return template.decode(ids[-1:])


def _answer(prompt: str, whole: str, message: Message) -> tuple[str, bool]:
    """What the target writes after `prompt`, and whether an empty thought of the template's is in it.

    `whole` is the rendered conversation up to the turn's end. An answer that thinks is taken word for
    word: the template would only move its parts. A plain one is taken as the template writes it.
    """
    content, reasoning = message["content"], (message.get("reasoning_content") or "").strip()
    if not content.strip():
        raise RefusedError("an empty answer")
    in_thought = prompt.rstrip().endswith(OPEN) and message.get("finish_reason") == "length"
    thinks = OPEN in content or CLOSE in content or in_thought
    if whole.startswith(prompt):
        body = whole[len(prompt) :]
        if same(body.strip(), content.strip()):
            return body, False
        if not thinks:
            before = body.rstrip().removesuffix(content.strip())
            thought = THOUGHT.fullmatch(before)
            if before == body.rstrip() or thought is None or thought[1].strip() != reasoning:
                raise RefusedError("the template alters the answer")
            return body, not reasoning
    if reasoning or message.get("tool_calls"):
        raise RefusedError("the template rewrites more of the turn than its text")
    if prompt.rstrip().endswith(OPEN) and not in_thought and CLOSE not in content:
        raise RefusedError("the generation prompt opens a thought that the answer does not close")
    return content, False
