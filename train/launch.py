"""Checks that what was launched is what was asked for.

accelerate silently drops settings that a machine cannot serve: processes would each train alone, or without plugins
that do not exist on a CPU. So the result is compared with what the launch asked for, before anything is trained.
"""

import logging
import os
import time
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
    compare_versions,
    gather_object,
    parse_flag_from_env,
)

from eagle31_train import PARENT
from eagle31_train.combinations import check_context_parallel, check_zero
from eagle31_train.common import artifacts
from eagle31_train.common.console import note, ranks, refuse_lone_process
from eagle31_train.common.errors import SharedError, UserError
from eagle31_train.common.locations import CONFIGS
from eagle31_train.config import Config, TrainConfig
from eagle31_train.precision import whole_float32
from train import tracking

SEE = "see docs/launch.md"
DEEPSPEED = "0.19.8"  # as in pyproject.toml: the first whose ZeRO-1 and 2 skip an fp32 update that is not finite
SETTINGS = "ACCELERATE_DEEPSPEED_CONFIG_FILE"  # set by accelerate's launcher; names DeepSpeed's settings
FALSE = ("false", "no", "off", "n", "f", "0")  # as accelerate reads them
# How long ranks wait for one another: the main process may be reading or writing checkpoints on a slow disk.
PATIENCE = timedelta(hours=2)


def make_accelerator(config: Config, folder: Path) -> Accelerator:
    """Return the accelerator. Raise UserError if it is not what was asked for, or this trainer does not support it."""
    check_environment(config.train)
    whole_float32()
    if config.train.deterministic:
        make_deterministic()
    # Future warnings are for the authors of libraries; users cannot fix them.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|accelerate|deepspeed)\.")
    # ZeRO-3 need not understand what the drafter's modules return, either: the objective is gathered as a whole.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "unknown inputs or outputs" not in record.getMessage())
    zero = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    on_cpu = zero and not torch.cuda.is_available()
    if on_cpu:  # use gloo alone: DeepSpeed would spend minutes compiling its shared-memory operator
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it would look for others, and say that there are none
        from deepspeed import ops

        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if ranks() > 1 and os.getppid() != PARENT:
        # It would join the processes of the next launch, which listens at the same address, and leave them waiting.
        raise UserError("this process's launcher has ended (was it killed?): run its command again")
    accelerator = Accelerator(
        mixed_precision="no",  # Objective.autocast sets the precision, the same in all profiles
        log_with=tracking.loggers(config) or None,
        project_dir=str(folder),
        deepspeed_plugin=deepspeed_plugin(config.train) if zero else None,
        kwargs_handlers=[
            # The only buffers are the target's weights, the same on every rank.
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            InitProcessGroupKwargs(backend="gloo" if on_cpu else None, timeout=PATIENCE),
        ],
    )
    check_accelerator(accelerator)
    check_context_parallel(config.train.context_parallel, accelerator.num_processes, "processes")
    return accelerator


def spans_machines() -> bool:
    """Return whether the launch has processes on more than one machine."""
    return ranks() > (ranks_here() or ranks())


def ranks_here() -> int | None:
    """Return the number of the launch's processes on this machine, as torchrun or DeepSpeed sets it; None if unset."""
    count = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return int(count) if count else None


def check_environment(t: TrainConfig) -> None:
    """Raise UserError for what the launch's environment asks for and this trainer does not do, or does differently."""
    asked = os.environ.get
    refuse_lone_process()
    on_gpus = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")
    if on_gpus and (here := ranks_here() or 1) > (gpus := torch.cuda.device_count()):
        raise UserError(
            f"{here} processes were launched on a machine with {gpus} GPUs: launch {gpus} on each machine "
            "(--num_processes counts those of all machines)"
        )
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        if asked("FSDP_VERSION", "1") != "2":
            raise UserError("accelerate launched FSDP1: set fsdp_version: 2, as in configs/accelerate/fsdp2.yaml")
        if parse_flag_from_env("FSDP_OFFLOAD_PARAMS"):
            raise UserError(
                "this trainer does not support offloading with FSDP2: use configs/accelerate/zero3_offload.yaml"
            )
        if parse_flag_from_env("FSDP_ACTIVATION_CHECKPOINTING") and not t.activation_checkpointing:
            raise UserError("accelerate's fsdp_activation_checkpointing is on: set train.activation_checkpointing=true")
        if asked("FSDP_RESHARD_AFTER_FORWARD", "true").lower() in FALSE:
            raise UserError("this trainer always reshards after the forward pass: remove fsdp_reshard_after_forward")
    if parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        raise UserError("accelerate's parallelism_config has no effect here: remove it, and set train.context_parallel")
    ours = {
        "mixed_precision": (("no", t.precision), "train.precision"),
        "gradient_accumulation_steps": (("1", "auto"), "train.gradient_accumulation_steps"),
        "dynamo_backend": (("no", "NO"), "train.kernels"),
    }
    for name, (harmless, option) in ours.items():
        if (value := asked(f"ACCELERATE_{name.upper()}", harmless[0])) not in harmless:
            raise UserError(
                f"accelerate's {name} is {value}: remove it from accelerate's configuration, and set {option}"
            )


