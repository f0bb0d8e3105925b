"""Everything before the first step, in order: inputs are read and checked, processes agree, the run's state is made.

Each part needs what the part before it returns, so that none can come too early: nothing of an earlier run is replaced
before inputs and launch are known to be good.
"""

from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from eagle31_train import artifacts, provenance
from eagle31_train.checkpoint.contract import unserved
from eagle31_train.checkpoint.run_folder import RECORD
from eagle31_train.config import Config, byte_count
from eagle31_train.console import is_main, note
from eagle31_train.errors import UserError
from eagle31_train.evaluation import trajectories
from eagle31_train.evaluation.trajectories import digest
from eagle31_train.evaluation.unrolled import Trajectory
from eagle31_train.model import vocab
from eagle31_train.store import Store, storage_of
from eagle31_train.store.stream import check_consumer
from eagle31_train.targets.derive import complete
from train import checkpoint, initial_weights, launch, order, tracking, windows
from train.acceptance import AcceptanceMeter
from train.build import build_objective, check_pairs, check_samples, check_store, choose_kernels, shape_of
from train.checkpoint import Saver
from train.claim import alone, begun, claim, join
from train.deadline import Deadline, parse_limit
from train.metrics import Reporter
from train.parallel import Parallel, parallelise
from train.trainer import Inputs, State, Trainer
from train.windows import Usage


def prepare(config: Config, resources: ExitStack) -> Trainer | None:
    """Check all that a run needs and make it ready to train.

    Args:
        resources: is given what must be closed, however training ends.

    Returns:
        The run, after its newest checkpoint if it has one; None where it is finished already.

    Raises:
        UserError: an option, an input or the launch is not as it must be; says which.
    """
    config = _completed(config)
    t = config.train
    deadline = resources.enter_context(Deadline(parse_limit(t.time_limit)))
    data = read_inputs(config, resources)
    accelerator = launch_processes(config, data)
    folder = claim_folder(config, data, accelerator, resources)
    if folder is None:
        return None
    schedule = order.schedule(
        data.train_split.lengths, t.batch_tokens, config.seed, t.epochs, t.max_steps, windows.samples(data.windows)
    )
    newest, best, state, parallel = restore(config, data, accelerator, folder)
    main, steps = accelerator.is_main_process, len(schedule)
    usage = Usage(data.store, data.train_split, schedule, data.windows, data.made_from.fingerprint)
    usage.begin(state.step, remove=main, ended=state.stale(t.early_stop))
    state.trackers = tracking.start(accelerator, config, folder, data.made_from.inputs, state.step, state.trackers)
    if main:
        tracking.record_launch(
            folder,
            config,
            {
                "profile": parallel.kind,
                "processes": accelerator.num_processes,
                "device": str(accelerator.device),
                "after_step": state.step,
                "steps": steps,
                "store": data.store.fingerprint,
            },
        )
    reporter = resources.enter_context(closing(Reporter(accelerator, folder, state.step, steps)))
    saver = Saver(folder / "checkpoints", data.made_from.fingerprint, t.keep_checkpoints, reporter.note, newest, best)
    resources.callback(saver.close)  # never in the middle of a save
    meter = make_meter(config, data, parallel, state)
    return Trainer(config, data, folder, schedule, parallel, usage, state, reporter, saver, deadline, meter)


def _completed(config: Config) -> Config:
    """With a drafter of which nothing is left open: as its record says, or the drafter that it begins from, or its
    target."""
    record, target = Path(config.run_dir) / "train" / RECORD, _manifest(config).get("target")
    if record.is_file() and (not config.overwrite or initial_weights.goes_by_record(config)):
        return complete(config, target, artifacts.read_json(record, "train.py")["inputs"]["drafter"])
    if config.train.init_from is None:
        return complete(config, target)
    completed = complete(config, target, initial_weights.options(config))
    ours, targets = asdict(completed.drafter), asdict(complete(config, target).drafter)
    differ = [name for name, value in targets.items() if value is not None and value != ours[name]]
    unlike = [f"{name} {ours[name]} (the target's {targets[name]})" for name in differ]
    if unlike and is_main():
        note(f"train: left open, and as in {config.train.init_from}: {', '.join(unlike)}")
    return completed


def read_inputs(config: Config, resources: ExitStack) -> Inputs:
    """Read options, data and store, and refuse what no run can be made of. Every process does it for itself."""
    t, data_dir = config.train, config.data_folder
    store = resources.enter_context(closing(Store(storage_of(config), config.store.follow, config.store.patience)))
    data = _manifest(config)
    check_store(store, data, config)
    vocab_file = data_dir / "vocab.safetensors"
    draft_vocab = vocab.read(vocab_file)
    vocab_sha, start = artifacts.file_sha256(vocab_file), initial_weights.identity(config)
    train_split = store.split("train")
    cut = windows.cut(train_split, t.window_tokens)
    windows.check(store, cut, t.epochs, byte_count(config.store.cache_bytes, "store.cache_bytes"))
    measured = trajectories.read(store, config.evaluate.num_speculative_tokens)
    chosen_on = chosen_by(config, store, measured)
    made_from = provenance.of_training(config, store.fingerprint, store.inputs["data"], vocab_sha, start, chosen_on)
    shape = shape_of(config.drafter, store, draft_vocab)
    check_samples(train_split, t.batch_tokens)
    if not begun(Path(config.run_dir) / "train", made_from):
        initial_weights.check(config, shape, store)
        if store.manifest is not None and not windows.bounded(store):  # else it would be waited for, or used up
            check_pairs(train_split, draft_vocab, t.oov)
    return Inputs(
        store=store,
        draft_vocab=draft_vocab,
        shape=shape,
        made_from=made_from,
        train_split=train_split,
        heldout=store.split("heldout"),
        windows=cut,
        shuffled=data["inputs"].get("shuffle") is not None,
        trajectories=measured,
    )


