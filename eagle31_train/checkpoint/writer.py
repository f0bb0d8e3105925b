"""An exported drafter, as vLLM loads it: RUN/export/ with config.json and model.safetensors, and RUN/export.json.

The record lies beside the folder, not in it: every file of the folder is for vLLM or the hub.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from eagle31_train import artifacts
from eagle31_train.checkpoint import config_json, contract
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.checkpoint.run_folder import MODEL, TRAIN
from eagle31_train.config import Config, DrafterShape
from eagle31_train.errors import UserError
from eagle31_train.store.tensors import save_file

EXPORT = "eagle31 export"
RECORD = "export.json"


def write_checkpoint(checkpoint: DrafterCheckpoint, shape: DrafterShape, config: Config, folder: Path) -> None:
    """Write what vLLM serves.

    Args:
        shape: the checkpoint's; max_position_embeddings may be another one.
        config: its target, to whose dtype the weights are rounded, and the export's format.

    Raises:
        UserError: the weights break the contract in this dtype, or the format has no such drafters.
    """
    dtype = config.target.dtype
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in checkpoint.tensors.items()}
    if contract.map_tensors(shape):
        tensors["d2t"] = torch.from_numpy(checkpoint.vocab.d2t)
        tensors["t2d"] = torch.from_numpy(checkpoint.vocab.t2d)
    contract.require(tensors, shape, str(checkpoint.folder / MODEL))
    if config.export_format == "speculators":
        draft_tokens = config.evaluate.num_speculative_tokens
        fields = config_json.speculators_json(shape, dtype, config.target_name, draft_tokens)
        tensors = {contract.speculators_name(name): tensor for name, tensor in tensors.items()}
    else:
        fields = config_json.config_json(shape, dtype, config.target_name)
    artifacts.write_json(folder / "config.json", fields)
    save_file(tensors, folder / MODEL, metadata={"format": "pt"})
    meant = dataclasses.replace(shape, rope_scaling=config_json.rope_scaling(shape))  # in config.json's words
    if config_json.shape_from_config(fields, {contract.canonical_name(name) for name in tensors}) != meant:
        raise UserError(f"{folder / 'config.json'} does not read back as the drafter's shape: check drafter.*")


def read_record(run: Path) -> dict[str, Any]:
    """The exporter's record of a run. A UserError if nothing was exported, or it is damaged, or has other weights than
    train/, where that is there."""
    record = artifacts.read_json(run / RECORD, EXPORT)
    if damage := artifacts.first_damaged(run, record["files"]):
        raise UserError(f"{damage}: run `{EXPORT}` again")
    if "checkpoint" not in record:
        raise UserError(f"{run / RECORD} is of an earlier version: run `{EXPORT}` again")
    if (run / "train" / artifacts.MANIFEST).is_file():  # vLLM can do without
        train, made_from = artifacts.read_json(run / "train" / artifacts.MANIFEST, TRAIN), record["inputs"]
        weights = train.get("files", {}).get(f"{train['checkpoint']}/{MODEL}", {}).get("sha256")
        if (made_from["train"], made_from["weights"]) != (train["fingerprint"], weights):
            raise UserError(
                f"{run / 'export'} has other weights than {run / 'train'}: run `{EXPORT}` again, with overwrite=true"
            )
    return record
