"""The training loop, top to bottom.

    accelerate launch train.py +experiment=smollm2

Reads run_dir/data (the draft vocabulary) and run_dir/store; writes run_dir/train. Run the same
command again after a stop: it goes on from the newest whole checkpoint, on as many devices as there are then.
"""

import math
import resource
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import gather_object, set_seed
from torch import Tensor

from eagle31_train import artifacts, cli, vocab
from eagle31_train.contract import caveats
from eagle31_train.drafter.batch import Batch
from eagle31_train.loss import MEASURES
from eagle31_train.schema import Config, DrafterShape, Stopped, TrainConfig, UserError, byte_count
from eagle31_train.store import Store, place_of
from eagle31_train.store.stream import check_consumer
from train import checkpoint, launch, order, rng, tracking, warm, windows
from train.build import build_objective, check_options, check_samples, check_store, shape_of
from train.claim import alone, check_made, claim, training_inputs
from train.deadline import Deadline, parse_limit
from train.heldout import evaluate
from train.loader import load
from train.metrics import Reporter, reduce_sums, summarise
from train.parallel import Parallel, parallelise
from train.rows import plain


def main() -> None:
    """Entry point of train.py."""
    cli.run(train, "Stage 3: fit the drafter to the stored hidden states (run it with `accelerate launch`).")


def train(config: Config) -> None:
    """Run the stage.

    Raises:
        UserError: missing, damaged or mismatched input, or a launch that this trainer cannot serve.
        Stopped: SIGTERM or the time limit came; a checkpoint was saved.
    """
    check_options(config.train, config.drafter)
    if config.seed < 0:
        raise UserError(f"seed={config.seed} must be 0 or more")
    with ExitStack() as opened:
        fit(config, opened)


