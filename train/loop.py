"""The training loop, top to bottom.

    accelerate launch train.py +experiment=smollm2

Reads run_dir/data (the draft vocabulary) and run_dir/store; writes run_dir/train. Run the same
command again after a stop: it goes on from the newest whole checkpoint.
"""

import math
import os
import time
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DistributedType, broadcast_object_list, parse_flag_from_env
from torch import Tensor, nn

from eagle31_train import artifacts, cli, vocab
from eagle31_train.drafter.batch import Batch, build_batch
from eagle31_train.loss import MEASURES, Objective
from eagle31_train.schema import Config, UserError, byte_count
from eagle31_train.store import Store, StoreSplit, place_of
from eagle31_train.store.stream import check_consumer
from train import checkpoint, order, windows
from train.build import build_objective, check_options, check_samples, check_store, drafter_shape
from train.loader import load
from train.metrics import Reporter, fetch, reduce_sums, summarise

LAYOUT = 2  # raise it when the same inputs are trained otherwise
# Options that steer memory, reporting and saving but not what is learnt.
UNRELATED = {"accumulation", "recompute", "compile", "eval_every", "eval_samples"}
UNRELATED |= {"checkpoint_every", "keep_checkpoints", "wandb", "project"}


def main() -> None:
    """Entry point of train.py."""
    cli.run(train, "Stage 3: fit the drafter to the stored hidden states (run it with `accelerate launch`).")


def train(config: Config) -> None:
    """Run the stage.

    Raises:
        UserError: missing, damaged or mismatched input, or a launch that this trainer cannot serve.
    """
    check_options(config.train, config.drafter)
    with closing(Store(place_of(config), config.store.follow, config.store.patience)) as store:
        fit(config, store)


