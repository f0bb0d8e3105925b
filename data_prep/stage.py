"""The stage: read, regenerate if asked, mask, split, count, and write `run_dir/data` whole or not at all."""

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.collect import Collected, collect
from data_prep.mixture import Corpus, Part, named
from data_prep.regenerate import answered, regenerate
from data_prep.sources import open_sources
from data_prep.summary import summary
from data_prep.template import ChatTemplate
from eagle31_train import artifacts, vocab
from eagle31_train.schema import Config, DataConfig, UserError
from eagle31_train.tokenizer import vocabulary_fingerprint

LAYOUT = 2  # raise it when the meaning of what is written changes
SHARED_NAMED = 20  # pairs of rows with one prompt that the manifest names


def prepare(config: Config) -> None:
    """Make `run_dir/data`: the data set, the draft vocabulary and the manifest.

    Raises:
        UserError: see `Corpus`, `ChatTemplate.load`; also when nothing is left to learn, of all rows or of
            one of `data.sources`, a split is empty, or `run_dir/data` holds something else.
    """
    started = time.monotonic()
    data, folder = config.data, config.data_folder.resolve()
    _check(data)
    template = ChatTemplate.load(config.target)
    vocab_size = template.vocabulary(config.target)
    # What no counts could fulfil is refused here, and not after hours of answers.
    nothing = np.zeros(vocab_size, dtype=np.int64)
    vocab.choose(nothing, template.special_ids(), data.draft_vocab_size, data.draft_vocab_coverage)
    corpus, asked = _open(config, template)
    inputs = _inputs(data, template, vocab_size, corpus)
    wanted = artifacts.fingerprint(inputs)
    ours = (folder / artifacts.MANIFEST).is_file()
    if artifacts.finished(folder, wanted, inputs, config.overwrite):
        print(f"data: {folder} is up to date")
        return
    if not ours and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        # commit() replaces the folder, and without our manifest what it holds may be the user's own.
        raise UserError(f"{folder} exists and is no output of this stage: move it away or choose run_dir=…")
    collected = collect(corpus.read(), template, data.max_length, data.heldout)
    collected.refused = asked.get("refused", []) + collected.refused
    _check_splits(collected, data)
    if data.shuffle is not None:
        collected.splits["train"].shuffle(data.shuffle)
    rows = asked.get("sources") or corpus.counts
    manifest = _write(folder, collected, rows, template, vocab_size, data, inputs, started)
    print(summary(folder, manifest))


def _open(config: Config, template: ChatTemplate) -> tuple[Corpus, dict[str, Any]]:
    """The conversations; where the target answers first, also the manifest of its answers."""
    if not config.regenerate:
        return Corpus.open(config, "conversations"), {}
    answers = open_sources(str(regenerate(config, template)), config.data.split, "data.prompts")
    return Corpus([Part(answers, "messages")]), answered(Path(config.run_dir))


def _check(data: DataConfig) -> None:
    if (processes := int(os.environ.get("WORLD_SIZE") or 1)) > 1:
        raise UserError(
            f"python -m data_prep is one process, and WORLD_SIZE={processes} is set: start it without a launcher; "
            "several GPUs answer as a server, data.generate.server"
        )
    if not 0 <= data.heldout < 1:
        raise UserError(f"data.heldout={data.heldout} is not in [0, 1)")
    if data.max_length < 2:
        raise UserError(f"data.max_length={data.max_length} leaves nothing to learn: set at least 2")
    if data.shuffle is not None and data.shuffle < 0:
        raise UserError(f"data.shuffle={data.shuffle} is no seed: set 0 or above, or null for the order as read")


def _inputs(data: DataConfig, template: ChatTemplate, vocab_size: int, corpus: Corpus) -> dict[str, Any]:
    return {
        "layout": LAYOUT,
        **corpus.inputs(),
        **template.fingerprints(),
        "vocab_size": vocab_size,
        "max_length": data.max_length,
        "heldout": data.heldout,
        "shuffle": data.shuffle,
        "draft_vocab_size": data.draft_vocab_size,
        "draft_vocab_coverage": data.draft_vocab_coverage,
    }


