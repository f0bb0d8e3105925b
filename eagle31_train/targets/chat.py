"""A target's tokenizer and chat template: they turn conversations into text and token ids as a server would, and
back into messages."""

import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle31_train.common import artifacts
from eagle31_train.common.errors import Refused, UserError, first_line
from eagle31_train.config import TargetConfig
from eagle31_train.rows.messages import Message, Tools, arguments
from eagle31_train.targets.chat_template import templates_of
from eagle31_train.targets.markup import CLOSE, EMPTY_THOUGHT, OPEN, apart
from eagle31_train.targets.pretrained import end_ids, load_tokenizer

NOT_FOR_TEMPLATES = {"finish_reason", "tokens", "token_ids", "weight"}
SWITCHES = ("true", "false", "yes", "no", "on", "off")  # as a command line may spell them
VARIANTS = 64  # how many are cached at most, each with its own view of the tokenizer
MARK = "the-{}-says"  # placeholder for a message, to see what the template puts around it
USER: Message = {"role": "user", "content": MARK.format("user")}  # stands for a user's turn


@dataclass(eq=False)
class ChatTemplate:
    """A target's tokenizer and chat template. `end_ids`: tokens at which the target stops. `tools_template`: a
    separate template for conversations with tools, if it has one."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: list[int]
    template: str
    template_args: dict[str, Any] = field(default_factory=dict)
    tools_template: str | None = None
    name: str = "the target"
    rows: int | None = None  # of the target's embedding; set by `check_rows`
    _variants: dict[str, "ChatTemplate"] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def reads_thoughts(self) -> bool:
        """Whether the template reads thoughts from a separate field, under any of the names in use."""
        thoughts = r"\b(reasoning_content|reasoning)\b|\w\.thinking\b|[\"']thinking"
        return bool(re.search(thoughts, self.template + (self.tools_template or "")))

    @property
    def thinks(self) -> bool:
        """Whether answers may begin with a thought: the template knows them, and its generation prompt closes none."""
        if not (self.reads_thoughts or OPEN in self.template):
            return False
        user: Message = {"role": "user", "content": "Hello"}
        for asked in ([user], [{**user, "role": "system"}, user]):  # it may require a system message
            with suppress(Refused):
                prompt = self.render(asked, add_generation_prompt=True).rstrip()
                return not (prompt.endswith(CLOSE) or re.search(rf"{EMPTY_THOUGHT}$", prompt))
        return False

    @property
    def reads_tools(self) -> bool:
        return self.tools_template is not None or re.search(r"\btools\b", self.template) is not None

    def text(self, tools: Tools) -> str:
        """Return the template's text for a conversation, chosen as transformers and vLLM choose it."""
        return self.tools_template if tools and self.tools_template is not None else self.template

    def check_calls(self, message: Message, tools: Tools) -> None:
        """Refuse a message with tool calls if the template, with these tools, writes none."""
        if message.get("tool_calls") and "tool_calls" not in self.text(tools):
            raise Refused(f"the chat template of {self.name} writes no tool calls")

    @cached_property
    def added(self) -> dict[int, str]:
        """Added tokens, special or not: id → spelling. Tokenizers split the text at them first."""
        return {i: token.content for i, token in self.tokenizer.added_tokens_decoder.items()}

    @cached_property
    def special(self) -> list[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        return sorted({token.content for token in added if token.special} | set(self.tokenizer.all_special_tokens))

    @classmethod
    def load(cls, target: TargetConfig) -> "ChatTemplate":
        """Load a target's tokenizer and template; UserError if one is missing, or the template ignores an argument."""
        tokenizer = load_tokenizer(target)
        if not tokenizer.is_fast:  # Kimi's warns about options at every call
            logging.getLogger(type(tokenizer).__module__).setLevel(logging.ERROR)
        named = templates_of(target, tokenizer)
        template, with_tools = named["default"], named.get("tool_use")
        loaded = cls(tokenizer, end_ids(tokenizer, target), template, target.template_args, with_tools, target.name)
        if unread := loaded.unread(target.template_args):  # it would be recorded, but change nothing
            raise UserError(f"the target's chat template does not read target.template_args.{unread[0]}: remove it")
        return loaded

    @cached_property
    def _words(self) -> set[str]:
        return set(re.findall(r"[A-Za-z_]\w*", self.template + (self.tools_template or "")))

    def unread(self, args: dict[str, Any]) -> list[str]:
        """Return the variables that the template does not read."""
        return [name for name in args if name not in self._words]

    def switch_as_text(self, args: dict[str, Any]) -> str | None:
        """Return a variable that is true or false as text, which counts as true where the template tests it."""
        text = f"{self.template}{self.tools_template}"
        for name, value in args.items():
            spelt = isinstance(value, str) and value.lower() in SWITCHES
            word = re.escape(name)
            alone = rf"\b(?:if|not|and|or)\s+\(*\s*{word}\s*(?:%|-|\)|and\b|or\b|else\b)|\b{word}\s+(?:and|or)\b"
            compared = rf"\b{word}\s*(?:is\s+(?:not\s+)?(?:sameas\W*)?|[=!]=\s*|\|\s*default\W\s*)(?:true|false)"
            tested = re.search(f"{alone}|{compared}", text, re.IGNORECASE)
            if spelt and tested and not re.search(rf"""['"]{value}['"]""", text):
                return name
        return None

    def under(self, args: dict[str, Any]) -> "ChatTemplate":
        """Return this template with further variables, which a row may set for itself. Variables that the template
        does not read are ignored. Refused for a switch given as text."""
        known = {name: value for name, value in args.items() if name in self._words}
        if not known:
            return self
        key = json.dumps(known, sort_keys=True)
        if key not in self._variants:
            if (name := self.switch_as_text(known)) is not None:
                raise Refused(f"{name}={known[name]!r} is text, which counts as true: write true or false")
            if len(self._variants) == VARIANTS:  # e.g. every row has its own date
                self._variants.clear()
            self._variants[key] = replace(self, template_args={**self.template_args, **known})
        return self._variants[key]

    # ------------------------------------------------------------ text

    def render(
        self,
        messages: list[Message],
        add_generation_prompt: bool = False,
        tools: Tools = None,
        verbatim: bool = False,
        template: str | None = None,
    ) -> str:
        """Render a conversation as servers do, or with another `template`; Refused if the template does not accept it.
        Arguments of tool calls are passed as objects; `verbatim`: those of the last message as they are."""
        if not messages:  # the history of an answer that begins its conversation
            raise Refused("no turn before the answer")
        try:
            text: Any = self.tokenizer.apply_chat_template(
                _plain(messages, verbatim),
                tools=tools,  # type: ignore[arg-type]  # it asks for a list that may hold functions too
                chat_template=template or self.text(tools),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **(self.template_args if template is None else {}),
            )
            text.encode()  # fails for half a surrogate pair, which JSON can spell
        except Exception as error:  # a template is a program, and may, e.g., add None to a text
            raise Refused(f"the template refuses the conversation: {first_line(error)}") from None
        return str(text)

    def prompt_ids(self, messages: list[Message], tools: Tools = None) -> list[int]:
        """Return the token ids up to and including the generation prompt."""
        return self.encode(self.render(self.history(messages), add_generation_prompt=True, tools=tools))

    def history(self, messages: list[Message]) -> list[Message]:
        """Return earlier turns as a prompt has them: with thoughts where the template reads them, to keep or drop."""
        return [apart(message) for message in messages] if self.reads_thoughts else messages

    def encode(self, text: str, begin: bool = False) -> list[int]:
        """Return the token ids of rendered text; `begin`: of plain text, with what the tokenizer puts around it."""
        return self.with_rows(list(self.tokenizer.encode(text, add_special_tokens=begin)))

    def with_rows(self, ids: list[int]) -> list[int]:
        """Return `ids` unchanged; Refused if the target has no embedding row for one of them."""
        if self.rows is not None and ids and max(ids) >= self.rows:
            raise Refused(f"token {max(ids)}, which has no row in the target's embedding")
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text exactly as the tokens spell it; Refused if the tokenizer, unlike the target, lacks one."""
        try:
            text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        except (KeyError, IndexError):  # from slow tokenizers; fast ones return no text for it
            raise Refused("a token that is not in the tokenizer") from None
        assert isinstance(text, str)
        return text

    def decode_after(self, prompt: list[int], ids: list[int]) -> str:
        """Return the text that `ids` add to a prompt. Some tokenizers spell a token differently at a text's start."""
        tail = prompt[max((i for i, token in enumerate(prompt) if token in self.added), default=0) :]
        before, whole = self.decode(tail), self.decode([*tail, *ids])
        return whole[len(before) :] if whole.startswith(before) else self.decode(ids)

    # ------------------------------------------------------------ prompts

    def as_text(self, text: str) -> str:
        """Return `text` with a space after the first character of everything that would be read as an added token,
        special or not. Tokens of white space or of a single character cannot be broken this way."""
        added = {*self.special, *self.added.values()}
        broken = [f"{re.escape(t[0])}(?={re.escape(t[1:])})" for t in sorted(added) if len(t) > 1 and not t.isspace()]
        return re.sub("|".join(broken), r"\g<0> ", text) if broken else text

    def messages_of(self, ids: list[int]) -> list[Message] | None:
        """Return the messages that a prompt was rendered from: the user's, perhaps after a system message. They render
        to exactly `ids`. None if the prompt has another form."""
        text = self.decode(ids)
        for roles in (("user",), ("system", "user")):
            marks = [MARK.format(role) for role in roles]
            try:
                asked = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
                form = self.render(asked, add_generation_prompt=True)
            except Refused:
                continue
            if re.findall("|".join(marks), form) != marks:
                continue
            around = map(re.escape, re.split("|".join(marks), form))
            match = re.fullmatch("(.*?)".join(around), text, re.DOTALL)
            if match is None or any(token in content for content in match.groups() for token in self.special):
                continue
            messages = [{"role": role, "content": said} for role, said in zip(roles, match.groups(), strict=True)]
            if self.prompt_ids(messages) == ids:
                return messages
        return None

    def without_system(self, messages: list[Message], tools: Tools = None) -> str:
        """Render the conversation without any system turn, its own or one that the template inserts. Refused if the
        user's turn cannot be told from what precedes it."""
        said = [message for message in messages if message["role"] != "system"]
        text = self.render(said, add_generation_prompt=True, tools=tools)
        before, _, _ = self.render([USER]).partition(USER["content"])
        header = self._header_of_user()
        if not header or not text.startswith(before):  # templates may rewrite earlier turns
            raise Refused("the user's text cannot be told apart from what the chat template puts before it")
        bos = self.tokenizer.bos_token or ""
        begin = bos if before.startswith(bos) and not header.startswith(bos) else ""
        return begin + header + text[len(before) :]

    def _header_of_user(self) -> str:
        """Return what the template writes before a user's text, "" if that cannot be told. It is what a turn adds after
        an answer: templates may put a system message into the first."""
        earlier = [{"role": role, "content": f"an-earlier-{role}"} for role in ("user", "assistant")]
        so_far = self.render(earlier)
        whole, _, _ = self.render([*earlier, USER]).partition(USER["content"])
        if whole.startswith(so_far):
            return whole[len(so_far) :]
        # It writes a last answer differently: take what follows the end of the earlier one.
        after = whole.partition("an-earlier-assistant")[2]
        end = max((token for token in self.added.values() if after.startswith(token)), key=len, default="")
        return after.removeprefix(end).lstrip() if end else ""

    # ------------------------------------------------------------ identity

    def check_fits(self, target: TargetConfig, vocab_size: int) -> None:
        """UserError for a tokenizer without an end-of-sequence token, or one that `check_rows` refuses."""
        if not self.end_ids:
            raise UserError(
                f"{target.path} names no end-of-sequence token: set eos_token_id in its generation_config.json"
            )
        self.check_rows(target, vocab_size)

    def check_rows(self, target: TargetConfig, vocab_size: int) -> None:
        """UserError for a tokenizer with a token that the target's embedding has no row for. Special tokens that
        nothing names are tolerated (Gemma 3's for images), but texts that contain one are refused from now on."""
        beyond = {i: token for token, i in self.tokenizer.get_vocab().items() if i >= vocab_size}
        if wanted := set(beyond) & set(self.kept_ids()) | {
            i for i, token in beyond.items() if token not in self.special
        }:
            message = f"the tokenizer of {target.path} has token {max(wanted)}, but its model only {vocab_size} rows"
            raise UserError(f"{message}: they do not belong together")
        self.rows = vocab_size

    def kept_ids(self) -> list[int]:
        """Return the ids that every draft vocabulary must hold, ascending: the end tokens, and the special tokens that
        the template names. A tokenizer may reserve thousands of others (Gemma 3: 6,242) that no target writes."""
        text, ids = self.template + (self.tools_template or ""), self.tokenizer.get_vocab()
        named = {ids[token] for token in self.special if token in text}
        return sorted(named | set(self.end_ids))

    @cached_property
    def identity(self) -> str:
        """A hash of the template and its arguments, which together decide the prompts."""
        return artifacts.fingerprint([self.template, self.tools_template, self.template_args])

    def fingerprints(self) -> dict[str, Any]:
        """Hashes of the tokenizer (with its special tokens) and of the template's text."""
        if self.tokenizer.is_fast:
            serial: Any = json.loads(self.tokenizer.backend_tokenizer.to_str())
            serial["padding"] = serial["truncation"] = None  # state of a call, not of the tokenizer
        else:
            serial = self.tokenizer.get_vocab()
        special = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        return {
            "tokenizer": artifacts.fingerprint([serial, special, self.end_ids]),
            "template": artifacts.fingerprint(self.template),
            **({"tools_template": artifacts.fingerprint(self.tools_template)} if self.tools_template else {}),
            # In plain text beside the hash: it is the likeliest difference between two runs of one target.
            **({"template_args": self.template_args} if self.template_args else {}),
        }


def rendered_otherwise(template: ChatTemplate, data: Mapping[str, Any]) -> str:
    """Return how a target's chat template, its variables and its end tokens differ from those that stage 1's manifest
    `data` records, or "". The tokenizer is compared elsewhere: its hash depends on transformers' version."""
    made, names = data.get("inputs", {}), ("template", "tools_template", "template_args")
    if "template" not in made:
        return ""
    there, here = ({name: one[name] for name in names if name in one} for one in (made, template.fingerprints()))
    if "end_ids" in data:  # data of an earlier version do not record them
        there["end_ids"], here["end_ids"] = data["end_ids"], template.end_ids
    return artifacts.describe_change(there, here)


def _plain(messages: list[Message], verbatim: bool = False) -> list[Message]:
    """Return messages as templates expect them: without our own fields, arguments as objects, thoughts under each
    usual name."""
    result = []
    for message in messages:
        plain = {key: value for key, value in message.items() if key not in NOT_FOR_TEMPLATES}
        if thought := plain.get("reasoning_content"):
            plain["reasoning"] = plain["thinking"] = thought
        if plain.get("tool_calls") and not (verbatim and message is messages[-1]):
            plain["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": arguments(call["function"]["arguments"])}}
                for call in plain["tool_calls"]
            ]
        result.append(plain)
    return result
