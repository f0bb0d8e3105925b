"""Everything before the first step, in order: inputs are read and checked, processes agree, the run's state is made.

Each part needs what the part before it returns. An earlier run that this one replaces is backed up until this one's
first checkpoint. If this one ends before that, the earlier run is restored; after a kill, by the next command.
"""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from eagle31_train import provenance
from eagle31_train.checkpoint.contract import unserved
from eagle31_train.checkpoint.run_folder import CHECKPOINTS, RECORD, name_of, restore_replaced
from eagle31_train.common import artifacts, locks
from eagle31_train.common.console import note, say
from eagle31_train.common.errors import UserError
from eagle31_train.common.units import parse_limit
from eagle31_train.config import Config
from eagle31_train.model.loss import Objective
from eagle31_train.provenance import Provenance
from eagle31_train.store.stream import check_consumer
from train import checkpoint, initial_weights, launch, tracking, windows
from train.acceptance import AcceptanceMeter
from train.build import build_objective, choose_kernels
from train.checkpoint import Saver
from train.deadline import Deadline
from train.inputs import OPEN, Inputs, read_inputs
from train.metrics import Reporter
from train.parallel import Parallel, parallelise
from train.trainer import State, Trainer

LOCK = ".training"  # beside train/, which may be replaced as a whole


def prepare(config: Config, resources: ExitStack) -> Trainer | None:
    """Check all that a run needs and make it ready to train, from its newest checkpoint if it has one. Return None if
    it is finished already. `resources` closes what is opened here, however training ends. Raise UserError, naming the
    option, input or launch that is wrong."""
    left_open = {name: getattr(config.train, name) for name in OPEN}  # saved as open, for use of the run as a recipe
    deadline = resources.enter_context(Deadline(parse_limit(config.train.time_limit)))
    data = read_inputs(config, deadline.pause, resources)
    config = data.config
    accelerator = launch_processes(data)
    if claim_folder(data, accelerator, resources):
        say(f"train: up to date ({config.train_folder})")
        tell_of_early_end(config, len(data.schedule))
        return None
    if accelerator.is_main_process:
        resources.callback(restore_if_unsaved, config.train_folder)
    trainer = make_trainer(data, accelerator, deadline, resources)
    if accelerator.is_main_process:
        tracking.record_launch(replace(config, train=replace(config.train, **left_open)), launch_facts(trainer))
    return trainer


def tell_of_early_end(config: Config, planned: int) -> None:
    """Say if a finished run has fewer steps than planned because it was ended by train.finish, which is off now."""
    manifest = config.train_folder / artifacts.MANIFEST
    record = artifacts.read_json(manifest, "train.py")
    steps, t = record.get("steps", planned), config.train
    ended = "planned" in record or (steps < planned and t.early_stop is None)  # earlier versions lack "planned"
    if ended and not t.finish:
        say(f"train: it was ended after step {steps} of {planned} (train.finish): to train on, remove {manifest}")


def restore_if_unsaved(folder: Path) -> None:
    """Restore the run that this one was to replace, if this one has ended before its first checkpoint."""
    if restore_replaced(folder):
        say(f"train: restored the earlier run in {folder}: this one ended before its first checkpoint")


