"""Several trainings, one after another, by the processes of one launch: most of what a launch takes is imports.

`train` launches this module as a script. Before each training it puts the environment of that training's own profile
in place, as accelerate's launcher makes it of configs/accelerate. A training may be told to stop after a step, as
SIGTERM would, and be harmed by a function `harm_NAME`.
"""

import gc
import json
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from forking import print_to, served
from planting import instead_of, replaced
from torch.nn import functional

from eagle31_train import compose
from eagle31_train.common import order
from eagle31_train.common.errors import Stopped, UserError
from eagle31_train.model.loss import Objective
from eagle31_train.store import StoreSplit
from eagle31_train.store.codec import plain
from train import launch, loop, parallel, trainer
from train.deadline import Deadline
from train.parallel import Parallel, Replicated, Zero

WHAT, RESULTS = "SEVERAL_TRAININGS", "SEVERAL_RESULTS"


def training(profile, run, *more, stop_after=None, harm=(), eps=None):
    """A training under a profile in a run's folder (conftest's Fitted); `harm`: NAME of a harm_NAME, and what it takes;
    `eps`: of AdamW, if not its own."""
    import launching

    how = {"stop_after": stop_after, "harm": harm, "eps": eps}
    return {"profile": profile, "options": launching.arguments(run, *more), "how": how}


def train(folder, trainings, profile="ddp", processes=2, timeout=600, on_gpus=False):
    """Launch the processes; returns for each training what it came to on each rank, as [status, message]."""
    import launching

    folder.mkdir(parents=True, exist_ok=True)
    what = folder / "trainings.json"
    what.write_text(json.dumps(trainings))
    variables = {WHAT: str(what), RESULTS: str(folder)}
    words = launching.command(profile, processes, Path(__file__))
    if on_gpus:  # forks may not use a GPU that was looked for before
        done = launching.execute(words, profile, timeout, on_gpus, **variables)
        status, said = done.returncode, done.stdout + done.stderr
    else:
        (output := folder / "said").touch()
        with served(launched, words[3:], launching.environment(profile, **variables), output) as process:
            process.join(timeout)
            status, said = process.exitcode, output.read_text()
    assert status == 0, said[-8000:]
    of_ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]
    return [list(ranks) for ranks in zip(*of_ranks, strict=True)]


# ---------------------------------------------------------------- in the processes


def launched(words, environment, output):
    """accelerate's launcher, except that ranks are forked instead of imported anew."""
    import deepspeed  # noqa: F401 (once for all ranks)
    from accelerate.commands import launch as launcher
    from torch.distributed import run

    print_to(output)
    os.environ.clear()
    os.environ.update(environment)
    right = run.config_from_args

    def forking(arguments):
        return replace(right(arguments)[0], start_method="fork"), main, ()

    with patch.object(run, "config_from_args", forking):
        launcher.launch_command(launcher.launch_command_parser().parse_args(words))