def make_deterministic() -> None:
    """Make torch use kernels that give the same bits every time, and raise where it has none. Call this before CUDA is
    used: cuBLAS reads its environment variable when it starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def deepspeed_plugin(t: TrainConfig) -> DeepSpeedPlugin:
    """Return DeepSpeed's settings from the JSON file that accelerate's configuration names. Raise UserError if they
    contradict this trainer's, or DeepSpeed is too old."""
    if compare_versions("deepspeed", "<", DEEPSPEED):
        raise UserError(
            f"this version of DeepSpeed would apply NaN updates to the weights: install {DEEPSPEED} or later"
        )
    if (file := Path(os.environ.get(SETTINGS, ""))).parts[:2] == ("configs", "deepspeed") and not file.is_file():
        # Our profiles name it relative to the top of a checkout. This is another folder, or there is no checkout.
        os.environ[SETTINGS] = str(CONFIGS / file.relative_to("configs"))
    try:
        plugin = DeepSpeedPlugin()
    except ValueError as error:
        raise UserError(f"accelerate rejects DeepSpeed's settings ({error}): {SEE}") from None
    settings = plugin.deepspeed_config
    # Settings that train.* has, too, and their values that do not contradict it.
    harmless: dict[str, tuple[Any, ...]] = {
        "optimizer": (None,),
        "scheduler": (None,),
        "gradient_accumulation_steps": (None, 1, "auto"),
        "train_batch_size": (None, "auto"),
        "train_micro_batch_size_per_gpu": (None, 1, "auto"),
        "gradient_clipping": (None, "auto", t.max_grad_norm),
        "communication_data_type": (None, "fp32"),
    }
    wrong = [name for name, values in harmless.items() if settings.get(name) not in values]
    halves = ("fp16", "bf16", "torch_autocast")
    wrong += [half for half in halves if settings.pop(half, {}).get("enabled") not in (None, False, "auto")]
    if wrong:
        raise UserError(f"remove {', '.join(wrong)} from DeepSpeed's settings, and set train.* instead: {SEE}")
    if settings.get("zero_optimization", {}).get("stage", 0) == 0:
        raise UserError("DeepSpeed without a ZeRO stage shards nothing: use configs/accelerate/ddp.yaml")
    check_zero(t)
    settings.pop("train_batch_size", None)
    settings["gradient_accumulation_steps"] = 1
    settings["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed needs a number; the trainer makes its own batches
    settings["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW steps on CPUs too, to the same bits
    settings["zero_allow_untested_optimizer"] = True
    settings.setdefault("steps_per_print", 1 << 60)
    return plugin


def check_accelerator(accelerator: Accelerator) -> None:
    """Raise UserError if the number of processes or the kind of parallelism is not what the launch asked for."""
    came, count = accelerator.distributed_type, accelerator.num_processes
    if count != (launched := ranks()):
        raise UserError(
            f"{launched} processes were launched, but each would train alone: on a machine without GPUs set "
            "ACCELERATE_USE_CPU=true before the command, or launch one process"
        )
    fsdp, wanted = parse_flag_from_env("ACCELERATE_USE_FSDP"), DistributedType.MULTI_GPU
    if fsdp and count == 1:
        raise UserError(f"FSDP2 needs several processes, but one was launched: use another profile, {SEE}")
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        wanted = DistributedType.DEEPSPEED
    elif accelerator.device.type == "cpu":  # where accelerate does not support FSDP
        wanted = DistributedType.MULTI_CPU
    elif fsdp:
        wanted = DistributedType.FSDP
    # One process may be a group of one, under torchrun.
    alone = count == 1 and wanted != DistributedType.DEEPSPEED and came == DistributedType.NO
    if came != wanted and not alone:
        raise UserError(
            f"the launch asked for {wanted.value}, but accelerate started {came.value}: with DeepSpeed unset "
            f"ACCELERATE_USE_CPU, otherwise {SEE}"
        )


def check_alike(
    accelerator: Accelerator, inputs: dict[str, Any], config: Config, measured_on: Sequence[str], counted: bool
) -> None:
    """Raise SharedError, naming the first rank that would train something other than rank 0, or out of step with it.
    inputs: what the trained weights depend on; measured_on: digests of prompts; counted: whether the store's plan has
    the supervised positions by which samples are dealt."""
    options = {**asdict(config.train), **inputs["train"]}
    del options["time_limit"]  # each may have its own
    zero = accelerator.state.deepspeed_plugin
    facts = {
        **inputs,
        "train": options,
        "store.follow": config.store.follow,
        "type": accelerator.distributed_type.value,
        "fsdp": parse_flag_from_env("ACCELERATE_USE_FSDP"),
        "deepspeed": zero.deepspeed_config["zero_optimization"] if zero else None,
        "torch": torch.__version__,
        "trajectories": measured_on,
        "store.supervised": counted,  # or ranks would divide a step differently
        "evaluate": {"dtype": config.evaluate.dtype, "draft_tokens": config.evaluate.num_speculative_tokens},
    }
    everyone = gather_object([facts])
    for rank, other in enumerate(everyone):
        if change := artifacts.describe_change(everyone[0], other):
            change = change.replace(" there, ", " on rank 0, ")
            remedy = "start every process with the same options, versions and files"
            stop_all(accelerator, f"rank {rank} differs from rank 0 ({change}): {remedy}")


def agreed(accelerator: Accelerator, make: Callable[[], Any]) -> Any:
    """Call `make` on the main process and return its result on every rank. If it raises UserError, raise SharedError on
    every rank."""
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
    """Raise SharedError to end the run. Every rank must call this."""
    if accelerator.is_main_process:  # before any rank ends: a launcher then ends the others
        note(f"error: {problem}", error=True)
    wait_at_the_end(accelerator)
    raise SharedError(problem)


def wait_at_the_end(accelerator: Accelerator) -> None:
    """Wait for every rank. After that, this one may end."""
    accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        # Gloo's thread now releases the last exchange's tensors, for which it needs the GIL. Freeing the group at that
        # instant would wait for the thread while holding the GIL: a deadlock (torch 2.13).
        time.sleep(0.1)
