"""A conversation as the target sees it: token ids, and which of them the assistant wrote.

The mask is exact or the conversation is refused. Where the assistant's turns stand in the rendered
text comes from the template's own `{% generation %}` markers, or else from rendering prefixes of
the conversation and comparing; either way it is verified by decoding the masked tokens back.
"""

import json
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from data_prep.messages import Message, Tool
from eagle31_train import artifacts
from eagle31_train.schema import TargetConfig, UserError


class RefusedError(Exception):
    """Why no exact loss mask can be made for a conversation; the text is the same for like cases."""


class RewrittenError(RefusedError):
    """The template writes a turn otherwise than the target did; turn by turn there may still be an exact mask."""


@dataclass(frozen=True)
class Sample:
    """input_ids [T] int32, loss_mask [T] bool; `cut`: more than max_length; `open_turns`: without end-of-turn."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    cut: bool
    open_turns: int


class ChatTemplate:
    """A target's tokenizer, chat template and end-of-turn tokens."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: list[int],
        template: str,
        template_args: dict[str, Any] | None = None,
    ) -> None:
        """`end_ids` are the ids at which the target stops; `template` is Jinja text, `template_args` what it reads."""
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self.template = template
        self.template_args = dict(template_args or {})
        # The tag as Jinja reads it; the word alone may stand in a comment or in prose.
        self.has_markers = "endgeneration" in template

    @classmethod
    def load(cls, target: TargetConfig) -> "ChatTemplate":
        """The tokenizer and template of a target.

        Raises:
            UserError: no such target, no template, or no end-of-turn token.
        """
        tokenizer = _from_pretrained(AutoTokenizer, target)
        if target.chat_template is not None:
            if not Path(target.chat_template).is_file():
                raise UserError(f"target.chat_template={target.chat_template} is missing: give a Jinja file")
            template = Path(target.chat_template).read_text(encoding="utf-8")
        else:
            own = tokenizer.chat_template
            template = (own.get("default") if isinstance(own, dict) else own) or ""
            if not template:
                raise UserError(
                    f"the tokenizer of {target.path} has no chat template: give one as target.chat_template=FILE"
                )
        end_ids = _end_ids(tokenizer, target)
        if not end_ids:
            raise UserError(f"{target.path} names no end-of-sequence token: set eos_token_id in its config")
        return cls(tokenizer, end_ids, template, target.template_args)

    # ------------------------------------------------------------ text

    def render(
        self, messages: list[Message], add_generation_prompt: bool = False, tools: list[Tool] | None = None
    ) -> str:
        """The conversation as text; RefusedError where the template does not accept it."""
        if not messages:  # what a conversation that begins with an answer has before it
            raise RefusedError("no turn before the answer")
        try:
            text = self.tokenizer.apply_chat_template(
                _plain(messages),
                tools=tools,  # type: ignore[arg-type]  # it asks for a list that may hold functions too
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_args,
            )
        except jinja2.TemplateError as error:
            raise RefusedError(f"the template refuses it: {error}") from None
        assert isinstance(text, str)
        return text

    def prompt_ids(self, messages: list[Message], tools: list[Tool] | None = None) -> list[int]:
        """Token ids up to and with the generation prompt."""
        return self.encode(self.render(messages, add_generation_prompt=True, tools=tools))

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
        text = self.render(messages, tools=tools)
        find = self._marked_spans if self.has_markers else self._prefix_spans
        spans = find(messages, text, tools)
        if len(spans) != len(turns):
            raise RewrittenError("the template does not mark each assistant turn once")
        tokens = Tokens(self, text)
        mask = np.zeros(len(tokens.ids), dtype=np.bool_)
        length = len(tokens.ids)
        open_turns = 0
        for turn, (start, end) in zip(turns, spans, strict=True):
            first, last = self.learnt(tokens, start, end, messages[turn]["content"])
            if messages[turn].get("finish_reason") == "length":
                open_turns += 1
                if turn == len(messages) - 1:
                    length = last
            else:
                last += 1
            mask[first:last] = True
        cut = length > max_length
        length = min(length, max_length)
        ids, mask = np.asarray(tokens.ids, dtype=np.int32)[:length], mask[:length]
        if not mask.any():
            raise RefusedError("nothing of the answers lies within max_length" if cut else "empty answers")
        return Sample(ids, mask, cut, open_turns)

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
        rendered, spans = renderer(
            [_plain(messages)], tools=tools, chat_template=self.template, return_assistant_tokens_mask=True, **names
        )
        if rendered[0] != text:
            raise RefusedError("the template renders otherwise with its markers read")
        return [(int(span[0]), int(span[1])) for span in spans[0]]

    def learnt(self, tokens: "Tokens", start: int, end: int, content: str) -> tuple[int, int]:
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
        if not same(text_of(tokens, start, body), body):
            raise RefusedError("a boundary inside a token")
        if not same(body.strip(), content.strip()):
            raise RewrittenError("the template alters the answer")
        if not body:
            raise RefusedError("an empty answer")
        return first, last

    # ------------------------------------------------------------ identity

    def vocabulary(self, target: TargetConfig) -> int:
        """V, the rows of the target's embedding: its configuration's number, not the tokenizer's."""
        size = int(_from_pretrained(AutoConfig, target).get_text_config().vocab_size)
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
            # Beside the hash and in words: the first thing to differ between two runs of one target.
            **({"template_args": self.template_args} if self.template_args else {}),
        }


