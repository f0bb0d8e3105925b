"""Which options go together: the same checks for a stage and for `eagle31 run` before its first stage."""

import importlib.util

from eagle31_train.common.errors import UserError
from eagle31_train.common.units import byte_count, parse_limit
from eagle31_train.config import Config, TrainConfig


def check_options(config: Config) -> None:
    """Raise UserError for options that contradict each other, or have no effect, on any machine."""
    if config.name == "plain":
        raise UserError("name=plain is reserved for decoding without a drafter: choose another name")
    if len(config.train.betas) != 2:
        raise UserError(f"train.betas={config.train.betas} must be two numbers, one for each of AdamW's moments")
    parse_limit(config.train.time_limit)
    for name in ("cache_bytes", "max_bytes"):
        if (text := getattr(config.store, name)) is not None:
            byte_count(text, f"store.{name}")
    shared = config.extract.engine_args.get("tensor_parallel_size", 1)
    if not isinstance(shared, int) or shared < 1:
        raise UserError(f"extract.engine_args.tensor_parallel_size={shared} must be a whole number of devices")
    data = config.data
    if data.rows is not None and all(source is None for source in data.sources.values()):
        raise UserError(f"data.rows={data.rows} applies only to data.sources: set data.sources.NAME.path, or remove it")
    most, headline = config.evaluate.max_speculative_tokens, config.evaluate.num_speculative_tokens
    if config.drafter.parallel and config.train.ttt_length == 1:
        raise UserError("drafter.parallel=true learns nothing with train.ttt_length=1: set that to the draft's length")
    t = config.train
    if t.init_from is None and t.init_revision is not None:
        raise UserError(f"train.init_revision={t.init_revision} needs train.init_from: set it to a hub id")
    if t.init_from is not None and t.fc_init_scale not in (None, 1):
        raise UserError(
            f"train.fc_init_scale={t.fc_init_scale} applies only to new weights: remove it or train.init_from"
        )
    for name in ("serve_speculative_tokens", "concurrency"):
        if not getattr(config.evaluate, name):
            raise UserError(f"evaluate.{name}=[] measures nothing: set one number or more")
    if most < headline:
        raise UserError(
            f"evaluate.max_speculative_tokens={most} must be at least evaluate.num_speculative_tokens={headline}"
        )


def check_wandb(t: TrainConfig) -> None:
    """UserError where Weights & Biases is asked for and not installed."""
    if t.wandb != "disabled" and importlib.util.find_spec("wandb") is None:
        raise UserError("train.wandb needs Weights & Biases: run `pip install wandb`, or set train.wandb=disabled")


def check_zero(t: TrainConfig) -> None:
    """Raise UserError for options that cannot be trained under DeepSpeed's ZeRO."""
    if t.optimizer == "muon":
        raise UserError(
            "train.optimizer=muon needs whole matrices, but DeepSpeed splits them: launch with ddp or fsdp2, or set "
            "train.optimizer=adamw with its own train.lr"
        )


def check_longest(row: str, tokens: int, batch_tokens: int) -> None:
    """Raise UserError if the longest conversation, called `row`, does not fit in a training batch."""
    if tokens > batch_tokens:
        raise UserError(
            f"{row} has {tokens} tokens: set train.batch_tokens={tokens} or more, or make data and store again with "
            f"data.max_length={batch_tokens}"
        )


def check_context_parallel(context: int, devices: int, name: str) -> None:
    """Raise UserError if devices, called `name`, cannot form groups of `context` that share conversations."""
    if devices % context:
        wrong = f"train.context_parallel={context} does not divide {name}={devices}"
        raise UserError(f"{wrong}: use a multiple of {context}")
