"""Extraction on a CUDA device: it never waits there, and stores what the engine gave, to the bits of the CPU."""

import pytest
import torch
from pipeline import AUX, HIDDEN, contents, make_run, tiny_config, tiny_llama
from targets.test_vllm_states import write_all, written
from whole import encode

from eagle31_train.store.codec import CODECS
from eagle31_train.store.shard_plan import PlannedShard, Shape
from eagle31_train.targets.extraction import extract, run_shard
from eagle31_train.targets.hf import HiddenStateTarget, TransformersEngine

LENGTHS = (60, 9, 33, 120, 3)


@pytest.mark.parametrize("codec", ["bf16", "int8_channel", "fp8"])
def test_nothing_waits_and_what_arrives_is_what_the_engine_gave(codec):
    target = tiny_llama().to("cuda", torch.bfloat16)
    engine = TransformersEngine(HiddenStateTarget(target, AUX), batch_tokens=128)
    rows = {"input_ids": [list(range(n)) for n in LENGTHS], "loss_mask": [[i > 1 for i in range(n)] for n in LENGTHS]}
    rows["input_ids"] = [[token % 40 for token in row] for row in rows["input_ids"]]
    shard = PlannedShard("shards/train-00000.safetensors", "train", 0, 0, len(LENGTHS), sum(LENGTHS), 10**6)
    run_shard(engine, rows, Shape(HIDDEN, 3, codec, codec), shard, None)[0].wait()  # kernels and memory are there then
    torch.cuda.set_sync_debug_mode("error")
    try:
        arriving, _ = run_shard(engine, rows, Shape(HIDDEN, 3, codec, codec), shard, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    documents = arriving.wait()
    for index, aux, last in engine.run([torch.tensor(row) for row in rows["input_ids"]]):
        document = documents[index]
        for here, there in (
            (document.aux, aux[: document.attended]),
            (document.last, last[document.supervised.cuda()]),
        ):
            expected = encode(there, codec)
            assert torch.equal(here.values.view(torch.uint8), expected.values.cpu().view(torch.uint8))
            assert torch.equal(here.scale, expected.scale.cpu())
        assert torch.equal(document.top1[1:-1], engine.readout.best(last[1:-1]).cpu())


def test_the_store_of_a_gpu_is_the_same_again(tmp_path):
    """The first one is read while copies of the next are under way: a block used too early would differ."""
    stores = []
    for name in ("one", "two"):
        make_run(tmp_path / name)
        extract(tiny_config(tmp_path / name, "target.device=cuda"))
        stores.append(contents(tmp_path / name / "run" / "store" / "shards"))
    assert stores[0] == stores[1]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("width", [1, 33, 128, 576, 4096])
def test_a_device_encodes_and_decodes_the_same_bits(codec, width):
    generator = torch.Generator().manual_seed(width)
    sizes = torch.tensor([1e-3, 1.0, 300.0])[:, None]
    states = (torch.randn(64, 3, width, generator=generator) * sizes).bfloat16()
    here = encode(states, codec)
    there = encode(states.cuda(), codec)
    assert torch.equal(here.decode().view(torch.int16), there.decode().view(torch.int16).cpu())


def test_each_conversation_gets_its_rows_though_the_next_step_writes_over_them(tmp_path):
    """States that a GPU goes on after: copied behind their step, and written by a thread."""
    write_all(tmp_path, "cuda")
    written(tmp_path)
