"""Estimate what a run will take, before anything is spent.

    eagle31 plan target.path=Qwen/Qwen3-8B
    eagle31 plan +experiment=llama31_8b
    eagle31 plan +experiment=kimi plan.tokens=5e8 plan.devices=4 plan.device_gib=141

For a hub id it downloads config.json and, if no recipe is named, the tokenizer. It writes nothing.
"""

from eagle31_train import cli
from eagle31_train.common.console import note
from eagle31_train.config import Config


def plan(config: Config) -> None:
    """Print the plan; raises as `reckon` does."""
    # These imports take seconds, so they follow the check of the options.
    from eagle31_train.planning import sections
    from eagle31_train.planning.planned import reckon
    from eagle31_train.targets.description import doubts

    planned, rows = reckon(config)
    note("\n".join([f"TARGET   {config.target.name}: the drafter's shape follows from its config.json", *rows, ""]))
    note(sections.text(planned))
    for what, doubt in doubts(config).items():
        note(f"\n{what}   {doubt}")


if __name__ == "__main__":
    # A precision of `auto` means that of the devices in plan.*, not of this machine.
    cli.run(plan, __doc__ or "", resolve=False)