def fit(config: Config, opened: ExitStack) -> None:
    """All of the stage; what must be closed, however it ends, is left in `opened`."""
    t, folder, data_dir = config.train, Path(config.run_dir) / "train", config.data_folder
    check_made(config)
    deadline = opened.enter_context(Deadline(parse_limit(t.time_limit)))
    store = opened.enter_context(closing(Store(place_of(config), config.store.follow, config.store.patience)))
    data = artifacts.read_json(data_dir / artifacts.MANIFEST, "python -m data_prep")
    check_store(store, data, config.target)
    draft_vocab = vocab.read(data_dir / "vocab.safetensors")
    vocab_sha = artifacts.file_sha256(data_dir / "vocab.safetensors")
    inputs = training_inputs(config, store, vocab_sha, warm.identity(config))
    fingerprint = artifacts.fingerprint(inputs)
    shape = shape_of(config.drafter, store, draft_vocab)
    warm.check(config, shape, store, inputs)
    train_split, heldout = store.split("train"), store.split("heldout")
    check_samples(train_split, t.batch_tokens)
    cut = windows.cut(train_split, t.window_tokens)
    windows.check(store, cut, t.epochs, byte_count(config.store.cache_bytes, "store.cache_bytes"))

    # Who trains: what was launched is what was asked for, and every process trains the same.
    accelerator = launch.make_accelerator(config, folder)
    launch.check_alike(accelerator, inputs, config)
    main, device = accelerator.is_main_process, accelerator.device
    if len(cut) > 1 and data["inputs"].get("shuffle") is None:
        accelerator.print("train: the windows follow the order of the data, which is not shuffled (data.shuffle=SEED)")
    check_consumer(store.place, fingerprint)  # before anything of an earlier run is replaced

    def up_to_date() -> bool:
        opened.enter_context(alone(folder.parent))
        claim(folder, fingerprint, inputs, config.overwrite)
        return artifacts.finished(folder, fingerprint, inputs, overwrite=False)

    for caveat in caveats(shape):  # before hours are spent
        accelerator.print(f"train: {caveat}")
    if launch.agreed(accelerator, up_to_date):
        accelerator.print(f"train: up to date ({folder})")
        return

    # What is trained, on what, how often; and where an earlier launch of the same inputs stopped.
    set_seed(config.seed % 2**32)  # numpy takes no larger one; torch's generator, which draws the weights, all of it
    objective = build_objective(config, shape, store, draft_vocab)
    batches = order.schedule(
        train_split.lengths, t.batch_tokens, config.seed, t.epochs, t.max_steps, windows.samples(cut)
    )
    usage = windows.Usage(train_split, batches, cut)
    kept = torch.from_numpy(draft_vocab.t2d)
    newest = launch.agreed(accelerator, lambda: checkpoint.newest(folder / "checkpoints", fingerprint, print))
    if newest is None:
        warm.initial_weights(config, shape, draft_vocab, store, objective.drafter, accelerator.print)
        state, parallel = State(), parallelise(accelerator, objective, t)
    else:
        loaded = checkpoint.load(newest, shape)
        objective.drafter.load_state_dict(loaded.weights)
        state, parallel = State(**loaded.extra["state"]), parallelise(accelerator, objective, t)
        parallel.set_moments(loaded.moments, state.updates)
        accelerator.print(f"train: going on after step {state.step} ({newest})")
    processes = accelerator.num_processes
    accelerator.print(f"train: {parallel.kind}{f', {processes} processes' * (processes > 1)} on {device.type}")
    windows.begin(store, usage, state.step, fingerprint, state.step == len(batches), main)
    state.trackers = tracking.start(accelerator, config, folder, inputs, state.step, state.trackers)
    if main:
        here = {"profile": parallel.kind, "processes": processes, "device": str(device)}
        here |= {"after_step": state.step, "steps": len(batches), "store": store.fingerprint}
        tracking.record_launch(folder, config, here)
    reporter = opened.enter_context(Reporter(accelerator, folder, state.step, len(batches)))
    saver = checkpoint.Saver(folder / "checkpoints", fingerprint, t.keep_checkpoints, reporter.note, newest)
    opened.callback(saver.close)  # never in the middle of a save
    if newest is not None:  # last, since what stands above may draw
        rng.set_rng_state(rng.of_rank(loaded.rng, accelerator.process_index), device)
        del loaded  # or it would stay mapped, and on the disk, after a later checkpoint has replaced it

    def end(problem: str) -> NoReturn:
        """Every rank comes here; what was being saved is saved."""
        saver.close()
        launch.stop_all(accelerator, problem)

    lap, saved, begun_at, stopping = time.perf_counter(), 0.0, state.step, False
    for step, share, counts, waited in load(train_split, batches, begun_at, config, kept, accelerator, deadline):
        samples, lr, final = batches[step - 1], learning_rate(step, len(batches), t), step == len(batches)
        counts[-1] = deadline.reason is not None  # who is told to stop tells the others with its counts
        sums, counts = accumulate(parallel, share, counts, t.gamma)
        norm, counts, sums = parallel.update(lr, counts, sums)
        if not counts[:-1].any():
            end(
                f"step {step}: no sample of its batch has a pair to train (samples {samples}), nothing was saved "
                "since: raise train.batch_tokens, or prepare the data without conversations that teach nothing"
            )
        tokens = sum(train_split.lengths[i] for i in samples)
        state.step, state.updates, state.tokens = step, parallel.updates, state.tokens + tokens
        if torch.isfinite(norm):
            report = {**summarise(sums), "lr": lr, "grad_norm": norm.item(), "tokens": state.tokens}
            state.pairs += int(sums[1].sum())
        else:
            state.left_out.append(step)
            if len(state.left_out) > t.skip_nonfinite:
                end(too_many(state.left_out, blame(parallel, share, samples, train_split.lengths)))
            report = {"left_out": True, "lr": lr, "tokens": state.tokens}

        # Reporting.
        trained = time.perf_counter()
        reporter.log(step, report)
        reporter.progress(tokens, report.get("loss", math.nan), report.get("tau", math.nan))
        if len(heldout) and (final or step % t.eval_every == 0):
            # A curve is of the same conversations at every step; what training leaves behind is of all.
            found = evaluate(parallel, heldout, config, kept)
            reporter.log(step, {f"heldout_{name}": value for name, value in found.items()})
            if final and len(heldout) > t.eval_samples:
                found = evaluate(parallel, heldout, config, kept, everything=True)
            reporter.note(f"step {step}: held-out loss {found['loss']:.3f}, tau {found['tau']:.3f}")
            state.heldout = plain(found)
        lap, before = time.perf_counter(), lap
        state.seconds += lap - before
        state.waited += waited
        timing = {"seconds": lap - before, "waited": waited, "aside": saved + lap - trained, "tokens": tokens}
        reporter.timing(step, {**timing, "memory_bytes": memory_bytes(device)})

        # Saving.
        stopping = bool(counts[-1]) and not final
        makes_room = usage.ends_window(step) and windows.bounded(store)
        saving = final or stopping or makes_room or step % t.checkpoint_every == 0
        if (saving or step == begun_at + 1) and (problem := parallel.differs()):
            end(f"step {step}: {problem}: the ranks do not train together as they should, nothing was saved")
        if saving:
            needed = final or stopping or makes_room
            keep(saver, parallel, state, shape, needed)
            # What no step after a checkpoint reads may go; before it is saved, a kill would need it again.
            windows.let_go(store, usage, step, fingerprint, final, remove=main and needed)
        saved = time.perf_counter() - lap
        if stopping:
            break
    saver.close()
    reporter.close()
    # Together, so that no rank closes its connections while another still saves or speaks to it.
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if stopping:
        why = f"{deadline.reason or 'another rank'}: saved after step {state.step} of {len(batches)}"
        raise Stopped(f"train: stopped by {why}; the same command goes on" if main else "")

    if main:
        assert saver.committed is not None
        facts = {name: value for name, value in asdict(state).items() if name != "step"}
        artifacts.write_json(
            folder / artifacts.MANIFEST,
            {
                "fingerprint": fingerprint,
                "inputs": inputs,
                "checkpoint": str(saver.committed.relative_to(folder)),
                "steps": len(batches),
                **facts,
                "files": artifacts.list_files(folder, saver.committed.iterdir()),
            },
        )
        idle = state.waited / max(state.seconds, 1e-9)
        print(
            f"train: {len(batches)} steps, {state.tokens:,} tokens, {idle:.1%} of the time waiting for data; "
            f"drafter in {saver.committed}"
        )


