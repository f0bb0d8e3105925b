"""STAGE 3: train the drafter on the stored hidden states.

    accelerate launch train.py +experiment=smollm2

Reads run_dir/data (the draft vocabulary) and run_dir/store; writes run_dir/train. After a stop the same command
resumes from the newest complete checkpoint, on any number of devices.
"""

from contextlib import ExitStack

from eagle31_train import cli
from eagle31_train.config import Config


def main() -> None:
    cli.run(train, __doc__ or "", tells="train.precision")


def train(config: Config) -> None:
    """Run the stage.

    Raises:
        UserError: missing, damaged or mismatched input, or a launch that this trainer cannot serve.
        Stopped: SIGTERM, Ctrl-C or the time limit came; a checkpoint was saved.
    """
    from train.prepare import prepare  # takes seconds to import; a mistyped option has been refused by now

    with ExitStack() as resources:  # closed however training ends
        trainer = prepare(config, resources)
        if trainer is None:
            return  # this run is finished already
        for batch in trainer.batches():
            result = trainer.train_step(batch)
            trainer.log(result)
            trainer.maybe_evaluate(result.step)
            trainer.maybe_save(result.step, result.stop_requested)
            if result.stop_requested or result.step == trainer.last_step:
                break
        trainer.finish()
