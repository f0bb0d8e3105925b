"""The vLLM that serves: its arguments, its version and device, and whether it can do what is to be measured."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from eagle31_train.checkpoint.published import drafts_in_parallel
from eagle31_train.common.errors import UserError
from eagle31_train.config import Config
from eagle31_train.evaluation.measurement import machine
from eagle31_train.evaluation.serving.server import ENVIRONMENT
from eagle31_train.targets.description import class_without_eagle3

# Arguments that the measurement sets itself.
OURS = {"model", "revision", "trust_remote_code", "speculative_config", "host", "port", "api_key"}
OURS |= {"enable_prefix_caching", "disable_log_stats"}  # prompts are sent again and again; the counters are read
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")  # devices: the product of these
PROBE_SECONDS = 600.0  # importing torch from a cold shared disk takes minutes
# The last line that it prints is the answer; vLLM may print others before.
PROBE = """
import json
from vllm.version import __version__
import torch
print(json.dumps([__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else None]))
"""


def target_arguments(config: Config) -> dict[str, Any]:
    """Return what the target needs of vLLM: what its extraction by vLLM needed, its own code, a class for drafts."""
    target, engine = config.target, config.extract.engine_args if config.extract.engine == "vllm" else {}
    wanted: dict[str, Any] = {"revision": target.revision, "trust_remote_code": target.trust_remote_code or None}
    if class_without_eagle3(target):
        wanted["model_impl"] = "transformers"
    return wanted | {name: engine.get(name) for name in ("tensor_parallel_size", "quantization")}


def speculation(config: Config, drafter: str, draft_tokens: int, parallel: bool) -> dict[str, Any]:
    """Return vLLM's --speculative-config.

    parallel: this is a parallel drafter; unless it is set, vLLM drafts as with a chain drafter, and says nothing."""
    options: dict[str, Any] = {"method": "eagle3", "model": drafter, "num_speculative_tokens": draft_tokens}
    if parallel:
        options["parallel_drafting"] = True
    if config.evaluate.draft_sampling != "greedy":
        options["draft_sample_method"] = config.evaluate.draft_sampling
    return options


def server_arguments(config: Config, drafter: Path | None, draft_tokens: int, port: int) -> dict[str, Any]:
    """Return all arguments of one server, by name. UserError if evaluate.vllm_args has one of `OURS`.

    drafter: its checkpoint; None serves the target alone."""
    given = {name.replace("-", "_"): value for name, value in config.evaluate.vllm_args.items()}
    for name in OURS & given.keys():
        raise UserError(f"evaluate.vllm_args.{name} is set by the measurement or by target.*: remove it")
    wanted = {
        "model": config.target.path,
        **target_arguments(config),
        "dtype": config.target.dtype,  # measure the speed of what will be served, not of the exact evaluation
        "seed": config.seed,
        "enable_prefix_caching": False,
        "disable_uvicorn_access_log": True,  # a log line for every request is no part of serving
        "host": "127.0.0.1",
        **given,
        "port": port,
    }
    if drafter is not None:
        wanted["speculative_config"] = speculation(config, str(drafter), draft_tokens, drafts_in_parallel(drafter))
    return wanted


def answering_arguments(config: Config, devices: int, port: int) -> dict[str, Any]:
    """Return the arguments of the server that answers in stage 1, of the target alone.

    It has as many copies as fit on the devices, each on as many devices as the options say, unless evaluate.vllm_args
    says how many copies."""
    arguments = server_arguments(config, None, 0, port)
    arguments |= {"enable_prefix_caching": None, "served_model_name": None}  # vLLM's own defaults
    told = any(name.startswith("data_parallel") for name in arguments)
    copies = devices // devices_of(arguments)
    return arguments if told or copies < 2 else {**arguments, "data_parallel_size": copies}


def max_model_len(config: Config) -> int | None:
    """Return the longest sequence that vLLM is set to take, or None. UserError if only vLLM can read the setting."""
    limit = server_arguments(config, None, 0, 0).get("max_model_len")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise UserError(f"evaluate.vllm_args.max_model_len={limit} must be a whole number, such as 32768, or unset")
    return limit


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments for the command line. true and false become --name and --no-name; null leaves it to vLLM."""
    line: list[str] = []
    for name, value in arguments.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            line.append(f"--{dashed}" if value else f"--no-{dashed}")
        elif isinstance(value, dict):
            line += [f"--{dashed}", json.dumps(value, ensure_ascii=False)]
        elif value is not None:
            line += [f"--{dashed}", *map(str, value if isinstance(value, list) else [value])]
    return line


@dataclass(frozen=True)
class Installation:
    """The vLLM that `check` found: its version, and the device it will serve on, in words."""

    version: str
    device: str


def check(config: Config) -> Installation:
    """Ask vLLM's python for its version and device. UserError if it, or an option of serving, will not do."""
    options = config.evaluate
    arguments = server_arguments(config, None, 0, 0)
    max_model_len(config)
    python, environment = options.vllm_python, {**ENVIRONMENT, **os.environ}
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
    if gpu is None:  # as vLLM's torch sees it, and not this environment's
        if options.temperature:  # its _expand_kernel_impl writes temperatures into a copy that nobody reads
            raise UserError("evaluate.temperature: vLLM 0.32 on a CPU samples wrong tokens when it drafts: set it to 0")
        return Installation(version, machine(torch.device("cpu")))
    devices = devices_of(arguments)
    return Installation(version, f"{devices} × {gpu}" if devices > 1 else gpu)


def devices_of(arguments: Mapping[str, Any]) -> int:
    """Return how many devices a server with these arguments takes."""
    return prod(size for name in PARALLEL if isinstance(size := arguments.get(name), int))