@dataclass
class State:
    """How far a run is: what a checkpoint holds beside tensors."""

    step: int = 0  # of the data order
    updates: int = 0  # of the weights: fewer, where steps were left out
    tokens: int = 0
    pairs: int = 0
    seconds: float = 0.0
    waited: float = 0.0  # seconds of these, for data
    left_out: list[int] = field(default_factory=list)  # steps whose gradient was not finite
    heldout: dict[str, Any] | None = None  # what was measured last
    trackers: dict[str, str] = field(default_factory=dict)  # under which ids trackers know the run


def accumulate(
    parallel: Parallel, share: list[tuple[Batch, bool]], counts: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """Add up the gradients of a step. Nothing here waits for the device: work is only queued.

    Args:
        share: this rank's micro-batches, as `load` gives them, with `counts` [K+1], their part of N_k.

    Returns:
        Over all ranks, on the device: what was measured [MEASURES, K], and the sum of counts [K+1].
    """
    accelerator = parallel.accelerator
    # N_k is complete before any gradient is taken: what a pair weighs does not depend on who has it.
    counts = reduce_sums(accelerator, counts.to(accelerator.device, non_blocking=True))
    weights = step_weights(counts[:-1], gamma)
    sums = torch.zeros(MEASURES, len(weights), device=accelerator.device)
    for index, (batch, real) in enumerate(share):
        # Ranks are averaged over; the loss is a sum over them, hence their number.
        factor = float(real) * accelerator.num_processes * batch.scale
        with parallel.micro_batch(last=index == len(share) - 1):
            loss, measured = parallel.model(batch.to(accelerator.device), weights * factor)
            # A loss that is not finite may have a gradient that is: then none is, on any rank.
            parallel.backward(loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan))
        if real:
            sums += measured.stacked()
    return reduce_sums(accelerator, sums), counts


