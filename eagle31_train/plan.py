"""Reckon what a run will take, before anything is spent.

    eagle31 plan target.path=Qwen/Qwen3-8B
    eagle31 plan +experiment=llama31_8b
    eagle31 plan +experiment=kimi plan.tokens=5e8 plan.devices=4 plan.device_gib=141

Without a recipe +experiment=any is taken, as by `eagle31 run`. Of a hub id config.json is downloaded, and nothing else;
nothing is written.
"""

import sys
from dataclasses import asdict

from eagle31_train import cli
from eagle31_train.config import Config
from eagle31_train.console import note
from eagle31_train.planning import inputs, sections
from eagle31_train.planning.planned import Planned
from eagle31_train.targets.derive import complete, planned_drafter
from eagle31_train.targets.description import serving_doubt


def plan(config: Config) -> None:
    """Print the plan; UserError for a target that cannot be read or a drafter that cannot be made."""
    planned, rows = reckon(config)
    note("\n".join([f"TARGET   {config.target.name}: the drafter's shape follows from its config.json", *rows, ""]))
    note(sections.text(planned))
    if doubt := serving_doubt(config.target, planned.target.description.model_type):
        note(f"\nNOT SERVED   {doubt}")


def reckon(config: Config) -> tuple[Planned, list[str]]:
    """What the sections speak of, and the table of where the drafter's options are from."""
    target, data = inputs.read_target(config), inputs.read_data(config)
    V, by_coverage = target.description.vocab_size, config.data.draft_vocab_coverage is not None
    size = data.vocabulary or (inputs.VOCABULARY if by_coverage else V)
    shape, rows = planned_drafter(config, target.description, min(V, size))
    return Planned(complete(config, asdict(target.description)), target, shape, data), rows


if __name__ == "__main__":
    # A precision of `auto` is that of the devices of plan.*, and not of this machine.
    cli.run(plan, __doc__ or "", cli.with_recipe(sys.argv[1:]), resolve=False)
