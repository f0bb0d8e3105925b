"""STAGE 5: the trained drafter as a checkpoint that vLLM serves.

    python -m eagle31_train.export +experiment=smollm2
    python -m eagle31_train.export +experiment=smollm2 push=true repo=me/my-draft private=true

Reads `train/`'s newest weights and the draft vocabulary, holds them against the contract, and
writes `export/` (config.json, model.safetensors, README.md and its pictures) whole or not at all.
What was measured since, by `eagle31_train.evaluate` with either backend, or by `eagle31_train.compare`
(comparisons=[FOLDER,…]), gives the same weights a new card. Nothing leaves the machine without push=true.
"""

import dataclasses
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eagle31_train import artifacts, card, cli, contract, draft_config, findings, hub, vocab
from eagle31_train.measure import drafters
from eagle31_train.schema import Config, DrafterShape, UserError, as_plain, check_architecture
from eagle31_train.store import read_manifest
from eagle31_train.targets.hf import DTYPES

TRAIN = "accelerate launch train.py"
# Raised whenever the same inputs make another checkpoint.
LAYOUT = 1
# What of an export may stay: nothing, all but the card, or everything.
NOTHING, CHECKPOINT, WHOLE = range(3)
SERVED = ("config.json", "model.safetensors")  # files of the checkpoint


@dataclass(frozen=True)
class Trained:
    """What the stage reads: a trained drafter, its weights on the disk, and what is known of it."""

    weights: Path
    shape: DrafterShape
    vocab: vocab.DraftVocab
    train: dict[str, Any]
    data: dict[str, Any] | None


def export(config: Config) -> None:
    """Write `run_dir/export` and `run_dir/export.json`; upload with push=true.

    Raises:
        UserError: an input is missing or damaged, was made with other options, or breaks the
            contract; the message names the key. Then nothing is written.
    """
    started = time.monotonic()
    check_architecture(config.drafter.architecture)
    if config.push and not config.repo:
        raise UserError("push=true needs the hub repository: add repo=owner/name")
    if config.target.dtype not in DTYPES:
        raise UserError(f"target.dtype={config.target.dtype} is none of {', '.join(DTYPES)}")
    run = Path(config.run_dir)
    trained = read_trained(config)
    checkpoint = checkpoint_inputs(config, trained)
    identity, compared = drafters.identity(trained.train), [Path(folder) for folder in config.comparisons]
    results = findings.read(run, identity, artifacts.fingerprint(checkpoint), compared)
    told = {
        "repo": config.repo,
        "draft_tokens": config.evaluate.draft_tokens,
        "data": trained.data and trained.data.get("fingerprint"),
        **results.fingerprints,
    }
    inputs = checkpoint | {"card": told}
    standing = finished(run, inputs, config.overwrite)
    if standing == WHOLE:
        print("export: up to date")
    else:
        _write(config, trained, results, run / "export", keep=standing == CHECKPOINT)
        files = artifacts.list_files(run, (file for file in (run / "export").rglob("*") if file.is_file()))
        record = {"fingerprint": artifacts.fingerprint(inputs), "inputs": inputs, "files": files}
        record["checkpoint"] = artifacts.fingerprint(checkpoint)
        record["serve"] = card.serve_command(config, str(run / "export"))
        artifacts.write_json(run / "export.json", record | {"seconds": round(time.monotonic() - started, 1)})
        print(f"export: wrote {run / 'export'}")
    for caveat in contract.caveats(trained.shape):
        print(f"export: {caveat}")
    drafter = str(run / "export")
    if config.push:
        assert config.repo is not None
        address = hub.push(run / "export", config.repo, config.private)
        print(f"export: uploaded to {address}")
        drafter = config.repo
    print("serve it with:")
    print("  " + card.serve_command(config, drafter))


# ---------------------------------------------------------------- reading


