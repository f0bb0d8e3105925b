"""The stage: read, regenerate if asked, mask, split, count, and write `run_dir/data` whole or not at all."""

import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.collect import Collected, collect
from data_prep.regenerate import refused_prompts, regenerate
from data_prep.sources import Source, open_sources, read
from data_prep.template import ChatTemplate
from eagle31_train import artifacts, vocab
from eagle31_train.schema import Config, DataConfig, UserError

LAYOUT = 1  # raise it when the meaning of what is written changes
NAMED = 5  # refused conversations that the summary names; the manifest names all


def prepare(config: Config) -> None:
    """Make `run_dir/data`: the data set, the draft vocabulary and the manifest.

    Raises:
        UserError: see `open_sources`, `read`, `ChatTemplate.load`; also when nothing is left to
            learn, a split is empty, or `run_dir/data` holds something else.
    """
    started = time.monotonic()
    data, folder = config.data, config.data_folder.resolve()
    _check(data)
    template = ChatTemplate.load(config.target)
    if config.regenerate:
        sources = open_sources(str(regenerate(config, template)), data.split, "data.prompts")
        asked, form = refused_prompts(Path(config.run_dir)), "messages"
    elif data.conversations is None:
        raise UserError("no conversations: set data.conversations, or data.prompts and regenerate=true")
    else:
        sources = open_sources(data.conversations, data.split, "data.conversations")
        asked, form = [], data.format
    vocab_size = template.vocabulary(config.target)
    inputs = _inputs(data, template, vocab_size, sources, form)
    wanted = artifacts.fingerprint(inputs)
    ours = (folder / artifacts.MANIFEST).is_file()
    if artifacts.finished(folder, wanted, inputs, config.overwrite):
        print(f"data: {folder} is up to date")
        return
    if not ours and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        # commit() replaces the folder, and without our manifest what it holds may be the user's own.
        raise UserError(f"{folder} exists and is no output of this stage: move it away or choose run_dir=…")
    collected = collect(read(sources, form), template, data.max_length, data.heldout)
    collected.refused = asked + collected.refused
    _check_splits(collected, data.heldout)
    if data.shuffle is not None:
        collected.splits["train"].shuffle(data.shuffle)
    manifest = _write(folder, collected, template, vocab_size, data, inputs, started)
    print(summary(folder, manifest))


def _check(data: DataConfig) -> None:
    if not 0 <= data.heldout < 1:
        raise UserError(f"data.heldout={data.heldout} is not in [0, 1)")
    if data.max_length < 2:
        raise UserError(f"data.max_length={data.max_length} leaves nothing to learn: set at least 2")


def _inputs(
    data: DataConfig, template: ChatTemplate, vocab_size: int, sources: list[Source], form: str
) -> dict[str, Any]:
    return {
        "layout": LAYOUT,
        "sources": [[source.name, source.fingerprint] for source in sources],
        "format": form,
        **template.fingerprints(),
        "vocab_size": vocab_size,
        "max_length": data.max_length,
        "heldout": data.heldout,
        "shuffle": data.shuffle,
        "draft_vocab_size": data.draft_vocab_size,
        "draft_vocab_coverage": data.draft_vocab_coverage,
    }


def _check_splits(collected: Collected, heldout: float) -> None:
    sizes = {name: len(split.ids) for name, split in collected.splits.items()}
    if not sum(sizes.values()):
        reasons = Counter(entry["reason"] for entry in collected.refused)
        told = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(3)) or "no rows"
        raise UserError(f"no conversation is left to learn from ({told})")
    if not sizes["train"]:
        raise UserError(f"data.heldout={heldout} holds out every prompt: lower it or give more prompts")
    if heldout > 0 and not sizes["heldout"]:
        raise UserError(
            f"data.heldout={heldout} holds out none of {sizes['train']} conversations: raise it, or set it to 0"
        )


def _write(
    folder: Path,
    collected: Collected,
    template: ChatTemplate,
    vocab_size: int,
    data: DataConfig,
    inputs: dict[str, Any],
    started: float,
) -> dict[str, Any]:
    """Build the folder under another name, manifest last, then give it its own."""
    counts = {name: split.token_counts(vocab_size) for name, split in collected.splits.items()}
    draft = vocab.choose(counts["train"], template.special_ids(), data.draft_vocab_size, data.draft_vocab_coverage)
    temporary = folder.with_name(f".{folder.name}.tmp")
    if temporary.exists():  # left by a run that was killed
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    vocab.write(temporary / "vocab.safetensors", draft)
    splits = collected.datasets()
    # An empty split would be given no file, and then not load: one file at least.
    shards = {name: None if len(split) else 1 for name, split in splits.items()}
    splits.save_to_disk(str(temporary / "dataset"), num_shards=shards)
    manifest = {
        "fingerprint": artifacts.fingerprint(inputs),
        "inputs": inputs,
        "dataset_fingerprint": artifacts.fingerprint(
            [split.fingerprint(name) for name, split in collected.splits.items()]
        ),
        "splits": {name: split.summary() for name, split in collected.splits.items()},
        "draft_vocab": {
            "size": len(draft),
            "target_size": vocab_size,
            "seen_in_train": int((counts["train"] > 0).sum()),
            "coverage": {name: coverage(count, draft) for name, count in counts.items()},
        },
        "end_ids": template.end_ids,
        "refused": collected.refused,
        "cut": collected.cut,
        "no_end_of_turn": collected.no_end_of_turn,
        "split_turns": collected.split_turns,
        "inserted": collected.inserted,
        "files": artifacts.list_files(temporary, [file for file in temporary.rglob("*") if file.is_file()]),
        "seconds": round(time.monotonic() - started, 2),
    }
    artifacts.write_json(temporary / artifacts.MANIFEST, manifest)
    artifacts.commit(temporary, folder)
    return manifest


def coverage(counts: NDArray[np.int64], draft: vocab.DraftVocab) -> float | None:
    """Share of counted tokens that the draft vocabulary holds; None where nothing was counted."""
    total = int(counts.sum())
    return int(counts[draft.target_ids].sum()) / total if total else None


def summary(folder: Path, manifest: dict[str, Any]) -> str:
    """What the user reads at the end."""
    lines = [f"data: {folder} in {manifest['seconds']} s"]
    for name, split in manifest["splits"].items():
        share = manifest["draft_vocab"]["coverage"][name]
        covered = "" if share is None else f", {share:.2%} within the draft vocabulary"
        lines.append(
            f"  {name:<8} {split['conversations']:>7,} conversations, {split['tokens']:>11,} tokens, "
            f"{split['assistant_tokens']:>11,} of the assistant{covered}"
        )
    draft = manifest["draft_vocab"]
    lines.append(
        f"  draft vocabulary {draft['size']:,} of {draft['target_size']:,} tokens "
        f"({draft['seen_in_train']:,} occur in the training answers)"
    )
    lines.append(f"  cut at max_length: {manifest['cut']}; answers without end of turn: {manifest['no_end_of_turn']}")
    if manifest["split_turns"]:
        lines.append(
            f"  made one sample per answer, since the template rewrites history: {manifest['split_turns']} "
            f"conversations; answers that it begins with an empty thought: {manifest['inserted']}"
        )
    lines.append(f"  REFUSED: {len(manifest['refused'])}" if manifest["refused"] else "  refused: 0")
    for reason, count in Counter(entry["reason"] for entry in manifest["refused"]).most_common():
        lines.append(f"    {count} × {reason}")
    for entry in manifest["refused"][:NAMED]:
        lines.append(f"    {entry['id']} ({entry['where']}): {entry['reason']}")
    return "\n".join(lines)
