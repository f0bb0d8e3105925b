"""STAGE 1: text → conversations → tokens and loss masks; the draft vocabulary.

eagle31 data +experiment=smollm2 [regenerate=true]
"""

from data_prep.stage import prepare
from eagle31_train import cli

if __name__ == "__main__":
    cli.run(prepare, __doc__)
