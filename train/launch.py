"""What was launched, and whether it is what was asked for.

accelerate drops settings that a machine cannot serve without a word: processes that each train alone, plugins
that do not exist on a CPU. So what came is compared with what the launch asked for, before anything is trained.
"""

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
    parse_flag_from_env,
)

from eagle31_train import artifacts
from eagle31_train.config import Config, TrainConfig
from eagle31_train.console import note
from eagle31_train.errors import SharedError, UserError
from eagle31_train.locations import CONFIGS
from train import tracking

SEE = "see docs/launch.md"
SETTINGS = "ACCELERATE_DEEPSPEED_CONFIG_FILE"  # DeepSpeed's, as accelerate's launcher hands them on
# For how long ranks wait for one another: the main process may read and write checkpoints on a slow disk meanwhile.
PATIENCE = timedelta(hours=2)


def make_accelerator(config: Config, folder: Path) -> Accelerator:
    """The accelerator, checked to be what was asked for.

    Raises:
        UserError: it is not, or it is nothing that this trainer serves; says what to do.
    """
    check_environment(config.train)
    if config.train.deterministic:
        make_deterministic()
    # Libraries tell one another's authors what will change: nothing that a user could mend.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|accelerate|deepspeed)\.")
    # Nor does ZeRO-3 need to understand what the drafter's modules return: the objective is gathered as a whole.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "unknown inputs or outputs" not in record.getMessage())
    deepspeed = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    # The only buffers are the target's weights, the same on every rank.
    handlers: list[Any] = [DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)]
    on_cpu = deepspeed and not torch.cuda.is_available()
    handlers.append(InitProcessGroupKwargs(backend="gloo" if on_cpu else None, timeout=PATIENCE))
    if on_cpu:
        leave_out_extension()
    accelerator = Accelerator(
        mixed_precision="no",  # Objective.autocast is the precision, alike in all profiles
        log_with=tracking.loggers(config) or None,
        project_dir=str(folder),
        deepspeed_plugin=deepspeed_plugin(config.train) if deepspeed else None,
        kwargs_handlers=handlers,
    )
    check_accelerator(accelerator)
    return accelerator


def check_environment(t: TrainConfig) -> None:
    """Refuse what a launch asks for by its environment and this trainer would not do, or does otherwise.

    Raises:
        UserError: names it.
    """
    asked = os.environ.get
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    if launched and asked("MASTER_ADDR") == "127.0.0.1" and asked("WORLD_SIZE") is None:
        # accelerate's launcher of one process, asked for several, starts one, and leaves this trace.
        raise UserError(
            "accelerate was asked for several processes and started one, as it does with --cpu and for profiles of one "
            "process: use configs/accelerate/ddp.yaml (on a CPU with ACCELERATE_USE_CPU=true), or --num_processes 1"
        )
    on_gpus = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")
    if on_gpus and (here := int(asked("LOCAL_WORLD_SIZE", "1"))) > (gpus := torch.cuda.device_count()):
        raise UserError(f"{here} processes were launched on a machine with {gpus} GPUs: launch --num_processes {gpus}")
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        if asked("FSDP_VERSION", "1") != "2":
            raise UserError("accelerate launched FSDP1: set fsdp_version: 2, as in configs/accelerate/fsdp2.yaml")
        if parse_flag_from_env("FSDP_OFFLOAD_PARAMS"):
            raise UserError("this trainer does not offload under FSDP2: use configs/accelerate/zero3_offload.yaml")
    ours = {
        "mixed_precision": (("no", t.precision), "train.precision"),
        "gradient_accumulation_steps": (("1", "auto"), "train.gradient_accumulation_steps"),
        "dynamo_backend": (("no", "NO"), "train.compile"),
    }
    for name, (harmless, option) in ours.items():
        if (value := asked(f"ACCELERATE_{name.upper()}", harmless[0])) not in harmless:
            raise UserError(f"accelerate's {name} is {value}: leave it out of its configuration, and set {option}")


