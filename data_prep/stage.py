"""Run the stage: read, regenerate if asked, mask, split, count, and write `run_dir/data` whole or not at all."""

import json
import os
import re
import time
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from datasets import DatasetDict

from data_prep import preview
from data_prep.dataset import Collected, check_shares, collect, most_common
from data_prep.journal import Journal
from data_prep.masks import NO_ANSWER
from data_prep.own_server import OwnServer
from data_prep.regenerate import of_answers, regenerate
from data_prep.self_prompts import write_prompts
from data_prep.sources import Corpus, Source, named
from eagle31_train import provenance
from eagle31_train.common import artifacts
from eagle31_train.common.console import note, ranks
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.common.locks import writing
from eagle31_train.config import ANSWERED, OWN_SERVER, SELF_WRITTEN, Config, DataConfig
from eagle31_train.model import vocab
from eagle31_train.model.rope import target_positions
from eagle31_train.provenance import REPLACE, Provenance
from eagle31_train.reporting.tables import aligned
from eagle31_train.rows.files import open_files
from eagle31_train.rows.messages import Message
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.derive import THOUGHT, planned_drafter, room_for_thoughts
from eagle31_train.targets.description import TargetDescription, changed_since, describe_target, doubts
from eagle31_train.targets.pretrained import served_sampling, vocabulary_fingerprint

# The variable that switches thinking off: Qwen's name, which most have, or that of Kimi, DeepSeek and Granite.
SWITCH = r"\benable_thinking\b|(?<!\.)\bthinking(?= is (?:not )?defined)|(?<=if )thinking\b"
NAMED = 5  # refused conversations that the summary names; the manifest names all
COUNTS = {  # in the manifest; the summary shows those that are not 0
    "repeated": "prompts that occur twice, both times on the same side of the split",
    "cut": "cut at max_length",
    "no_end_of_turn": "answers without end of turn",
    "split_turns": "conversations split into several samples (docs/data.md, Thoughts)",
    "from_words": "answers given as text, tokenized here (the file lacks some of their token_ids)",
    "given_ids": "rows given as token ids, used as they are: they must be this target's",
    "args_unread": "rows with chat_template_kwargs that the chat template of {target} does not read",
    "inserted": "answers before which the template puts an empty thought",
    "tools_unread": "conversations with tools, which the chat template of {target} does not write",
}


def prepare(config: Config) -> None:
    """Make `run_dir/data`: the data set, the draft vocabulary and the manifest. UserError: see `Corpus` and
    `ChatTemplate.load`; also if a source or a split is left without conversations, or the folder is not ours."""
    started = time.monotonic()
    folder = Path(os.path.realpath(config.data_folder))
    ours = (folder / artifacts.MANIFEST).is_file()  # an output of this stage
    if ranks() > 1:
        raise UserError("eagle31 data runs in one process, but WORLD_SIZE is set: start it without a launcher")
    target = describe_target(config.target)
    template = ChatTemplate.load(config.target)
    template.check_fits(config.target, target.vocab_size)
    if not ours:
        _check_replaceable(folder)
        _check_switches(template)
    if config.regenerate:
        check_ends(template)
    drafter = _planned(config, template, target)
    _tell_of_two_inputs(config)
    answers_due = config.regenerate and not Journal(Path(config.run_dir) / ANSWERED).manifest.is_file()
    if answers_due and ours and not config.overwrite and _needs_no_answers(folder, config, template, target):
        return
    if not ours:
        _introduce(config, drafter)
    if answers_due:
        _tell_of_thoughts(template, config.data, target)
        _tell_of_other_sampling(config)
    corpus, answers = _open(config, template)
    made_from = provenance.of_data(config, corpus.inputs(), template.fingerprints(), target.vocab_size)
    if _is_done(folder, made_from, config, target):
        return
    if ours:  # and made anew
        _introduce(config, drafter)
    collected = _collected(config, corpus, answers, template, target)
    with writing(folder, "run_dir=… or data_dir=…"), artifacts.building(folder) as temporary:
        manifest = {
            **made_from.record(),
            **_write(temporary, collected, template, target.vocab_size, config.data),
            "sources": _sources(answers.get("sources") or corpus.counts, collected),
            "vocabulary": vocabulary_fingerprint(template.tokenizer),  # extraction compares it with its target's
            "end_ids": template.end_ids,
            "target": asdict(target),  # training derives the drafter from it, wherever the target's files are
            "files": artifacts.list_files(temporary, [file for file in temporary.rglob("*") if file.is_file()]),
            "seconds": round(time.monotonic() - started, 2),
        }
        artifacts.write_json(temporary / artifacts.MANIFEST, manifest)
    note(summary(folder, manifest, template.name))


# ---------------------------------------------------------------- before anything is read or answered


