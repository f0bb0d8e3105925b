"""STAGE 4: how many drafted tokens the target accepts, by real speculative decoding.

    python -m eagle31_train.evaluate +experiment=smollm2

Reads run_dir/data and run_dir/train, writes run_dir/evaluate/manifest.json. Every prompt is decoded
twice, with and without the drafter; the two outputs must be equal, token for token.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tqdm import tqdm

from eagle31_train import artifacts, cli, vocab
from eagle31_train.drafter.decode import DraftDecoder
from eagle31_train.drafter.model import Drafter
from eagle31_train.measure import prompts
from eagle31_train.measure.acceptance import Outcome, describe, summarise, table
from eagle31_train.measure.decoding import (
    Decoded,
    Limits,
    decode_plain,
    decode_speculative,
    first_difference,
    logit_gap,
)
from eagle31_train.measure.prompts import Prompt
from eagle31_train.schema import Config, DrafterShape, EvaluateConfig, UserError, check_architecture
from eagle31_train.store import read_manifest
from eagle31_train.targets.cached import CachedTarget
from eagle31_train.targets.hf import load_model, pick_dtype

TRAIN = "accelerate launch train.py"
DATA = "python -m data_prep"
LAYOUT = 2  # raise it when the same inputs are counted or reported otherwise


@dataclass(frozen=True)
class Checkpoint:
    """What training left: its manifest, the drafter's shape, the weights' file and the draft vocabulary."""

    manifest: dict[str, Any]
    shape: DrafterShape
    weights: Path
    vocab: vocab.DraftVocab


def evaluate(config: Config) -> None:
    """Run the stage.

    Raises:
        UserError: missing or damaged input, output of other inputs, or an output that differs from
            plain greedy decoding.
    """
    began = time.perf_counter()
    run_dir = Path(config.run_dir)
    check_options(config.evaluate)
    data = artifacts.read_json(config.data_folder / artifacts.MANIFEST, DATA)
    trained = read_checkpoint(config)
    inputs = stage_inputs(config, data, trained.manifest)
    folder = run_dir / "evaluate"
    if artifacts.finished(folder, artifacts.fingerprint(inputs), inputs, config.overwrite):
        print(f"evaluate: up to date ({folder})")
        return
    if data["dataset_fingerprint"] != trained.manifest["inputs"].get("data"):
        raise UserError(
            f"{config.data_folder} is not the data that the drafter was trained on, so its held-out prompts may have "
            f"been trained on: run `{TRAIN}` on it, or give data_dir=… of training"
        )
    refuse_other_target(read_manifest(config), trained.manifest, inputs["target"], config.target.path)
    if damage := artifacts.first_damaged(config.data_folder, data.get("files", {})):
        raise UserError(f"{damage}: run `{DATA}` again")

    target = CachedTarget(load_model(config.target, config.evaluate.dtype), trained.shape.aux_layers)
    drafter = load_drafter(trained, target, config)
    room = positions(target, trained.shape) - config.evaluate.max_new_tokens - config.evaluate.draft_tokens
    given = read_prompts(config, data)
    chosen, too_long = prompts.choose(given, config.evaluate.num_prompts, room)
    if too_long:
        print(f"evaluate: {len(too_long)} prompts have more than {room} tokens and are left out: {', '.join(too_long)}")
    outcomes = decode_all(target, drafter, torch.from_numpy(trained.vocab.target_ids), chosen, data, config.evaluate)

    report = summarise(outcomes, config.evaluate, target)
    report["not_measured"] = sorted(sources_of(given, config, data) - report["by_source"].keys())
    seconds = time.perf_counter() - began
    manifest = {
        "fingerprint": artifacts.fingerprint(inputs),
        "inputs": inputs,
        "report": {**report, "seconds": seconds},
        "per_prompt": [describe(outcome, config.evaluate.draft_tokens) for outcome in outcomes],
        "too_long": too_long,
        "end_ids": data["end_ids"],
        "files": {},
        "seconds": seconds,
    }
    artifacts.write_json(folder / artifacts.MANIFEST, manifest)
    print(table(report))


# ---------------------------------------------------------------- input


def check_options(options: EvaluateConfig) -> None:
    """Refuse numbers with which nothing would be measured."""
    pick_dtype(options.dtype)
    for name, least in (("num_prompts", 1), ("draft_tokens", 1), ("max_new_tokens", 2)):
        if getattr(options, name) < least:
            raise UserError(f"evaluate.{name}={getattr(options, name)} measures nothing: set at least {least}")


def read_checkpoint(config: Config) -> Checkpoint:
    """The checkpoint that training left, whole and with its own vocabulary; UserError otherwise."""
    folder = Path(config.run_dir) / "train"
    manifest = artifacts.read_json(folder / artifacts.MANIFEST, TRAIN)
    if damage := artifacts.first_damaged(folder, manifest.get("files", {})):
        raise UserError(f"{damage}: run `{TRAIN}` again")
    checkpoint = folder / manifest["checkpoint"]
    try:
        shape = DrafterShape(**artifacts.read_json(checkpoint / "drafter.json", TRAIN))
    except TypeError as error:
        raise UserError(
            f"{checkpoint / 'drafter.json'} is not a drafter's shape ({error}): run `{TRAIN}` again"
        ) from None
    check_architecture(shape.architecture)
    if not (weights := checkpoint / "model.safetensors").is_file():
        raise UserError(f"{weights} is missing: run `{TRAIN}` first")
    file = config.data_folder / "vocab.safetensors"
    kept = vocab.read(file)
    # Another vocabulary of the same size would change the meaning of lm_head's rows in silence.
    if manifest["inputs"].get("vocab") != artifacts.file_sha256(file)[:16]:
        raise UserError(f"{file} is not the vocabulary that the drafter was trained with: run `{TRAIN}` again")
    return Checkpoint(manifest, shape, weights, kept)


def stage_inputs(config: Config, data: dict[str, Any], train: dict[str, Any]) -> dict[str, Any]:
    """Everything that the counts depend on."""
    options = asdict(config.evaluate)
    del options["warmup"]
    if config.evaluate.prompts is not None:
        options["prompts"] = [artifacts.file_sha256(f)[:16] for f in prompts.files_of(config.evaluate.prompts)]
        if config.target.template_args:
            options["template_args"] = config.target.template_args
        if config.target.chat_template is not None:
            options["template"] = artifacts.file_sha256(Path(config.target.chat_template))[:16]
    return {
        "layout": LAYOUT,
        "train": train["fingerprint"],
        "data": data["fingerprint"],
        "target": {
            "name": config.target.name,
            "revision": config.target.revision,
            "weights": artifacts.weights_fingerprint(config.target.path),
            "dtype": config.target.dtype,
        },
        "evaluate": options,
    }


def refuse_other_target(store: dict[str, Any] | None, train: dict[str, Any], target: dict[str, Any], path: str) -> None:
    """The store's manifest, where there is one still, knows whose hidden states the drafter learnt from."""
    if store is None:
        return
    learnt = store["inputs"]["target"]
    same = learnt["weights"] == target["weights"] and learnt["revision"] == target["revision"]
    if store["fingerprint"] == train["inputs"].get("store") and not same:
        raise UserError(
            f"the drafter was trained for {learnt['name']}, which had other weights than target.path={path}: "
            "give the target of training, or another run_dir=…"
        )


