"""STAGE 5: export the trained drafter as a checkpoint that vLLM serves.

    eagle31 export +experiment=smollm2
    eagle31 export +experiment=smollm2 push=true repo=me/my-draft private=true
    eagle31 export +experiment=smollm2 export_vocab_size=4096

Reads run_dir/train (the newest weights) and the draft vocabulary, checks them against vLLM's contract, and writes
run_dir/export (config.json, model.safetensors, README.md and its pictures), whole or not at all. Repeat it after
`eagle31 evaluate`, or with comparisons=[FOLDER,…] after `eagle31 compare`: the same weights get a new model card.
Nothing leaves the machine without push=true.
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eagle31_train import cli, compose, provenance
from eagle31_train.checkpoint import config_json, contract, hub, published_config
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.checkpoint.run_folder import CARD, EXPORT, EXPORTED, MODEL, TRAIN
from eagle31_train.checkpoint.smaller import served
from eagle31_train.common import artifacts
from eagle31_train.common.console import note
from eagle31_train.common.errors import UserError
from eagle31_train.common.locks import writing
from eagle31_train.config import Config, DrafterShape
from eagle31_train.reporting import card, recipe
from eagle31_train.store import read_manifest
from eagle31_train.store.tensors import save_file


def export(config: Config) -> None:
    """Write `run_dir/export` and `run_dir/export.json`; upload with push=true. Raise UserError, and write nothing, if
    an input is missing or damaged, was made with other options, or breaks the contract."""
    started = time.monotonic()
    hub.check(config)
    run, folder = Path(config.run_dir), Path(config.run_dir) / "export"
    checkpoint = served(config)
    shape = exported_shape(config, checkpoint)
    checkpoint.check_target(config.target, by_name=True, store=read_manifest(config))
    data = data_of(config, checkpoint)
    train = checkpoint.manifest
    assert train is not None
    weights, target_ids = artifacts.file_sha256(checkpoint.folder / MODEL), checkpoint.vocab.target_ids.tolist()
    made_from = provenance.of_export(config, train, weights, dataclasses.asdict(shape), target_ids)
    fingerprint = made_from.fingerprint  # of all but the card
    results = card.read_results(config, checkpoint.identity, fingerprint)
    made_from = dataclasses.replace(made_from, card=card_inputs(config, data, results))
    if not folder.exists():  # an export was killed while replacing it
        artifacts.restore_backup(folder)
    theirs = added(run, config.overwrite)
    if provenance.up_to_date(folder, made_from, config.overwrite, run / EXPORTED, EXPORT):
        note("export: up to date")
    else:
        text = card.render(trained_by(config, data), shape, train, data, results)
        with writing(folder):
            with artifacts.building(folder) as temporary:
                write_checkpoint(checkpoint, shape, config, temporary)
                artifacts.write_text(temporary / "README.md", text)
                copies = {name: file for _, file, name in results.pictures}
                copies |= {str(file.relative_to(folder)): file for file in theirs}
                for name, file in copies.items():
                    (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, temporary / name)
                (run / EXPORTED).unlink(missing_ok=True)  # it describes the old folder
            ours = (file for file in folder.rglob("*") if file.is_file() and file not in theirs)
            record = made_from.record(files=artifacts.list_files(run, ours), checkpoint=fingerprint)
            record["serve"] = recipe.serve_command(config, recipe.HERE)  # the run's folder may be moved
            artifacts.write_json(run / EXPORTED, record | {"seconds": round(time.monotonic() - started, 1)})
        note(f"export: wrote {folder}")
    effort = config.target.template_args.get("reasoning_effort")
    for caveat in card.caveats_of(shape, data, effort):
        note(f"export: {caveat}")
    drafter = str(folder)
    if config.push and config.repo:
        note(f"export: uploaded to {hub.push(folder, config.repo, config.private, config.overwrite)}")
        drafter = config.repo
    note(f"serve it with vLLM {contract.oldest_vllm(shape)} or later:")
    note("  " + recipe.serve_command(config, drafter))
    if config.export_format == "sglang":
        note("  " + recipe.sglang_command(config, drafter, shape.sliding_window))


def data_of(config: Config, checkpoint: DrafterCheckpoint) -> dict[str, Any] | None:
    """Return stage 1's manifest, for the counts on the card; None if it is gone. UserError if it is of other data."""
    if not (config.data_folder / artifacts.MANIFEST).is_file():
        return None
    data = provenance.read_data(config)
    checkpoint.check_data(data, config.data_folder)
    given = data.get("inputs", {}).get("template_args", {})
    if given != config.target.template_args:
        note(f"export: stage 1 had target.template_args={json.dumps(given)}: set it here, too, to serve with it")
    return data


def card_inputs(config: Config, data: Mapping[str, Any] | None, results: card.CardResults) -> dict[str, Any]:
    """Return what the card depends on besides the checkpoint."""
    said = {  # shown on the card if set
        "license": config.license,
        "drawn": config.evaluate.draft_sampling != "greedy",
        "revision": config.target.revision,
        "trust_remote_code": config.target.trust_remote_code,
        "chat_template": config.target.chat_template,
        "template_args": config.target.template_args,
    }
    return {
        "repo": config.repo,
        "draft_tokens": config.evaluate.num_speculative_tokens,
        "data": data and data.get("fingerprint"),
        **results.fingerprints,
        **{name: value for name, value in said.items() if value},
    }