def _check_splits(collected: Collected, data: DataConfig) -> None:
    heldout = data.heldout
    sizes = {name: len(split.ids) for name, split in collected.splits.items()}
    if not sum(sizes.values()):
        raise UserError(f"no conversation is left to learn from ({_reasons(collected.refused)})")
    for name in named(data):
        if not any(name in split.sources for split in collected.splits.values()):
            refused = [entry for entry in collected.refused if entry["source"] == name]
            raise UserError(f"data.sources.{name}: no conversation of it is left to learn from ({_reasons(refused)})")
    if not sizes["train"]:
        raise UserError(f"data.heldout={heldout} holds out every prompt: lower it or give more prompts")
    if heldout > 0 and not sizes["heldout"]:
        raise UserError(
            f"data.heldout={heldout} holds out none of {sizes['train']} conversations: raise it, or set it to 0"
        )


def _reasons(refused: list[dict[str, str]]) -> str:
    reasons = Counter(entry["reason"] for entry in refused)
    return "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(3)) or "no rows"


def _write(
    folder: Path,
    collected: Collected,
    rows: dict[str, dict[str, Any]],
    template: ChatTemplate,
    vocab_size: int,
    data: DataConfig,
    inputs: dict[str, Any],
    started: float,
) -> dict[str, Any]:
    """Build the folder under another name, manifest last, then give it its own."""
    by_source = {name: split.token_counts(vocab_size) for name, split in collected.splits.items()}
    counts = {name: _sum(found.values(), vocab_size) for name, found in by_source.items()}
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
    told = {name: split.summary() for name, split in collected.splits.items()}
    manifest = {
        "fingerprint": artifacts.fingerprint(inputs),
        "inputs": inputs,
        "dataset_fingerprint": artifacts.fingerprint(
            [split.fingerprint(name) for name, split in collected.splits.items()]
        ),
        "splits": told,
        "sources": _rows(rows, collected),
        "shared_prompts": {"rows": len(collected.shared.pairs), "named": collected.shared.pairs[:SHARED_NAMED]},
        "not_held_out": sorted(told["train"]["by_source"].keys() - told["heldout"]["by_source"])
        if data.heldout
        else [],
        "draft_vocab": {
            "size": len(draft),
            "target_size": vocab_size,
            "seen_in_train": int((counts["train"] > 0).sum()),
            "coverage": {name: coverage(count, draft) for name, count in counts.items()},
            "coverage_by_source": {
                name: coverage(by_source["train"][name], draft) for name in sorted(by_source["train"]) if name
            },
        },
        "vocabulary": vocabulary_fingerprint(template.tokenizer),  # extraction compares it with its target's
        "end_ids": template.end_ids,
        "refused": collected.refused,
        "cut": collected.total("cut"),
        "no_end_of_turn": collected.total("open"),
        "split_turns": collected.total("split_turns"),
        "inserted": collected.total("inserted"),
        "respelt": collected.total("respelt"),
        "tools_unread": collected.total("tools_unread"),
        "files": artifacts.list_files(temporary, [file for file in temporary.rglob("*") if file.is_file()]),
        "seconds": round(time.monotonic() - started, 2),
    }
    artifacts.write_json(temporary / artifacts.MANIFEST, manifest)
    artifacts.commit(temporary, folder)
    return manifest


def _sum(counts: Iterable[NDArray[np.int64]], vocab_size: int) -> NDArray[np.int64]:
    total = np.zeros(vocab_size, dtype=np.int64)
    for count in counts:
        total += count
    return total


def _rows(rows: dict[str, dict[str, Any]], collected: Collected) -> dict[str, dict[str, Any]]:
    """What became of every source's rows: read, taken, and of these refused and cut."""
    refused = Counter(entry["source"] for entry in collected.refused)
    none: Counter[str] = Counter()
    return {
        name: {
            **rows[name],
            "refused": refused[name],
            "cut": collected.counts.get(name, none)["cut"],
            "no_end_of_turn": collected.counts.get(name, none)["open"],
        }
        for name in sorted(rows)
    }


def coverage(counts: NDArray[np.int64], draft: vocab.DraftVocab) -> float | None:
    """Share of counted tokens that the draft vocabulary holds; None where nothing was counted."""
    total = int(counts.sum())
    return int(counts[draft.target_ids].sum()) / total if total else None
