"""What a plan is made of: the target's sizes, the drafter's shape and the data, counted where they can be."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from eagle31_train import provenance
from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError, first_line
from eagle31_train.config import SELF, Config
from eagle31_train.planning.work import Work, add_up, count_work, made_mask
from eagle31_train.rows import samples
from eagle31_train.rows.files import DAMAGE, count, find_files
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.description import (
    CHOSEN,
    EXPERTS,
    TargetDescription,
    description_of,
    most,
    quantization,
    read_raw,
    text_config,
    whole_config,
)

EXAMPLE = 100_000_000  # tokens to plan for if they are neither counted nor given
LOOKED_AT = 1000  # conversations whose loss masks stand for all of them
MXFP4 = "mxfp4"
QUANTIZED = {"fp8": 8, "fbgemm_fp8": 8, MXFP4: 4, "nvfp4": 4}  # methods and algorithms whose config lacks the bits
LOADED = {"load_in_4bit": 4, "load_in_8bit": 8}
OTHER_BITS = ("activations", "kv_cache")
VISION = ("visual", "vision", "projector")  # parts of parameters' names that no text runs through


@dataclass(frozen=True)
class Parameters:
    """A target's parameters: those that every token is multiplied with, those of all experts, the share of experts that
    a token is sent to, and an input embedding that is not also lm_head, of which a token reads one row."""

    dense: float
    experts: float = 0.0
    chosen: float = 1.0
    embedding: float = 0.0

    @property
    def all(self) -> float:
        return self.dense + self.experts + self.embedding

    @property
    def multiplied(self) -> float:
        return self.dense + self.experts * self.chosen

    @property
    def active(self) -> float:
        """The active parameters, as model cards count them."""
        return self.multiplied + self.embedding


@dataclass(frozen=True)
class Target:
    """The target, its parameters, and the bytes of one: on disk and in vLLM, and as loaded by transformers, which
    unpacks MXFP4 if the package `kernels` is missing."""

    description: TargetDescription
    sizes: Parameters
    weight_bytes: float = 2.0
    loaded_bytes: float = 2.0


@dataclass(frozen=True)
class Data:
    origin: str  # where the numbers are from, in words
    work: Work  # of one pass over the training split
    each: list[Work]  # conversations that stand for all; if uncounted a single one, as if all were equally long
    heldout: float  # tokens held out, as a share of these
    longest: int  # tokens of the longest conversation
    lengths: list[int] | None  # tokens of every training conversation; None if uncounted, or with plan.tokens
    vocabulary: int | None  # Vd, None where it is not known


def read_target(config: Config) -> Target:
    """Read the target from its config.json alone; UserError if it has none, or its parameters cannot be counted."""
    raw = read_raw(config.target)
    text = text_config(raw)
    given = config.plan.target_parameters
    sizes = Parameters(given) if given else count_parameters(text, whole_config(raw))
    path = f"target.path={config.target.path}"
    if sizes is None:
        unknown = f"the parameters of {path} cannot be counted: transformers has no class for {raw['model_type']}"
        raise UserError(f"{unknown}: set plan.target_parameters to those that are active per token, such as 32e9")
    how = quantization(raw)
    stored = weight_bytes(how, config.target.dtype)
    unpacked = how.get("quant_method") == MXFP4 and find_spec("kernels") is None
    return Target(
        description_of(raw, text, path), sizes, stored, weight_bytes({}, config.target.dtype) if unpacked else stored
    )


def weight_bytes(quantization: Any, dtype: str) -> float:
    """Return the bytes of a weight, by config.json's quantization or else by the dtype; `auto` is bf16 on a GPU."""
    widths, inner = [], [quantization]
    while inner:
        if isinstance(value := inner.pop(), dict):
            widths += [value[key] for key in ("bits", "num_bits") if isinstance(value.get(key), int)]
            widths += [QUANTIZED.get(str(value.get(key)).lower()) for key in ("quant_method", "quant_algo")]
            widths += [bits for option, bits in LOADED.items() if value.get(option)]
            inner += [other for key, other in value.items() if not any(part in key for part in OTHER_BITS)]
    widths = [bits for bits in widths if bits]
    return min(widths) / 8 if widths else 4.0 if dtype == "float32" else 2.0


