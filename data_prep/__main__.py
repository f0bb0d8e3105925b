"""STAGE 1: text → conversations → tokens and loss masks; the draft vocabulary.

eagle31 data +experiment=smollm2 [regenerate=true]
"""

from eagle31_train import cli
from eagle31_train.config import Config


def data(config: Config) -> None:
    from data_prep.stage import prepare  # seconds, before which a mistyped option is refused

    prepare(config)


if __name__ == "__main__":
    cli.run(data, __doc__)
