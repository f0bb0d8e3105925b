"""A prepared run and what its loop does with it: a step, its report, an evaluation, a checkpoint."""

import math
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import torch

from eagle31_train.checkpoint.run_folder import CHECKPOINTS, EXPORTED, name_of, read_export
from eagle31_train.common import artifacts
from eagle31_train.common.console import note, say
from eagle31_train.common.errors import UserError
from eagle31_train.config import DrafterShape, TrainConfig
from eagle31_train.reporting.training_page import HELDOUT
from train import launch
from train.acceptance import AcceptanceMeter, evaluate
from train.checkpoint import Saver, Snapshot
from train.deadline import Deadline
from train.inputs import Inputs, tokens_to_keep
from train.loader import GlobalBatch, load
from train.metrics import Reporter, heldout_text, plain, summarise
from train.parallel import Parallel
from train.step import accumulate, learning_rate
from train.windows import Usage


@dataclass
class State:
    """How far a run is: what a checkpoint holds besides tensors."""

    step: int = 0  # position in the schedule
    updates: int = 0  # optimizer steps: skipped steps do not count
    tokens: int = 0
    pairs: int = 0
    seconds: float = 0.0
    waited: float = 0.0  # seconds of these spent waiting for data
    left_out: list[int] = field(default_factory=list)  # steps skipped for a loss or gradient that was not finite
    without_pairs: list[int] = field(default_factory=list)  # steps skipped because they had nothing to train
    heldout: dict[str, Any] | None = None  # metrics of the newest evaluation
    best: dict[str, Any] | None = None  # step, acceptance_length and heldout metrics of the best evaluation so far
    since_best: int = 0  # evaluations since then
    measured_on: list[str] = field(default_factory=list)  # digests of trajectories' prompts, of earlier stores, too

    def stale(self, early_stop: int | None) -> bool:
        """Whether acceptance has not risen for `train.early_stop` evaluations."""
        return early_stop is not None and self.since_best >= early_stop

    def ended(self, t: TrainConfig) -> bool:
        """Whether the run ends at the checkpoint from which it would resume."""
        return t.finish or self.stale(t.early_stop)


@dataclass(frozen=True)
class StepResult:
    """The result of one step; all but `waited` are the same on every rank."""

    step: int
    metrics: dict[str, Any]  # the row of metrics.jsonl
    tokens: int  # of all ranks
    waited: float  # seconds that this rank waited for data
    stop_requested: bool