def read_trained(config: Config) -> Trained:
    """Read and verify what training left in `run_dir`; UserError names what is wrong."""
    found = drafters.of_run(Path(config.run_dir), config.data_folder)
    assert found.weights is not None
    assert found.manifest is not None
    train = found.manifest
    shape = _reaching_further(found.shape, config.drafter.max_position_embeddings)
    _refuse_contradictions(config, shape, found.weights.parent)
    _refuse_other_target(config, train)
    data = _read_if_there(config.data_folder / artifacts.MANIFEST)
    if data is not None and data["dataset_fingerprint"] != train["inputs"].get("data"):
        raise UserError(
            f"{config.data_folder} is not the data that the drafter was trained on, and the card would tell its "
            f"counts: run `{TRAIN}` on it, or give data_dir=… of training"
        )
    return Trained(found.weights, shape, found.vocab, train, data)


def _read_if_there(path: Path) -> dict[str, Any] | None:
    return artifacts.read_json(path, "the stage") if path.is_file() else None


def _reaching_further(shape: DrafterShape, positions: int) -> DrafterShape:
    """The shape with as many positions as the options say: no weight depends on them, and vLLM may need more of them
    than were trained with. How many a scaling may have, the contract knows."""
    if positions <= shape.max_position_embeddings:
        return shape
    print(f"export: max_position_embeddings is {positions:,} now, {shape.max_position_embeddings:,} in training")
    return dataclasses.replace(shape, max_position_embeddings=positions)


def _refuse_contradictions(config: Config, shape: DrafterShape, folder: Path) -> None:
    """The card tells the options; they must be those of the weights."""
    options = {**as_plain(config.drafter), "aux_layers": config.target.aux_layers}
    if options["aux_layers"] is not None:
        options["aux_layers"] = sorted(options["aux_layers"])
    for name, trained in as_plain(shape).items():
        wanted = options.get(name)
        if name == "rope_scaling":  # {} is no scaling, which a shape writes as None
            wanted, trained = wanted or {}, trained or {}
        if wanted is not None and wanted != trained:
            raise UserError(
                f"{folder} was trained with {name}={trained}, but the options say {wanted}: "
                f"give the options of training, or run `{TRAIN}` with these"
            )


def _refuse_other_target(config: Config, train: dict[str, Any]) -> None:
    """The store, where it is still there, knows whose hidden states the drafter learnt from."""
    store = read_manifest(config)
    if store is None or not _mentions(train.get("inputs"), store["fingerprint"]):
        return
    learnt = store.get("inputs", {}).get("target", {}).get("name", config.target.name)
    if learnt != config.target.name:
        raise UserError(
            f"the drafter was trained for {learnt}, but target.path is {config.target.path}: "
            "give the target of training, or another run_dir=…"
        )


def _mentions(value: Any, wanted: str) -> bool:
    """Whether a fingerprint stands anywhere in a manifest's inputs."""
    if isinstance(value, dict):
        return any(_mentions(inner, wanted) for inner in value.values())
    return bool(value == wanted)


# ---------------------------------------------------------------- whether there is anything to do


def checkpoint_inputs(config: Config, trained: Trained) -> dict[str, Any]:
    """What the checkpoint depends on, the card apart."""
    return {
        "layout": LAYOUT,
        "train": trained.train["fingerprint"],
        "checkpoint": trained.train["checkpoint"],
        "weights": artifacts.file_sha256(trained.weights),
        "shape": as_plain(trained.shape),
        "vocab": artifacts.fingerprint(trained.vocab.target_ids.tolist()),
        "target": config.target.name,
        "dtype": config.target.dtype,
    }