def load_drafter(trained: Checkpoint, target: CachedTarget, config: Config) -> Drafter:
    """The drafter as it is served: weights rounded to target.dtype, run in evaluate.dtype.

    The exporter writes them in target.dtype, hence the rounding, here and nowhere else.
    """
    embedding = target.embedding.weight.data
    drafter = Drafter(trained.shape, embedding)
    try:
        drafter.load_state_dict(load_file(trained.weights))
    except (RuntimeError, SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{trained.weights} does not fit its drafter.json ({reason}): run `{TRAIN}` again") from None
    drafter.to(pick_dtype(config.target.dtype)).to(embedding.device, pick_dtype(config.evaluate.dtype))
    if trained.shape.share_embedding:
        drafter.shared_embedding = embedding  # the target's own, which the rounding has no business with
    return drafter.eval().requires_grad_(False)


def positions(target: CachedTarget, shape: DrafterShape) -> int:
    """The longest sequence on which vLLM drafts every time."""
    limit = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)
    return min(shape.max_position_embeddings, limit or shape.max_position_embeddings)


def read_prompts(config: Config, data: dict[str, Any]) -> list[Prompt]:
    """The prompts of the configuration, in their order."""
    if config.evaluate.prompts is not None:
        return prompts.from_files(prompts.files_of(config.evaluate.prompts), config.target)
    folder = config.data_folder
    # Asked of the manifest: `datasets` saves an empty split and then cannot load it.
    if not data["splits"]["heldout"]["conversations"]:
        raise UserError(
            f"{folder} holds out no prompts (data.heldout=0): set data.heldout and run `{DATA}` again, "
            "or set evaluate.prompts=FILE"
        )
    return prompts.from_heldout(folder / "dataset")


