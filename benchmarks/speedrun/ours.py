"""Our own trainer: the stage as it is, but it saves drafts on the way instead of checkpoints and evaluations."""

from contextlib import ExitStack
from pathlib import Path

from benchmarks.speedrun.job import Clock, Job, write_draft
from eagle31_train import compose
from eagle31_train.common.errors import UserError
from train.prepare import prepare


def train(job: Job, clock: Clock) -> None:
    never = 1_000_000_000
    ours = [f"run_dir={job.out}/run", f"train.max_steps={job.steps}"]
    ours += [f"train.epochs={never}", f"train.checkpoint_every={never}"]
    config = compose.load_config([*job.recipe, "train.wandb=disabled", *job.options, *ours])
    with ExitStack() as resources:
        trainer = prepare(config, resources)
        if trainer is None:
            raise UserError(f"{job.out} already holds a training: remove it")
        shape, vocab = trainer.data.shape, trainer.data.draft_vocab

        def save(folder: Path) -> None:
            write_draft(folder, shape, dict(trainer.parallel.weights()), vocab, config.target.dtype, config.target.name)

        clock.begin(save)
        clock.run()
        for batch in trainer.batches():
            result = trainer.train_step(batch)
            trainer.log(result)
            clock.step(result.step, trainer.state.tokens, save)
            if result.step == trainer.last_step:
                break
