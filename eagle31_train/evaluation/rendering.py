"""A target's tokenizer and chat template: messages become token ids as a server would make them, and messages again."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from eagle31_train.config import TargetConfig
from eagle31_train.targets.chat_template import templates_of
from eagle31_train.targets.pretrained import first_line, load_tokenizer

Message = dict[str, Any]  # role and content, as OpenAI's API has them
Tool = dict[str, Any]
MARK = "the-{}-says"  # what stands in for a message, to see what the template puts around it


class UnfitError(Exception):
    """Why a conversation cannot be rendered, or a prompt cannot be perturbed; the text is the same for like cases."""


@dataclass(eq=False)
class Rendering:
    """How a target sees conversations: `template` is Jinja text in place of the tokenizer's own, `arguments` are what
    it reads."""

    tokenizer: Any
    template: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, target: TargetConfig) -> "Rendering":
        """The tokenizer and template of a target; UserError where it has none."""
        tokenizer = load_tokenizer(target)
        template = templates_of(target, tokenizer)["default"]
        return cls(tokenizer, None if target.chat_template is None else template, target.template_args)

    def text(
        self,
        messages: list[Message],
        tools: list[Tool] | None = None,
        generation: bool = True,
        template: str | None = None,
    ) -> str:
        """The conversation as text, with the generation prompt unless told otherwise; `template`: another family's.

        Raises:
            UnfitError: the template does not take it.
        """
        arguments = self.arguments if template is None else {}
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=template or self.template,
                tokenize=False,
                add_generation_prompt=generation,
                **arguments,
            )
            str(text).encode()  # half a surrogate pair, which JSON can spell, is none
        except Exception as error:  # a template is a program: say, "+" between text and none
            raise UnfitError(f"the chat template refuses it ({first_line(error)})") from None
        return str(text)

    def ids(self, messages: list[Message], tools: list[Tool] | None = None) -> list[int]:
        """Token ids up to and with the generation prompt."""
        return self.encode(self.text(messages, tools))

    def encode(self, text: str, begin: bool = False) -> list[int]:
        """Token ids; `begin`: with what the tokenizer puts around plain text, where it puts anything."""
        return list(self.tokenizer.encode(text, add_special_tokens=begin))

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special tokens spelt out."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def special(self) -> list[str]:
        """How special tokens are spelt."""
        added = self.tokenizer.added_tokens_decoder.values()
        return sorted({token.content for token in added if token.special} | set(self.tokenizer.all_special_tokens))

    def as_text(self, text: str) -> str:
        """`text` with a space after the first character of all in it that would be one of the tokenizer's added tokens,
        special or not. White space and single characters cannot be broken so."""
        added = {*self.special, *(token.content for token in self.tokenizer.added_tokens_decoder.values())}
        broken = [f"{re.escape(t[0])}(?={re.escape(t[1:])})" for t in sorted(added) if len(t) > 1 and not t.isspace()]
        return re.sub("|".join(broken), r"\g<0> ", text) if broken else text

    def messages_of(self, ids: list[int]) -> list[Message] | None:
        """The messages that a prompt was rendered from: the user's, perhaps after a system message.

        None if it is no such prompt. What is returned renders to the very same ids.
        """
        text = self.decode(ids)
        for roles in (("user",), ("system", "user")):
            marks = [MARK.format(role) for role in roles]
            try:
                form = self.text([{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)])
            except UnfitError:
                continue
            if re.findall("|".join(marks), form) != marks:
                continue
            around = map(re.escape, re.split("|".join(marks), form))
            match = re.fullmatch("(.*?)".join(around), text, re.DOTALL)
            if match is None or any(token in content for content in match.groups() for token in self.special):
                continue
            messages = [{"role": role, "content": said} for role, said in zip(roles, match.groups(), strict=True)]
            if self.ids(messages) == ids:
                return messages
        return None

    def without_system(self, messages: list[Message], tools: list[Tool] | None = None) -> str:
        """The conversation without any system turn, be it its own or one that the template puts in by itself.

        Raises:
            UnfitError: a user's turn cannot be told from what stands before it.
        """
        text = self.text([message for message in messages if message["role"] != "system"], tools)
        mark = {"role": "user", "content": MARK.format("user")}
        before, _, _ = self.text([mark], generation=False).partition(mark["content"])
        # What begins a turn is what one adds after an answer: templates may put a system message into the first turn.
        earlier = [{"role": role, "content": f"an-earlier-{role}"} for role in ("user", "assistant")]
        so_far = self.text(earlier, generation=False)
        whole, _, _ = self.text([*earlier, mark], generation=False).partition(mark["content"])
        header = whole.removeprefix(so_far)
        if header in ("", whole) or not text.startswith(before):  # templates may rewrite what is over
            raise UnfitError("the user's words cannot be told from what the chat template puts before them")
        bos = self.tokenizer.bos_token or ""
        begin = bos if before.startswith(bos) and not header.startswith(bos) else ""
        return begin + header + text[len(before) :]