def make_trainer(data: Inputs, accelerator: Accelerator, deadline: Deadline, resources: ExitStack) -> Trainer:
    """Put the run's state on the devices, and make all that trains it. The folder must be claimed by now."""
    config, t, folder = data.config, data.config.train, data.config.train_folder
    tell_of_waiting(data.schedule, accelerator.num_processes // t.context_parallel)
    state, parallel = restore(data, accelerator, deadline)
    main = accelerator.is_main_process
    usage = windows.Usage(data.store, data.train_split, data.schedule, data.windows, data.made_from.fingerprint)
    usage.begin(state.step, remove=main, ended=state.ended(t))
    data.store.wait_for(data.heldout.shards, deadline.pause)  # here, not between the exchanges of an evaluation
    tracking.start(accelerator, config, data.made_from.inputs, state.step)
    reporter = resources.enter_context(closing(Reporter(accelerator, folder, state.step, len(data.schedule))))
    best = state.best["step"] if t.keep_best and state.best else None
    saver = Saver(folder / CHECKPOINTS, data.made_from.fingerprint, t.keep_checkpoints, say, state.step, best)
    resources.callback(saver.close)  # never in the middle of a save
    meter = make_meter(data, parallel, state)
    return Trainer(data, parallel, usage, state, reporter, saver, deadline, meter)


def launch_facts(trainer: Trainer) -> dict[str, Any]:
    accelerator, data = trainer.accelerator, trainer.data
    return {
        "profile": trainer.parallel.kind,
        "processes": accelerator.num_processes,
        "device": str(accelerator.device),
        "after_step": trainer.state.step,
        "steps": len(data.schedule),
        "store": data.store.fingerprint,
    }


def tell_of_waiting(schedule: list[list[int]], replicas: int) -> None:
    """Warn if steps have fewer conversations than there are processes, or groups of processes that share one."""
    each = sum(map(len, schedule)) / len(schedule)
    if each < replicas:
        say(
            f"train: a step has only {each:.1f} conversations on average for {replicas} processes, so some wait: fewer "
            "processes would be as fast, or raise train.batch_tokens (the drafter then learns less from a small corpus)"
        )


# ---------------------------------------------------------------- processes, and the run's folder


def launch_processes(data: Inputs) -> Accelerator:
    """Return the accelerator of the launch. Its processes are what was asked for, and every one trains the same."""
    accelerator = launch.make_accelerator(data.config, data.config.train_folder)
    counted = data.train_split.supervised is not None
    launch.check_alike(accelerator, data.made_from.inputs, data.config, data.measured_on, counted)
    for problem in unserved(data.shape):  # before hours are spent
        say(f"train: WARNING: {problem}")
    return accelerator


def claim_folder(data: Inputs, accelerator: Accelerator, resources: ExitStack) -> bool:
    """Reserve run_dir/train for this run as long as `resources` is open. Return whether the run is finished."""
    folder = data.config.train_folder
    lock = folder.with_name(LOCK)

    def up_to_date() -> bool:
        # First, before anything of an earlier run is replaced.
        check_consumer(data.store.storage, data.store.fingerprint, data.made_from.fingerprint)
        artifacts.make_folder(lock.parent)
        locks.hold(resources.enter_context(lock.open("a")), f"another process is training in {folder}")
        claim(folder, data.made_from, data.config.overwrite, data.store.inputs["target"])
        return provenance.up_to_date(folder, data.made_from, overwrite=False)

    finished = launch.agreed(accelerator, up_to_date)
    if not accelerator.is_main_process and lock.exists():
        resources.enter_context(lock.open("a"))  # so that a process that is refused can name all of this run
    return finished


def claim(folder: Path, made_from: Provenance, overwrite: bool, target: Mapping[str, Any]) -> None:
    """Record that the folder is this run's. If it holds another run, back that up; raise UserError if `overwrite` is
    off. target: as the store has it. It is recorded, too, so that it is known once the store is gone."""
    restore_replaced(folder)  # after a kill
    artifacts.remove_backup(folder)
    record, facts = folder / RECORD, {"target": dict(target)}
    if record.exists():
        earlier = artifacts.read_json(record, "train.py")
        made_from.refuse_other(folder, earlier, overwrite)
        if not made_from.matches(earlier):
            artifacts.back_up(folder)
        elif (folder / artifacts.MANIFEST).is_file() and "target" not in earlier:
            facts = {}  # a finished run of an earlier version stays as it is
    try:
        artifacts.write_json(record, made_from.record(**facts))
    except BaseException:
        artifacts.restore_backup(folder)
        raise


# ---------------------------------------------------------------- state


def restore(data: Inputs, accelerator: Accelerator, deadline: Deadline) -> tuple[State, Parallel]:
    """Return the run on the launch's devices, after its newest whole checkpoint or before its first step."""
    config, t = data.config, data.config.train
    folder = config.train_folder / CHECKPOINTS
    objective = build_objective(config, data.shape, data.store, data.draft_vocab)
    kernels = choose_kernels(objective, t, accelerator.device)
    newest = launch.agreed(accelerator, lambda: checkpoint.newest(folder, data.made_from.fingerprint, note))
    if newest is not None:
        state, parallel = resume(newest, data, objective, accelerator)
        say(f"train: resuming after step {state.step} ({newest})")
    elif t.finish:
        raise UserError(f"train.finish=true needs a complete checkpoint, but {folder} has none: remove train.finish")
    else:
        copy_initial_weights(data, objective, deadline)
        state, parallel = State(), parallelise(accelerator, objective, t)
    processes = f", {accelerator.num_processes} processes" if accelerator.num_processes > 1 else ""
    if t.context_parallel > 1:
        processes += f", {t.context_parallel} per conversation"
    say(f"train: {parallel.kind}{processes} on {accelerator.device.type}, {kernels}")
    return state, parallel


def copy_initial_weights(data: Inputs, objective: Objective, deadline: Deadline) -> None:
    """Copy the weights that `train.init_from` names, if any, over fresh ones. Raise UserError if they are not, or no
    longer, those that the run began with."""
    config, begun_with = data.config, data.made_from.inputs["train"]["init_from"]
    source = initial_weights.open_source(config)
    if source is None:
        return
    initial_weights.refuse_other_kind(source, data.shape, data.store)
    if source.initial_identity != begun_with:  # it has changed on the hub
        raise UserError(
            f"{config.train_folder / CHECKPOINTS} has no complete checkpoint, and train.init_from="
            f"{config.train.init_from} has changed since the run began: set train.init_revision, or start over with "
            "overwrite=true"
        )
    initial_weights.copy_weights(source, data.draft_vocab, data.store, objective.drafter, deadline.pause)


def resume(newest: Path, data: Inputs, objective: Objective, accelerator: Accelerator) -> tuple[State, Parallel]:
    """Return the run after a whole checkpoint of it."""
    loaded, drafter, t = checkpoint.load(newest), objective.drafter, data.config.train
    weights = {name: drafter.from_checkpoint(name, weight) for name, weight in loaded.weights.items()}
    drafter.load_state_dict(weights)
    saved = dict(loaded.extra["state"])
    saved.pop("trackers", None)  # checkpoints of earlier versions have it
    state, parallel = State(**saved), parallelise(accelerator, objective, t)
    parallel.set_moments(loaded.moments, state.updates)
    if t.keep_best and state.best is not None:
        best = newest.with_name(name_of(state.best["step"]))
        if launch.agreed(accelerator, lambda: checkpoint.damage(best, data.made_from.fingerprint)) is not None:
            say("train: the best checkpoint so far is missing or damaged: the best of the later ones will be kept")
            state.best = None
    return state, parallel


def make_meter(data: Inputs, parallel: Parallel, state: State) -> AcceptanceMeter | None:
    """Return what measures acceptance, and add its prompts to `state.measured_on`; None without trajectories."""
    if not data.trajectories:
        say(f"train: acceptance is not measured: {data.store.location} has no trajectories")
        return None
    # Earlier prompts stay: the store may have been made anew.
    state.measured_on = list(dict.fromkeys([*state.measured_on, *data.measured_on]))
    return AcceptanceMeter(data.config, parallel, data.store, data.trajectories)
