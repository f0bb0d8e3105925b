"""Reckon what a run will take, before anything is spent.

    python -m eagle31_train.plan +experiment=llama31_8b
    python -m eagle31_train.plan +experiment=kimi plan.tokens=5e8 plan.devices=4 plan.device_gib=141

Nothing is downloaded, and nothing is written.
"""

from eagle31_train import cli
from eagle31_train.config import Config
from eagle31_train.planning import inputs, sections
from eagle31_train.planning.planned import Planned


def plan(config: Config) -> None:
    """Print the plan; UserError where a size that it needs is neither given nor to be found."""
    target, data = inputs.read_target(config), inputs.read_data(config)
    shape = inputs.planned_shape(config, target, data.vocabulary or target.vocab_size)
    print(sections.text(Planned(config, target, shape, data)))


if __name__ == "__main__":
    cli.run(plan, __doc__ or "")
