"""Makes a trained drafter smaller for serving: a shorter attention (`export_sliding_window`), fewer draft tokens
(`export_vocab_size`).

The first gains acceptance in long contexts, the second costs some. `evaluate` and `export` take the same drafter from
here, so the card's numbers are those of the drafter that is served. The trained weights stay as they are.
"""

import dataclasses
from pathlib import Path

import torch

from eagle31_train.checkpoint import contract
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.common import artifacts
from eagle31_train.common.console import note
from eagle31_train.common.errors import UserError
from eagle31_train.config import Config
from eagle31_train.model import vocab
from eagle31_train.rows import samples


def served(config: Config) -> DrafterCheckpoint:
    """Return the drafter to evaluate and export: that of the finished run, made as small as the options say. Raise
    UserError if training is not finished or damaged, the options would drop nothing, vLLM would not serve the result,
    or the data that says which tokens are used is missing or not the run's."""
    checkpoint = DrafterCheckpoint.of_run(Path(config.run_dir), config.data_folder)
    wanted, has = config.data.draft_vocab_size, checkpoint.shape.draft_vocab_size
    if wanted is not None and wanted < has:
        note(f"data.draft_vocab_size={wanted} has no effect after training, with {has}: set export_vocab_size={wanted}")
    if config.export_sliding_window is not None:
        checkpoint = windowed(checkpoint, config.export_sliding_window)
    if config.export_vocab_size is not None:
        checkpoint = pruned(checkpoint, config.export_vocab_size, config.data_folder)
    return checkpoint


def windowed(checkpoint: DrafterCheckpoint, window: int) -> DrafterCheckpoint:
    """Return the drafter with attention to the last `window` positions only, its own included, in every layer."""
    before = checkpoint.shape.sliding_window
    if before is not None and window >= before:
        raise UserError(
            f"export_sliding_window={window} must be below the drafter's window, {before}: lower or remove it"
        )
    shape = dataclasses.replace(checkpoint.shape, sliding_window=window)
    if problems := contract.check_shape(shape):
        raise UserError(f"export_sliding_window={window}: {problems[0]}")
    return dataclasses.replace(checkpoint, shape=shape, smaller={"sliding_window": window})


def pruned(checkpoint: DrafterCheckpoint, size: int, data: Path) -> DrafterCheckpoint:
    """Return the drafter with the `size` draft tokens that the assistant wrote most in training. Tokens that end
    answers stay."""
    manifest = artifacts.read_json(data / artifacts.MANIFEST, "eagle31 data")
    checkpoint.check_data(manifest, data)
    before = checkpoint.vocab
    if size >= len(before):
        raise UserError(
            f"export_vocab_size={size} must be below the drafter's {len(before)} draft tokens: lower or remove it"
        )
    counts = vocab.count(samples.masked(data / "dataset", "train"), before.target_size)
    ends = [rank for rank, token in enumerate(before.target_ids.tolist()) if token in manifest["end_ids"]]
    if size <= len(ends):
        raise UserError(f"export_vocab_size={size} leaves only tokens that end an answer: raise it")
    rows = vocab.choose(counts[before.target_ids], ends, size).target_ids
    kept = vocab.DraftVocab(before.target_ids[rows], before.target_size)
    written, reached = (int(counts[one.target_ids].sum()) for one in (before, kept))
    note(
        f"kept {size:,} of {len(before):,} draft tokens, with {reached / max(written, 1):.2%} of their uses in training"
    )
    head = checkpoint.tensors["lm_head.weight"][torch.from_numpy(rows)]
    return dataclasses.replace(
        checkpoint,
        shape=dataclasses.replace(checkpoint.shape, draft_vocab_size=size),
        vocab=kept,
        smaller={**(checkpoint.smaller or {}), "vocab": artifacts.fingerprint(kept.target_ids.tolist())},
        _mapped={**checkpoint.tensors, "lm_head.weight": head},
    )