def _check_switches(template: ChatTemplate) -> None:
    if (name := template.switch_as_text(template.template_args)) is not None:
        given = f"target.template_args.{name}={template.template_args[name]}"
        raise UserError(f"{given} is text, which counts as true: set it to true or false")


def check_ends(template: ChatTemplate) -> None:
    """UserError if the template ends an answer with a token at which the target does not stop. It is raised before
    hours of answers that would each go on until they are cut."""
    chat: list[Message] = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes."}]
    with suppress(Refused):  # some templates take no plain answer
        after = template.render(chat).partition("Yes.")[2]
        ends = [token for token in template.encode(after) if token in template.added]
        if ends and not set(ends) & set(template.end_ids):
            raise UserError(
                f"the chat template of {template.name} ends an answer with {template.added[ends[0]]}, at which the "
                "target does not stop: add it to eos_token_id in generation_config.json, or set target.chat_template"
            )


def _planned(config: Config, template: ChatTemplate, target: TargetDescription) -> list[str]:
    """Return the drafter in words. UserError, before hours of answers, for one that could not be made in the end."""
    zeros = np.zeros(target.vocab_size, dtype=np.int64)  # whatever the counts will be
    draft = vocab.choose(zeros, template.kept_ids(), config.data.draft_vocab_size)
    return planned_drafter(config, target, len(draft))[1]


def _tell_of_two_inputs(config: Config) -> None:
    data = config.data
    if data.conversations is not None and data.prompts is not None:
        read = "prompts" if config.regenerate else "conversations"
        note(f"data: reading data.{read}={getattr(data, read)}, since regenerate={config.regenerate}")


def _check_replaceable(folder: Path) -> None:
    """UserError for a folder without our manifest that holds something: the output replaces the folder, and that may be
    the user's own."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists, but is not an output of this stage: move it, or choose another run_dir=…")


def _needs_no_answers(folder: Path, config: Config, template: ChatTemplate, target: TargetDescription) -> bool:
    """Return whether another run's data set serves as it is. UserError if hours of answers would be refused in the end
    or, since that run has the data, thrown away."""
    inputs = _rows_of(folder, config, template)
    made_from = provenance.of_data(config, inputs, template.fingerprints(), target.vocab_size)
    if config.data_dir and _is_done(folder, made_from, config, target):
        return True
    provenance.up_to_date(folder, made_from, overwrite=False)
    return False


def _rows_of(folder: Path, config: Config, template: ChatTemplate) -> dict[str, Any]:
    """Return what another run's data set was made of, if that was answers. UserError if that run's records are beside
    it, and are of other prompts or settings."""
    inputs = provenance.read_data(config).get("inputs", {})
    beside = Journal(folder.parent / ANSWERED).manifest
    if beside.is_file() and not config.data.writes_prompts:  # their file is not written yet
        record = artifacts.read_json(beside, provenance.DATA)
        of_answers(config, template, Corpus.open(config, "prompts")).refuse_other(folder, record, False)
    sources = inputs["sources"] if provenance.are_answers(inputs) else "the target's answers"
    return {"sources": sources, "format": "messages"}


def _is_done(folder: Path, made_from: Provenance, config: Config, target: TargetDescription) -> bool:
    """Return whether the folder is up to date. Training derives the drafter from the target in its manifest, so one
    whose config.json was corrected since is recorded anew."""
    if not provenance.up_to_date(folder, made_from, config.overwrite):
        return False
    note(f"data: {folder} is up to date")
    manifest = artifacts.read_json(folder / artifacts.MANIFEST, "eagle31 data")
    if change := changed_since(manifest.get("target") or {}, target):
        note(f"data: the target has changed ({change}); recorded the new one")
        with writing(folder, "run_dir=… or data_dir=…"):
            artifacts.write_json(folder / artifacts.MANIFEST, {**manifest, "target": asdict(target)})
    return True


def _introduce(config: Config, rows: list[str]) -> None:
    """Print what the drafter will be, and what is doubtful about its target."""
    note("\n".join([f"data: the drafter for {config.target.name}, derived from its config.json", *rows]))
    for what, doubt in doubts(config).items():
        note(f"data: {what}: {doubt}")


def _tell_of_thoughts(template: ChatTemplate, data: DataConfig, target: TargetDescription) -> None:
    """Warn, before hours of answers, that they may think and have little room for it."""
    most = min(data.generate.max_new_tokens, data.max_length)
    if most >= THOUGHT or not template.thinks:
        return
    remedies, room = [], room_for_thoughts(data, target)
    if room:
        remedies.append(f"set {' '.join(f'{option}={tokens}' for option, tokens in room.items())}")
    if switch := re.search(SWITCH, template.template):
        remedies.append(f"switch thinking off with target.template_args.{switch[0]}=false")
    what = f"{template.name} may think, and answers are cut after {most} tokens"
    note(f"data: THOUGHTS: {what}" + (f": {', or '.join(remedies)}" if remedies else ""))


def _tell_of_other_sampling(config: Config) -> None:
    """Warn, before hours of sampled answers, if a server samples differently by default."""
    generate = config.data.generate
    served = served_sampling(config.target) if generate.temperature else {}
    other = {name: value for name, value in served.items() if value != (getattr(generate, name) or 0)}
    if other:
        defaults = ", ".join(f"{name} {value:g}" for name, value in other.items())
        ours = ", ".join(f"data.generate.{name}={json.dumps(getattr(generate, name))}" for name in other)
        note(
            f"data: vLLM serves {config.target.name} with {defaults} (its generation_config.json); "
            f"these answers use {ours}"
        )


# ---------------------------------------------------------------- from rows to a data set


def _open(config: Config, template: ChatTemplate) -> tuple[Corpus, dict[str, Any]]:
    """Open the conversations; if the target answers first, also return the manifest of its answers."""
    if not config.regenerate:
        return Corpus.open(config, "conversations"), {}
    data = config.data
    with OwnServer(config) if data.generate.server == OWN_SERVER else nullcontext() as own:
        if data.writes_prompts:
            _refuse_other_answers(config)
            write_prompts(config, template, own)
        answered, manifest = regenerate(config, template, own)
    source = Source(open_files(str(answered), data.split, "data.prompts"), "messages", str(answered))
    return Corpus([source]), manifest


def _refuse_other_answers(config: Config) -> None:
    """UserError if a run's answers are to given prompts. It is raised before the target writes others, not after."""
    run = Path(config.run_dir)
    answers, prompts = Journal(run / ANSWERED), Journal(run / SELF_WRITTEN)
    begun = answers.manifest.is_file() or answers.path.is_file()
    if begun and not prompts.manifest.is_file() and not config.overwrite:
        raise UserError(
            f"{answers.output} answers prompts from a file, but data.prompts=self would write others: set "
            f"data.prompts=FILE to the same prompts, {REPLACE}"
        )