def text_of(tokens: "Tokens", start: int, body: str) -> str:
    """The rendered text as long as `body`, from character `start`."""
    return tokens.text[start : start + len(body)]


class Tokens:
    """Rendered text, its tokens, and the way from characters to tokens."""

    def __init__(self, template: ChatTemplate, text: str) -> None:
        self.template = template
        self.text = text
        self.offsets: list[tuple[int, int]] | None = None
        if template.tokenizer.is_fast:
            encoding = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            self.ids: list[int] = list(encoding["input_ids"])
            self.offsets = [(start, end) for start, end in encoding["offset_mapping"]]
            self.starts = np.asarray([start for start, _ in self.offsets], dtype=np.int64)
        else:
            self.ids = template.encode(text)

    def boundary(self, char: int) -> int:
        """How many tokens lie before character `char`; RefusedError where one lies across it."""
        if char >= len(self.text):
            return len(self.ids)
        if self.offsets is None:
            # A tokenizer without offsets: the tokens of the text so far must be the first tokens of all.
            before = self.template.encode(self.text[:char])
            if self.ids[: len(before)] != before:
                raise RefusedError("a boundary inside a token")
            return len(before)
        count = int(np.searchsorted(self.starts, char))
        if count and self.offsets[count - 1][1] > char:
            raise RefusedError("a boundary inside a token")
        return count

    def text_between(self, first: int, last: int) -> str:
        """What tokens [first, last) add to the text before them.

        Some tokenizers spell a token differently at the start of a text, so both prefixes are
        decoded, not the middle alone.
        """
        before = self.template.decode(self.ids[:first])
        whole = self.template.decode(self.ids[:last])
        if not whole.startswith(before):
            raise RefusedError("a boundary inside a token")
        return whole[len(before) :]


def same(left: str, right: str) -> bool:
    """Whether two texts have the same tokens as far as can be told from outside."""
    # Tokenizers may normalise to NFC; nothing else is forgiven.
    return unicodedata.normalize("NFC", left) == unicodedata.normalize("NFC", right)


def _plain(messages: list[Message]) -> list[Message]:
    """Without our own bookkeeping, which a template might print."""
    return [{key: value for key, value in m.items() if key != "finish_reason"} for m in messages]


def _from_pretrained(kind: Any, target: TargetConfig) -> Any:
    try:
        return kind.from_pretrained(target.path, revision=target.revision, trust_remote_code=target.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"target.path={target.path} cannot be loaded ({reason}): give a directory in transformers format "
            "or a hub id; the embedded target is made by `python -m eagle31_train.targets.embedded`"
        ) from None


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
