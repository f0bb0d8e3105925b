"""Configurations without Hydra."""

import copy
import functools
import re

import yaml

from eagle31_train.cli import load_config


@functools.cache
def _recipe():
    return load_config(["+experiment=smollm2", "target.path=HuggingFaceTB/SmolLM2-135M-Instruct"])


def configured(*options):
    """The recipe smollm2 with options as on a command line, which must be valid; its target lies on the hub, where its
    weights need not be hashed."""
    config = copy.deepcopy(_recipe())
    for option in options:
        name, _, value = option.lstrip("+").partition("=")
        *parents, last = name.split(".")
        holder = config
        for parent in parents:
            holder = holder.setdefault(parent, {}) if isinstance(holder, dict) else getattr(holder, parent)
        # Hydra takes {a:1}, YAML wants a space.
        parsed = yaml.safe_load(re.sub(r"(\w):(?=[\w\[])", r"\1: ", value) if value.startswith("{") else value)
        if last == "leave_out":
            parsed = list(map(str, parsed))
        if isinstance(holder, dict):
            holder[last] = parsed
        else:
            assert hasattr(holder, last), name
            setattr(holder, last, parsed)
    return config