@dataclass
class Trainer:
    """A run that is ready to train; `train.prepare.prepare` makes it."""

    data: Inputs
    parallel: Parallel
    usage: Usage
    state: State
    reporter: Reporter
    saver: Saver
    deadline: Deadline
    meter: AcceptanceMeter | None = None  # where the store has trajectories

    def __post_init__(self) -> None:
        self.t, self.folder = self.data.config.train, self.data.config.train_folder
        self.schedule, self.heldout, self.accelerator = self.data.schedule, self.data.heldout, self.parallel.accelerator
        self.keep_mask = tokens_to_keep(self.data.draft_vocab, self.t.oov)
        self.first_step = self.state.step + 1
        # The run ends with the schedule, or earlier (`train.early_stop`, `train.finish`).
        self.last_step = self.state.step if self.state.ended(self.t) else len(self.schedule)
        self.lap = time.perf_counter()  # when the previous step was logged
        self.aside = 0.0  # seconds of the previous step's evaluation and checkpoint, which come after its log

    def batches(self) -> Iterator[GlobalBatch]:
        self.deadline.save_on_interrupt()
        self.lap = time.perf_counter()
        split, schedule, seed = self.data.train_split, self.schedule[: self.last_step], self.data.config.seed
        return load(split, schedule, self.state.step, self.t, seed, self.keep_mask, self.accelerator, self.deadline)

    def train_step(self, batch: GlobalBatch) -> StepResult:
        """Update the weights. Skip a step that has nothing to train, or whose loss or gradient is not finite. Raise
        SharedError after more than `train.skip_nonfinite` of the latter."""
        self.aside = time.perf_counter() - self.lap - batch.waited
        if self.deadline.reason is not None:
            batch.totals.request_stop()
        step, state = batch.step, self.state
        lr = learning_rate(step, len(self.schedule), self.t)
        sums, totals = accumulate(self.parallel, batch.micro_batches, batch.totals, self.t.gamma)
        norm, totals, sums = self.parallel.update(lr, totals, sums)  # on the host now
        tokens = sum(self.data.train_split.lengths[i] for i in batch.samples)
        state.step, state.updates, state.tokens = step, self.parallel.updates, state.tokens + tokens
        if not totals.pairs.any():
            metrics = {"no_pairs": True, "lr": lr, "tokens": state.tokens}
            self._pass_over(batch)
        elif torch.isfinite(norm):
            metrics = {**summarise(sums), "lr": lr, "grad_norm": norm.item(), "tokens": state.tokens}
            state.pairs += int(sums[1].sum())
        else:
            metrics = {"left_out": True, "lr": lr, "tokens": state.tokens}
            self._leave_out(batch)
        stop_requested = totals.stop_requested and step < self.last_step
        return StepResult(step, metrics, tokens, batch.waited, stop_requested)

    def log(self, result: StepResult) -> None:
        metrics, now = result.metrics, time.perf_counter()
        loss, estimate = (metrics.get(name, math.nan) for name in ("loss", "acceptance_estimate"))
        self.reporter.log(result.step, metrics)
        self.reporter.progress(result.tokens, loss, estimate)
        seconds, self.lap = now - self.lap, now
        self.state.seconds += seconds
        self.state.waited += result.waited
        timing = {"seconds": seconds, "waited": result.waited, "aside": self.aside, "tokens": result.tokens}
        self.reporter.timing(result.step, {**timing, "memory_bytes": memory_bytes(self.accelerator.device)})

    def maybe_evaluate(self, step: int) -> None:
        """Evaluate the held-out split every `train.eval_every` steps, always on the same `train.eval_samples`
        conversations, and after the last step on all. With `train.early_stop`, this may make the step the last one."""
        if not len(self.heldout) or not (step == self.last_step or step % self.t.eval_every == 0):
            return
        measured = self.meter.measure() if self.meter else {}
        count = min(self.t.eval_samples, len(self.heldout))
        metrics = evaluate(self.parallel, self.heldout, self.t, self.keep_mask, count)
        self.reporter.log(step, {f"{HELDOUT}{name}": value for name, value in {**metrics, **measured}.items()})
        if self.meter:
            self._compare(step, measured["acceptance_length"])  # may make this step the last
        if step == self.last_step and count < len(self.heldout):
            count = len(self.heldout)
            metrics = evaluate(self.parallel, self.heldout, self.t, self.keep_mask, count)
        self.state.heldout = plain({**metrics, **measured, "conversations": count})
        if self.state.best and self.state.best["step"] == step:
            self.state.best["heldout"] = self.state.heldout
        text = f"step {step}: {heldout_text(metrics)}"
        if self.meter:
            length, tokens = measured["acceptance_length"], self.meter.draft_tokens
            text += f", acceptance length {length:.3f} with {tokens} draft tokens"
        say(text)

    def maybe_save(self, step: int, stop_requested: bool) -> None:
        """Save every `train.checkpoint_every` steps, at the end or a stop, before shards are removed, and, with
        `train.keep_best`, at the best evaluation so far.

        Raises:
            SharedError: ranks do not hold the same weights, or no step of the whole run had anything to train.
            UserError: the run cannot go on without this checkpoint, and it cannot be written.
        """
        final = step == self.last_step
        best = self.t.keep_best and self.state.best is not None and self.state.best["step"] == step
        required = final or stop_requested or self.usage.frees_shards(step, self.accelerator)
        saving = required or best or step % self.t.checkpoint_every == 0
        if (saving or step == self.first_step) and (problem := self.parallel.differs()):
            self._abort(f"step {step}: {problem}: the ranks are not training the same drafter, so nothing was saved")
        if not saving:
            return
        if final and not self.state.pairs:
            if self.state.left_out:
                problem = (
                    f"none of the {step} steps updated a weight, {len(self.state.left_out)} of them since loss or "
                )
                self._abort(f"{problem}gradient is not finite, so there is no drafter: {self._advice()}")
            self._abort(
                f"none of the {step} steps had a pair to train, so there is no drafter: raise data.draft_vocab_size, "
                "and check what the loss masks cover (`eagle31 data` counts the assistant's tokens)"
            )
        main = self.accelerator.is_main_process
        if main:
            self.saver.wait()  # for the previous checkpoint, so that there are never two in memory
        self.accelerator.wait_for_everyone()  # up to PATIENCE; the snapshot's groups, DeepSpeed's own, wait less
        snapshot = take_snapshot(self.parallel, self.state, self.data.shape)
        if main:
            self.saver.save(snapshot, required, best)
        # Steps after this checkpoint do not read these shards, but a run resumed from the previous one would.
        self.usage.release(step, remove=main and required, ended=final)

    def finish(self) -> None:
        """Close the run's files. Raise Stopped if the run is not at its end; else write what later stages read."""
        if self.t.finish and self.last_step < self.first_step:  # no step ran, so nothing was evaluated
            self.maybe_evaluate(self.last_step)
        self.saver.close()
        self.reporter.close()
        # Together, so that no rank closes its connections while another one still saves or sends to it.
        launch.wait_at_the_end(self.accelerator)
        self.accelerator.end_training()
        main, state, steps = self.accelerator.is_main_process, self.state, self.last_step
        state.seconds += time.perf_counter() - self.lap
        if state.step < steps:
            why = f"{self.deadline.reason or 'another rank'}: saved after step {state.step} of {steps}"
            raise self.deadline.stopped(
                f"train: stopped by {why}; run the same command again to resume" if main else ""
            )
        if main:
            self._write_manifest()

    def _write_manifest(self) -> None:
        """Record which checkpoint is the run's result, and say so."""
        state, steps, checkpoint = self.state, self.last_step, self.saver.committed
        kept: dict[str, Any] = {}
        # The best checkpoint may not have been written, on a full disk: then the last one is used.
        if self.t.keep_best and state.best and state.best["step"] == self.saver.best:
            checkpoint, state.heldout = self.folder / CHECKPOINTS / name_of(state.best["step"]), state.best["heldout"]
            kept = {"kept": {name: state.best[name] for name in ("step", "acceptance_length")}}
        assert checkpoint is not None
        manifest = self.data.made_from.record(
            checkpoint=str(checkpoint.relative_to(self.folder)),
            steps=steps,
            **{name: value for name, value in asdict(state).items() if name not in ("step", "best", "since_best")},
            **kept,
            **({"planned": len(self.schedule)} if self.t.finish and steps < len(self.schedule) else {}),
            files=artifacts.list_files(self.folder, checkpoint.iterdir()),
        )
        artifacts.write_json(self.folder / artifacts.MANIFEST, manifest)
        if state.left_out:
            most = 2 * len(state.left_out) > steps
            advice = f": this is hardly a drafter: {self._advice()}, and start over with overwrite=true"
            note(
                f"train: {'WARNING: ' * most}{len(state.left_out):,} of {steps:,} steps had a loss or gradient that is "
                f"not finite, and were skipped (train.skip_nonfinite){advice * most}"
            )
        if state.without_pairs:
            note(f"train: {len(state.without_pairs):,} of {steps:,} steps had nothing to train, so they were skipped")
        if kept:
            which, length = kept["kept"]["step"], f"{kept['kept']['acceptance_length']:.3f}"
            note(f"train: kept step {which} of {steps}, which has the greatest acceptance length, {length}")
        try:
            if (self.folder.parent / EXPORTED).is_file():
                read_export(self.folder.parent)
        except UserError as error:  # of an earlier training, say
            note(f"train: {error}")
        planned = f"{steps} of {len(self.schedule)}" if steps < len(self.schedule) else steps
        idle = state.waited / max(state.seconds, 1e-9)
        note(
            f"train: {planned} steps, {state.tokens:,} tokens, {idle:.1%} of the time waiting for data; "
            f"drafter in {checkpoint}"
        )

    def _compare(self, step: int, length: float) -> None:
        """Compare an acceptance length with the best so far; end the run if it has not risen (`train.early_stop`)."""
        state = self.state
        if state.best is None or length > state.best["acceptance_length"]:
            state.best, state.since_best = {"step": step, "acceptance_length": length}, 0
            return
        state.since_best += 1
        if state.stale(self.t.early_stop) and step < self.last_step:
            self.last_step = step
            say(
                f"step {step} of {len(self.schedule)} is the last one: the acceptance length has not risen since step "
                f"{state.best['step']} (train.early_stop={self.t.early_stop})"
            )

    def _pass_over(self, batch: GlobalBatch) -> None:
        """Count a step that has nothing to train; say so at the first."""
        if not self.state.without_pairs:
            say(
                f"step {batch.step}: nothing to train, so the weights stay: no answer in samples {batch.samples} has a "
                "token whose prediction is in the draft vocabulary; further such steps are only counted"
            )
        self.state.without_pairs.append(batch.step)

    def _leave_out(self, batch: GlobalBatch) -> None:
        """Count a step whose loss or gradient is not finite; end the run after more than `train.skip_nonfinite`."""
        left_out, where = self.state.left_out, f"samples {sorted(batch.samples)} of the train split"
        left_out.append(batch.step)
        if len(left_out) <= self.t.skip_nonfinite:
            if len(left_out) == 1:
                say(f"step {batch.step}: skipped, loss or gradient is not finite ({where}); more are only counted")
            return
        before = f", after {len(left_out) - 1} skipped steps" if len(left_out) > 1 else ""
        self._abort(
            f"step {batch.step}: loss or gradient is not finite ({where}){before}; nothing was updated or saved: "
            f"{self._advice()}, or skip such steps with train.skip_nonfinite=n"
        )

    def _advice(self) -> str:
        verify = f"run `eagle31 store verify {self.data.store.location}`"
        return f"{verify} to find stored states that are not finite; else lower train.lr"

    def _abort(self, problem: str) -> NoReturn:
        """End the run on every rank; every rank must call it. A checkpoint under way is completed."""
        self.saver.close()
        launch.stop_all(self.accelerator, problem)


def take_snapshot(parallel: Parallel, state: State, shape: DrafterShape) -> Snapshot:
    """The run's state; on the main process also a copy of all tensors on the CPU. Every rank must call it."""
    main = parallel.accelerator.is_main_process
    weights, moments = (
        {name: tensor.to("cpu", copy=True) for name, tensor in tensors if main}
        for tensors in (parallel.weights(), parallel.moments())
    )
    return Snapshot(state.step, weights, moments, shape, {"state": asdict(state)})


def memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated on its GPU, or resident on the host if it trains on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts kilobytes
