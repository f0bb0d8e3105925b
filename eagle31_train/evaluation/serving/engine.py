"""The vLLM that serves: what its own python has, and whether it can be asked for what is to be measured."""

import json
import os
import subprocess
from dataclasses import dataclass
from math import prod

import torch

from eagle31_train.config import Config
from eagle31_train.errors import UserError
from eagle31_train.evaluation.measurement import machine
from eagle31_train.evaluation.serving.command import max_model_len, server_arguments
from eagle31_train.evaluation.serving.server import ENVIRONMENT

PROBE_SECONDS = 600.0  # importing torch from a cold shared disk takes minutes
# What it prints last is the answer, after anything that vLLM says of itself.
PROBE = """
import json
from vllm.version import __version__
import torch
print(json.dumps([__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else None]))
"""
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")  # whose product is of devices


@dataclass(frozen=True)
class Engine:
    """vLLM's version, and what it computes on, in words."""

    version: str
    device: str


def check(config: Config) -> Engine:
    """Refuse what would measure nothing, or twice the same, before anything is measured; ask vLLM's python what it is.

    Raises:
        UserError: evaluate's options of serving, or its python, will not do.
    """
    options = config.evaluate
    for name in ("serve_speculative_tokens", "concurrency"):
        values: list[int] = getattr(options, name)
        if not values or min(values) < 1 or len(set(values)) < len(values):
            raise UserError(f"evaluate.{name}={values} measures nothing: list numbers from 1 on, each once")
    arguments = server_arguments(config, None, 0, 0)
    max_model_len(config)
    version, gpu = ask(options.vllm_python)
    if gpu is None:  # as vLLM's torch sees it, and not this environment's
        return Engine(version, machine(torch.device("cpu"), threads=False))
    devices = prod(size for name in PARALLEL if isinstance(size := arguments.get(name), int))
    return Engine(version, f"{devices} × {gpu}" if devices > 1 else gpu)


def ask(python: str) -> tuple[str, str | None]:
    """The version of a python's vLLM, and the name of the GPU that its torch sees first, if any; UserError where it
    cannot be run, or cannot import vLLM."""
    environment = {**ENVIRONMENT, **os.environ}
    try:
        done = subprocess.run(
            [python, "-c", PROBE], capture_output=True, stdin=subprocess.DEVNULL, timeout=PROBE_SECONDS, env=environment
        )
        done.check_returncode()
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        raise UserError(
            f"evaluate.vllm_python={python} cannot import vLLM ({[str(error), *lines][-1]}): set it to the python of "
            "vLLM's environment, e.g. .venv-vllm/bin/python"
        ) from None
    version, gpu = json.loads(done.stdout.decode().splitlines()[-1])
    return version, gpu
