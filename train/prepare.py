"""Everything before the first step, in order: inputs are read and checked, processes agree, the run's state is made.

Each part needs what the part before it returns. An earlier run that this one replaces is backed up until this one's
first checkpoint. If this one ends before that, the earlier run is restored; after a kill, by the next command.
"""

import math
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from eagle31_train import provenance
from eagle31_train.checkpoint.contract import unserved
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.checkpoint.run_folder import CHECKPOINTS, RECORD, in_order, latest_run, name_of, restore_replaced
from eagle31_train.common import artifacts, locks, order
from eagle31_train.common.console import note, say
from eagle31_train.common.errors import UserError
from eagle31_train.common.units import byte_count, parse_limit
from eagle31_train.config import Config, DrafterShape, TrainConfig
from eagle31_train.evaluation import trajectories
from eagle31_train.evaluation.trajectories import Trajectory, digest
from eagle31_train.model import vocab
from eagle31_train.provenance import Provenance
from eagle31_train.store import Store, StoreSplit, storage_of
from eagle31_train.store.stream import check_consumer
from eagle31_train.targets.derive import complete, default_weight_decay
from train import checkpoint, initial_weights, launch, tracking, windows
from train.acceptance import AcceptanceMeter
from train.build import as_made, build_objective, check_pairs, check_store, choose_kernels, shape_of, tokens_of_a_step
from train.checkpoint import Saver
from train.deadline import Deadline
from train.metrics import Reporter
from train.parallel import Parallel, parallelise
from train.trainer import Inputs, State, Trainer

OPEN = ("batch_tokens", "lr", "weight_decay", "fc_init_scale", "fc_input_scale")  # options of training that may be null
LOCK = ".training"  # beside train/, which may be replaced as a whole


def prepare(config: Config, resources: ExitStack) -> Trainer | None:
    """Check all that a run needs and make it ready to train, from its newest checkpoint if it has one. Return None if
    it is finished already. `resources` closes what is opened here, however training ends. Raise UserError, naming the
    option, input or launch that is wrong."""
    folder = config.train_folder
    left_open = {name: getattr(config.train, name) for name in OPEN}  # saved as open, for use of the run as a recipe
    deadline = resources.enter_context(Deadline(parse_limit(config.train.time_limit)))
    source = initial_weights.open_source(config)
    config = complete_drafter(config, source)
    data = read_inputs(config, source, deadline, resources)
    config = as_made(replace(config, train=data.train), provenance.read_data(config), data.store)
    accelerator = launch_processes(config, data)
    if claim_folder(config, data, accelerator, resources):
        say(f"train: up to date ({folder})")
        tell_of_early_end(config, len(data.schedule))
        return None
    if accelerator.is_main_process:
        resources.callback(restore_if_unsaved, folder)
    trainer = make_trainer(config, data, accelerator, deadline, resources)
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


