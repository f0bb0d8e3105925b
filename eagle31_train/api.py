"""The library in a few calls: read stored states, draft, generate speculatively, score a drafter (docs/api.md).

from eagle31_train.api import Speculator, open_store

states = open_store("runs/smollm2/store").sample("train", 0)
speculator = Speculator.load("runs/smollm2", target="models/SmolLM2-135M-Instruct")
print(speculator.generate("Why is the sky blue?").text)
print(speculator.score(["Why is the sky blue?", "Count to ten."]))
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.checkpoint.run_folder import option
from eagle31_train.common import foreign
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.config import TargetConfig, check_value
from eagle31_train.evaluation import decoding, intervals
from eagle31_train.model.decode import DraftDecoder
from eagle31_train.model.drafter import Drafter
from eagle31_train.model.rope import stretched
from eagle31_train.rows.formats import messages_of
from eagle31_train.store import Store
from eagle31_train.store.backends import open_storage
from eagle31_train.store.reader import StoreSplit
from eagle31_train.store.shard_plan import SPLITS
from eagle31_train.targets.cached import CachedTarget
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.hf import DTYPES, load_model, read_config, served_positions

Prompt = str | list[dict[str, Any]] | list[int]  # a user's words, messages, or token ids


@dataclass(frozen=True)
class Sample:
    """One conversation of T tokens with the target's decoded states: A auxiliary layers, hidden size H, bfloat16.

    tokens [T] int64; loss_mask [T] bool, true where the assistant wrote the token; supervised [M] int64, positions
    whose distribution the drafter learns; aux [n, A, H], states of the first n positions, those that a draft may
    attend to; last [M, H], last hidden states at the supervised positions, before the final norm.
    """

    tokens: Tensor
    loss_mask: Tensor
    supervised: Tensor
    aux: Tensor
    last: Tensor


@dataclass(frozen=True)
class OpenStore:
    """A store opened for reading by `open_store`. aux_layers: the layers whose inputs are in `Sample.aux`."""

    store: Store
    aux_layers: list[int]

    def count(self, split: str) -> int:
        """Return the number of samples in a split, train or heldout."""
        return len(self._split(split))

    def sample(self, split: str, index: int) -> Sample:
        """Return one sample with its states decoded.

        Raises:
            UserError: no such split, or its shard is missing or damaged.
            IndexError: no such sample.
        """
        document = self._split(split).read(index)
        aux, last = document.aux.decode(), document.last.decode()
        return Sample(document.tokens, document.loss_mask, document.supervised, aux, last)

    def _split(self, name: str) -> StoreSplit:
        if name not in SPLITS:
            raise UserError(f"a store has the splits {' and '.join(SPLITS)}, and none named {name!r}")
        return self.store.split(name)


def open_store(where: str | Path, cache_dir: str | Path = "store-cache", cache_bytes: int = 64 * 10**9) -> OpenStore:
    """Open a complete store: a folder, or a URL such as s3://bucket/store.

    Args:
        cache_dir, cache_bytes: folder for local copies of a URL's shards, and their maximum total size.

    Raises:
        UserError: there is no store, or it is not finished.
    """
    store = Store(open_storage(str(where), Path(cache_dir), cache_bytes))
    return OpenStore(store, store.states["aux_layers"])


@dataclass(frozen=True)
class Generation:
    """An answer: text and token ids, how many drafted tokens each verification accepted, and the seconds it took."""

    text: str
    tokens: list[int]
    accepted: list[int]
    seconds: float

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per verification, the target's own included; 1 without any draft."""
        return 1 + sum(self.accepted) / max(len(self.accepted), 1)