def count_parameters(text: Any, whole: Any = None) -> Parameters | None:
    """Count a target's parameters on a model without storage; None for a kind that transformers does not know.
    whole: the configuration that contains `text`, used if transformers has classes only for that."""
    import torch

    from eagle31_train.targets.hf import has_causal_class, model_class

    config = text if whole is None or has_causal_class(text) else whole
    try:
        with torch.device("meta"):
            model = model_class(config).from_config(config)
    except ValueError:  # no class for it
        return None
    except Exception as error:  # sizes that its class cannot use
        raise UserError(
            f"transformers cannot use the target's config.json ({first_line(error)}): correct it, or copy it again"
        ) from None
    count = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if config is not text:
        count = {name: size for name, size in count.items() if not any(part in name for part in VISION)}
    experts = sum(size for name, size in count.items() if ".experts." in name)
    chosen, of = (next((n for key in keys if (n := most(getattr(text, key, None)))), 1) for keys in (CHOSEN, EXPERTS))
    try:
        first, last = model.get_input_embeddings(), model.get_output_embeddings()
        embedding = 0 if last is None or last.weight is first.weight else first.weight.numel()
    except (AttributeError, NotImplementedError):  # its class names neither
        embedding = 0
    return Parameters(sum(count.values()) - experts - embedding, experts, chosen / of, embedding)


def read_data(config: Config) -> Data:
    """Return the data as `eagle31 data` counted them, if it has run; else as plan.* says, or by the prompts' number."""
    if (config.data_folder / artifacts.MANIFEST).is_file():
        return _counted(config)
    _check_given(config)
    p, d = config.plan, config.data
    length = min(p.sample_tokens, d.max_length)
    if p.tokens is not None:
        tokens, origin = p.tokens, "as plan.* says"
    elif rows := (prompts_at_hand(config) or 0) * (d.generate.samples if config.regenerate else 1):
        tokens = rows * (1 - d.heldout) * length
        origin = f"{rows:,} conversations of {length:,} tokens (plan.sample_tokens), until they are counted"
    else:
        tokens, origin = EXAMPLE, "an EXAMPLE: neither counted (eagle31 data) nor set (plan.tokens)"
    one = count_work([made_mask(length, p.share)], config.train.ttt_length)
    heldout = d.heldout / max(1 - d.heldout, 0.01)
    return Data(origin, one * (tokens / length), [one], heldout, d.max_length, None, d.draft_vocab_size)


def _counted(config: Config) -> Data:
    counted, given = provenance.read_data(config), config.plan.tokens
    train, heldout = counted["splits"]["train"], counted["splits"]["heldout"]
    each, lengths = _look_at(config.data_folder / "dataset", config.train.ttt_length)
    looked = add_up(each)
    work = looked * (train["tokens"] / looked.tokens)
    work = replace(work, conversations=train["conversations"], assistant=train["assistant_tokens"])
    origin = f"as counted in {config.data_folder}"
    if given:
        origin, work = f"plan.tokens, in conversations {origin}", work * (given / work.tokens)
    share = heldout["tokens"] / max(train["tokens"], 1)
    known = None if given else lengths
    return Data(origin, work, each, share, max(lengths), known, counted["draft_vocab"]["size"])


def prompts_at_hand(config: Config) -> int | None:
    """Return how many prompts there are to answer, or conversations to learn; of a mixture, as many as its weights
    allow. None if counting takes a download, or a weight is invalid."""
    d = config.data
    if d.rows:
        return d.rows
    alone = d.prompts if config.regenerate else d.conversations
    sources = d.weighted_paths or ([(alone, 1)] if alone else [])
    known: list[tuple[int, Fraction]] = []
    for path, weight in sources:
        rows = d.self_prompts.count if path == SELF else _rows(path)
        if rows is None or not (isinstance(weight, int | float) and 0 < weight < math.inf):
            return None
        known.append((rows, Fraction(str(weight))))
    whole = sum(weight for _, weight in known)
    return min((rows * whole // weight for rows, weight in known), default=None)


def _check_given(config: Config) -> None:
    """Raise UserError, as `eagle31 data` does, for missing rows and for a local tokenizer without a chat template."""
    option = "data.prompts" if config.regenerate else "data.conversations"
    alone = config.data.prompts if config.regenerate else config.data.conversations
    sources = config.data.source_paths
    for spec in sources or filter(None, [alone]):
        if spec != SELF:
            find_files(spec, "data.sources: path" if sources else option)
    if any(Path(config.target.path).glob("tokenizer*")):
        ChatTemplate.load(config.target)


def _rows(spec: str) -> int | None:
    """Return the rows of local files and folders; None if missing or unreadable, which `eagle31 data` reports."""
    try:
        files = find_files(spec, "data")
        return sum(count(path) for _, path in files) if files else None
    except DAMAGE:
        return None


def _look_at(dataset: Path, ttt_length: int) -> tuple[list[Work], list[int]]:
    """Return the work of some evenly spread training conversations, and the number of tokens of each of all."""
    split = samples.load(dataset, "train")
    lengths = [n for chunk in split.data.column("loss_mask").chunks for n in chunk.value_lengths().to_pylist()]
    rows = np.unique(np.linspace(0, len(split) - 1, min(LOOKED_AT, len(split))).astype(int))
    masks = (np.asarray(split[row]["loss_mask"], dtype=bool) for row in rows.tolist())
    return [count_work([mask], ttt_length) for mask in masks], lengths