def make_trainer(
    config: Config, data: Inputs, accelerator: Accelerator, deadline: Deadline, resources: ExitStack
) -> Trainer:
    """Put the run's state on the devices, and make all that trains it. The folder must be claimed by now."""
    t, folder = config.train, config.train_folder
    tell_of_waiting(data.schedule, accelerator.num_processes // t.context_parallel)
    state, parallel = restore(config, data, accelerator, deadline)
    main = accelerator.is_main_process
    usage = windows.Usage(data.store, data.train_split, data.schedule, data.windows, data.made_from.fingerprint)
    usage.begin(state.step, remove=main, ended=state.ended(t))
    data.store.wait_for(data.heldout.shards, deadline.pause)  # here, not between the exchanges of an evaluation
    tracking.start(accelerator, config, data.made_from.inputs, state.step)
    reporter = resources.enter_context(closing(Reporter(accelerator, folder, state.step, len(data.schedule))))
    best = state.best["step"] if t.keep_best and state.best else None
    saver = Saver(folder / CHECKPOINTS, data.made_from.fingerprint, t.keep_checkpoints, say, state.step, best)
    resources.callback(saver.close)  # never in the middle of a save
    meter = make_meter(config, data, parallel, state)
    return Trainer(config, data, folder, parallel, usage, state, reporter, saver, deadline, meter)


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


# ---------------------------------------------------------------- inputs


def complete_drafter(config: Config, source: DrafterCheckpoint | None) -> Config:
    """Fill in the drafter's open options and the learning rate: from the run's record, else from the initial weights,
    else from the target. Training's other open options come from the record only."""
    record, recorded = latest_run(config.train_folder) / RECORD, None
    if record.is_file() and (not config.overwrite or initial_weights.goes_by_record(config)):
        inputs = artifacts.Record(artifacts.read_json(record, "train.py")["inputs"], record, "train.py")
        recorded = inputs["drafter"]
        if not config.overwrite:  # other versions may choose differently
            names = [name for name in OPEN if getattr(config.train, name) is None]
            values = {name: provenance.recorded_value(inputs["train"], f"train.{name}") for name in names}
            kinds = ("fc_norm", "norm_before_fc")
            if any(recorded.get(name, False) != getattr(config.drafter, name) for name in kinds):
                values.pop("fc_input_scale", None)  # another kind of drafter: that is what will be refused
            config = replace(config, train=replace(config.train, **values))
    elif source is not None:
        recorded = {name: getattr(source.shape, name) for name in initial_weights.FOLLOWED}
    return complete(config, provenance.read_data(config).get("target"), recorded)


def read_inputs(config: Config, source: DrafterCheckpoint | None, deadline: Deadline, resources: ExitStack) -> Inputs:
    """Read options, data and store. Raise UserError if no run can be made of them. Every process does this."""
    t, data_dir = config.train, config.data_folder
    follow, patience = config.store.follow, config.store.patience
    store = resources.enter_context(closing(Store(storage_of(config), follow, patience, deadline.pause)))
    data = provenance.read_data(config)
    check_store(store, data, config)
    if store.storage.remote and config.store.cache_dir is None and launch.spans_machines():
        raise UserError(
            "several machines train, and the store's cache would be in run_dir, which they share: set "
            "store.cache_dir=… to a folder on each machine's own disk"
        )
    vocab_file = data_dir / "vocab.safetensors"
    draft_vocab = vocab.read(vocab_file)
    train_split = store.split("train")
    cut = windows.cut(train_split, t.window_tokens)
    windows.check(store, cut, t.epochs, byte_count(config.store.cache_bytes, "store.cache_bytes"))
    if len(cut) > 1 and data["inputs"].get("shuffle") is None:
        say("train: the windows follow the order of the data, which is not shuffled: set data.shuffle=SEED")
    measured = read_trajectories(store, config)
    measured_on = [digest(one.prompt) for one in measured]
    batch_tokens = tokens_of_a_step(train_split, t)
    t = replace(t, batch_tokens=batch_tokens)
    schedule = order.schedule(
        train_split.lengths, batch_tokens, config.seed, t.epochs, t.max_steps, windows.samples(cut)
    )
    shape = shape_of(config.drafter, store, draft_vocab)
    if config.overwrite and t.fc_input_scale is None and t.fc_init_scale is None and not shape.norms_states:
        t = replace(t, fc_input_scale=recorded_scale(config, store))
    t = complete_training(t, shape, len(schedule), train_split, deadline)
    config = replace(config, train=t)
    made_from = partial(
        provenance.of_training,
        config,
        store.fingerprint,
        store.inputs["data"],
        artifacts.file_sha256(vocab_file),
        chosen_on=measured_on if by_acceptance(t) else None,
    )
    begun = made_from(initial_weights.identity(config, source))
    if not has_checkpoint(latest_run(config.train_folder), begun):
        if source := source or initial_weights.open_source(config, needed=True):
            initial_weights.refuse_other_kind(source, shape, store)
            begun = made_from(source.initial_identity)  # no longer with the recorded weights
        if store.manifest is not None and not windows.bounded(store):  # all shards are there, and none is used up
            check_pairs(train_split, draft_vocab, t.oov)
    return Inputs(
        store=store,
        draft_vocab=draft_vocab,
        shape=shape,
        made_from=begun,
        train_split=train_split,
        heldout=store.split("heldout"),
        windows=cut,
        schedule=schedule,
        train=t,
        trajectories=measured,
        measured_on=measured_on,
    )


def by_acceptance(t: TrainConfig) -> bool:
    """Return whether measured acceptance decides which checkpoint the run leaves."""
    return t.keep_best or t.early_stop is not None


def read_trajectories(store: Store, config: Config) -> list[Trajectory]:
    """Read what acceptance is measured on. Raise UserError if there is nothing and the run goes by acceptance."""
    measured = trajectories.read(store, config.evaluate.num_speculative_tokens)
    if by_acceptance(config.train) and not measured:
        raise UserError(
            f"train.keep_best and train.early_stop need measured acceptance, but {store.location} has no trajectories "
            "to measure it on: remove these options, or remove the store's manifest.json and run `eagle31 extract` "
            "with extract.trajectories above 0 (it keeps the shards)"
        )
    return measured


def recorded_scale(config: Config, store: Store) -> list[float] | None:
    """Return `train.fc_input_scale` of the recorded run if it used this store, whose states may be used up by now."""
    record = latest_run(config.train_folder) / RECORD
    inputs = artifacts.read_json(record, "train.py")["inputs"] if record.is_file() else {}
    same = inputs.get("store") == store.fingerprint
    return provenance.recorded_value(inputs["train"], "train.fc_input_scale") or None if same else None


def complete_training(
    t: TrainConfig, shape: DrafterShape, steps: int, split: StoreSplit, deadline: Deadline
) -> TrainConfig:
    """Fill in an open weight decay, by width and steps, and open scales of fc: from the stored states, but none if a
    norm precedes fc or fc_init_scale is given. Raise UserError for given scales that do not fit."""
    if t.weight_decay is None:
        t = replace(t, weight_decay=default_weight_decay(t.optimizer, shape.hidden_size, steps))
    if t.fc_input_scale is None:
        scaled = not shape.norms_states and t.fc_init_scale is None
        t = replace(t, fc_input_scale=initial_weights.input_scale(split, deadline.pause) if scaled else [])
    elif scales := t.fc_input_scale:
        exact = all(math.frexp(scale)[0] == 0.5 for scale in scales)
        if shape.norms_states or len(scales) != len(shape.aux_layers) or not exact:
            one = f"a power of two for each of the {len(shape.aux_layers)} auxiliary layers"
            raise UserError(f"train.fc_input_scale={scales} applies only to EAGLE 3, and must have {one}: remove it")
    return t if t.fc_init_scale is not None else replace(t, fc_init_scale=1.0)


# ---------------------------------------------------------------- processes, and the run's folder


def launch_processes(config: Config, data: Inputs) -> Accelerator:
    """Return the accelerator of the launch. Its processes are what was asked for, and every one trains the same."""
    accelerator = launch.make_accelerator(config, config.train_folder)
    launch.check_alike(
        accelerator, data.made_from.inputs, config, data.measured_on, data.train_split.supervised is not None
    )
    for problem in unserved(data.shape):  # before hours are spent
        say(f"train: WARNING: {problem}")
    return accelerator


def claim_folder(config: Config, data: Inputs, accelerator: Accelerator, resources: ExitStack) -> bool:
    """Reserve run_dir/train for this run as long as `resources` is open. Return whether the run is finished."""
    folder = config.train_folder
    lock = folder.with_name(LOCK)

    def up_to_date() -> bool:
        # First, before anything of an earlier run is replaced.
        check_consumer(data.store.storage, data.store.fingerprint, data.made_from.fingerprint)
        artifacts.make_folder(lock.parent)
        locks.hold(resources.enter_context(lock.open("a")), f"another process is training in {folder}")
        claim(folder, data.made_from, config.overwrite, data.store.inputs["target"])
        return provenance.up_to_date(folder, data.made_from, overwrite=False)

    finished = launch.agreed(accelerator, up_to_date)
    if not accelerator.is_main_process and lock.exists():
        resources.enter_context(lock.open("a"))  # so that a process that is refused can name all of this run
    return finished


def has_checkpoint(folder: Path, made_from: Provenance) -> bool:
    """Return whether this same run has a checkpoint in the folder, from which it can resume."""
    record = folder / RECORD
    there = record.is_file() and bool(in_order(folder / CHECKPOINTS))
    return there and made_from.matches(artifacts.read_json(record, "train.py"))


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


def restore(config: Config, data: Inputs, accelerator: Accelerator, deadline: Deadline) -> tuple[State, Parallel]:
    """Return the run on the launch's devices, after its newest whole checkpoint or before its first step."""
    t, folder, fingerprint = config.train, config.train_folder / CHECKPOINTS, data.made_from.fingerprint
    objective = build_objective(config, data.shape, data.store, data.draft_vocab)
    kernels = choose_kernels(objective, t, accelerator.device)
    newest = launch.agreed(accelerator, lambda: checkpoint.newest(folder, fingerprint, note))
    if newest is None and t.finish:
        raise UserError(f"train.finish=true needs a complete checkpoint, but {folder} has none: remove train.finish")
    if newest is None:
        if (source := initial_weights.open_source(config, needed=True)) is not None:
            initial_weights.refuse_other_kind(source, data.shape, data.store)
            if source.initial_identity != data.made_from.inputs["train"]["init_from"]:  # it has changed on the hub
                raise UserError(
                    f"{folder} has no complete checkpoint, and train.init_from={t.init_from} has changed since the run "
                    "began: set train.init_revision, or start over with overwrite=true"
                )
            initial_weights.copy_weights(source, data.draft_vocab, data.store, objective.drafter, deadline.pause)
        state, parallel = State(), parallelise(accelerator, objective, t)
    else:
        loaded = checkpoint.load(newest)
        drafter = objective.drafter
        weights = {name: drafter.from_checkpoint(name, weight) for name, weight in loaded.weights.items()}
        drafter.load_state_dict(weights)
        saved = dict(loaded.extra["state"])
        saved.pop("trackers", None)  # checkpoints of earlier versions have it
        state, parallel = State(**saved), parallelise(accelerator, objective, t)
        parallel.set_moments(loaded.moments, state.updates)
        if t.keep_best and state.best is not None:
            path = folder / name_of(state.best["step"])
            if launch.agreed(accelerator, lambda: checkpoint.damage(path, fingerprint)) is not None:
                say("train: the best checkpoint so far is missing or damaged: the best of the later ones will be kept")
                state.best = None
        say(f"train: resuming after step {state.step} ({newest})")
    processes = f", {accelerator.num_processes} processes" if accelerator.num_processes > 1 else ""
    if t.context_parallel > 1:
        processes += f", {t.context_parallel} per conversation"
    say(f"train: {parallel.kind}{processes} on {accelerator.device.type}, {kernels}")
    return state, parallel


def make_meter(config: Config, data: Inputs, parallel: Parallel, state: State) -> AcceptanceMeter | None:
    """Return what measures acceptance, and add its prompts to `state.measured_on`; None without trajectories."""
    if not data.trajectories:
        say(f"train: acceptance is not measured: {data.store.location} has no trajectories")
        return None
    # Earlier prompts stay: the store may have been made anew.
    state.measured_on = list(dict.fromkeys([*state.measured_on, *data.measured_on]))
    return AcceptanceMeter(config, parallel, data.store, data.trajectories)