def chosen_by(config: Config, store: Store, measured: list[Trajectory]) -> list[str] | None:
    """The prompts, by their digests, whose measurements choose what the run leaves; None where none do.

    Raises:
        UserError: they are to, and there are none.
    """
    t = config.train
    if not t.keep_best and t.early_stop is None:
        return None
    if not measured:
        raise UserError(
            f"train.keep_best and train.early_stop go by measured acceptance, and {store.location} has no trajectories "
            "to measure it on: leave them out, or extract with extract.trajectories above 0 (and data.heldout)"
        )
    return [digest(one.prompt) for one in measured]


def _manifest(config: Config) -> dict[str, Any]:
    """What stage 1 says of its data and of the target."""
    return artifacts.read_json(config.data_folder / artifacts.MANIFEST, "eagle31 data")


def launch_processes(config: Config, data: Inputs) -> Accelerator:
    """The processes of the launch: they are what was asked for, and every one trains the same."""
    accelerator = launch.make_accelerator(config, Path(config.run_dir) / "train")
    launch.check_alike(accelerator, data.made_from.inputs, config, [digest(one.prompt) for one in data.trajectories])
    for problem in unserved(data.shape):  # before hours are spent
        _say(f"train: NOT SERVED: {problem}")
    if len(data.windows) > 1 and not data.shuffled:
        _say("train: the windows follow the order of the data, which is not shuffled (data.shuffle=SEED)")
    return accelerator


def claim_folder(config: Config, data: Inputs, accelerator: Accelerator, resources: ExitStack) -> Path | None:
    """run_dir/train, this run's and no other process's while `resources` is open; None if the run is finished."""
    folder = Path(config.run_dir) / "train"

    def up_to_date() -> bool:
        # Before anything of an earlier run is replaced.
        check_consumer(data.store.storage, data.store.fingerprint, data.made_from.fingerprint)
        resources.enter_context(alone(folder.parent))
        claim(folder, data.made_from, config.overwrite)
        return provenance.up_to_date(folder, data.made_from, overwrite=False)

    finished = launch.agreed(accelerator, up_to_date)
    if not accelerator.is_main_process:  # so that whoever is refused while they run can name them all
        resources.enter_context(join(folder.parent))
    if finished:
        _say(f"train: up to date ({folder})")
        return None
    return folder


def restore(
    config: Config, data: Inputs, accelerator: Accelerator, folder: Path
) -> tuple[Path | None, Path | None, State, Parallel]:
    """The newest whole checkpoint of the run, its best one (`train.keep_best`) and its state, or none and the initial
    state, on the launch's devices."""
    objective = build_objective(config, data.shape, data.store, data.draft_vocab)
    kernels = choose_kernels(objective, config.train, accelerator.device)
    fingerprint, best = data.made_from.fingerprint, None
    newest = launch.agreed(accelerator, lambda: checkpoint.newest(folder / "checkpoints", fingerprint, note))
    if newest is None:
        drafter = objective.drafter
        initial_weights.copy_initial_weights(config, data.shape, data.draft_vocab, data.store, drafter, _say)
        state, parallel = State(), parallelise(accelerator, objective, config.train)
    else:
        loaded = checkpoint.load(newest, data.shape)
        objective.drafter.load_state_dict(loaded.weights)
        state, parallel = State(**loaded.extra["state"]), parallelise(accelerator, objective, config.train)
        parallel.set_moments(loaded.moments, state.updates)
        if config.train.keep_best:
            best, found = launch.agreed(
                accelerator, lambda: checkpoint.best(folder / "checkpoints", fingerprint, state.step)
            )
            if found != state.best:
                _say("train: the best checkpoint so far is missing or damaged: another one is the best now")
                state.best = found
        _say(f"train: going on after step {state.step} ({newest})")
    processes = f", {accelerator.num_processes} processes" if accelerator.num_processes > 1 else ""
    _say(f"train: {parallel.kind}{processes} on {accelerator.device.type}, {kernels}")
    return newest, best, state, parallel


def make_meter(config: Config, data: Inputs, parallel: Parallel, state: State) -> AcceptanceMeter | None:
    """What measures acceptance, on prompts that `state` is told; None, which is said, without trajectories."""
    if not data.trajectories:
        _say(
            f"train: acceptance is not measured: {data.store.location} has no trajectories (it is of an earlier "
            "version, or of extract.trajectories=0, or its extraction said why)"
        )
        return None
    now = [digest(one.prompt) for one in data.trajectories]
    state.measured_on = list(dict.fromkeys([*state.measured_on, *now]))  # and on others before, of a store made anew
    ids = torch.from_numpy(data.draft_vocab.target_ids)
    return AcceptanceMeter(config, parallel, data.store, data.shape, ids, data.trajectories)


def _say(text: str) -> None:
    """A line, of one process alone."""
    if is_main():
        note(text)
