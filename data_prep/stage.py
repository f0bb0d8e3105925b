"""The stage: read, regenerate if asked, mask, split, count, and write `run_dir/data` whole or not at all."""

import os
import shutil
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import DatasetDict

from data_prep.dataset import Collected, collect, most_common
from data_prep.files import open_files
from data_prep.masks import NO_ANSWER
from data_prep.regenerate import read_manifest, regenerate
from data_prep.self_prompts import write_prompts
from data_prep.sources import Corpus, Source, named
from data_prep.template import ChatTemplate
from eagle31_train import artifacts, provenance
from eagle31_train.config import SELF, Config, DataConfig
from eagle31_train.console import note
from eagle31_train.errors import UserError
from eagle31_train.model import vocab
from eagle31_train.targets.derive import planned_drafter
from eagle31_train.targets.description import describe_target, serving_doubt
from eagle31_train.targets.pretrained import vocabulary_fingerprint

REPEATED_NAMED = 20  # pairs of prompts that ask the same, of those that the manifest names
NAMED = 5  # refused conversations that the summary names; the manifest names all
LISTED = 20  # sources that it names
TOLD = {  # counts of the manifest, where they are not 0
    "cut": "cut at max_length",
    "no_end_of_turn": "answers without end of turn",
    "split_turns": "conversations with one sample per answer, since the template rewrites history",
    "inserted": "answers that the template begins with an empty thought",
    "respelt": "answers that have not as many tokens as the target wrote",
    "tools_unread": "conversations with tools, which the chat template of {target} does not write",
}


def prepare(config: Config) -> None:
    """Make `run_dir/data`: the data set, the draft vocabulary and the manifest.

    Raises:
        UserError: see `Corpus`, `ChatTemplate.load`; also when nothing is left to train on, of all rows or of
            one of `data.sources`, a split is empty, or `run_dir/data` holds something else.
    """
    started = time.monotonic()
    data, folder = config.data, config.data_folder.resolve()
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UserError("eagle31 data is one process, and WORLD_SIZE is set: start it without a launcher")
    template = ChatTemplate.load(config.target)
    target = describe_target(config.target)
    vocab_size = target.vocab_size
    template.check_fits(config.target, vocab_size)
    # What no counts could fulfil, and no drafter could be made for, is refused here, and not after hours of answers.
    zeros = np.zeros(vocab_size, dtype=np.int64)
    draft = vocab.choose(zeros, template.special_ids(), data.draft_vocab_size, data.draft_vocab_coverage)
    _, rows = planned_drafter(config, target, len(draft))
    if data.conversations is not None and data.prompts is not None:
        read = "prompts" if config.regenerate else "conversations"
        note(f"data: reading data.{read}={getattr(data, read)}, since regenerate={config.regenerate}")
    corpus, answers = _open(_with_written_prompts(config, template), template)
    made_from = provenance.of_data(config, corpus.inputs(), template.fingerprints(), vocab_size)
    ours = (folder / artifacts.MANIFEST).is_file()
    if provenance.up_to_date(folder, made_from, config.overwrite):
        note(f"data: {folder} is up to date")
        return
    if not ours and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        # commit() replaces the folder, and without our manifest what it holds may be the user's own.
        raise UserError(f"{folder} exists and is no output of this stage: move it away or choose run_dir=…")
    note("\n".join([f"data: the drafter for {config.target.name}, as its config.json has it", *rows]))
    if doubt := serving_doubt(config.target, target.model_type):
        note(f"data: NOT SERVED: {doubt}")
    collected = collect(corpus.read(), template, data.max_length, data.heldout)
    collected.refused = answers.get("refused", []) + collected.refused
    _check_splits(collected, data)
    if data.shuffle is not None:
        collected.splits["train"].shuffle(data.shuffle)
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a run that was killed
    temporary.mkdir(parents=True)
    counts = answers.get("sources") or corpus.counts
    manifest = {
        **made_from.record(),
        **_write(temporary, collected, template, vocab_size, data),
        "sources": _sources(counts, collected),
        "vocabulary": vocabulary_fingerprint(template.tokenizer),  # extraction compares it with its target's
        "end_ids": template.end_ids,
        "target": asdict(target),  # of which training derives the drafter, wherever the target's files are
        "files": artifacts.list_files(temporary, [file for file in temporary.rglob("*") if file.is_file()]),
        "seconds": round(time.monotonic() - started, 2),
    }
    artifacts.write_json(temporary / artifacts.MANIFEST, manifest)
    artifacts.commit(temporary, folder)
    note(summary(folder, manifest, template.name))