def main():
    launch.PARENT = os.getppid()  # it may have been forked
    gc.disable()  # until all is imported
    rank, end = int(os.environ["RANK"]), torch.distributed.destroy_process_group
    results = []
    # The connections between the processes stay from training to training.
    with patch.object(torch.distributed, "destroy_process_group"):
        for one in json.loads(Path(os.environ[WHAT]).read_text()):
            results.append(come_to(one))
            if len(results) == 1:  # no collection looks through its imports again: DeepSpeed asks for many
                gc.collect()
                gc.freeze()
                gc.enable()
            (Path(os.environ[RESULTS]) / f"rank{rank}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    end()


def come_to(one):
    """What a training comes to; a crash ends the process, since others would wait for it."""
    AcceleratorState._reset_state(True)
    variables = environment(one["profile"])
    with patch.dict(os.environ, variables, clear=True), pytest.MonkeyPatch.context() as patches:
        patches.setattr(functional, "linear", functional.linear)  # ZeRO-3 puts its own there
        disturb(patches, **one["how"])
        try:
            loop.train(compose.load_config(one["options"]))
        except UserError as error:
            return ["refused", str(error)]
        except Stopped as stopped:
            return ["stopped", str(stopped)]
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    return ["done", ""]


def environment(profile):
    """A process's environment under a profile, as accelerate's launcher makes it."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    words = ["--config_file", f"configs/accelerate/{profile}.yaml", "--num_processes", os.environ["WORLD_SIZE"]]
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args([*words, "train.py"]))
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    with patch.dict(os.environ, mine, clear=True):
        made = prepare_deepspeed_cmd_env(arguments)[1] if arguments.use_deepspeed else prepare_multi_gpu_env(arguments)
    if not (arguments.use_deepspeed or torch.cuda.is_available()):
        made["ACCELERATE_USE_CPU"] = "true"
    return {**made, **mine}


# ---------------------------------------------------------------- stopping and harming

NOW = [0]  # the step that is being trained


def disturb(patch, stop_after=None, harm=(), eps=None):
    """What a training's `stop_after`, `harm` and `eps` say; patch: a pytest.MonkeyPatch."""
    last = float("inf") if stop_after is None else stop_after

    @replaced(patch, trainer, "load")
    def counted(load, *arguments):
        for batch in load(*arguments):
            NOW[0] = batch.step
            yield batch

    @replaced(patch, parallel, "make_optimizer")
    def dampened(make, *arguments):
        optimizer = make(*arguments)
        for group in optimizer.param_groups if eps is not None else []:
            group["eps"] = eps
        return optimizer

    patch.setattr(Deadline, "reason", property(lambda self: f"the test after step {last}" if NOW[0] >= last else None))
    if harm:
        globals()[f"harm_{harm[0]}"](patch, *harm[1:])


def harm_sample(patch, index, value, split="train"):
    """The states of a sample are all this value as they are read, whichever rank reads it."""

    @replaced(patch, StoreSplit, "read")
    def harmed(read, self, i, states=True):
        document = read(self, i, states)
        if states and i == index and self.shards[0].split == split:
            return replace(document, aux=plain(torch.full_like(document.aux.decode(), value)))
        return document


def harm_loss(patch, steps, rank, value):
    """On one rank the loss of these steps is this value, and its gradient right."""
    _harm_forward(patch, steps, rank, lambda loss, weight: loss + value)


def harm_gradient(patch, steps, rank, value):
    """On one rank the loss of these steps is right, and the gradient of a norm's weight is this value."""

    class Harm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss, weight):
            ctx.shape = weight.shape
            return loss.clone()

        @staticmethod
        def backward(ctx, slope):
            return slope, slope.new_full(ctx.shape, value)

    _harm_forward(patch, steps, rank, Harm.apply)


def _harm_forward(patch, steps, rank, harm):
    @replaced(patch, Objective, "forward")
    def harmed(forward, self, *arguments):
        loss, measured = forward(self, *arguments)
        if NOW[0] in steps and PartialState().process_index == rank:
            loss = harm(loss, self.drafter.norm.weight)
        return loss, measured


def harm_exchange(patch):
    """DDP never exchanges gradients."""
    patch.setattr(Replicated, "micro_batch", lambda self, last: self.model.no_sync())


def harm_sharding(patch):
    """FSDP2 wraps nothing."""
    patch.setattr(parallel, "fully_shard", lambda module, **_: module)


def harm_weights(patch, rank):
    """Steps of one rank do something that those of others do not."""
    for kind in (Parallel, Zero):

        @replaced(patch, kind, "update")
        def harmed(update, self, *arguments):
            found = update(self, *arguments)
            with torch.no_grad():
                self.objective.drafter.norm.weight.data += 1e-6 * (self.accelerator.process_index == rank)
            return found


def harm_options(patch, rank, option):
    """One rank is given another option."""
    if int(os.environ["RANK"]) == rank:
        instead_of(compose, "load_config")(lambda load, words: load([*words, option]))(patch)


def harm_absent(patch, steps):
    """No harm: these steps are in no schedule, and the others have the learning rates that they have anyway."""

    @replaced(patch, order, "schedule")
    def shorter(schedule, *arguments):
        return [batch for step, batch in enumerate(schedule(*arguments), 1) if step not in steps]

    @replaced(patch, trainer, "learning_rate")
    def later(rate, step, total, t):
        total += len(steps)
        return rate([s for s in range(1, total + 1) if s not in steps][step - 1], total, t)


def harm_pairs(patch, steps):
    """These steps have nothing to train: the draft vocabulary holds no token, as they see it."""

    @replaced(patch, trainer, "load")
    def emptied(load, split, schedule, done, t, seed, keep_mask, *more):
        for batch in load(split, schedule, done, t, seed, keep_mask, *more):
            alone = schedule[: batch.step], batch.step - 1
            without = batch.step in steps
            yield next(load(split, *alone, t, seed, keep_mask & False, *more)) if without else batch


if __name__ == "__main__":
    main()
