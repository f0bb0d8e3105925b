"""Targets in transformers: loading them, and taking hidden states from hooks on the wanted layers.

Auxiliary layer i means the **input of layer i** (0 = embeddings, N = output of the last layer, before the final
norm), which is vLLM's convention. The last hidden state is the input of the final norm. Both come from forward
pre-hooks, since transformers takes `hidden_states[N]` after that norm.

Shapes: B sequences padded to T; A auxiliary layers; H hidden; V vocabulary.
"""

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from eagle31_train.common.console import ranks
from eagle31_train.common.errors import UserError
from eagle31_train.common.machine import gpus
from eagle31_train.common.transfers import to_device
from eagle31_train.config import TargetConfig
from eagle31_train.model.context_attention import takes_flash
from eagle31_train.model.rope import ORIGINAL, target_positions
from eagle31_train.precision import whole_float32
from eagle31_train.targets.description import pick_layers
from eagle31_train.targets.packed_linear import pack_linears
from eagle31_train.targets.pretrained import from_pretrained, refuse_adapter
from eagle31_train.targets.readout import Readout, find_parts, readout_from_checkpoint, readout_of

LENGTH_ROPES = {"longrope", "dynamic", "su"}  # RoPE types that depend on the length of a batch
BATCH_COST = 128  # padded tokens that one more batch must save; chosen, not measured
PADS = 8  # padding tokens that make the gate's own forward pass take the model's masked path
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """Return the device that target.device names. `auto` is CUDA if available; each of several processes takes its own.

    UserError if there is no such device here, or several processes would share it.
    """
    count = 0 if name == "cpu" else gpus()
    try:
        device = torch.device(name if name != "auto" else "cuda" if count else "cpu")
        if device.type != "cuda":
            torch.empty(0, device=device)  # only torch knows whether a device of another kind is here
            return device
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UserError(f"target.device={name} is not a device here: use cpu, cuda, cuda:N or auto") from None
    if not count:
        raise UserError(f"target.device={name}: there is no CUDA device here: use cpu or auto")
    # A launcher may show each process only its own device: then all may give the same name.
    shared = device.index is not None and ranks() > 1 and count > 1
    if device.index is None and ranks() > 1:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if shared or (device.index or 0) >= count:
        many = f"{ranks()} processes and {count} CUDA devices"
        use = "use target.device=auto and at most one process for each device"
        raise UserError(f"target.device={name} does not fit {many}: {use}")
    return device


def load_model(config: TargetConfig, dtype: str | None = None) -> Any:
    """Load the target as a transformers causal LM in eval mode, on its device or spread over several.

    UserError if target.path holds none, some of its weights are missing, or it cannot be placed as asked.
    """
    if config.device_map and (ranks() > 1 or config.device != "auto"):
        raise UserError("target.device_map spreads one target: start one process, and set target.device=auto")
    refuse_adapter(config)
    whole_float32()
    device = None if config.device_map else pick_device(config.device)
    if device is not None and device.type == "cuda":
        # Quantized weights are unpacked, and some kernels run, on the current device. Load straight to it: otherwise
        # every process of a machine would first hold the whole target in host memory.
        torch.cuda.set_device(device)
    _spare_scores()
    options: dict[str, Any] = {"device_map": config.device_map or {"": device}}
    # Tensors whose size is not the model's are refused below, by name.
    options |= {"dtype": DTYPES[dtype or config.dtype], "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = from_pretrained(model_class(from_pretrained(AutoConfig, config)), config, **options)
    # transformers makes up missing weights, and nothing later could notice: states, fidelity gate and evaluation would
    # all use the same wrong target.
    if wrong := sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}):
        lacks = f"{len(wrong)} of its weights are missing or of another size, such as {wrong[0]}"
        raise UserError(
            f"target.path={config.path}: {lacks}: is it complete, and of the architecture in its config.json?"
        )
    model.eval().requires_grad_(False)
    pack_linears(model)
    return model