def trained_by(config: Config, data: Mapping[str, Any] | None) -> Config:
    """Return these options with those of the training restored, so that the card's commands repeat it.

    Options that the target (in stage 1's manifest) decides by itself stay open; positions stay the export's.
    """
    run = Path(config.run_dir)
    if not compose.is_run(str(run)):
        return config
    then = compose.load_config([str(run)])
    names = ("data", "extract", "store", "train", "seed", "regenerate")
    target = dataclasses.replace(config.target, aux_layers=then.target.aux_layers, dtype=then.target.dtype)
    trained = dataclasses.replace(config, target=target, **{name: getattr(then, name) for name in names})
    decided = config
    if described := (data or {}).get("target"):
        from eagle31_train.targets.derive import complete  # imports transformers

        decided = complete(config, described)
    options = {name: value for name, value in vars(then.drafter).items() if value != getattr(decided.drafter, name)}
    options.pop("max_position_embeddings", None)
    trained.drafter = dataclasses.replace(config.drafter, **options)
    return trained


def added(run: Path, overwrite: bool) -> list[Path]:
    """Return files that others put into `export/`, such as a licence or notes, which stay. UserError if the card was
    edited, unless `overwrite` allows replacing it."""
    readme = CARD[0]
    if not (run / EXPORTED).is_file():  # nothing was exported, or its files are not listed yet
        there = [file for file in (run / "export").rglob("*") if file.is_file()]
        ours = (*CARD, "export/config.json", f"export/{MODEL}")
        return [file for file in there if not str(file.relative_to(run)).startswith(ours)]
    files = artifacts.read_json(run / EXPORTED, EXPORT).get("files", {})
    written = {name: file for name, file in files.items() if name == readme}
    if not overwrite and (run / readme).is_file() and artifacts.first_damaged(run, written):
        raise UserError(
            f"{run / readme} was edited after the export: set a licence with license=…, move other text to a file of "
            "its own there, or replace the card with overwrite=true"
        )
    known = {run / name for name in files}
    return [file for file in (run / "export").rglob("*") if file.is_file() and file not in known]


def exported_shape(config: Config, checkpoint: DrafterCheckpoint) -> DrafterShape:
    """Return the trained shape, with max_position_embeddings raised if the options say so.

    No weight depends on it, and vLLM may need more positions than training had. UserError if other options contradict
    the weights, since the card shows these options.
    """
    shape, positions = checkpoint.shape, config.drafter.max_position_embeddings
    if positions is not None and positions > shape.max_position_embeddings:
        note(f"export: max_position_embeddings is {positions:,} now, {shape.max_position_embeddings:,} in training")
        shape = dataclasses.replace(shape, max_position_embeddings=positions)
    options = dataclasses.asdict(config.drafter)
    options["aux_layers"] = config.target.aux_layers and sorted(config.target.aux_layers)
    if config.export_sliding_window is not None:
        del options["sliding_window"]
    for name, trained in dataclasses.asdict(shape).items():
        wanted = options.get(name)
        if name == "rope_scaling":  # {} means no scaling, None in a shape
            wanted, trained = wanted or {}, trained or {}
            if options["rope_theta"] is None:  # then the given entries replaced some of the target's
                wanted = trained | wanted
        if wanted is not None and wanted != trained:
            raise UserError(
                f"{checkpoint.folder} was trained with {name}={trained}, but the options say {wanted}: "
                f"use the options of training, or run `{TRAIN}` with these"
            )
    return shape


def write_checkpoint(checkpoint: DrafterCheckpoint, shape: DrafterShape, config: Config, folder: Path) -> None:
    """Write what vLLM serves, with the weights rounded to the target's dtype. UserError if they then break the
    contract, or the format has no such drafters. shape: the checkpoint's, except perhaps max_position_embeddings."""
    dtype = config.target.dtype
    tensors = {name: one.to(getattr(torch, dtype)) for name, one in checkpoint.tensors.items()}
    contract.require(tensors, shape, str(checkpoint.folder / MODEL))
    if checkpoint.vocab.pruned:  # otherwise vLLM has no parameter for d2t, and refuses it
        tensors["d2t"] = torch.from_numpy(checkpoint.vocab.d2t)
        tensors["t2d"] = torch.from_numpy(checkpoint.vocab.t2d)
    if config.export_format == "speculators":
        draft_tokens = config.evaluate.num_speculative_tokens
        fields = config_json.speculators_json(shape, dtype, config.target_name, draft_tokens)
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    elif config.export_format == "sglang":
        from eagle31_train.targets.description import describe_target  # imports transformers

        target = describe_target(config.target)
        if problems := contract.sglang_problems(shape, target.model_type, target.num_hidden_layers):
            raise UserError(f"SGLang would not draft as trained ({problems[0]}): use export_format=vllm")
        fields = config_json.sglang_json(shape, dtype, config.target_name)
        for number in range(1, shape.num_layers):  # SGLang has another name for these
            norm = tensors[f"layers.{number}.input_layernorm.weight"]
            tensors[f"layers.{number}.hidden_norm.weight"] = norm.clone()
    else:
        fields = config_json.config_json(shape, dtype, config.target_name)
    artifacts.write_json(folder / "config.json", fields)
    save_file(tensors, folder / MODEL, metadata={"format": "pt"})
    meant = dataclasses.replace(shape, rope_scaling=config_json.rope_scaling(shape))  # in config.json's words
    if published_config.shape_from_config(fields, {contract.canonical_name(name) for name in tensors}) != meant:
        raise UserError(f"{folder / 'config.json'} does not read back as the drafter's shape: check drafter.*")


if __name__ == "__main__":
    cli.run(export, __doc__ or "")
