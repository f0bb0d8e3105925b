"""The engine that a configuration asks for."""

import importlib.util
import os

from eagle31_train.schema import Config, UserError
from eagle31_train.targets.engine import Engine
from eagle31_train.targets.hf import HiddenStateTarget, load_model, pick_device, pick_dtype, serving_doubt
from eagle31_train.targets.readout import readout_from_checkpoint
from eagle31_train.targets.transformers_engine import TransformersEngine
from eagle31_train.targets.vllm_engine import VllmEngine

ENGINES = ("transformers", "vllm")


def make_engine(config: Config) -> Engine:
    """The engine that `extract.engine` names, with the target loaded.

    Raises:
        UserError: no such engine, it is not installed, or it cannot load the target.
    """
    name = config.extract.engine
    if name not in ENGINES:
        raise UserError(f"extract.engine={name!r} is not one of {', '.join(ENGINES)}")
    if name == "vllm":
        if importlib.util.find_spec("vllm") is None:
            raise UserError(
                "extract.engine=vllm needs vLLM in this environment: pip install vllm (on a CPU: "
                "tests/vllm/install.sh DIR makes an environment, DIR/bin/python -m eagle31_train.extract runs in it)"
            )
        return VllmEngine(config)
    if config.extract.engine_args:
        raise UserError(
            f"extract.engine_args={config.extract.engine_args} are vLLM's: use extract.engine=vllm, or leave them out"
        )
    if int(os.environ.get("RANK", 0)) == 0 and (doubt := serving_doubt(config.target)):
        print(f"target: {doubt}")
    target = HiddenStateTarget(load_model(config.target), config.target.aux_layers)
    offloaded = any(module.weight.is_meta for module in (target.embedding, target.final_norm, target.head))
    readout = readout_from_checkpoint(config.target, pick_dtype(config.target.dtype)) if offloaded else target.readout
    device = pick_device(config.target.device) if offloaded else target.head.weight.device
    return TransformersEngine(target, readout.to(device), config.extract.batch_tokens)