def _open(config: Config, template: ChatTemplate) -> tuple[Corpus, dict[str, Any]]:
    """The conversations; where the target answers first, also the manifest of its answers."""
    if not config.regenerate:
        return Corpus.open(config, "conversations"), {}
    answered = str(regenerate(config, template))
    source = Source(open_files(answered, config.data.split, "data.prompts"), "messages", answered)
    return Corpus([source]), read_manifest(Path(config.run_dir))


def _with_written_prompts(config: Config, template: ChatTemplate) -> Config:
    """The configuration; where it says `self` of prompts, with the file of those that the target has written."""
    data = config.data
    sources = {name: dict(entry) for name, entry in data.sources.items() if entry}
    own = [entry for entry in sources.values() if entry.get("path") == SELF]
    if not config.regenerate or not (data.prompts == SELF or own):
        return config
    file = str(write_prompts(config, template))
    for entry in own:
        entry.update(path=file, format="auto")  # ours, whatever that of the other files is
    if data.prompts == SELF:
        data = replace(data, prompts=file, format="auto")
    return replace(config, data=replace(data, sources=sources))


def _check_splits(collected: Collected, data: DataConfig) -> None:
    sources = {source for split in collected.splits.values() for _, source, _ in split.rows}
    if not sources:
        raise UserError(f"no conversation is left to learn from ({_reasons(collected.refused, data)})")
    for name in sorted(named(data).keys() - sources):
        reasons = _reasons([entry for entry in collected.refused if entry["source"] == name], data)
        raise UserError(f"data.sources.{name}: no conversation of it is left to learn from ({reasons})")
    if not collected.splits["train"].rows:
        raise UserError(f"data.heldout={data.heldout} holds out every prompt: lower it or give more prompts")
    if data.heldout > 0 and not collected.splits["heldout"].rows:
        raise UserError(f"data.heldout={data.heldout} holds out no conversation: raise it, or set it to 0")


def _reasons(refused: list[dict[str, Any]], data: DataConfig) -> str:
    """Why none of some rows is of use; where they are prompts, what to do with these."""
    if {entry["reason"] for entry in refused} != {NO_ANSWER}:
        return most_common(refused)
    option = f"data.prompts={data.conversations} and " if data.conversations else ""
    return f"all {len(refused)} are prompts without answers: set {option}regenerate=true for the target to answer them"


def _write(
    folder: Path, collected: Collected, template: ChatTemplate, vocab_size: int, data: DataConfig
) -> dict[str, Any]:
    """Write the draft vocabulary and the data set; what the manifest says of them."""
    counts = collected.splits["train"].token_counts(vocab_size)
    draft = vocab.choose(counts, template.special_ids(), data.draft_vocab_size, data.draft_vocab_coverage)
    vocab.write(folder / "vocab.safetensors", draft)
    datasets = DatasetDict({name: split.dataset(name) for name, split in collected.splits.items()})
    # An empty split would be given no file, and then not load: one file at least.
    shards = {name: None if len(split) else 1 for name, split in datasets.items()}
    datasets.save_to_disk(str(folder / "dataset"), num_shards=shards)
    splits = {name: split.summary() for name, split in collected.splits.items()}
    coverage = {name: split.coverage(draft.t2d) for name, split in collected.splits.items()}
    not_held_out = sorted(splits["train"]["by_source"].keys() - splits["heldout"]["by_source"])
    repeated = [[first, identity] for identity, first in collected.repeated_prompts.items()]
    fingerprints = [split.fingerprint(name) for name, split in collected.splits.items()]
    return {
        "dataset_fingerprint": artifacts.fingerprint(fingerprints),
        "splits": splits,
        "repeated_prompts": {"prompts": len(repeated), "named": repeated[:REPEATED_NAMED]},
        "not_held_out": not_held_out if data.heldout else [],
        "draft_vocab": {
            "size": len(draft),
            "target_size": vocab_size,
            "seen_in_train": int((counts > 0).sum()),
            "coverage": {name: whole for name, (whole, _) in coverage.items()},
            "coverage_by_source": coverage["train"][1],
        },
        "refused": collected.refused,
        "no_end_of_turn": collected.total("open"),
        **{what: collected.total(what) for what in ("cut", "split_turns", "inserted", "respelt", "tools_unread")},
    }