@cache
def _spare_scores() -> None:
    """Make transformers repeat shared keys where CUDA's flash kernel does not run: in float32 and before Ampere.

    The other kernel that stores no scores takes no shared keys. So with shared keys, all scores of a conversation would
    be in memory at once: 8.6 GB for 8,192 tokens and 32 heads."""
    from transformers.integrations import sdpa_attention

    name = "use_gqa_in_sdpa"  # not part of its public interface
    if usual := getattr(sdpa_attention, name, None):
        setattr(
            sdpa_attention,
            name,
            lambda mask, key, *rest: usual(mask, key, *rest) and (key.device.type != "cuda" or takes_flash(key, key)),
        )


def has_causal_class(config: Any) -> bool:
    """Return whether transformers has a causal LM for a configuration, by its private table (some versions lack it)."""
    return type(config) in getattr(AutoModelForCausalLM, "_model_mapping", ())


def model_class(config: Any) -> Any:
    """Return the transformers class that loads a target: for some multimodal ones (Mistral 3) it has no causal LM."""
    multimodal = type(config) in getattr(AutoModelForImageTextToText, "_model_mapping", ())
    # The causal LM class may find the target's own code; otherwise it raises its own error for an unknown kind.
    return AutoModelForImageTextToText if multimodal and not has_causal_class(config) else AutoModelForCausalLM


def read_config(config: TargetConfig) -> Any:
    """Return transformers' configuration of the target's text model; UserError if target.path holds none."""
    return from_pretrained(AutoConfig, config).get_text_config()


def positions(config: Any) -> int | None:
    """Return how many positions a target has, by its configuration and in vLLM; None if it sets no limit."""
    config = config.get_text_config()
    return target_positions(getattr(config, "max_position_embeddings", None), config.model_type, _ropes(config))


def served_positions(config: Any) -> int | None:
    """Like `positions`, for vLLM without max_model_len: with a longrope, it then takes only the short contexts."""
    config = config.get_text_config()
    longropes = [rope for rope in _ropes(config) if rope.get("rope_type") == "longrope"]
    shorts: list[int] = [getattr(config, ORIGINAL, None) or rope.get(ORIGINAL) or 0 for rope in longropes]
    return min(shorts, default=0) or positions(config)


