"""Published drafters: EAGLE 3 and 3.1 in the layout that vLLM serves, in any of the spellings that it takes.

A folder, or a repository of the Hugging Face Hub, with a config.json and safetensors. What names and fields may be
called stands in `contract.py` and `draft_config.py`. Nothing is ever unpickled.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle31_train import contract, draft_config
from eagle31_train.schema import DrafterShape, UserError
from eagle31_train.vocab import DraftVocab

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
WANTED = [CONFIG, INDEX, "*.safetensors"]


@dataclass(frozen=True)
class Draft:
    """A drafter's weights and what they mean.

    where: what to call it in a message.
    tensors: canonical names, of any float dtype, without maps. Without
        lm_head.weight where the target's own is meant.
    vocab: the target's id of each row of lm_head.
    """

    where: str
    shape: DrafterShape
    tensors: dict[str, Tensor]
    vocab: DraftVocab

    def __post_init__(self) -> None:
        found: dict[str, contract.TensorOrShape] = dict(self.tensors)
        if self.vocab.pruned:
            found |= {"d2t": torch.from_numpy(self.vocab.d2t), "t2d": torch.from_numpy(self.vocab.t2d)}
        else:  # whoever has the target's whole vocabulary may share its head, too
            found.setdefault("lm_head.weight", (self.shape.draft_vocab_size, self.shape.hidden_size))
        if problems := contract.check(found, self.shape):
            more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise UserError(f"{self.where} is no whole drafter: {'; '.join(problems[:3])}{more}")


def fetch(repo: str, revision: str | None) -> Path:
    """The folder of a repository of the hub, downloaded or found in the hub's cache; its name is the commit.

    Raises:
        UserError: there is no such repository or revision, or the hub cannot be reached and the cache lacks it.
    """
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=WANTED))
    except RevisionNotFoundError:
        raise UserError(f"the hub repository {repo} has no revision {revision or 'main'}") from None
    except GatedRepoError:
        raise UserError(f"the hub repository {repo} is gated: accept its terms there, and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{repo} is no folder here, and no repository of the hub either, or a private one: check the name, "
            "or set HF_TOKEN"
        ) from None
    except (OSError, ValueError) as error:  # no network, HF_HUB_OFFLINE, a full disk
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{repo} is no folder here, and cannot be had from the hub ({reason}): check the name, the network and "
            "HF_HUB_OFFLINE, or give a folder"
        ) from None


def read(folder: Path, where: str, target_layers: Callable[[], int]) -> Draft:
    """A published draft, once config and tensors are known to fit each other.

    Args:
        folder: with config.json and safetensors.
        where: what to call it in a message.
        target_layers: gives the layers of the target, and is asked only where vLLM would count them.

    Raises:
        UserError: it is damaged, of another kind, or says one thing in two ways that differ.
    """
    try:
        config = _read_config(folder / CONFIG)
        tensors = _canonical(_read_tensors(folder))
        _refuse_older(tensors)
        depth = target_layers() if draft_config.leaves_layers_open(config) else None
        shape = draft_config.shape_from_config(config, tensors, depth)
        tensors = contract.separate(tensors, shape)
        vocab, order = _vocabulary(tensors.pop("d2t", None), tensors.pop("t2d", None), shape)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if order is not None and "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    return Draft(where, shape, tensors, vocab)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path.name} is missing: a published draft is a folder with config.json and safetensors")
    return _read_object(path)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON or of UTF-8
        raise UserError(f"{path.name} is damaged ({error}): get it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path.name} is no JSON object: get it again")
    return value


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's safetensors, or of those that an index names."""
    files, listed = sorted(folder.glob("*.safetensors")), set()
    if (folder / INDEX).is_file():
        places = _read_object(folder / INDEX).get("weight_map")
        if not isinstance(places, dict):
            raise UserError(f"{INDEX} has no weight_map: get it again")
        files, listed = [folder / Path(name).name for name in sorted(set(places.values()))], set(places)
    if not files:
        raise UserError(
            "no *.safetensors there, and a pytorch_model.bin is a pickle, which may run code and is not opened: "
            "convert it with safetensors.torch.save_file, or take a repository that holds safetensors"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                part = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError) as error:
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
        if contract.is_table(name):
            continue
        if (canonical := contract.canonical_name(name)) in named:
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
        if _are_tokens(offsets, t2d, V):
            raise UserError("d2t holds target ids, but vLLM reads offsets: subtract arange(len(d2t)) from it")
        raise UserError(
            f"d2t names no {Vd} different tokens of {V}{'' if t2d is None else ' that t2d names, too'}: "
            "target id = draft id + d2t"
        )
    order = ids.argsort()
    return DraftVocab(ids[order].numpy(), V), order if (ids[1:] < ids[:-1]).any() else None


def _are_tokens(ids: Tensor, t2d: Tensor | None, V: int) -> bool:
    """Whether these are different tokens of a target of V, and, where t2d is there, those that it marks."""
    if ids.min() < 0 or ids.max() >= V or len(ids.unique()) < len(ids):
        return False
    marked = torch.zeros(V, dtype=torch.bool)
    marked[ids] = True
    return t2d is None or (t2d.shape == (V,) and torch.equal(t2d.bool(), marked))
