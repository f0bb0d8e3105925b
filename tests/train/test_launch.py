"""What was launched is what was asked for, or training stops with one line that says what to do."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import launching
import pytest
import several
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from launching import PROFILES, ROOT
from pipeline import assert_close

from eagle31_train.config import Config, TrainConfig
from eagle31_train.errors import UserError
from train import launch

CPU, GPU = torch.device("cpu"), torch.device("cuda")
KIND = DistributedType


def refusal(call, *arguments):
    with pytest.raises(UserError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def use(monkeypatch, variables):
    """These variables, and none of accelerate's or a launcher's besides."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "MASTER_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


# ---------------------------------------------------------------- what the environment asks for


FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
REFUSED = {
    "Megatron": (
        {"ACCELERATE_USE_MEGATRON_LM": "true"},
        "accelerate launched Megatron-LM, which this trainer does not",
    ),
    "FSDP1": ({**FSDP2, "FSDP_VERSION": "1"}, "accelerate launched FSDP1: set fsdp_version: 2"),
    "FSDP of no version": ({"ACCELERATE_USE_FSDP": "true"}, "accelerate launched FSDP1: set fsdp_version: 2"),
    "FSDP offload": (
        {**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"},
        "does not offload under FSDP2: use configs/accelerate/zer",
    ),
    "fp16": (
        {"ACCELERATE_MIXED_PRECISION": "fp16"},
        "mixed_precision is fp16, but train.precision=bf16: set train.pre",
    ),
    "fp8": ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "mixed_precision is fp8, but train.precision=bf16: set train.preci"),
    "accumulation": (
        {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
        "steps is 4: set train.gradient_accumulation_steps instead",
    ),
    "dynamo": ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend is INDUCTOR: set train.compile=true instead"),
}


@pytest.mark.parametrize(("variables", "words"), REFUSED.values(), ids=REFUSED)
def test_what_this_trainer_would_do_otherwise_is_refused(monkeypatch, variables, words):
    use(monkeypatch, variables)
    assert words in refusal(launch.check_environment, TrainConfig())


def launched(*words):
    """What accelerate's launcher of one process adds to the environment."""
    arguments = launch_command_parser().parse_args([*words, "train.py"])
    made = prepare_simple_launcher_cmd_env(_validate_launch_command(arguments)[0])[1]
    return {name: value for name, value in made.items() if os.environ.get(name) != value}


@pytest.mark.parametrize(
    "words",
    [["--cpu", "--num_processes", "2"], ["--config_file", "configs/accelerate/cpu.yaml", "--num_processes", "2"]],
)
def test_one_process_where_several_were_asked_for_is_refused(monkeypatch, words):
    monkeypatch.chdir(ROOT)
    use(monkeypatch, {})
    use(monkeypatch, launched(*words))
    message = refusal(launch.check_environment, TrainConfig())
    assert message.startswith("accelerate was asked for several processes and started one, as it does with --cpu")
    use(monkeypatch, {})
    use(monkeypatch, launched(*words[:-1], "1"))
    launch.check_environment(TrainConfig())


def test_more_processes_than_gpus_are_refused(monkeypatch):
    use(monkeypatch, {"LOCAL_WORLD_SIZE": "8"})
    launch.check_environment(TrainConfig())  # there is none here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    message = refusal(launch.check_environment, TrainConfig())
    assert message == "8 processes were launched on a machine with 4 GPUs: launch --num_processes 4"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    launch.check_environment(TrainConfig())


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_asks_for_what_this_trainer_does(monkeypatch, profile):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", "2")
    made = several.environment(profile)
    with patch.dict(os.environ, made, clear=True):
        for precision in ("no", "bf16"):
            launch.check_environment(TrainConfig(precision=precision))
        if profile.startswith("zero"):
            settings = launch.deepspeed_plugin(TrainConfig()).deepspeed_config
            assert settings["zero_optimization"]["stage"] == int(profile[4])
            assert settings["gradient_accumulation_steps"] == settings["train_micro_batch_size_per_gpu"] == 1


# ---------------------------------------------------------------- DeepSpeed's file


ZERO = {"zero_optimization": {"stage": 2}}
SETTINGS = {
    "no ZeRO": ({"zero_optimization": {}}, "DeepSpeed without a ZeRO stage shards nothing: use configs/accelerate/ddp"),
    "bf16": ({"bf16": {"enabled": True}}, "DeepSpeed's bf16 is enabled, which would round the weights: remove it from"),
    "fp16": ({"fp16": {"enabled": True}}, "DeepSpeed's fp16 is enabled, which would round the weights: remove it from"),
    "accumulation": ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps must be 1: set train.gradient"),
    "clipping": (
        {"gradient_clipping": 1.0},
        "gradient_clipping is 1.0, but train.max_grad_norm=0.5: set the latter alone",
    ),
    "optimizer": ({"optimizer": {"type": "AdamW"}}, "sets an optimizer or a scheduler: those are train.*'s, remove"),
    "scheduler": ({"scheduler": {"type": "WarmupLR"}}, "sets an optimizer or a scheduler: those are train.*'s, remove"),
    "weights on NVMe": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nowhere"}}},
        "offload_param to NVMe is not served: use configs/deepspeed/zero3_offload.json",
    ),
    "moments on NVMe": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}}},
        "offload_optimizer to NVMe is not served: use configs/deepspeed/zero3_offload.json",
    ),
}


