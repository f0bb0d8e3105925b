"""What was launched is what was asked for, or training stops with one line that says what to do."""

import json
import os
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import several
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from launching import PROFILES, ROOT

from eagle31_train.config import TrainConfig
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
    "FSDP1": ({**FSDP2, "FSDP_VERSION": "1"}, "launched FSDP1"),
    "FSDP offload": ({**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"}, "zero3_offload.yaml"),
    "fp16": ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "set train.precision"),
    "accumulation": ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "set train.gradient_accumulation_steps"),
    "dynamo": ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "set train.compile"),
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
    "no ZeRO": ({"zero_optimization": {}}, "without a ZeRO stage"),
    "bf16": ({"bf16": {"enabled": True}}, "remove fp16 and bf16"),
    "accumulation": ({"gradient_accumulation_steps": 2}, "remove gradient_accumulation_steps"),
    "clipping": ({"gradient_clipping": 1.0}, "remove gradient_clipping"),
    "optimizer": ({"optimizer": {"type": "AdamW"}}, "remove optimizer"),
}


def deepspeed(monkeypatch, path):
    use(monkeypatch, {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)})
    return launch.deepspeed_plugin(TrainConfig())


@pytest.mark.parametrize(("settings", "words"), SETTINGS.values(), ids=SETTINGS)
def test_settings_of_deepspeed_that_contradict_the_trainer_are_refused(monkeypatch, tmp_path, settings, words):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({**ZERO, **settings}))
    assert words in refusal(deepspeed, monkeypatch, file)


# ---------------------------------------------------------------- what came


def came(kind, processes, device):
    return SimpleNamespace(distributed_type=kind, num_processes=processes, device=device)


DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
TWO, ON_CPU = {"WORLD_SIZE": "2"}, {"ACCELERATE_USE_CPU": "true"}
WRONG = {
    "each alone": (TWO, (KIND.NO, 1, CPU), "each would train alone"),
    "DeepSpeed dropped": ({**TWO, **DEEPSPEED, **ON_CPU}, (KIND.MULTI_CPU, 2, CPU), "made MULTI_CPU of it"),
    "DeepSpeed without a launcher": (DEEPSPEED, (KIND.NO, 1, CPU), "made NO of it"),
    "FSDP dropped on GPUs": ({**TWO, **FSDP2}, (KIND.MULTI_GPU, 2, GPU), "asked for FSDP"),
    "FSDP where none was asked for": (TWO, (KIND.FSDP, 2, GPU), "made FSDP of it"),
    "FSDP of one": (FSDP2, (KIND.FSDP, 1, GPU), "FSDP2 shards over several processes"),
    "Megatron": (TWO, (KIND.MEGATRON_LM, 2, GPU), "made MEGATRON_LM of it"),
}
RIGHT = {
    "one on a CPU": ({}, (KIND.NO, 1, CPU)),
    "a group of one": ({"WORLD_SIZE": "1"}, (KIND.MULTI_GPU, 1, GPU)),
    "DDP": (TWO, (KIND.MULTI_GPU, 2, GPU)),
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
