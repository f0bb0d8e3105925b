"""Reads a published EAGLE 3 or 3.1 drafter: config.json and safetensors, in any spelling that vLLM accepts.

`contract.py` has the spellings of tensors, `published_config.py` those of fields. Nothing is ever unpickled.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle31_train.checkpoint import contract, published_config
from eagle31_train.common import foreign
from eagle31_train.common.errors import UserError
from eagle31_train.config import DrafterShape
from eagle31_train.model.vocab import DraftVocab

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
NORM_OF_SGLANG = "hidden_norm.weight"  # its name for the norm of the state in layers above the first
# RoPE tables that old trainers saved, and that vLLM ignores.
TABLES = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def read(
    folder: Path, target_layers: Callable[[], int] | None, counted: str | None = None
) -> tuple[DrafterShape, DraftVocab, dict[str, Tensor], str | None]:
    """Read config.json and memory-map the tensors. (`contract` checks that they are complete.) Raise UserError if the
    drafter is damaged, of another kind, or contradicts itself. Arguments: see `shape_from_config`.

    Returns:
        Shape; the target's id of each row of lm_head; tensors by canonical names, mapped from the files, of any float
        dtype, without d2t and t2d, and without lm_head.weight if the target's is meant; path or hub id of the target,
        if config.json names it.
    """
    config, tensors = _read_object(folder / CONFIG), _read_tensors(folder)
    if "fc.weight" in tensors and "midlayer.hidden_norm.weight" not in tensors:  # config.json does not tell
        raise UserError("midlayer.hidden_norm.weight is missing, so this is not an EAGLE 3 drafter (EAGLE 1 or 2?)")
    shape = published_config.shape_from_config(config, tensors, target_layers, counted)
    tensors = contract.separate(tensors, shape)
    d2t = tensors.pop("d2t", None)
    vocab, order = _vocabulary(d2t, tensors.pop("t2d", None), shape)
    if "_torchspec_version" in config and d2t is not None and "lm_head.weight" in tensors:
        # TorchSpec's `--prune-vocab` takes row d2t[i] of lm_head for draft token i: one row for all with that offset.
        head, alike = tensors["lm_head.weight"], (d2t[1:] == d2t[:-1]).nonzero()[:64, 0]
        if len(alike) and torch.equal(head[alike], head[alike + 1]):
            raise UserError("lm_head has repeated rows, as from TorchSpec's --prune-vocab: convert again without it")
    norm, target = tensors.get("norm.weight", torch.zeros(1)), published_config.target_name(config)
    # SpecForge names no target, and does not write norms of 8 bits.
    if target is None and config.get("norm_output") is False and norm.element_size() > 1 and (norm == 1).all():
        raise UserError(
            "norm.weight is all ones, as SpecForge writes it, but vLLM uses it: train with norm_output=true"
        )
    if order is not None and "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    return shape, vocab, tensors, target


def check_served(folder: Path) -> None:
    """Raise UserError for a drafter whose config.json is damaged, or that vLLM could not load."""
    published_config.check_served(_read_object(folder / CONFIG))


def drafts_in_parallel(folder: Path) -> bool:
    """Return whether vLLM can draft in parallel with this drafter, judging by its weights. A mask token in config.json
    proves nothing: a chain's may name the tokenizer's. Raise UserError for damaged files."""
    return "mask_hidden" in _read_tensors(folder)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return foreign.read_object(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path.name} is missing or damaged ({error}): get it again") from None


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of the folder's safetensors, or of those that an index names, by its canonical name."""
    files = sorted(folder.glob("*.safetensors"))
    if os.path.lexists(folder / INDEX):  # even a broken link is not ignored
        try:
            places = foreign.typed(dict[str, str], _read_object(folder / INDEX).get("weight_map"))
        except ValueError as error:
            raise UserError(f"weight_map of {INDEX} does not map names to files ({error}): get it again") from None
        files = [folder / Path(name).name for name in sorted(set(places.values()))]
    if not files:
        if any(folder.glob("*.bin")):
            raise UserError("it has no *.safetensors, and pickles (pytorch_model.bin) are never opened: convert it")
        raise UserError("it has no *.safetensors: get the rest of it, or another drafter (pickles are never opened)")
    tensors: dict[str, Tensor] = {}
    norms: dict[str, Tensor] = {}
    for file in files:
        try:
            foreign.check_file(file, None)
            part = load_file(file)
        except (OSError, *foreign.NO_TENSORS) as error:
            raise UserError(f"{file.name} is missing or damaged ({error}): get it again") from None
        for name, tensor in part.items():
            canonical = contract.canonical_name(name)
            if canonical in tensors:
                raise UserError(f"{canonical} occurs twice, once as {name} in {file.name}: remove one of them")
            if canonical.startswith("layers.") and canonical.endswith(f".{NORM_OF_SGLANG}"):
                norms[canonical.replace(NORM_OF_SGLANG, "input_layernorm.weight")] = tensor
            elif not any(table in canonical for table in TABLES):
                tensors[canonical] = tensor
    for name, norm in norms.items():
        if not torch.equal(tensors.setdefault(name, norm), norm):
            raise UserError(f"{name} differs from {NORM_OF_SGLANG} (SGLang's): remove the one that was not trained")
    return tensors


def _vocabulary(d2t: Tensor | None, t2d: Tensor | None, shape: DrafterShape) -> tuple[DraftVocab, Tensor | None]:
    """Return the draft vocabulary, and the order that sorts lm_head's rows by target id, None if they are sorted. (vLLM
    accepts any order.)"""
    Vd, V = shape.draft_vocab_size, shape.vocab_size
    if d2t is None:
        if Vd != V:
            raise UserError(f"d2t is missing, which must map {Vd} draft tokens to the target's {V}: get it again")
        return DraftVocab(np.arange(V, dtype=np.int64), V), None
    if d2t.shape != (Vd,) or d2t.is_floating_point() or d2t.is_complex():
        raise UserError(f"d2t is {list(d2t.shape)} {d2t.dtype}, but must be [{Vd}] integers")
    ids = d2t.long() + torch.arange(Vd)
    order = ids.argsort()
    vocab = DraftVocab(ids[order].numpy(), V)
    if t2d is not None and not np.array_equal(vocab.t2d, t2d.bool().numpy()):
        raise UserError("d2t and t2d contradict each other: d2t must be the offset target id - draft id")
    return vocab, order if (ids[1:] < ids[:-1]).any() else None
