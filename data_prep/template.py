"""A conversation as the target sees it: token ids, and which of them the assistant wrote.

The mask is exact or the conversation is refused. Where the assistant's turns stand in the rendered
text comes from the template's own `{% generation %}` markers, or else from rendering prefixes of
the conversation and comparing; either way it is verified by decoding the masked tokens back. Thoughts
and tool calls, and histories that the template rewrites, are the matter of turns.py.
"""

import difflib
import json
import logging
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from data_prep.formats import MARKUP, apart
from data_prep.messages import Message, Tool, UnusableError, arguments
from data_prep.tokens import RefusedError as RefusedError
from data_prep.tokens import RewrittenError as RewrittenError
from data_prep.tokens import Tokens, same
from eagle31_train import artifacts
from eagle31_train.schema import TargetConfig, UserError
from eagle31_train.tokenizer import from_pretrained


@dataclass(frozen=True)
class Sample:
    """input_ids [T] int32, loss_mask [T] bool; `cut`: more than max_length; `open_turns`: without end-of-turn.

    respelt: answers that have not as many tokens here as the target wrote, where that is known. It wrote the same
        text in other tokens, or white space that a server took away.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    cut: bool
    open_turns: int
    respelt: int = 0


class ChatTemplate:
    """A target's tokenizer, chat template and end-of-turn tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: list[int],
        template: str,
        template_args: dict[str, Any] | None = None,
        tools_template: str | None = None,
    ) -> None:
        """`end_ids` are the ids at which the target stops; `template` is Jinja text, `template_args` what it reads,
        `tools_template` another one for conversations with tools."""
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self.template = template
        self.tools_template = tools_template
        self.template_args = dict(template_args or {})
        # Whether it reads thoughts from a field of their own, under one of the names in use.
        thoughts = r"\b(reasoning_content|reasoning|[\w.]+\.thinking)\b|[\"']thinking"
        self.reads_thoughts = bool(re.search(thoughts, template + (tools_template or "")))

    def template_for(self, tools: list[Tool] | None) -> str:
        """The template of conversations with these tools: transformers and vLLM choose likewise."""
        return self.tools_template if tools and self.tools_template is not None else self.template

    @property
    def reads_tools(self) -> bool:
        """Whether tools may change what is rendered."""
        return self.tools_template is not None or re.search(r"\btools\b", self.template) is not None

    def has_markers(self, tools: list[Tool] | None) -> bool:
        """Whether the template marks what is generated."""
        # The tag as Jinja reads it; the word alone may stand in a comment or in prose.
        return "endgeneration" in self.template_for(tools)

    @cached_property
    def added(self) -> dict[int, str]:
        """Added tokens, special or not: id and spelling. Tokenizers cut the text at them first."""
        return {i: token.content for i, token in self.tokenizer.added_tokens_decoder.items()}

    @property
    def hides_markup(self) -> bool:
        """Whether text without special tokens lacks a thought's tags, or a tool call's."""
        special = {str(self.tokenizer.convert_ids_to_tokens(i)) for i in self.special_ids()}
        return not special.isdisjoint(MARKUP)

    @classmethod
    def load(cls, target: TargetConfig) -> "ChatTemplate":
        """The tokenizer and template of a target.

        Raises:
            UserError: no such target, no template, an argument that it does not read, or no end-of-turn token.
        """
        tokenizer = from_pretrained(AutoTokenizer, target)
        if not tokenizer.is_fast:  # Kimi's warns at each call that it is called with options
            logging.getLogger(type(tokenizer).__module__).setLevel(logging.ERROR)
        with_tools = None
        if target.chat_template is not None:
            if not Path(target.chat_template).is_file():
                raise UserError(f"target.chat_template={target.chat_template} is missing: give a Jinja file")
            template = Path(target.chat_template).read_text(encoding="utf-8")
        else:
            own = tokenizer.chat_template
            named = own if isinstance(own, dict) else {"default": own}
            template, with_tools = named.get("default") or "", named.get("tool_use")
            if not template:
                raise UserError(
                    f"the tokenizer of {target.path} has no chat template: give one as target.chat_template=FILE"
                )
        _check_args(target, template + (with_tools or ""))
        end_ids = _end_ids(tokenizer, target)
        if not end_ids:
            raise UserError(f"{target.path} names no end-of-sequence token: set eos_token_id in its config")
        return cls(tokenizer, end_ids, template, target.template_args, with_tools)

    # ------------------------------------------------------------ text

    def render(
        self,
        messages: list[Message],
        add_generation_prompt: bool = False,
        tools: list[Tool] | None = None,
        verbatim: bool = False,
    ) -> str:
        """The conversation as text, as servers render it: the arguments of tool calls as objects.

        `verbatim`: those of the last message as they are, perhaps the target's own spelling of them.

        Raises:
            RefusedError: the template does not accept it.
        """
        if not messages:  # what a conversation that begins with an answer has before it
            raise RefusedError("no turn before the answer")
        try:
            text = self.tokenizer.apply_chat_template(
                _plain(messages, verbatim),
                tools=tools,  # type: ignore[arg-type]  # it asks for a list that may hold functions too
                chat_template=self.template_for(tools),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_args,
            )
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: say, "+" between text and none
            raise RefusedError(f"the template refuses it: {error}") from None
        assert isinstance(text, str)
        return text

    def prompt_ids(self, messages: list[Message], tools: list[Tool] | None = None) -> list[int]:
        """Token ids up to and with the generation prompt."""
        return self.encode(self.render(self.history(messages), add_generation_prompt=True, tools=tools))

    def history(self, messages: list[Message]) -> list[Message]:
        """Earlier turns as a prompt has them: thoughts where the template looks for them, to keep or to drop."""
        return [apart(message) for message in messages] if self.reads_thoughts else messages

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; the template has written the special tokens already."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """Text exactly as the tokens spell it."""
        text = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    # ------------------------------------------------------------ masks

    def sample(self, messages: list[Message], max_length: int, tools: list[Tool] | None = None) -> Sample:
        """Token ids and loss mask of a conversation.

        A turn with `finish_reason` "length" was cut off: its end-of-turn token is not the
        target's and is not learnt; where that turn is the last, the sequence ends with its content.

        Raises:
            RefusedError: the mask would be empty, or cannot be known exactly; RewrittenError where
                it may be known turn by turn.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise RefusedError("no assistant turn")
        parts = ("reasoning_content", "tool_calls")
        answers = self.history([messages[turn] for turn in turns])
        if any(answer.get(part) for answer in answers for part in parts):
            raise RewrittenError("answers of several parts are taken turn by turn")
        text = self.render(messages, tools=tools)
        find = self._marked_spans if self.has_markers(tools) else self._prefix_spans
        spans = find(messages, text, tools)
        if len(spans) != len(turns):
            raise RewrittenError("the template does not mark each assistant turn once")
        tokens = Tokens(self, text)
        mask = np.zeros(len(tokens.ids), dtype=np.bool_)
        length = len(tokens.ids)
        open_turns = respelt = 0
        for turn, (start, end) in zip(turns, spans, strict=True):
            first, last = self.learnt(tokens, start, end, messages[turn]["content"])
            if not tokens.is_prompt(first, start):
                raise RefusedError("a boundary inside a token")  # serving tokenizes the prompt alone
            if messages[turn].get("finish_reason") == "length":
                open_turns += 1
                if turn == len(messages) - 1:
                    length = last
            else:
                last += 1
            mask[first:last] = True
            respelt += messages[turn].get("tokens", last - first) != last - first
        cut = length > max_length
        length = min(length, max_length)
        ids, mask = np.asarray(tokens.ids, dtype=np.int32)[:length], mask[:length]
        if not mask.any():
            raise RefusedError("nothing of the answers lies within max_length" if cut else "empty answers")
        return Sample(ids, mask, cut, open_turns, respelt)

    def _prefix_spans(self, messages: list[Message], text: str, tools: list[Tool] | None) -> list[tuple[int, int]]:
        """Character spans of the assistant turns, from what each turn adds to the rendered text."""
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:i], add_generation_prompt=True, tools=tools)
            after = self.render(messages[: i + 1], tools=tools)
            if not text.startswith(after) or not text.startswith(before):
                raise RewrittenError("the template rewrites history")
            if len(after) < len(before):
                raise RewrittenError("the generation prompt is longer than the turn")
            spans.append((len(before), len(after)))
        return spans

    def _marked_spans(self, messages: list[Message], text: str, tools: list[Tool] | None) -> list[tuple[int, int]]:
        """Character spans that the template marks as generated."""
        names: dict[str, Any] = {**self.tokenizer.special_tokens_map, **self.template_args}
        spans: Any
        renderer: Any = render_jinja_template  # a pair, with the masks asked for; tools as in render
        names |= {"chat_template": self.template_for(tools), "return_assistant_tokens_mask": True}
        rendered, spans = renderer([_plain(messages)], tools=tools, **names)
        if rendered[0] != text:
            raise RefusedError("the template renders otherwise with its markers read")
        return [(int(span[0]), int(span[1])) for span in spans[0]]

    def learnt(self, tokens: Tokens, start: int, end: int, content: str) -> tuple[int, int]:
        """Token positions [first, last) of a turn's content; `last` is its end-of-turn token."""
        first = tokens.boundary(start)
        stop = tokens.boundary(end)
        ends = [i for i in range(first, stop) if tokens.ids[i] in self.end_ids]
        if not ends and stop < len(tokens.ids) and tokens.ids[stop] in self.end_ids:
            ends = [stop]  # markers around the content alone: the end-of-turn token follows them
        if not ends:
            raise RefusedError("no end-of-turn token after the answer")
        if len(ends) > 1:
            raise RefusedError("an end-of-turn token inside the answer")
        last = ends[0]
        if self.decode(tokens.ids[last + 1 : stop]).strip():
            raise RefusedError("text of the turn after its end-of-turn token")
        body = tokens.text_between(first, last)
        if not same(tokens.text[start : start + len(body)], body):
            raise RefusedError("a boundary inside a token")
        if not same(body.strip(), content.strip()):
            raise RewrittenError("the template alters the answer")
        if not body:
            raise RefusedError("an empty answer")
        return first, last

    # ------------------------------------------------------------ identity

    def vocabulary(self, target: TargetConfig) -> int:
        """V, the rows of the target's embedding: its configuration's number, not the tokenizer's."""
        size = int(from_pretrained(AutoConfig, target).get_text_config().vocab_size)
        if (largest := max(self.tokenizer.get_vocab().values())) >= size:
            raise UserError(
                f"the tokenizer of {target.path} has token {largest}, its model only {size} rows: "
                "they do not belong together"
            )
        return size

    def special_ids(self) -> list[int]:
        """Special and end-of-turn ids, ascending."""
        added = self.tokenizer.added_tokens_decoder
        marked = {i for i, token in added.items() if token.special}
        return sorted(marked | set(self.tokenizer.all_special_ids) | set(self.end_ids))

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
            # Beside the hash and in words: the first thing to differ between two runs of one target.
            **({"template_args": self.template_args} if self.template_args else {}),
        }


