"""Which prompts are held out: a property of the prompt's text, so that it never moves.

Other rows, their order, the answers and the seed have no say; all samples of a prompt fall on the
same side.
"""

import hashlib
import json

from data_prep.messages import Message


def prompt_digest(messages: list[Message]) -> bytes:
    """SHA-256 of all that stands before the first answer, white space stripped."""
    prompt = []
    for message in messages:
        if message["role"] == "assistant":
            break
        prompt.append([message["role"], message["content"].strip()])
    text = json.dumps(prompt, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def prompt_hash(messages: list[Message]) -> int:
    """32 bits of the digest."""
    return int.from_bytes(prompt_digest(messages)[:4], "big")


def is_heldout(messages: list[Message], share: float) -> bool:
    """Whether the conversation belongs to the held-out split; raising `share` only adds prompts to it."""
    return prompt_hash(messages) / 2**32 < share