def make_deterministic() -> None:
    """Let torch choose kernels that give the same bits every time, and raise where it has none.

    Before CUDA is used: cuBLAS reads its variable when it starts.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def leave_out_extension() -> None:
    """Let DeepSpeed's processes on a CPU speak through gloo alone.

    Else it compiles, for minutes and with tools that a user may lack, what helps such processes to share memory.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it looks for others, and says that there are none
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def deepspeed_plugin(t: TrainConfig) -> DeepSpeedPlugin:
    """DeepSpeed's settings, of the JSON file that accelerate's configuration names.

    Raises:
        UserError: they contradict this trainer.
    """
    if (file := Path(os.environ.get(SETTINGS, ""))).parts[:2] == ("configs", "deepspeed") and not file.is_file():
        # As our profiles name it, below the top of a checkout. This is another folder, or there is no checkout.
        os.environ[SETTINGS] = str(CONFIGS / file.relative_to("configs"))
    try:
        plugin = DeepSpeedPlugin()
    except ValueError as error:
        raise UserError(f"accelerate refuses DeepSpeed's settings ({' '.join(str(error).split())}): {SEE}") from None
    settings = plugin.deepspeed_config
    halves = [half for half in ("fp16", "bf16") if settings.pop(half, {}).get("enabled") not in (None, False, "auto")]
    stage = settings.get("zero_optimization", {}).get("stage", 0)
    refusals = (
        (bool(halves), "remove fp16 and bf16, which would round the weights: set train.precision=bf16"),
        ("optimizer" in settings or "scheduler" in settings, "remove optimizer and scheduler, which are train.*'s"),
        (
            settings.get("gradient_accumulation_steps", 1) not in (1, "auto"),
            "remove gradient_accumulation_steps: set train.gradient_accumulation_steps",
        ),
        (
            settings.get("gradient_clipping", "auto") not in ("auto", t.max_grad_norm),
            "remove gradient_clipping: set train.max_grad_norm",
        ),
        (stage == 0, "without a ZeRO stage it shards nothing: use configs/accelerate/ddp.yaml"),
    )
    for is_so, problem in refusals:
        if is_so:
            raise UserError(f"DeepSpeed's settings are no good here: {problem} ({SEE})")
    if t.optimizer == "muon":
        raise UserError(
            "train.optimizer=muon needs whole matrices, which DeepSpeed cuts up: launch with ddp or fsdp2 "
            f"({SEE}), or set train.optimizer=adamw"
        )
    settings.pop("train_batch_size", None)
    settings["gradient_accumulation_steps"] = 1
    settings["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed wants a number; batches are the trainer's own
    settings["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW steps on CPUs too, to the same bits
    settings["zero_allow_untested_optimizer"] = True
    settings.setdefault("steps_per_print", 1 << 60)
    return plugin


def check_accelerator(accelerator: Accelerator) -> None:
    """Compare what came with what the launch asked for: kind, number of processes, back end.

    Raises:
        UserError: says what differs.
    """
    came, count = accelerator.distributed_type, accelerator.num_processes
    if count != (launched := int(os.environ.get("WORLD_SIZE", "1"))):
        raise UserError(
            f"{launched} processes were launched, and each would train alone: on a machine without GPUs set "
            "ACCELERATE_USE_CPU=true before the command, or launch one process"
        )
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and count == 1:
        raise UserError("FSDP2 shards over several processes, and one was launched: use configs/accelerate/gpu.yaml")
    on_cpu, fsdp = accelerator.device.type == "cpu", parse_flag_from_env("ACCELERATE_USE_FSDP")
    wanted = DistributedType.FSDP if fsdp else DistributedType.MULTI_GPU
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        wanted = DistributedType.DEEPSPEED
    elif on_cpu:  # where accelerate knows no FSDP
        wanted = DistributedType.MULTI_CPU
    # One process may be a group of one, under torchrun.
    alone = count == 1 and wanted != DistributedType.DEEPSPEED and came == DistributedType.NO
    if came != wanted and not alone:
        raise UserError(
            f"the launch asked for {wanted.value}, and accelerate made {came.value} of it: with DeepSpeed leave "
            f"ACCELERATE_USE_CPU away, otherwise {SEE}"
        )


def check_alike(accelerator: Accelerator, inputs: dict[str, Any], config: Config, measured_on: Sequence[str]) -> None:
    """Refuse ranks that would train something else than the first, or would not do it in step with it.

    Args:
        inputs: what the trained weights depend on. measured_on: prompts, by their digests.

    Raises:
        SharedError: names the first rank that differs and how.
    """
    options = {**asdict(config.train), **inputs["train"]}
    del options["time_limit"]  # each may have its own
    zero = accelerator.state.deepspeed_plugin
    profile = {
        "type": accelerator.distributed_type.value,
        "fsdp": parse_flag_from_env("ACCELERATE_USE_FSDP"),
        "deepspeed": zero.deepspeed_config["zero_optimization"] if zero else None,
    }
    facts = {**inputs, "train": options, "store.follow": config.store.follow, "profile": profile}
    facts["torch"] = torch.__version__
    facts["trajectories"] = measured_on
    facts["evaluate"] = {"dtype": config.evaluate.dtype, "draft_tokens": config.evaluate.num_speculative_tokens}
    everyone = gather_object([facts])
    for rank, other in enumerate(everyone):
        if change := artifacts.describe_change(everyone[0], other):
            stop_all(
                accelerator,
                f"rank {rank} is not as rank 0 ({change.replace(' there, ', ' on rank 0, ')}): "
                "start every process with the same options, versions and files",
            )


def agreed(accelerator: Accelerator, make: Callable[[], Any]) -> Any:
    """What the main process makes, on every rank.

    Raises:
        SharedError: it raised a UserError.
    """
    value = problem = None
    if accelerator.is_main_process:
        try:
            value = make()
        except UserError as error:
            problem = str(error)
    if accelerator.num_processes > 1:
        value, problem = broadcast_object_list([value, problem])
    if problem is not None:
        stop_all(accelerator, problem)
    return value


def stop_all(accelerator: Accelerator, problem: str) -> NoReturn:
    """End a run that every rank knows to be over; all come here.

    Raises:
        SharedError: always.
    """
    if accelerator.is_main_process:  # before any rank is gone, whereupon a launcher ends the others
        note(f"error: {problem}", error=True)
    accelerator.wait_for_everyone()
    raise SharedError(problem)