def step_weights(counts: Tensor, gamma: float) -> Tensor:
    """[K] fp32: gamma^k / N_k; a step that nothing trains weighs nothing."""
    steps = torch.arange(len(counts), device=counts.device)
    return torch.where(counts > 0, gamma**steps / counts.clamp(min=1), 0.0).float()


def learning_rate(step: int, total: int, t: TrainConfig) -> float:
    """Linear warm-up, then a cosine to min_lr * lr; `step` counts from 1."""
    warmup = max(1, round(t.warmup * total))
    if step <= warmup:
        return t.lr * step / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return t.lr * (t.min_lr + (1 - t.min_lr) * 0.5 * (1 + math.cos(math.pi * progress)))


def blame(parallel: Parallel, share: list[tuple[Batch, bool]], samples: list[int], lengths: Sequence[int]) -> list[int]:
    """Which samples of a step give a loss that is not finite, on any rank; all of the step's if none does alone."""
    accelerator, guilty = parallel.accelerator, []
    parts = order.share(samples, lengths, accelerator.num_processes * len(share))
    weights = torch.ones(share[0][0].unroll, device=accelerator.device)
    for (batch, real), part in zip(share, parts[accelerator.process_index :: accelerator.num_processes], strict=True):
        with torch.no_grad():
            loss, _ = parallel.model(batch.to(accelerator.device), weights)
        guilty += part if real and not loss.isfinite() else []
    return sorted(gather_object(guilty)) or sorted(samples)


def keep(saver: checkpoint.Saver, parallel: Parallel, state: State, shape: DrafterShape, needed: bool) -> None:
    """Save the run as it is now, in the background; with `needed`, return once it is on the disk. Every rank calls it.

    Raises:
        UserError: it is needed, and cannot be written.
    """
    main = parallel.accelerator.is_main_process
    if main:
        saver.wait()  # for the one before, so that there are never two in memory
    snapshot = take(parallel, state, shape)
    if not main:
        return
    saver.save(snapshot)
    if needed:
        saver.wait()
        if saver.failed:
            raise saver.failed


def too_many(left_out: list[int], samples: list[int]) -> str:
    """What to say of the last of these steps, whose loss or gradient was not finite, with the samples to blame."""
    before = f", after {len(left_out) - 1} steps that were left out" if len(left_out) > 1 else ""
    return (
        f"step {left_out[-1]}: loss or gradient is not finite (samples {samples} of the train split){before}; nothing "
        "was updated or saved: look at them, lower train.lr, or leave out such steps by train.skip_nonfinite=n"
    )


def take(parallel: Parallel, state: State, shape: DrafterShape) -> checkpoint.Snapshot:
    """The run as it is now; on the main process with all tensors, in memory of their own. Every rank calls it."""
    main = parallel.accelerator.is_main_process
    weights, moments = (
        {name: tensor.to("cpu", copy=True) for name, tensor in some if main}
        for some in (parallel.weights(), parallel.moments())
    )
    generators = rng.of_all(gather_object([rng.rng_state(parallel.accelerator.device)]))
    return checkpoint.Snapshot(state.step, weights, moments, generators, shape, {"state": asdict(state)})


def memory_bytes(device: torch.device) -> int:
    """The most that this process held on its GPU; on a CPU, the most that it held at all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts kilobytes
