"""Perturbations: named transforms of prompts, under which a drafter's acceptance is measured once more.

Each is a pure function of the prompt and a `Context`. It gives other token ids, or another temperature."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import yaml

from eagle31_train.common.errors import Refused, UserError
from eagle31_train.evaluation.prompts import Prompt
from eagle31_train.rows.messages import Message
from eagle31_train.targets.chat import ChatTemplate

TEXTS = yaml.safe_load(Path(__file__).with_name("perturb_texts.yaml").read_text(encoding="utf-8"))
CONTEXT_BEFORE = "Here are some texts from our archive. They may have nothing to do with my question.\n\n"
CONTEXT_AFTER = "\n\nThat was the archive. This is my question:\n\n"


@dataclass(frozen=True)
class Filler:
    """A text that may be put before any prompt but the one that it answers, whose token ids are `of`."""

    of: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Context:
    """What perturbations read besides the prompt: template, data.max_length, and texts that fill long contexts."""

    template: ChatTemplate
    max_length: int
    fillers: list[Filler]


Transform = Callable[[list[Message], Prompt, Context], list[int]]  # messages are the prompt's


@dataclass(frozen=True)
class Perturbation:
    """A perturbation, with its meaning in one line. Without a transform, the prompt stays as it is.

    temperature: replaces evaluate.temperature. filled: other texts are put before the prompt."""

    name: str
    meaning: str
    transform: Transform | None = None
    temperature: float | None = None
    filled: bool = False

    def apply(self, prompt: Prompt, context: Context) -> Prompt:
        """Return the prompt under the perturbation, with the same id and source. Refused if it has no such form."""
        if self.transform is None:
            return prompt
        if prompt.messages is None:
            raise Refused("its messages cannot be recovered from its tokens (pass them as evaluate.prompts=FILE)")
        return replace(prompt, ids=self.transform(prompt.messages, prompt, context))


def find(name: str) -> Perturbation:
    """Return the perturbation of a name. context_ and temperature_ take other numbers, too."""
    return KNOWN.get(name) or _of_a_number(name)


def _of_a_number(name: str) -> Perturbation:
    for form, make in OF_NUMBERS.items():
        if (match := re.fullmatch(form, name)) and float(match[1]) > 0:
            return make(float(match[1]))
    raise UserError(f"evaluate.perturbations has no {name!r}: choose from {', '.join(KNOWN)}, also with other numbers")


def _template(messages: list[Message], prompt: Prompt, context: Context, template: str | None) -> list[int]:
    if prompt.tools:
        raise Refused("its tools would be lost")
    if template is None:
        return context.template.encode("\n\n".join(message["content"] for message in messages), begin=True)
    return context.template.encode(context.template.render(messages, add_generation_prompt=True, template=template))


def _system_absent(messages: list[Message], prompt: Prompt, context: Context) -> list[int]:
    return context.template.encode(context.template.without_system(messages, prompt.tools))


def _system(messages: list[Message], prompt: Prompt, context: Context, text: str) -> list[int]:
    """Make `text` the system message, and add to it the one that the prompt has, if any."""
    own = [message["content"] for message in messages if message["role"] == "system"]
    rest = [message for message in messages if message["role"] != "system"]
    system = {"role": "system", "content": "\n\n".join([context.template.as_text(text), *own])}
    return context.template.prompt_ids([system, *rest], prompt.tools)


def _around(messages: list[Message], prompt: Prompt, context: Context, before: str = "", after: str = "") -> list[int]:
    *earlier, last = messages
    return context.template.prompt_ids([*earlier, {**last, "content": before + last["content"] + after}], prompt.tools)


def _long_context(messages: list[Message], prompt: Prompt, context: Context, length: Callable[[int], int]) -> list[int]:
    """Put texts before the question for a prompt of length(data.max_length) tokens, or nearly, at a cut character."""
    wanted = length(context.max_length)

    def built(text: str) -> list[int]:
        return _around(messages, prompt, context, before=CONTEXT_BEFORE + text + CONTEXT_AFTER)

    missing = wanted - len(built(""))
    if missing < 0:
        raise Refused(f"it already has more than {wanted} tokens")
    filling = _filling(prompt, context, wanted)
    for _ in range(8):  # a cut may add or remove tokens at the seam
        # A character of several tokens may be cut in two; what is left of it decodes to U+FFFD.
        ids = built(context.template.decode(filling[:missing]).rstrip("\ufffd"))
        if len(ids) == wanted:
            break
        missing = max(missing + wanted - len(ids), 0)
    return ids


def _filling(prompt: Prompt, context: Context, length: int) -> list[int]:
    """Return at least `length` tokens of texts that do not answer the prompt. Its id decides which text is first."""
    texts = [filler.text for filler in context.fillers if filler.of != tuple(prompt.ids)]
    if not any(text.strip() for text in texts):
        raise Refused("there is no other text to put before it")
    first = int.from_bytes(hashlib.sha256(prompt.id.encode()).digest()[:4], "big") % len(texts)
    ids: list[int] = []
    number = 0
    while len(ids) < length:
        text = texts[(first + number) % len(texts)].strip()
        number += 1
        ids += context.template.encode(f"Text {number}\n{text}\n\n")
    return ids


def _filled(name: str, many: str, length: Callable[[int], int]) -> Perturbation:
    meaning = f"other texts before the prompt, {many} tokens in all"
    return Perturbation(f"context_{name}", meaning, partial(_long_context, length=length), filled=True)


OF_NUMBERS: dict[str, Callable[[float], Perturbation]] = {
    r"context_(\d+(?:\.\d+)?)": lambda n: _filled(
        f"{n:g}", f"{n:g} times data.max_length", lambda limit: round(n * limit)
    ),
    r"context_(\d+)_tokens": lambda n: _filled(f"{n:.0f}_tokens", f"{n:,.0f}", lambda _: round(n)),
    r"temperature_(\d+(?:\.\d+)?)": lambda n: Perturbation(f"temperature_{n:g}", f"sampled at {n:g}", temperature=n),
}
ADVERSARIAL = "after a system message of markup, fake special tokens, role markers, JSON and base64"
_ALL = [
    Perturbation("no_template", "the text alone, without a chat template", partial(_template, template=None)),
    *(
        Perturbation(f"template_{kind}", f"in the chat template of {kind} models", partial(_template, template=text))
        for kind, text in TEXTS["templates"].items()
    ),
    Perturbation("system_absent", "no system turn, not even the template's own", _system_absent),
    Perturbation("system_long", "after a policy of some 700 tokens", partial(_system, text=TEXTS["policy"])),
    Perturbation("system_adversarial", ADVERSARIAL, partial(_system, text=TEXTS["adversarial"])),
    *map(_of_a_number, ("context_0.5", "context_1", "context_2", "context_4", "context_512_tokens")),
    *(
        Perturbation(f"language_{code}", f"to be answered in {name}", partial(_around, after=f"\n\n{wish}"))
        for code, (name, wish) in TEXTS["languages"].items()
    ),
    *map(_of_a_number, ("temperature_0.3", "temperature_0.7", "temperature_1")),
]
KNOWN = {perturbation.name: perturbation for perturbation in _ALL}
