"""What is to be served by: vLLM as its own python has it, and whether it can be asked for what is to be measured."""

import json
import os
import subprocess
from dataclasses import dataclass
from math import prod

import torch

from eagle31_train.measure import acceptance
from eagle31_train.measure.serving.command import max_model_len, server_arguments
from eagle31_train.measure.serving.server import ENVIRONMENT, pick_port
from eagle31_train.schema import Config, UserError

HINT = "set evaluate.vllm_python to the python of vLLM's environment, e.g. .venv-vllm/bin/python"
PROBE_SECONDS = 600.0  # importing torch from a cold shared disk takes minutes
NO_VLLM = 3
# It prints what it found last, after anything that vLLM says of itself.
PROBE = f"""
import importlib.util, json, sys
if importlib.util.find_spec("vllm") is None:
    sys.exit({NO_VLLM})
from vllm.version import __version__
import torch
print(json.dumps([__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else None]))
"""
SPREAD = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")  # whose product is of devices


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
    for name in ("serve_depths", "concurrency"):
        values: list[int] = getattr(options, name)
        if not values or min(values) < 1 or len(set(values)) < len(values):
            raise UserError(f"evaluate.{name}={values} measures nothing: list numbers from 1 on, each once")
    if options.max_new_tokens < 2:
        raise UserError(
            f"evaluate.max_new_tokens={options.max_new_tokens} has no time per token: let answers have 2 tokens or more"
        )
    arguments = server_arguments(config, None, 0, 0)
    max_model_len(config)
    pick_port(options.vllm_args.get("port"))
    version, gpu = ask(options.vllm_python)
    # Those of this environment's torch, which may see no GPU, are not vLLM's.
    devices = prod(size for name in SPREAD if isinstance(size := arguments.get(name), int))
    cpu = acceptance.machine(torch.device("cpu"), threads=False)
    return Engine(version, cpu if gpu is None else f"{devices} × {gpu}" if devices > 1 else gpu)


def ask(python: str) -> tuple[str, str | None]:
    """The version of a python's vLLM, and the name of the GPU that its torch sees first, if any.

    Raises:
        UserError: the python is not there, or has no vLLM, or one that cannot be imported.
    """
    try:
        done = subprocess.run(
            [python, "-c", PROBE],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=PROBE_SECONDS,
            env={**ENVIRONMENT, **os.environ},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or "it does not answer"
        raise UserError(f"evaluate.vllm_python={python} cannot be run ({reason}): {HINT}") from None
    if done.returncode == NO_VLLM:
        raise UserError(f"evaluate.vllm_python={python} has no vLLM: {HINT}")
    if done.returncode:
        words = done.stderr.decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(words) if line.strip()), f"exit status {done.returncode}")
        raise UserError(f"evaluate.vllm_python={python} cannot import vLLM ({said[:300]}): {HINT}")
    version, gpu = json.loads(done.stdout.decode().splitlines()[-1])
    return version, gpu
