"""What was launched is what was asked for, or training stops with one line that says what to do."""

import json
import os
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from conftest import kept_mask
from made import message_of
from packaging.version import Version

from eagle31_train.common.errors import SharedError
from eagle31_train.compose import load_config
from eagle31_train.config import TrainConfig
from eagle31_train.model.batch import build_batch
from eagle31_train.targets.extraction import rank_of
from train import launch

CPU, GPU = torch.device("cpu"), torch.device("cuda")
KIND = DistributedType


def use(monkeypatch, variables):
    """These variables, and none of accelerate's or a launcher's besides."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "MASTER_", "LOCAL_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


TWO, ON_CPU = {"WORLD_SIZE": "2"}, {"ACCELERATE_USE_CPU": "true"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
LONE = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}
REFUSED = {
    "FSDP1": ({**FSDP2, "FSDP_VERSION": "1"}, "launched FSDP1"),
    "FSDP1 unsaid": ({"ACCELERATE_USE_FSDP": "true"}, "fsdp_version: 2"),
    "FSDP offload": ({**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"}, "zero3_offload.yaml"),
    "FSDP recomputation": ({**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "train.activation_checkpointing=true"),
    "FSDP without resharding": ({**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "false"}, "remove fsdp_reshard_after_forward"),
    "fp16": ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "set train.precision"),
    "bf16": ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "train.precision"),
    "accumulation": ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "set train.gradient_accumulation_steps"),
    "other ways to share": ({**FSDP2, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "set train.context_parallel"),
    "one of several": (LONE, "accelerate started only one of several processes"),
    "dynamo": ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "set train.kernels"),
}


@pytest.mark.parametrize(("variables", "words"), REFUSED.values(), ids=REFUSED)
def test_what_this_trainer_would_do_otherwise_is_refused(monkeypatch, variables, words):
    use(monkeypatch, variables)
    assert words in message_of(launch.check_environment, TrainConfig(precision="no"))


def test_more_processes_than_gpus_are_refused_unless_they_train_on_cpus(monkeypatch):
    """They would share a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    use(monkeypatch, {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"})
    launch.check_environment(TrainConfig())
    use(monkeypatch, {"LOCAL_WORLD_SIZE": "3"})
    assert "launch 2 on each machine" in message_of(launch.check_environment, TrainConfig())
    use(monkeypatch, ON_CPU)
    launch.check_environment(TrainConfig())


def test_machines_are_several_by_what_any_launcher_sets(monkeypatch):
    four = {"WORLD_SIZE": "4"}
    for one in ({}, four, {**four, "LOCAL_WORLD_SIZE": "4"}):
        use(monkeypatch, one)
        assert not launch.spans_machines()
    for here in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # the latter is DeepSpeed's
        use(monkeypatch, {**four, here: "2"})
        assert launch.spans_machines()


def test_one_process_of_several_extracts_nothing_alone(monkeypatch):
    config = load_config(["name=x", "target.path=x", "extract.parts=3", "extract.part=2"])
    use(monkeypatch, {})
    assert rank_of(config) == (2, 3)
    use(monkeypatch, LONE)
    assert "accelerate started only one of several processes" in message_of(rank_of, config)


def test_a_process_whose_launcher_has_ended_does_not_meet_those_of_the_next(monkeypatch):
    use(monkeypatch, {"WORLD_SIZE": "2"})
    monkeypatch.setattr(launch, "PARENT", -1)
    config = load_config(["name=x", "target.path=x"])
    assert "this process's launcher has ended" in message_of(launch.make_accelerator, config, None)


def test_deterministic_kernels_are_asked_for_before_cuda_starts(monkeypatch, tiny):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    objective, documents = tiny
    try:
        launch.make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        batch = build_batch(documents, 3, kept_mask(objective))
        objective(batch, torch.ones(3))[0].backward()  # nothing in it is refused
    finally:
        torch.use_deterministic_algorithms(False)


def test_settings_that_our_profiles_name_are_found_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    use(monkeypatch, {**DEEPSPEED, launch.SETTINGS: "configs/deepspeed/zero3.json"})
    assert launch.deepspeed_plugin(TrainConfig()).deepspeed_config["zero_optimization"]["stage"] == 3
    use(monkeypatch, {**DEEPSPEED, launch.SETTINGS: "configs/deepspeed/mine.json"})
    assert "mine.json" in message_of(launch.deepspeed_plugin, TrainConfig())
    # A file of one's own in that place goes first.
    own = tmp_path / "configs" / "deepspeed" / "zero3.json"
    own.parent.mkdir(parents=True)
    own.write_text('{"zero_optimization": {"stage": 0}}')
    use(monkeypatch, {**DEEPSPEED, launch.SETTINGS: "configs/deepspeed/zero3.json"})
    assert "shards nothing" in message_of(launch.deepspeed_plugin, TrainConfig())


def test_deepspeeds_settings_that_would_compute_otherwise_are_refused(monkeypatch, tmp_path):
    t = TrainConfig(max_grad_norm=0.5, gradient_accumulation_steps=4)
    use(monkeypatch, {**DEEPSPEED, launch.SETTINGS: str(tmp_path / "own.json")})

    def plugin(zero, t=t):
        (tmp_path / "own.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, **zero}))
        return launch.deepspeed_plugin(t)

    on = {"enabled": True}
    wrong = {"torch_autocast": {**on, "dtype": "bfloat16"}, "communication_data_type": "bf16", "bf16": on, "fp16": on}
    wrong |= {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}, "gradient_clipping": 1.0}
    wrong |= {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}
    wrong |= {"gradient_accumulation_steps": 4}  # the trainer accumulates itself: it would be done twice
    for name, value in wrong.items():
        assert name in message_of(plugin, {name: value})
    assert "train.optimizer=muon" in message_of(plugin, {}, replace(t, optimizer="muon"))
    # What says the same, or is decided by the trainer whatever it says.
    own = {"gradient_accumulation_steps": "auto", "train_batch_size": "auto", "bf16": {"enabled": "auto"}}
    taken = plugin({"gradient_clipping": 0.5, "zero_force_ds_cpu_optimizer": True, **own}).deepspeed_config
    assert (taken["gradient_accumulation_steps"], taken["train_micro_batch_size_per_gpu"]) == (1, 1)
    assert not {"train_batch_size", "bf16"} & taken.keys()
    assert taken["zero_force_ds_cpu_optimizer"] is False
    # One that would update by NaN.
    compare = launch.compare_versions
    monkeypatch.setattr(launch, "compare_versions", lambda _, *than: compare(Version("0.19.7"), *than))
    assert launch.DEEPSPEED in message_of(plugin, {})


WRONG = {
    "each alone": (TWO, (KIND.NO, 1, CPU), "each would train alone"),
    "DeepSpeed dropped": ({**TWO, **DEEPSPEED, **ON_CPU}, (KIND.MULTI_CPU, 2, CPU), "accelerate started MULTI_CPU"),
    "DeepSpeed without a launcher": (DEEPSPEED, (KIND.NO, 1, CPU), "accelerate started NO"),
    "FSDP dropped on GPUs": ({**TWO, **FSDP2}, (KIND.MULTI_GPU, 2, GPU), "asked for FSDP"),
    "FSDP where none was asked for": (TWO, (KIND.FSDP, 2, GPU), "accelerate started FSDP"),
    "FSDP of one": (FSDP2, (KIND.FSDP, 1, GPU), "but one was launched: use another profile, see"),
    "Megatron": (TWO, (KIND.MEGATRON_LM, 2, GPU), "accelerate started MEGATRON_LM"),
}


@pytest.mark.parametrize(("variables", "came", "words"), WRONG.values(), ids=WRONG)
def test_what_came_otherwise_than_it_was_asked_for_is_refused(monkeypatch, variables, came, words):
    use(monkeypatch, variables)
    kind, processes, device = came
    accelerator = SimpleNamespace(distributed_type=kind, num_processes=processes, device=device)
    assert words in message_of(launch.check_accelerator, accelerator)


@pytest.fixture
def made(monkeypatch):
    """What accelerate is asked for, while two processes of a CPU come of it, in whatever precision torch was left."""
    asked = Mock(return_value=SimpleNamespace(distributed_type=KIND.MULTI_CPU, num_processes=2, device=CPU))
    use(monkeypatch, {**TWO, **ON_CPU})
    monkeypatch.setattr(launch, "Accelerator", asked)
    monkeypatch.setattr(launch, "make_deterministic", Mock())
    torch.set_float32_matmul_precision("high")
    yield asked
    torch.set_float32_matmul_precision("highest")


def test_precision_kernels_and_patience_are_the_trainers_own(made, tmp_path):
    t = ["train.precision=bf16", "train.deterministic=true"]
    launch.make_accelerator(load_config(["name=x", "target.path=x", *t]), tmp_path)
    assert made.call_args.kwargs["mixed_precision"] == "no", "the objective has autocast of its own"
    assert torch.get_float32_matmul_precision() == "highest"
    launch.make_deterministic.assert_called_once()
    handlers = made.call_args.kwargs["kwargs_handlers"]
    waits = [handler.timeout for handler in handlers if isinstance(handler, InitProcessGroupKwargs)]
    assert min(waits) >= timedelta(hours=1), "the main process may be writing a checkpoint to a slow disk"


def test_what_was_made_is_looked_at(made, monkeypatch, tmp_path):
    options = ["name=x", "target.path=x"]
    threes = load_config([*options, "train.context_parallel=3"])
    assert "train.context_parallel=3" in message_of(launch.make_accelerator, threes, tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "ACCELERATE_USE_CPU=true" in message_of(launch.make_accelerator, load_config(options), tmp_path)


def test_what_the_main_process_refuses_ends_a_rank_that_does_nothing_itself(monkeypatch):
    """Else it would go on alone where the others end. That what is decided holds for it: test_windows.py."""
    monkeypatch.setattr(launch, "broadcast_object_list", lambda _: [None, "refused"])
    rank, make = Mock(is_main_process=False, num_processes=2), Mock()
    with pytest.raises(SharedError):
        launch.agreed(rank, make)
    rank.wait_for_everyone.assert_called_once()
    make.assert_not_called()


UNLIKE = {  # what another rank has, as options, or instead of what rank 0 hands over
    "train.num_workers": "train.num_workers=0",
    "train.eval_every": "train.eval_every=7",
    "store.follow": "store.follow=true",
    "evaluate.dtype": "evaluate.dtype=bfloat16",
    "evaluate.draft_tokens": "evaluate.num_speculative_tokens=2",
    "vocab": {"inputs": {"vocab": "other", "train": {}}},
    "train.init_from": {"inputs": {"vocab": "v", "train": {"init_from": "other"}}},
    "trajectories": {"measured_on": ["other"]},
    "store.supervised": {"counted": False},
    "type": {"kind": KIND.FSDP},
    "deepspeed.stage": {"zero": 3},
    "torch": {"version": "0"},
    "fsdp": {"fsdp": "true"},
}


@pytest.mark.parametrize("name", UNLIKE)
def test_in_what_a_rank_is_not_as_the_first_is_named_and_time_limits_are_their_own(monkeypatch, name):
    """Else they train on other samples, or wait for one another for ever."""
    asked = []

    def ask(*options, version="2", kind=KIND.DEEPSPEED, zero=2, fsdp="false", **instead):
        plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": zero}})
        accelerator = Mock(state=SimpleNamespace(deepspeed_plugin=plugin), distributed_type=kind, num_processes=1)
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setenv("ACCELERATE_USE_FSDP", fsdp)
        handed = {"inputs": {"vocab": "v", "train": {}}, "measured_on": ["one"], "counted": True, **instead}
        launch.check_alike(accelerator, config=load_config(["name=x", "target.path=x", *options]), **handed)

    monkeypatch.setattr(launch, "gather_object", lambda facts: asked.extend(facts) or asked)
    ask()
    ask("train.time_limit=1h")
    given = UNLIKE[name]
    told = message_of(ask, given) if isinstance(given, str) else message_of(ask, **given)
    assert told.startswith(f"rank 2 differs from rank 0 ({name}: "), told
    assert ";" not in told