def _collected(
    config: Config, corpus: Corpus, answers: dict[str, Any], template: ChatTemplate, target: TargetDescription
) -> Collected:
    """Return what the rows give, checked and, if asked, shuffled. `answers`: the manifest of the target's answers."""
    data = config.data
    collected = collect(corpus.read(), template, data.max_length, data.heldout)
    collected.refused = answers.get("refused", []) + collected.refused
    _check_splits(collected, data)
    if config.extract.engine == "transformers":
        _check_positions(collected, target)
    if data.shuffle is not None:
        collected.splits["train"].shuffle(data.shuffle)
    return collected


def _check_splits(collected: Collected, data: DataConfig) -> None:
    sources = {source for split in collected.splits.values() for _, source, _ in split.rows}
    if not sources:
        raise UserError(f"no conversation is left to train on ({_reasons(collected.refused, data)})")
    for name in sorted(named(data).keys() - sources):
        reasons = _reasons([entry for entry in collected.refused if entry["source"] == name], data)
        raise UserError(f"data.sources.{name}: none of its conversations is left to train on ({reasons})")
    check_shares(collected.places, data.heldout)


def _reasons(refused: list[dict[str, Any]], data: DataConfig) -> str:
    """Return why none of some rows is of use and, if they are prompts, what to do with them."""
    given = f"set data.prompts={data.conversations} instead of data.conversations"
    hint = f"; {given if data.conversations else 'set regenerate=true'} for the target to answer them"
    return most_common(refused) + hint * ({entry["reason"] for entry in refused} == {NO_ANSWER})


def _check_positions(collected: Collected, target: TargetDescription) -> None:
    """UserError for a conversation that the target would not take in extraction."""
    positions = target_positions(target.max_position_embeddings, target.model_type, [target.rope_scaling])
    lengths = {id: len(sample.input_ids) for split in collected.splits.values() for id, _, sample in split.rows}
    longest = max(lengths, key=lambda id: lengths[id])
    if positions and lengths[longest] > positions:
        count = f"{lengths[longest]:,} tokens, but the target has only {positions:,} positions"
        raise UserError(f"conversation {longest} has {count}: set data.max_length={positions}")