class HiddenStateTarget:
    """A transformers model with taps on its residual stream.

    UserError for layer ids that the model lacks, no RMSNorm before lm_head, or a biased lm_head.
    """

    def __init__(self, model: Any, aux_layers: Sequence[int] | None) -> None:
        self.model = model
        self.decoder, layers, self.final_norm, self.embedding, self.head = find_parts(model)
        self.depth = len(layers)
        kinds = model.config.model_type, model.config.get_text_config().model_type
        self.layers = pick_layers(aux_layers, self.depth, kinds)
        # Input of layer N is the input of the final norm.
        self._taps = [layers[i] if i < self.depth else self.final_norm for i in self.layers]

    @property
    def device(self) -> torch.device:
        """The device for input tokens: the embedding's, or another part's if a device map left that on disk."""
        parameters = (self.embedding.weight, *self.model.parameters())
        return next((p.device for p in parameters if not p.is_meta), torch.device("cpu"))

    @cached_property
    def readout(self) -> Readout:
        """What turns the last hidden states into logits; UserError if the final norm is not an RMSNorm."""
        return readout_of(self.model)

    @torch.no_grad()
    def states(self, tokens: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the decoder, without lm_head, on tokens [B, T] int64, padded at the end where the mask is 0. Return aux
        [B, T, A, H] and last [B, T, H] in the target's dtype, meaningless at padding.

        No mask is faster, and gives the same states in a causal decoder, whose tokens do not see padding behind them.
        """
        with self._tapped([*self._taps, self.final_norm]) as caught, unpacked_rows():
            self.decoder(input_ids=tokens, attention_mask=attention_mask, use_cache=False)
        for state in caught.values():
            if state.dim() != tokens.dim() + 1:
                raise UserError(
                    f"this target's layers pass on states of shape {list(state.shape[2:])}, several streams instead "
                    "of one: eagle31 cannot train a drafter for it"
                )
        return self._stacked(caught), caught[len(self._taps)]

    def _stacked(self, caught: dict[int, Tensor]) -> Tensor:
        """Stack what the auxiliary taps caught, [B, T, A, H], on the device of the last one."""
        # The layers of one target may be on several devices (target.device_map).
        device = caught[max(caught)].device
        return torch.stack([caught[i].to(device) for i in range(len(self._taps))], dim=2)

    @contextmanager
    def _tapped(self, taps: Sequence[nn.Module]) -> Iterator[dict[int, Tensor]]:
        """Within this context, each forward pass stores the input of taps[i] under key i."""
        caught: dict[int, Tensor] = {}
        handles = [
            module.register_forward_pre_hook(partial(_catch, caught, index), with_kwargs=True)
            for index, module in enumerate(taps)
        ]
        try:
            yield caught
        finally:
            for handle in handles:
                handle.remove()


_UNPACKED: ContextVar[bool] = ContextVar("unpacked", default=False)
_PACKED = "find_packed_sequence_indices"  # in transformers, but not part of its public interface


@cache
def _patch_packing() -> None:
    from transformers import masking_utils  # slow to import: a stage that is up to date does without

    if find := getattr(masking_utils, _PACKED, None):
        setattr(masking_utils, _PACKED, lambda position_ids: None if _UNPACKED.get() else find(position_ids))


@contextmanager
def unpacked_rows() -> Iterator[None]:
    """Within this context, transformers does not check in this thread whether a row without a mask holds several packed
    sequences. None here does, and the check makes the host wait for the GPU in every forward pass."""
    _patch_packing()
    token = _UNPACKED.set(True)
    try:
        yield
    finally:
        _UNPACKED.reset(token)


def _catch(caught: dict[int, Tensor], index: int, _module: nn.Module, args: tuple, kwargs: dict) -> None:
    caught[index] = args[0] if args else kwargs["hidden_states"]


# ---------------------------------------------------------------- engines of extraction
#
# An engine runs the target over conversations: transformers here, vLLM in `vllm_engine.py`. Both give the same states
# up to the target's own rounding.


@dataclass(frozen=True)
class Reference:
    """The target's own next-token distribution at n positions. `own`: [n, V] fp32 logits or, with `ids` [n, k] int64
    (the most likely tokens among others), [n, k] fp32 log-probabilities of those."""

    own: Tensor
    ids: Tensor | None = None


class Engine(Protocol):
    """What extraction needs of an engine. `longest`: how many tokens a conversation may have; None for no limit."""

    name: str
    readout: Readout
    layers: list[int]

    @property
    def longest(self) -> int | None: ...

    def run(self, tokens: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Run the target over conversations [T] int64. Yield (index, aux [T, A, H], last [T, H]) of each, in any order,
        in the target's dtype, on any device. UserError for a conversation that the engine cannot take."""
        ...

    def reference(self, tokens: Tensor, positions: Tensor) -> Reference:
        """Return the target's own distribution at some positions of a conversation [T], none of them the last."""
        ...


def check_length(engine: Engine, length: int) -> None:
    """UserError if the engine does not take a conversation of `length` tokens."""
    if engine.longest is not None and length > engine.longest:
        advice = f"set data.max_length={engine.longest}, or for vLLM extract.engine_args.max_model_len"
        raise UserError(f"a conversation of {length} tokens is too long for extract.engine={engine.name}: {advice}")


class TransformersEngine:
    """A transformers model in this process, run on batches of conversations of similar length; see `Engine`.

    batch_tokens: padded tokens in one forward pass. readout: taken from the model if not given.
    """

    name = "transformers"

    def __init__(self, target: HiddenStateTarget, readout: Readout | None = None, batch_tokens: int = 4096) -> None:
        self.target = target
        self.readout = target.readout if readout is None else readout
        self.layers = target.layers
        self.batch_tokens = batch_tokens
        # Beyond its positions a model still computes something, but no serving engine would.
        self.longest = positions(target.model.config)
        config = target.model.config.get_text_config()
        # A causal decoder's tokens see no padding at the end: without a mask attention takes its fast path.
        self._causal = getattr(config, "is_causal", True) and not getattr(config, "use_bidirectional_attention", None)
        self._alone = rope_by_length(target.model.config)

    def run(self, tokens: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """See `Engine.run`."""
        device = self.target.device
        lengths = [len(row) for row in tokens]
        for batch in batches_by_length(lengths, 1 if self._alone else self.batch_tokens):
            self._forget_lengths()
            padded = pad_sequence([tokens[i] for i in batch], batch_first=True)
            lengths_B1 = torch.tensor([[len(tokens[i])] for i in batch])
            mask = None if self._causal else to_device((torch.arange(padded.shape[1]) < lengths_B1).long(), device)
            aux, last = self.target.states(to_device(padded, device), mask)
            for row, index in enumerate(batch):
                length = len(tokens[index])
                yield index, aux[row, :length], last[row, :length]

    @torch.no_grad()
    def reference(self, tokens: Tensor, positions: Tensor) -> Reference:
        """See `Engine.reference`. Calls the whole model in the ordinary way, with norm, lm_head and attention mask."""
        model, device = self.target.model, self.target.device
        self._forget_lengths()
        padded = torch.nn.functional.pad(tokens, (0, 0 if self._alone else PADS))[None].to(device)
        mask = (torch.arange(padded.shape[1], device=device) < len(tokens)).long()[None]
        inputs = {"input_ids": padded, "attention_mask": mask, "use_cache": False}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            # CPU positions index a tensor on any device: a spread target's last part is on another one.
            return Reference(model(**inputs, logits_to_keep=positions.cpu()).logits[0].float())
        return Reference(model(**inputs).logits[0, positions].float())  # own code of an older target

    def _forget_lengths(self) -> None:
        """Before each conversation, reset a RoPE that depends on length: it remembers the longest one seen."""
        if not self._alone:
            return
        for module in self.target.model.modules():
            for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
                setattr(module, name, 0)


def load_engine(config: TargetConfig, batch_tokens: int) -> TransformersEngine:
    """Load the target as an engine. Readout weights that a device map left on disk are read from the checkpoint."""
    target = HiddenStateTarget(load_model(config), config.aux_layers)
    offloaded = any(module.weight.is_meta for module in (target.embedding, target.final_norm, target.head))
    readout = readout_from_checkpoint(config, DTYPES[config.dtype]) if offloaded else target.readout
    device = pick_device(config.device) if offloaded else target.head.weight.device
    return TransformersEngine(target, readout.to(device), batch_tokens)


def rope_by_length(config: Any) -> bool:
    """Return whether a target's RoPE depends on a batch's length, padding included: its conversations run alone."""
    return any(each.get(key) in LENGTH_ROPES for each in _ropes(config) for key in ("rope_type", "type"))


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the RoPE settings from wherever a configuration may have them; where layers differ, also those by type."""
    config = config.get_text_config()
    ropes = [getattr(config, name, None) or {} for name in ("rope_parameters", "rope_scaling")]
    return ropes + [value for each in ropes for value in each.values() if isinstance(value, dict)]


def batches_by_length(lengths: Sequence[int], batch_tokens: int, batch_cost: int = BATCH_COST) -> list[list[int]]:
    """Group samples of similar length into batches of at most `batch_tokens`, padding included, in the least time.

    Time is counted in tokens: padded ones, and `batch_cost` for every batch. A sample beyond `batch_tokens` runs alone.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    count = len(order)
    # For the samples before each end: their least time, and where their last batch begins.
    least, begin = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        longest = lengths[order[end - 1]]  # sets the padded width
        begins = np.arange(max(0, end - max(1, batch_tokens // longest)), end)
        times = least[begins] + (end - begins) * longest + batch_cost
        least[end], begin[end] = times.min(), begins[times.argmin()]
    batches: list[list[int]] = []
    while count:
        batches.append(order[begin[count] : count])
        count = int(begin[count])
    return batches[::-1]
