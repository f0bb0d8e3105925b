"""Samples of answers whose token ids are known, as they are if the target answers here: what it saw and what it wrote.

The ids decide what is learnt; the text beside them is for people, and for the prompt of the next turn. For answers of
which only the text is known, see masks.py.
"""

from dataclasses import dataclass

from data_prep.sample import EMPTY, ENDED, Sample, Samples, of_turns
from eagle31_train.common.errors import Refused
from eagle31_train.rows.messages import Message, Tools, is_learnt
from eagle31_train.targets import markup
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.markup import apart, meant, opens_thought


@dataclass(frozen=True)
class Turn:
    """The token ids of an answer, after those of its prompt."""

    prompt: list[int]
    ids: list[int]

    def continues(self, earlier: "Turn") -> bool:
        """Return whether the prompt begins with all of an earlier turn."""
        before = earlier.prompt + earlier.ids
        return self.prompt[: len(before)] == before


def known(messages: list[Message]) -> bool:
    """Return whether there are answers to learn, and the token ids of all are known."""
    answers = [message for message in messages if is_learnt(message)]
    return bool(answers) and all("token_ids" in message for message in answers)


def message_of(template: ChatTemplate, prompt: list[int], ids: list[int], tools: Tools) -> Message:
    """Return the message that a target writes with `ids` after a prompt; they may end with an end token. It is taken
    apart if it has channels, or calls `tools`. Special tokens are in its text as they are spelt."""
    said = template.decode_after(prompt, ids[:-1] if ids and ids[-1] in template.end_ids else ids)
    opened = opens_thought(template.decode(prompt))
    return markup.take_apart(said, opened, calls=bool(tools)) or {"role": "assistant", "content": said}


def check_goes_on(template: ChatTemplate, answer: Message, tools: Tools) -> None:
    """Refused if no server would repeat the text of an answer in the prompt of a next turn."""
    message = apart(answer)
    words = message["content"] + (message.get("reasoning_content") or "")
    if special := [token for token in template.special if token in words]:
        raise Refused(f"the answer's text has {special[0]}, a special token, which no later prompt can repeat")
    template.check_calls(message, tools)


def samples(template: ChatTemplate, messages: list[Message], max_length: int, tools: Tools) -> Samples:
    """Return one sample of all turns or, if a later prompt does not continue what was seen and written before (a
    template drops thoughts, or text is tokenized differently), several. Refused if no turn is of use."""

    def read(i: int) -> Turn:
        prompt = template.prompt_ids(messages[:i], tools)
        _check(template, prompt, messages[i], tools)
        return Turn(prompt, messages[i]["token_ids"])

    def sample(turns: list[Turn]) -> Sample:
        ids = turns[-1].prompt + turns[-1].ids
        mask = [False] * len(ids)
        for turn in turns:
            mask[len(turn.prompt) : len(turn.prompt) + len(turn.ids)] = [True] * len(turn.ids)
        return Sample.within(max_length, ids, mask, sum(turn.ids[-1] not in template.end_ids for turn in turns))

    return of_turns(messages, read, sample)


def _check(template: ChatTemplate, prompt: list[int], message: Message, tools: Tools) -> None:
    """Refuse an empty answer, one with an end token inside, and one whose ids spell another text."""
    ids = template.with_rows(message["token_ids"])
    if not ids or ids[0] in template.end_ids:
        raise Refused(EMPTY)
    if any(token in template.end_ids for token in ids[:-1]):
        raise Refused(ENDED)
    said = message_of(template, prompt, ids, tools or message.get("tool_calls"))
    if meant(apart(said)).difference(meant(apart(message))):
        raise Refused(
            "the token_ids of an answer spell another text than its content: remove them if they are of another "
            "tokenizer, or if the content was changed"
        )