def _plain(messages: list[Message], verbatim: bool = False) -> list[Message]:
    """As templates expect them: without our own bookkeeping, arguments as objects, thoughts under each usual name."""
    plain = []
    for message in messages:
        kept = {key: value for key, value in message.items() if key not in ("finish_reason", "tokens")}
        if thought := kept.get("reasoning_content"):
            kept["reasoning"] = kept["thinking"] = thought
        if kept.get("tool_calls") and not (verbatim and message is messages[-1]):
            kept["tool_calls"] = [_with_object(call) for call in kept["tool_calls"]]
        plain.append(kept)
    return plain


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    try:
        given = arguments(call["function"]["arguments"])
    except UnusableError as error:
        raise RefusedError(str(error)) from None
    return {**call, "function": {**call["function"], "arguments": given}}


def _check_args(target: TargetConfig, template: str) -> None:
    """Refuse an argument that the template does not read: it would be taken, recorded, and change nothing."""
    words = set(re.findall(r"[A-Za-z_]\w*", template))
    for name in target.template_args:
        if name not in words:
            close = difflib.get_close_matches(name, words, n=1, cutoff=0.8)
            hint = f"did you mean {close[0]!r}?" if close else "leave it out"
            raise UserError(f"target.template_args.{name} is nothing that the target's chat template reads: {hint}")


def _end_ids(tokenizer: PreTrainedTokenizerBase, target: TargetConfig) -> list[int]:
    """The ids at which the target stops: the tokenizer's and those of generation_config.json."""
    found: list[int] = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    try:
        generation: Any = GenerationConfig
        listed = generation.from_pretrained(target.path, revision=target.revision).eos_token_id
    except OSError:  # a target without generation_config.json: the tokenizer alone says it
        listed = None
    if listed is not None:
        found += listed if isinstance(listed, list) else [listed]
    return sorted(set(found))
