"""STAGE 1: turn text into conversations, token ids and loss masks, and choose the draft vocabulary.

eagle31 data +experiment=smollm2 [regenerate=true]
"""

from eagle31_train import cli
from eagle31_train.config import Config


def data(config: Config) -> None:
    from data_prep.stage import prepare  # takes seconds; a mistyped option has been refused by now

    prepare(config)


if __name__ == "__main__":
    cli.run(data, __doc__)