def _sources(counts: dict[str, dict[str, Any]], collected: Collected) -> dict[str, dict[str, Any]]:
    """What became of every source's rows: read, taken, and of these refused, with a repeated prompt, and cut."""
    refused = Counter(entry["source"] for entry in collected.refused)
    result = {}
    for name, read_and_taken in sorted(counts.items()):
        of_source = collected.counts.get(name, Counter())
        result[name] = {**read_and_taken, "refused": refused[name], "repeated": of_source["repeated"]}
        result[name] |= {"cut": of_source["cut"], "no_end_of_turn": of_source["open"]}
    return result


# ---------------------------------------------------------------- what the user reads


def summary(folder: Path, manifest: dict[str, Any], target: str) -> str:
    """The manifest in words: the splits, the sources, and everything that was refused or cut; `target` is its name."""
    lines = [f"data: {folder} in {manifest['seconds']} s"]
    draft, refused = manifest["draft_vocab"], manifest["refused"]
    for name, split in manifest["splits"].items():
        share = draft["coverage"][name]
        covered = "" if share is None else f", {share:.2%} within the draft vocabulary"
        lines.append(
            f"  {name:<8} {split['conversations']:>7,} conversations, {split['tokens']:>11,} tokens, "
            f"{split['assistant_tokens']:>11,} of the assistant{covered}"
        )
    lines.append(
        f"  draft vocabulary {draft['size']:,} of {draft['target_size']:,} tokens "
        f"({draft['seen_in_train']:,} occur in the training answers)"
    )
    lines += _table(manifest)
    lines += [f"  {what.format(target=target)}: {manifest[name]:,}" for name, what in TOLD.items() if manifest[name]]
    if repeated := manifest["repeated_prompts"]["prompts"]:
        pair = " and ".join(manifest["repeated_prompts"]["named"][0])
        lines.append(f"  prompts that stand there twice, kept on one side of the split: {repeated:,} ({pair})")
    if missing := manifest["not_held_out"]:
        names = ", ".join(missing[:LISTED]) + " …" * (len(missing) > LISTED)
        lines.append(f"  NOT HELD OUT: no prompt of {names}, which evaluation will not measure: raise data.heldout")
    lines.append(f"  REFUSED: {len(refused)}" if refused else "  refused: 0")
    lines += [f"    {n} × {reason}" for reason, n in Counter(entry["reason"] for entry in refused).most_common()]
    lines += [f"    {entry['id']} ({entry['where']}): {entry['reason']}" for entry in refused[:NAMED]]
    return "\n".join(lines)


def _table(manifest: dict[str, Any]) -> list[str]:
    """A line for each source, where there are several: rows, then conversations and tokens that came of them."""
    sources = manifest["sources"]
    if len(sources) < 2:
        return []
    table = [["source", "read", "taken", "refused", "cut", "train", "held out", "tokens", "assistant's", "in vocab"]]
    for name, counts in list(sources.items())[:LISTED]:
        train, held = (Counter(manifest["splits"][split]["by_source"].get(name, {})) for split in ("train", "heldout"))
        share = manifest["draft_vocab"]["coverage_by_source"].get(name)
        numbers = [counts[what] for what in ("read", "taken", "refused", "cut")]
        numbers += [train["conversations"], held["conversations"]]
        numbers += [train[what] + held[what] for what in ("tokens", "assistant_tokens")]
        table.append([name, *(f"{number:,}" for number in numbers), "-" if share is None else f"{share:.2%}"])
    lines = [f"  {name:<16}" + "".join(f"{cell:>12}" for cell in cells) for name, *cells in table]
    return lines + [f"  … and {len(sources) - LISTED} more in the manifest"] * (len(sources) > LISTED)