def sources_of(given: list[Prompt], config: Config, data: dict[str, Any]) -> set[str]:
    """Every source that somebody might look for: of the file's prompts, or of what the drafter learnt."""
    known = {prompt.source for prompt in given}
    if config.evaluate.prompts is None:
        known |= data["splits"]["train"].get("by_source", {}).keys()
    return known


# ---------------------------------------------------------------- decoding


def decode_all(
    target: CachedTarget,
    drafter: Drafter,
    target_ids: torch.Tensor,
    chosen: list[Prompt],
    data: dict[str, Any],
    options: EvaluateConfig,
) -> list[Outcome]:
    """Decode every prompt both ways, in turns, so that a busy machine slows both alike.

    Raises:
        UserError: the outputs of a prompt differ.
    """
    limits = Limits(options.max_new_tokens, frozenset(data["end_ids"]))
    ids = target_ids.to(target.embedding.weight.device)

    def plain(prompt: Prompt) -> Decoded:
        return decode_plain(target, prompt.ids, limits)

    def speculative(prompt: Prompt) -> Decoded:
        capacity = len(prompt.ids) + options.max_new_tokens + options.draft_tokens
        decoder = DraftDecoder(drafter, ids, capacity)
        return decode_speculative(target, decoder, prompt.ids, options.draft_tokens, limits)

    if options.warmup:
        plain(chosen[0])
        speculative(chosen[0])
    outcomes: list[Outcome] = []
    with tqdm(chosen, desc="evaluate", unit="prompt") as bar:
        for index, prompt in enumerate(bar):
            if index % 2:
                with_drafter, without = speculative(prompt), plain(prompt)
            else:
                without, with_drafter = plain(prompt), speculative(prompt)
            refuse_difference(target, prompt, without, with_drafter, options)
            outcomes.append(Outcome(prompt, without, with_drafter))
            counts = [accepted for outcome in outcomes for accepted in outcome.speculative.accepted]
            bar.set_postfix_str(f"acceptance length {1 + sum(counts) / max(len(counts), 1):.3f}")
    return outcomes


def refuse_difference(
    target: CachedTarget, prompt: Prompt, plain: Decoded, speculative: Decoded, options: EvaluateConfig
) -> None:
    """UserError where speculation changed the output."""
    at = first_difference(plain.tokens, speculative.tokens)
    if at is None:
        return
    ours, theirs = (tokens[at] if at < len(tokens) else None for tokens in (speculative.tokens, plain.tokens))
    gap = "one output is shorter"
    if ours is not None and theirs is not None:
        gap = f"the target's logits differ by {logit_gap(target, prompt.ids + plain.tokens[:at], theirs, ours):.3g}"
    hint = (
        "under 1e-4, rounding chose between equals: decode other prompts by evaluate.prompts=FILE; otherwise a mistake"
        if options.dtype == "float32"
        else f"evaluate.dtype={options.dtype} rounds differently for one token and for several: "
        "use evaluate.dtype=float32"
    )
    raise UserError(
        f"prompt {prompt.id}, output token {at}: speculation gives {ours}, plain decoding {theirs} ({gap}); {hint}"
    )


if __name__ == "__main__":
    cli.run(evaluate, "Stage 4: real speculative decoding on held-out prompts: acceptance and speed.")