def deepspeed(monkeypatch, path):
    use(monkeypatch, {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)})
    return launch.deepspeed_plugin(TrainConfig())


@pytest.mark.parametrize(("settings", "words"), SETTINGS.values(), ids=SETTINGS)
def test_settings_of_deepspeed_that_contradict_the_trainer_are_refused(monkeypatch, tmp_path, settings, words):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({**ZERO, **settings}))
    assert words in refusal(deepspeed, monkeypatch, file)


def test_what_users_files_say_besides_is_taken_as_it_is_meant(monkeypatch, tmp_path):
    """Halves that are off or accelerate's to choose stay off, batches are the trainer's."""
    file = tmp_path / "settings.json"
    said = {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False},
        "train_batch_size": 32,
        "gradient_clipping": "auto",
    }
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": "auto", **said}))
    settings = deepspeed(monkeypatch, file).deepspeed_config
    assert not {"bf16", "fp16", "train_batch_size"} & settings.keys()
    assert settings["zero_optimization"]["stage"] == 1
    assert settings["gradient_accumulation_steps"] == settings["train_micro_batch_size_per_gpu"] == 1


# ---------------------------------------------------------------- what came


def came(kind, processes, device):
    return SimpleNamespace(distributed_type=kind, num_processes=processes, device=device)


DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
TWO, ON_CPU = {"WORLD_SIZE": "2"}, {"ACCELERATE_USE_CPU": "true"}
WRONG = {
    "each alone": (
        TWO,
        (KIND.NO, 1, CPU),
        "2 processes were launched, and each would train alone: on a machine without",
    ),
    "DeepSpeed dropped": (
        {**TWO, **DEEPSPEED, **ON_CPU},
        (KIND.MULTI_CPU, 2, CPU),
        "the launch asked for DEEPSPEED, and accelerate made MULTI_CPU of it: leave ACCELERATE_USE_CPU away",
    ),
    "DeepSpeed dropped, one process": (
        {"WORLD_SIZE": "1", **DEEPSPEED, **ON_CPU},
        (KIND.MULTI_CPU, 1, CPU),
        "the launch asked for DEEPSPEED, and accelerate made MULTI_CPU of it: leave ACCELERATE_USE_CPU away",
    ),
    "DeepSpeed without a launcher": (DEEPSPEED, (KIND.NO, 1, CPU), "asked for DEEPSPEED, and accelerate made NO of it"),
    "FSDP dropped on GPUs": (
        {**TWO, **FSDP2},
        (KIND.MULTI_GPU, 2, GPU),
        "asked for FSDP, and accelerate made MULTI_GPU",
    ),
    "FSDP where none was asked for": (TWO, (KIND.FSDP, 2, GPU), "asked for MULTI_GPU, and accelerate made FSDP of it"),
    "FSDP of one": (FSDP2, (KIND.FSDP, 1, GPU), "FSDP2 shards over several processes, and one was launched: use confi"),
    "Megatron": (TWO, (KIND.MEGATRON_LM, 2, GPU), "asked for MULTI_GPU, and accelerate made MEGATRON_LM of it"),
}
RIGHT = {
    "one on a CPU": ({}, (KIND.NO, 1, CPU)),
    "one on a GPU": ({}, (KIND.NO, 1, GPU)),
    "a group of one": ({"WORLD_SIZE": "1"}, (KIND.MULTI_GPU, 1, GPU)),
    "a group of one on a CPU": ({"WORLD_SIZE": "1", **ON_CPU}, (KIND.MULTI_CPU, 1, CPU)),
    "DDP": (TWO, (KIND.MULTI_GPU, 2, GPU)),
    "DDP on a CPU": ({**TWO, **ON_CPU}, (KIND.MULTI_CPU, 2, CPU)),
    "FSDP2": ({**TWO, **FSDP2}, (KIND.FSDP, 2, GPU)),
    "FSDP2 on a CPU, ours alone": ({**TWO, **FSDP2, **ON_CPU}, (KIND.MULTI_CPU, 2, CPU)),
    "DeepSpeed": ({**TWO, **DEEPSPEED}, (KIND.DEEPSPEED, 2, GPU)),
    "DeepSpeed of one": ({"WORLD_SIZE": "1", **DEEPSPEED}, (KIND.DEEPSPEED, 1, CPU)),
}


@pytest.mark.parametrize(("variables", "what", "words"), WRONG.values(), ids=WRONG)
def test_what_came_otherwise_than_it_was_asked_for_is_refused(monkeypatch, variables, what, words):
    use(monkeypatch, variables)
    assert words in refusal(launch.check_accelerator, came(*what))


@pytest.mark.parametrize(("variables", "what"), RIGHT.values(), ids=RIGHT)
def test_what_came_as_it_was_asked_for_trains(monkeypatch, variables, what):
    use(monkeypatch, variables)
    launch.check_accelerator(came(*what))