def fit(config: Config, store: Store) -> None:
    """Train on a store."""
    folder, data_dir = Path(config.run_dir) / "train", config.data_folder
    data = artifacts.read_json(data_dir / artifacts.MANIFEST, "python -m data_prep")
    check_store(store, data, config.target)
    draft_vocab = vocab.read(data_dir / "vocab.safetensors")
    inputs = training_inputs(config, store, artifacts.file_sha256(data_dir / "vocab.safetensors"))
    fingerprint = artifacts.fingerprint(inputs)
    shape = drafter_shape(config.drafter, store, draft_vocab)
    train_split, heldout = store.split("train"), store.split("heldout")
    check_samples(train_split, config.train.batch_tokens)
    cut = windows.cut(train_split, config.train.window_tokens)
    windows.check(store, cut, config.train.epochs, byte_count(config.store.cache_bytes, "store.cache_bytes"))

    accelerator = make_accelerator(config, folder)
    if len(cut) > 1 and data["inputs"].get("shuffle") is None:
        accelerator.print("train: the windows follow the order of the data, which is not shuffled (data.shuffle=SEED)")
    up_to_date = [False]
    check_consumer(store.place, fingerprint)  # before anything of an earlier run is replaced
    if accelerator.is_main_process:
        claim(folder, fingerprint, inputs, config.overwrite)
        up_to_date = [artifacts.finished(folder, fingerprint, inputs, overwrite=False)]
    if broadcast_object_list(up_to_date)[0]:
        accelerator.print(f"train: up to date ({folder})")
        return

    # What is trained, on what, how often.
    objective = build_objective(config, shape, store, draft_vocab)
    drafter = objective.drafter
    t = config.train
    optimizer = torch.optim.AdamW(
        checkpoint.parameter_groups(drafter, t.weight_decay),
        lr=t.lr,
        betas=(t.betas[0], t.betas[1]),
        fused=True,
    )
    model, prepared = accelerator.prepare(objective, optimizer)
    batches = order.schedule(
        train_split.lengths, t.batch_tokens, config.seed, t.epochs, t.max_steps, windows.samples(cut)
    )
    usage = windows.Usage(train_split, batches, cut)
    kept = torch.from_numpy(draft_vocab.t2d)

    # Where an earlier run of the same inputs stopped.
    done, totals = 0, {"tokens": 0, "pairs": 0, "seconds": 0.0, "waited": 0.0}
    if (found := checkpoint.newest(folder / "checkpoints", fingerprint)) is not None:
        manifest = checkpoint.restore(found, drafter, optimizer)
        done, totals = manifest["step"], manifest["totals"]
        accelerator.print(f"train: going on after step {done} ({found})")
    windows.begin(store, usage, done, fingerprint, done == len(batches), accelerator.is_main_process)
    start_tracker(accelerator, config, folder, inputs)
    reporter = Reporter(accelerator, folder, done, len(batches))

    lap = time.perf_counter()
    measured_heldout: dict[str, Any] | None = None
    for step, share, counts, waited in load(train_split, batches, done, config, kept, accelerator):
        lr = learning_rate(step, len(batches), config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        sums, counts = accumulate(model, share, counts, t.gamma, accelerator)
        norm = accelerator.clip_grad_norm_(drafter.parameters(), t.clip)
        # All that the host wants to know of a step, in one wait for the device.
        norm, counts, sums = fetch(norm, counts, sums)
        if not counts.any():
            raise UserError(
                f"step {step}: no sample of its batch has a pair to train (samples {batches[step - 1]}), nothing was "
                "updated: raise train.batch_tokens, or prepare the data without conversations that teach nothing"
            )
        if not torch.isfinite(norm):
            raise UserError(
                f"step {step}: the gradient is not finite (samples {batches[step - 1]}); nothing was updated"
            )
        prepared.step()
        prepared.zero_grad(set_to_none=True)

        # Reporting.
        report = summarise(sums)
        tokens = sum(train_split.lengths[i] for i in batches[step - 1])
        totals["tokens"] += tokens
        totals["pairs"] += int(sums[1].sum())
        totals["waited"] += waited
        reporter.log(step, {**report, "lr": lr, "grad_norm": norm.item(), "tokens": totals["tokens"]})
        reporter.progress(tokens, report["loss"], report["tau"])
        final = step == len(batches)
        if len(heldout) and (final or step % t.eval_every == 0):
            measured_heldout = evaluate(model, heldout, config, kept, accelerator, everything=final)
            reporter.log(step, {f"heldout_{name}": value for name, value in measured_heldout.items()})
            reporter.note(
                f"step {step}: held-out loss {measured_heldout['loss']:.3f}, tau {measured_heldout['tau']:.3f}"
            )
        lap, before = time.perf_counter(), lap
        totals["seconds"] += lap - before
        if not (final or step % t.checkpoint_every == 0 or (usage.ends_window(step) and windows.bounded(store))):
            continue
        if accelerator.is_main_process:
            extra = {"fingerprint": fingerprint, "totals": totals, "heldout": measured_heldout if final else None}
            found = checkpoint.save(folder / "checkpoints", step, drafter, optimizer, extra)
            checkpoint.prune(folder / "checkpoints", t.keep_checkpoints)
        # What no step after a checkpoint reads may go; before it is saved, a kill would need it again.
        windows.let_go(store, usage, step, fingerprint, final, remove=accelerator.is_main_process)
    reporter.bar.close()
    # Together, so that no rank closes its connections while another still saves or speaks to it.
    accelerator.wait_for_everyone()
    accelerator.end_training()

    if accelerator.is_main_process:
        assert found is not None
        artifacts.write_json(
            folder / artifacts.MANIFEST,
            {
                "fingerprint": fingerprint,
                "inputs": inputs,
                "checkpoint": str(found.relative_to(folder)),
                "steps": len(batches),
                **totals,
                "heldout": artifacts.read_json(found / artifacts.MANIFEST, "train.py")["heldout"],
                "files": artifacts.list_files(folder, found.iterdir()),
            },
        )
        waited = totals["waited"] / max(totals["seconds"], 1e-9)
        print(
            f"train: {len(batches)} steps, {totals['tokens']:,} tokens, {waited:.1%} of the time waiting for data; "
            f"drafter in {found}"
        )


def accumulate(
    model: nn.Module, share: list[tuple[Batch, bool]], counts: Tensor, gamma: float, accelerator: Accelerator
) -> tuple[Tensor, Tensor]:
    """Add up the gradients of a step. Nothing here waits for the device: work is only queued.

    Args:
        share: this rank's micro-batches, as `load` gives them, with `counts` [K], their part of N_k.

    Returns:
        Over all ranks, on the device: what was measured [MEASURES, K], and N_k [K].
    """
    # N_k is complete before any gradient is taken.
    counts = reduce_sums(accelerator, counts.to(accelerator.device, non_blocking=True))
    weights = step_weights(counts, gamma)
    sums = torch.zeros(MEASURES, len(counts), device=accelerator.device)
    for index, (batch, real) in enumerate(share):
        last = index == len(share) - 1
        # DDP averages over ranks; the loss is a sum over them, hence the world size.
        factor = float(real) * accelerator.num_processes * batch.scale
        with nullcontext() if last else accelerator.no_sync(model):
            loss, measured = model(batch.to(accelerator.device), weights * factor)
            accelerator.backward(loss)
        sums += measured.stacked() * float(real)
    return reduce_sums(accelerator, sums), counts


def training_inputs(config: Config, store: Store, vocab_sha: str) -> dict[str, Any]:
    """Everything that the trained weights depend on."""
    recipe = {name: value for name, value in asdict(config.train).items() if name not in UNRELATED}
    return {
        "layout": LAYOUT,
        "store": store.fingerprint,
        "data": store.inputs["data"],
        "vocab": vocab_sha[:16],
        "drafter": asdict(config.drafter),
        "train": recipe,
        "seed": config.seed,
    }


def claim(folder: Path, fingerprint: str, inputs: dict[str, Any], overwrite: bool) -> None:
    """Mark the folder as this run's; a folder that holds another run, finished or not, is refused.

    Raises:
        UserError: the folder holds a run of other inputs and `overwrite` is off.
    """
    record = folder / "inputs.json"
    if record.exists():
        begun = artifacts.read_json(record, "train.py")["inputs"]
        if begun != inputs and not overwrite:
            raise UserError(
                f"{folder} holds a run of other inputs ({artifacts.describe_change(begun, inputs)}): "
                "choose another name=… or run_dir=…, or replace it with overwrite=true"
            )
        if begun != inputs:
            artifacts.discard(folder)
    artifacts.write_json(record, {"fingerprint": fingerprint, "inputs": inputs})


def make_accelerator(config: Config, folder: Path) -> Accelerator:
    """The accelerator, checked to be a kind that this loop synchronises and saves correctly."""
    unsupported = "which this trainer does not support yet: launch one process or DDP (configs/accelerate/)"
    for plugin in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        # On CPUs accelerate drops the plugin and says nothing: ask what was wanted, not only what came.
        if parse_flag_from_env(f"ACCELERATE_USE_{plugin}"):
            raise UserError(f"accelerate launched {plugin}, {unsupported}")
    accelerator = Accelerator(
        mixed_precision=config.train.precision,
        log_with="wandb" if config.train.wandb != "disabled" else None,
        project_dir=str(folder),
        # The only buffers are the target's weights, the same on every rank.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    supported = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    if accelerator.distributed_type not in supported:
        raise UserError(f"accelerate launched {accelerator.distributed_type.value}, {unsupported}")
    if accelerator.num_processes != (launched := int(os.environ.get("WORLD_SIZE", "1"))):
        raise UserError(
            f"{launched} processes were launched, and each would train alone: "
            "without GPUs set ACCELERATE_USE_CPU=true, or launch one process"
        )
    return accelerator


def start_tracker(accelerator: Accelerator, config: Config, folder: Path, inputs: dict[str, Any]) -> None:
    """Save the resolved configuration and start the tracker."""
    if accelerator.is_main_process:
        artifacts.write_text(folder / "config.yaml", cli.to_yaml(config))
    if config.train.wandb != "disabled":
        settings = {"dir": str(folder), "mode": config.train.wandb, "name": config.name, "resume": "allow"}
        settings["id"] = f"{config.name}-{artifacts.fingerprint(inputs)}"
        accelerator.init_trackers(config.train.project, config=inputs, init_kwargs={"wandb": settings})


def step_weights(counts: Tensor, gamma: float) -> Tensor:
    """[K] fp32: gamma^k / N_k; a step that nothing trains weighs nothing."""
    steps = torch.arange(len(counts), device=counts.device)
    return torch.where(counts > 0, gamma**steps / counts.clamp(min=1), 0.0).float()


def learning_rate(step: int, total: int, config: Config) -> float:
    """Linear warm-up, then a cosine to min_lr * lr; `step` counts from 1."""
    t = config.train
    warmup = max(1, round(t.warmup * total))
    if step <= warmup:
        return t.lr * step / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return t.lr * (t.min_lr + (1 - t.min_lr) * 0.5 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def evaluate(
    model: Objective,
    split: StoreSplit,
    config: Config,
    kept: Tensor,
    accelerator: Accelerator,
    everything: bool,
) -> dict[str, Any]:
    """Teacher-forced metrics on the held-out split (the first `eval_samples` of it, or everything)."""
    t = config.train
    chosen = range(len(split) if everything else min(len(split), t.eval_samples))
    lengths = [split.lengths[i] for i in chosen]
    # A long conversation here needs no memory for gradients: the batches grow, and the numbers stay the split's.
    batches = order.global_batches(lengths, max([t.batch_tokens, *lengths]), seed=0, epoch=0)
    mine = batches[accelerator.process_index :: accelerator.num_processes]
    sums = torch.zeros(MEASURES, t.unroll, device=accelerator.device)
    weights = torch.zeros(t.unroll, device=accelerator.device)
    objective = accelerator.unwrap_model(model, keep_fp32_wrapper=True)
    objective.eval()
    with accelerator.autocast():
        for indices in mine:
            batch = build_batch(split.read_all(indices), t.unroll, kept, t.oov)
            sums += objective(batch.to(accelerator.device), weights)[1].stacked()
    objective.train()
    return summarise(reduce_sums(accelerator, sums))