def _write(
    folder: Path, collected: Collected, template: ChatTemplate, vocab_size: int, data: DataConfig
) -> dict[str, Any]:
    """Write the draft vocabulary and the data set. Return what the manifest says of them."""
    learnt = ((sample.input_ids, sample.loss_mask) for _, _, sample in collected.splits["train"].rows)
    counts = vocab.count(learnt, vocab_size)
    draft = vocab.choose(counts, template.kept_ids(), data.draft_vocab_size)
    vocab.write(folder / "vocab.safetensors", draft)
    datasets = DatasetDict({name: split.dataset(name) for name, split in collected.splits.items()})
    # Give an empty split one file: it would get none by default, and then not load.
    shards = {name: None if len(split) else 1 for name, split in datasets.items()}
    datasets.save_to_disk(str(folder / "dataset"), num_shards=shards)
    artifacts.write_text(folder / preview.PAGE, preview.page(collected.splits, template))
    splits = {name: split.summary() for name, split in collected.splits.items()}
    coverage = {name: split.coverage(draft.t2d) for name, split in collected.splits.items()}
    not_held_out = sorted(splits["train"]["by_source"].keys() - splits["heldout"]["by_source"])
    return {
        "dataset_fingerprint": artifacts.fingerprint([dataset._fingerprint for dataset in datasets.values()]),
        "splits": splits,
        "not_held_out": not_held_out if data.heldout else [],
        "draft_vocab": {
            "size": len(draft),
            "target_size": vocab_size,
            "seen_in_train": int((counts > 0).sum()),
            "coverage": {name: whole for name, (whole, _) in coverage.items()},
            # Of a source's held-out rows, if it has any: the vocabulary was not counted on them.
            "coverage_by_source": {**coverage["train"][1], **coverage["heldout"][1]},
        },
        "refused": collected.refused,
        **{what: sum(counts[what] for counts in collected.counts.values()) for what in COUNTS},
    }


def _sources(counts: dict[str, dict[str, Any]], collected: Collected) -> dict[str, dict[str, Any]]:
    """Return what became of every source's rows: read, taken, and of these refused, repeated and cut."""
    refused, counted = Counter(entry["source"] for entry in collected.refused), ("repeated", "cut", "no_end_of_turn")
    return {
        name: {**given, "refused": refused[name], **{what: collected.counts[name][what] for what in counted}}
        for name, given in sorted(counts.items())
    }


# ---------------------------------------------------------------- what the user reads


def summary(folder: Path, manifest: dict[str, Any], target: str) -> str:
    """Return the manifest in words: splits, sources, and all that was refused or cut. `target`: the target's name."""
    draft, refused = manifest["draft_vocab"], manifest["refused"]
    lines = [f"data: {folder} in {manifest['seconds']} s"]
    for name, split in manifest["splits"].items():
        covered = "-" if draft["coverage"][name] is None else f"{draft['coverage'][name]:.2%}"
        lines.append(
            f"  {name:<8} {split['conversations']:>7,} conversations, {split['tokens']:>11,} tokens, "
            f"{split['assistant_tokens']:>11,} of the assistant, {covered} within the draft vocabulary"
        )
    lines.append(
        f"  draft vocabulary {draft['size']:,} of {draft['target_size']:,} tokens "
        f"({draft['seen_in_train']:,} occur in the training answers)"
    )
    if len(manifest["sources"]) > 1:
        lines += _table(manifest)
    lines += [f"  {what.format(target=target)}: {manifest[name]:,}" for name, what in COUNTS.items() if manifest[name]]
    answers, cut = sum(split["conversations"] for split in manifest["splits"].values()), manifest["no_end_of_turn"]
    if cut > answers / 2:
        longer = "raise data.generate.max_new_tokens (to several thousand for a target that thinks)"
        remedy = longer if provenance.are_answers(manifest["inputs"]) else "provide whole answers"
        lines.append(f"  MOST ANSWERS HAVE NO END, so a drafter learns little of how they end: {remedy}")
    if missing := manifest["not_held_out"]:
        lines.append(f"  NOT HELD OUT, so not evaluated: {', '.join(missing)}: raise data.heldout")
    lines.append(f"  REFUSED: {len(refused)}" if refused else "  refused: 0")
    lines += [f"    {n} × {reason}" for reason, n in Counter(entry["reason"] for entry in refused).most_common()]
    lines += [f"    {entry['id']} ({entry['where']}): {entry['reason']}" for entry in refused[:NAMED]]
    lines.append(f"  preview of what is learnt: {folder / preview.PAGE}")
    return "\n".join(lines)


def _table(manifest: dict[str, Any]) -> list[str]:
    """Return a line for each source: its rows, then the conversations and tokens made from them."""
    head = ["source", "read", "taken", "refused", "cut", "train", "held out", "tokens", "assistant's", "in vocab"]
    rows = []
    for name, counts in manifest["sources"].items():
        train, held = (Counter(manifest["splits"][split]["by_source"].get(name, {})) for split in ("train", "heldout"))
        numbers = [counts[what] for what in ("read", "taken", "refused", "cut")]
        numbers += [train["conversations"], held["conversations"]]
        numbers += [train[what] + held[what] for what in ("tokens", "assistant_tokens")]
        covered = manifest["draft_vocab"]["coverage_by_source"].get(name, 0)
        rows.append([name, *(f"{number:,}" for number in numbers), f"{covered:.2%}"])
    return [f"  {line}" for line in aligned(head, rows)]
