"""The recipe smollm2, with options as on a command line."""

from eagle31_train.compose import load_config


def configured(*options):
    """Its target lies on the hub, where its weights need not be hashed."""
    return load_config(["+experiment=smollm2", "target.path=HuggingFaceTB/SmolLM2-135M-Instruct", *options])