def finished(run: Path, inputs: dict[str, Any], overwrite: bool) -> int:
    """How much of `run/export` is there, whole, and made from these inputs.

    The manifest lies beside the folder, not in it: every file of the folder is for vLLM or the hub.
    What only the card depends on, a measurement for instance, may change without `overwrite`.
    """
    path = run / "export.json"
    if not path.is_file():
        return NOTHING
    old = artifacts.read_json(path, "python -m eagle31_train.export")
    before = old.get("inputs", {})
    change = artifacts.describe_change(before, inputs)
    if {**before, "card": None} != {**inputs, "card": None}:
        if not overwrite:
            raise UserError(
                f"{run / 'export'} was made from other inputs ({change}): "
                "choose another name=… or run_dir=…, or replace it with overwrite=true"
            )
        print(f"export: made again ({change})")
        return NOTHING
    if damage := artifacts.first_damaged(run, old.get("files", {})):
        print(f"{damage}; exporting again")
        return NOTHING
    if old.get("fingerprint") == artifacts.fingerprint(inputs):
        return WHOLE
    print(f"export: the same checkpoint, with a new card ({change})")
    return CHECKPOINT


# ---------------------------------------------------------------- writing


def _write(config: Config, trained: Trained, results: findings.Results, final: Path, keep: bool) -> None:
    """Write the export into a temporary folder, read it back, and only then give it its name.

    Args:
        keep: the checkpoint that is there stays; the rest is new.
    """
    facts = card.Facts(config, trained.shape, trained.train, trained.data, **vars(results))
    temporary = final.with_name(".export.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a run that was killed
    temporary.mkdir(parents=True)
    try:
        if keep:
            for name in SERVED:
                _link(final / name, temporary / name)
        else:
            _write_checkpoint(config, trained, temporary)
        for picture in results.pictures:
            (temporary / picture.name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(picture.file, temporary / picture.name)
        artifacts.write_text(temporary / "README.md", card.render(facts))
        final.with_name("export.json").unlink(missing_ok=True)  # it is the old folder's
        artifacts.commit(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _link(old: Path, new: Path) -> None:
    """The same file under a second name; a copy where the file system has no such thing."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copy2(old, new)


def _write_checkpoint(config: Config, trained: Trained, folder: Path) -> None:
    tensors = read_tensors(trained.weights, DTYPES[config.target.dtype])
    if unexpected := tensors.keys() & {"d2t", "t2d"}:
        raise UserError(f"{trained.weights} holds {min(unexpected)}: the maps come from data/vocab.safetensors")
    if contract.map_tensors(trained.shape):
        tensors["d2t"] = torch.from_numpy(trained.vocab.d2t)
        tensors["t2d"] = torch.from_numpy(trained.vocab.t2d)
    refuse(trained.weights, contract.check(tensors, trained.shape))
    settings = draft_config.config_json(trained.shape, config.target.dtype, config.target.name)
    artifacts.write_json(folder / "config.json", settings)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors gives its files to their owner alone, which a server run by another user cannot read.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode & 0o777)
    verify(folder, trained.shape, tensors)


def read_tensors(path: Path, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Every tensor of a safetensors file; floating-point ones cast to `dtype` where one is given.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is missing or damaged ({error}): run `{TRAIN}` again") from None
    if dtype is None:
        return tensors
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def refuse(path: Path, problems: list[str]) -> None:
    """Raise the first few problems of a checkpoint as one UserError; return where there are none."""
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(f"{path} is no checkpoint for vLLM: {'; '.join(problems[:3])}{more}. Train it again")


def verify(folder: Path, shape: DrafterShape, tensors: dict[str, torch.Tensor]) -> None:
    """Read a written checkpoint back: the contract again, and every value as it was meant."""
    found = read_tensors(folder / "model.safetensors")
    refuse(folder, contract.check(found, shape))
    for name, tensor in tensors.items():
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor):
            raise UserError(f"{folder}: {name} did not read back as it was written: check the disk and export again")
    settings = artifacts.read_json(folder / "config.json", "python -m eagle31_train.export")
    meant = dataclasses.replace(shape, rope_scaling=draft_config.rope_scaling(shape))  # in config.json's words
    if draft_config.shape_from_config(settings, found) != meant:
        raise UserError(f"{folder / 'config.json'} does not read back as the drafter's shape: check drafter.*")


if __name__ == "__main__":
    cli.run(export, __doc__ or "")