@pytest.mark.parametrize(
    ("backend", "device", "right"),
    [
        ("gloo", CPU, True),
        ("nccl", GPU, True),
        ("cpu:gloo,cuda:nccl", GPU, True),
        ("mpi", CPU, False),
        ("gloo", GPU, False),
    ],
)
def test_the_processes_must_speak_through_what_serves_their_device(monkeypatch, backend, device, right):
    use(monkeypatch, TWO)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    what = came(KIND.MULTI_CPU if device == CPU else KIND.MULTI_GPU, 2, device)
    if right:
        launch.check_accelerator(what)
    else:
        message = refusal(launch.check_accelerator, what)
        assert message == f"the processes speak through {backend}, which does not serve {device.type}"


def test_the_first_rank_that_differs_is_named_with_what_differs(monkeypatch, capsys):
    config, inputs = Config(), {"train": {"lr": 1e-4}, "seed": 0}
    accelerator = came(KIND.MULTI_CPU, 3, CPU)
    accelerator.state, accelerator.is_main_process = SimpleNamespace(deepspeed_plugin=None), True
    accelerator.wait_for_everyone = lambda: None

    def check(*others):
        monkeypatch.setattr(launch, "gather_object", lambda mine: [*mine, *(other(mine[0]) for other in others)])
        launch.check_alike(accelerator, inputs, config)

    def with_torch(facts):
        return {**facts, "torch": "2.9.1"}

    def with_options(facts):
        return {**facts, "train": {**facts["train"], "lr": 2e-4, "gradient_accumulation_steps": 2}}

    check(dict, dict)
    message = refusal(check, dict, with_torch)
    assert message.startswith(
        f"rank 2 is not as rank 0 (torch: {torch.__version__} on rank 0, 2.9.1 here): start every"
    )
    message = refusal(check, with_options, with_torch)
    assert (
        "rank 1 is not as rank 0 (train.gradient_accumulation_steps: 1 on rank 0, 2 here; train.lr: 0.0001 on"
        in message
    )
    assert capsys.readouterr().err.count("error: rank 1 ") == 1, "said by the main process, for all"


# ---------------------------------------------------------------- slow: as users launch


DDP, FSDP, ZERO2 = (["--config_file", f"configs/accelerate/{name}.yaml"] for name in ("ddp", "fsdp2", "zero2"))
TWICE, ONCE = ["--num_processes", "2"], ["--num_processes", "1"]
INLINE = ["--use_deepspeed", "--zero_stage", "2", "--gradient_clipping"]
# Command, whether ACCELERATE_USE_CPU is set, and the line that it must end with; None if it trains.
COMMANDS = {
    "nothing said": ([], False, None),
    "cpu.yaml": (["--config_file", "configs/accelerate/cpu.yaml"], False, None),
    "gpu.yaml": (["--config_file", "configs/accelerate/gpu.yaml"], False, None),
    "--cpu": (["--cpu", *TWICE], False, "accelerate was asked for several processes and started one"),
    "--multi_gpu": (["--multi_gpu", *TWICE], False, "2 processes were launched, and each would train alone"),
    "--multi_gpu on a CPU": (["--multi_gpu", *TWICE], True, None),
    "ddp.yaml": ([*DDP, *TWICE], False, "2 processes were launched, and each would train alone"),
    "ddp.yaml, one process": ([*DDP, *ONCE], True, None),
    "fsdp2.yaml": ([*FSDP, *TWICE], False, "2 processes were launched, and each would train alone"),
    "fsdp2.yaml, one process": ([*FSDP, *ONCE], True, "FSDP2 shards over several processes, and one was launched"),
    "zero2.yaml told of the CPU": (
        [*ZERO2, *TWICE],
        True,
        "the launch asked for DEEPSPEED, and accelerate made MULTI_CPU",
    ),
    "zero2.yaml, one process": ([*ZERO2, *ONCE], False, None),
    "DeepSpeed without a file": ([*INLINE, "0.5", *TWICE], False, None),
    "another clipping": (
        [*INLINE, "1.0", *TWICE],
        False,
        "DeepSpeed's gradient_clipping is 1.0, but train.max_grad_norm=0.5",
    ),
}


def user(run, words, on_cpu):
    """`accelerate launch` of these words, as a user without GPUs types them."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", *words, "train.py"]
    environment = launching.environment("ddp" if on_cpu else "zero1")
    how = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "check": False, "timeout": 300}
    return subprocess.run([*command, *launching.arguments(run, "train.max_steps=3")], **how)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "on_cpu", "refused"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_trains_rightly_or_says_in_one_line_why_not(new_run, words, on_cpu, refused):
    run = new_run()
    done = user(run, words, on_cpu)
    errors = set(re.findall(r"^error: .*$", done.stderr, re.MULTILINE))
    if refused is None:
        assert (done.returncode, errors) == (0, set()), done.stderr[-3000:]
        assert_close(run.weights(), new_run().fit("train.max_steps=3").weights(), 5e-6)
    else:
        assert done.returncode != 0
        assert len(errors) == 1, "the same on every rank"
        assert errors.pop().startswith(f"error: {refused}")
        assert not run.train.exists()
