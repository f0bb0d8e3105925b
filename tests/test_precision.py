"""Precision `auto`: what this machine's hardware, or a record, makes of it; and every record has that value."""

import json

import pytest
import torch
from made import message_of
from pipeline import save_quietly, tiny_llama

from eagle31_train import cli, precision
from eagle31_train.compose import load_config
from eagle31_train.config import TargetConfig
from eagle31_train.targets.hf import load_model

WORDS = ["+experiment=any", "name=x", "target.path=t"]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(flags, capabilities): a CPU with these instructions, and GPUs of these kinds."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)

    def make(flags="fpu avx2 avx512f", *capabilities):
        file = tmp_path / "cpuinfo"
        file.write_text(f"processor : 0\nflags\t\t: {flags}\nprocessor : 1\nflags\t\t: {flags}\n")
        monkeypatch.setattr(precision, "CPUINFO", file)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)

    return make


def chosen(*words):
    config = load_config([*WORDS, *words])
    return config.target.dtype, config.train.precision


BF16, FP32 = ("bfloat16", "bf16"), ("float32", "no")


def test_gpus_that_torch_counts_and_cannot_use_are_said(machine, monkeypatch):
    machine("avx512_bf16", (8, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the driver is older than this torch
    assert "cannot use this machine's 1 GPUs: install a build for their driver" in message_of(chosen)
    assert chosen("target.device=cpu", "train.precision=bf16") == BF16


def test_the_hardware_decides_and_it_is_said(machine, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for hardware, choice in (
        (["fpu avx512_bf16"], BF16),
        (["amx_bf16 fpu"], BF16),
        (["asimd bf16"], BF16),
        (["fpu", (9, 0), (8, 0)], BF16),
        (["fpu avx512_bf16", (9, 0), (7, 5)], FP32),  # a GPU that only imitates bf16
    ):
        machine(*hardware)
        assert chosen() == choice, hardware
    assert chosen("target.device=cpu") == ("bfloat16", "no")
    machine("fpu", (9, 0))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")  # as `accelerate launch --cpu` spells it
    assert chosen() == ("bfloat16", "no")
    machine("fpu avx512f bf16x")
    assert chosen() == FP32
    assert chosen("target.dtype=float16", "train.precision=bf16") == ("float16", "bf16")
    cli.run(lambda config: print(config.target.dtype), "", WORDS)
    cli.run(lambda config: None, "", WORDS, tells="train.precision")
    why = "(this CPU has no bf16 instructions)"
    told = f"auto: target.dtype=float32 {why}\nfloat32\nauto: train.precision=no {why}\n"
    assert capsys.readouterr().out == told
    # Of several processes one speaks; and whoever plans for other devices leaves it open.
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    cli.run(lambda config: print(config.target.dtype), "", WORDS)
    cli.run(lambda config: print(config.target.dtype), "", WORDS, resolve=False)
    assert capsys.readouterr().out == "float32\nauto\n"


RECORDS = {
    "store/provenance.json": {"inputs": {"target": {"dtype": "bfloat16"}}},
    "train/config.yaml": {"target": {"dtype": "bfloat16"}},
    "conversations.manifest.json": {"inputs": {"dtype": "bfloat16"}},
    "prompts.manifest.json": {"inputs": {"dtype": "bfloat16"}},
}


@pytest.mark.parametrize("name", RECORDS)
def test_what_was_begun_on_another_machine_stays_as_it_was_begun(machine, tmp_path, name, capsys):
    machine("fpu")
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(RECORDS[name]))
    assert chosen(f"run_dir={tmp_path}") == ("bfloat16", "no")
    assert chosen(f"run_dir={tmp_path}", "target.dtype=float32") == FP32, "what is given is taken"
    (tmp_path / "train").mkdir(exist_ok=True)
    (tmp_path / "train" / "inputs.json").write_text(json.dumps({"inputs": {"train": {"precision": "bf16"}}}))
    assert chosen(f"run_dir={tmp_path}") == BF16
    capsys.readouterr()
    cli.run(lambda _: None, "", [*WORDS, f"run_dir={tmp_path}", "overwrite=true"], tells="train.precision")
    assert "auto: train.precision=bf16 (as in " in capsys.readouterr().out, "the run there may be another one"
    if name.startswith("store"):  # a store elsewhere comes before this run's own records
        assert chosen("run_dir=nowhere", f"store_dir={tmp_path / 'store'}") == ("bfloat16", "no")
    file.write_text("{torn")
    assert chosen(f"run_dir={tmp_path}") == ("float32", "bf16"), "a damaged record is told of by its stage"


def test_float32_is_whole_where_a_target_is_loaded(tmp_path):
    """And where a training begins: train/test_launch.py."""
    folder = save_quietly(tiny_llama(), tmp_path / "target")
    torch.set_float32_matmul_precision("high")  # as under NVIDIA's TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    load_model(TargetConfig(path=str(folder), dtype="float32", device="cpu"))
    assert torch.get_float32_matmul_precision() == "highest"