@dataclass(repr=False)
class Speculator:
    """A drafter and its target in memory; made by `load`.

    target_ids: [Vd] int64, the target's token for each row of the drafter's lm_head. ends: tokens that end an answer.
    longest: positions that both models have, None if unlimited.
    """

    target: CachedTarget
    drafter: Drafter
    target_ids: Tensor
    template: ChatTemplate
    ends: list[int]
    longest: int | None

    @classmethod
    def load(
        cls, drafter: str | Path, target: str | Path, *, dtype: str = "float32", device: str = "auto", **options: Any
    ) -> "Speculator":
        """Load a drafter (a run, an exported or published checkpoint, a hub id) and its target (a folder or hub id).

        Args:
            dtype: precision of all computation. A run's weights are first rounded to its target's dtype, as for
                serving. In float32, outputs equal the target's own greedy ones, token for token.
            options: further `target.*` options, as in a recipe: revision, trust_remote_code, … The chat template and
                its variables default to the run's.

        Raises:
            UserError: one of them cannot be read, they do not belong together, or there is no such option.
        """
        dtype = str(dtype).removeprefix("torch.")
        check_value("dtype", dtype, {"choices": DTYPES})
        given = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
        try:
            config = foreign.typed(TargetConfig, {"path": str(target), "dtype": dtype, "device": str(device), **given})
        except ValueError as error:
            known = ", ".join(each.name for each in fields(TargetConfig))
            raise UserError(f"Speculator.load takes target.* options, {known}: {error}") from None
        checkpoint = DrafterCheckpoint.open(drafter, target_layers=lambda: read_config(config).num_hidden_layers)
        checkpoint.check_target(config)
        for name in {"chat_template", "template_args"} - options.keys():
            if checkpoint.options_folder and (own := option(checkpoint.options_folder, f"target.{name}")):
                setattr(config, name, OmegaConf.to_object(own) if OmegaConf.is_config(own) else own)
        cached = CachedTarget(load_model(config), checkpoint.shape.aux_layers)
        own = option(checkpoint.train, "target.dtype") if checkpoint.train else None
        loaded = checkpoint.load(cached, DTYPES[own or dtype], DTYPES[dtype])  # rounds a run's weights as for serving
        ids = torch.from_numpy(checkpoint.vocab.target_ids).to(cached.device)
        chat = ChatTemplate.load(config)
        shape = checkpoint.shape
        limits = served_positions(cached.model.config), stretched(shape.max_position_embeddings, shape.rope_scaling)
        longest = min((limit for limit in limits if limit), default=None)
        return cls(cached, loaded, ids, chat, chat.end_ids, longest)

    @torch.inference_mode()
    def draft(self, prompt: Prompt, count: int = 3) -> list[int]:
        """Return the `count` tokens that the drafter proposes after the target's first one; raises as `generate`."""
        _check_count("count", count)
        ids, _ = self._ids_and_room(prompt, count)
        self.target.reset()
        aux, logits = self.target.read([ids], 1)
        decoder = DraftDecoder(self.drafter, self.target_ids, len(ids) + count)
        decoder.extend(aux[0], torch.tensor([*ids[1:], int(logits[0, -1].argmax())], device=self.target.device))
        return decoder.propose(count)[0].tolist()

    @torch.inference_mode()
    def generate(self, prompt: Prompt, num_speculative_tokens: int = 3, max_new_tokens: int = 128) -> Generation:
        """Answer greedily, verifying `num_speculative_tokens` drafted tokens at a time.

        An answer ends with an end token, after `max_new_tokens`, or when the target or the drafter is out of positions.

        Raises:
            UserError: a count is below 1, or the prompt is empty, has tokens that the target lacks, or leaves no
                positions.
        """
        _check_count("num_speculative_tokens", num_speculative_tokens)
        _check_count("max_new_tokens", max_new_tokens)
        ids, room = self._ids_and_room(prompt, num_speculative_tokens)
        limits = decoding.Limits(min(max_new_tokens, room), frozenset(self.ends))
        (done,) = decoding.decode_speculative(
            self.target, self.drafter, self.target_ids, [ids], num_speculative_tokens, limits
        )
        text = str(self.template.tokenizer.decode(done.tokens, skip_special_tokens=True))
        return Generation(text, done.tokens, done.accepted, done.seconds)

    def score(
        self, prompts: Iterable[Prompt], num_speculative_tokens: int = 3, max_new_tokens: int = 128
    ) -> dict[str, Any]:
        """Return the acceptance length on some prompts, and the acceptance at each depth.

        The length is [value, low, high], with a 95 % interval for five or more prompts. Acceptance at depth k is the
        share of drafts whose first k tokens were accepted, None if every answer ended before a draft. UserError for no
        prompts, or for a single text or row, whose letters or columns would be the prompts.
        """
        several = isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | Mapping)
        given = [one.item() if isinstance(one, np.generic) else one for one in prompts] if several else []
        if not given or any(isinstance(one, int) or getattr(one, "ndim", 1) == 0 for one in given):
            raise UserError("score needs a list with at least one prompt: put a single one into a list")
        answers = [self.generate(prompt, num_speculative_tokens, max_new_tokens) for prompt in given]
        gained = [[sum(answer.accepted) + len(answer.accepted)] for answer in answers]
        accepted = [count for answer in answers for count in answer.accepted]
        reached = [sum(count >= depth for count in accepted) for depth in range(1, num_speculative_tokens + 1)]
        return {
            "acceptance_length": intervals.ratios(gained, [len(answer.accepted) for answer in answers]).intervals()[0],
            "acceptance_at_depth": [count / len(accepted) if accepted else None for count in reached],
            "prompts": len(answers),
            "tokens": sum(len(answer.tokens) for answer in answers),
        }

    def ids(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids, by the target's chat template. An array or tensor may be a batch of one."""
        given: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        parts: list[Any] = list(given) if isinstance(given, list | tuple) else [None]
        parts = [one.item() if hasattr(one, "item") else one for one in parts]  # NumPy or torch scalars
        if len(parts) == 1 and isinstance(parts[0], list):
            parts = parts[0]
        if all(type(one) is int for one in parts):
            return parts
        if not all(isinstance(one, dict) for one in parts):
            raise UserError(
                "a prompt must be a text, a list of messages or a list of token ids, and no mixture of these"
            )
        try:
            return self.template.prompt_ids(messages_of({"messages": parts}, "messages"))
        except Refused as error:
            raise UserError(f"the prompt cannot be rendered: {error}") from None

    def _ids_and_room(self, prompt: Prompt, drafted: int) -> tuple[list[int], int]:
        """Return a prompt's ids and how many tokens can follow it, with `drafted` of them drafted at a time."""
        ids, vocabulary = self.ids(prompt), self.target.embedding.weight.shape[0]
        if unknown := [one for one in ids if not 0 <= one < vocabulary]:
            raise UserError(f"the prompt has token {unknown[0]}, but the target's tokens are 0 to {vocabulary - 1}")
        if not ids:
            raise UserError("the prompt has no tokens")
        room = sys.maxsize if self.longest is None else self.longest - len(ids) - drafted
        if room < 1:
            wanted = f"a prompt of {len(ids)} tokens and {drafted} to draft"
            where = f"the {self.longest} positions of target and drafter"
            raise UserError(f"{wanted} leave no room for an answer in {where}: shorten the prompt")
        return ids, room


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int | np.integer) or value < 1:
        raise UserError(f"{name}={value!r} must be a whole number of at least 1")
