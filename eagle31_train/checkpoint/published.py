"""The files of a published EAGLE 3 or 3.1 draft: config.json and safetensors, in any spelling that vLLM takes.

What names and fields may be called stands in `contract.py` and `config_json.py`. Nothing is ever unpickled.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle31_train import foreign
from eagle31_train.checkpoint import config_fields, config_json, contract
from eagle31_train.config import DrafterShape
from eagle31_train.errors import UserError
from eagle31_train.model.vocab import DraftVocab

CONFIG, INDEX = "config.json", "model.safetensors.index.json"


def read(
    folder: Path, target_layers: Callable[[], int] | None
) -> tuple[DrafterShape, DraftVocab, dict[str, Tensor], str | None]:
    """Read config.json and map the tensors; whether they are all of a drafter, `contract` knows.

    Args:
        folder: with config.json and safetensors.
        target_layers: gives the layers of the target, and is asked only where vLLM would count them.

    Returns:
        Shape; the target's id of each row of lm_head; tensors by canonical names, mapped from the files, of any float
        dtype, without maps, and without lm_head.weight where the target's own is meant; path or hub id of the target,
        where config.json says it.

    Raises:
        UserError: it is damaged, of another kind, or says one thing in two ways that differ.
    """
    config = _read_object(folder / CONFIG)
    config_fields.check(config)
    tensors = _canonical(_read_tensors(folder))
    _refuse_older(tensors)
    depth = target_layers() if target_layers and config_json.leaves_layers_open(config) else None
    shape = config_json.shape_from_config(config, tensors, depth)
    tensors = contract.separate(tensors, shape)
    vocab, order = _vocabulary(tensors.pop("d2t", None), tensors.pop("t2d", None), shape)
    if order is not None and "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    return shape, vocab, tensors, config_json.target_name(config)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return foreign.read_object(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path.name} is missing or damaged ({error}): get it again") from None


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's safetensors, or of those that an index names."""
    files, listed = sorted(folder.glob("*.safetensors")), set()
    if os.path.lexists(folder / INDEX):  # even a link to nowhere is not passed over
        try:
            places = foreign.typed(dict[str, str], _read_object(folder / INDEX).get("weight_map"))
        except ValueError as error:
            raise UserError(f"weight_map of {INDEX} names no files ({error}): get it again") from None
        files, listed = [folder / Path(name).name for name in sorted(set(places.values()))], set(places)
    if not files:
        raise UserError(
            "no *.safetensors there, and a pytorch_model.bin is a pickle, which may run code and is not opened: "
            "convert it with safetensors.torch.save_file, or take a repository that holds safetensors"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            foreign.check_file(file, None)
            with safe_open(file, "pt") as opened:
                part = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"{file.name} is missing or damaged ({error}): get it again") from None
        if twice := tensors.keys() & part.keys():
            raise UserError(f"{min(twice)} is in two files: remove the one that does not belong there")
        tensors |= part
    if lacking := listed - tensors.keys():
        raise UserError(f"{min(lacking)} is listed in {INDEX} but in none of its files: get them again")
    return tensors


def _canonical(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if contract.is_idle(canonical := contract.canonical_name(name)):
            continue
        if canonical in named:
            raise UserError(f"{canonical} is there twice, once as {name}: remove one of them")
        named[canonical] = tensor
    return named


def _refuse_older(tensors: dict[str, Tensor]) -> None:
    """EAGLE 1 and 2 name their layer alike, and their config.json does not tell."""
    if "fc.weight" in tensors and "midlayer.hidden_norm.weight" not in tensors:
        raise UserError(
            "a drafter of EAGLE 1 or 2 (one state of the target beside the embedding, no hidden_norm): "
            "only EAGLE 3 and 3.1 drafters, which read several layers, can be continued"
        )


def _vocabulary(d2t: Tensor | None, t2d: Tensor | None, shape: DrafterShape) -> tuple[DraftVocab, Tensor | None]:
    """The draft vocabulary, and the order that puts lm_head's rows by target id where they are not (vLLM takes any)."""
    Vd, V = shape.draft_vocab_size, shape.vocab_size
    if d2t is None:
        if Vd < V:
            raise UserError(f"d2t is missing though the vocabulary is pruned ({Vd} of {V}): its rows name no tokens")
        return DraftVocab(np.arange(V, dtype=np.int64), V), None
    if d2t.shape != (Vd,) or d2t.is_floating_point() or d2t.is_complex():
        raise UserError(f"d2t {list(d2t.shape)} {d2t.dtype} is no map of {Vd} draft tokens")
    offsets = d2t.long()
    ids = offsets + torch.arange(Vd)
    if not _are_tokens(ids, t2d, V):
        ids_given = _are_tokens(offsets, t2d, V)
        what = "holds target ids" if ids_given else f"names no {Vd} different tokens of {V}, those of t2d"
        raise UserError(f"d2t {what}: vLLM reads offsets, target id = draft id + d2t")
    order = ids.argsort()
    return DraftVocab(ids[order].numpy(), V), order if (ids[1:] < ids[:-1]).any() else None


def _are_tokens(ids: Tensor, t2d: Tensor | None, V: int) -> bool:
    """Whether these are different tokens of a target of V, and, where t2d is there, those that it marks."""
    if ids.min() < 0 or ids.max() >= V or len(ids.unique()) < len(ids):
        return False
    marked = torch.zeros(V, dtype=torch.bool)
    marked[ids] = True
    return t2d is None or (t2d.shape == (V,) and torch.equal(t2d.bool(), marked))
