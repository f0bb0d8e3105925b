"""STAGE 2: run the target over the conversations and store its hidden states.

    eagle31 extract +experiment=smollm2
    accelerate launch --num_processes 8 -m eagle31_train.extract +experiment=qwen3_8b
    eagle31 extract +experiment=kimi extract.parts=4 extract.part=0    # 1, 2, 3 on other machines

Reads run_dir/data and writes the store (docs/store.md). After a kill the same command continues at the first shard that
is not committed. Several processes share the shards and coordinate only through the store's files; the store has the
same bytes for any number of them. Where no launcher spans the machines, give each command its own `extract.part` of
`extract.parts`.
"""

from eagle31_train import cli
from eagle31_train.config import Config


def extract(config: Config) -> None:
    # These imports take seconds, so they follow the check of the options.
    from eagle31_train.evaluation import trajectories
    from eagle31_train.targets import extraction

    extraction.extract(config, trajectories.record)


if __name__ == "__main__":
    cli.run(extract, __doc__ or "")
