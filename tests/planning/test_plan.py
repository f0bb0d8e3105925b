"""The command: what it prints, what it counts, what it advises."""

import functools
import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from launching import ROOT
from made import message_of
from pipeline import MLA, options
from published_targets import recipe
from safetensors.torch import load_file
from talking import make_tokenizer

from eagle31_train import compose
from eagle31_train.common import order
from eagle31_train.config import TrainConfig
from eagle31_train.model.drafter import Drafter
from eagle31_train.plan import plan
from eagle31_train.planning import sections
from eagle31_train.planning.dealing import deal
from eagle31_train.planning.footprint import PROFILES
from eagle31_train.planning.planned import reckon
from eagle31_train.planning.work import add_up, count_work, made_mask
from eagle31_train.store import Store, storage_of
from eagle31_train.store.shard_plan import sample_size
from eagle31_train.targets.derive import STEP_TOKENS
from train.inputs import tokens_of_a_step
from train.optimizer import make_optimizer

EXPERIMENTS = ("llama31_8b", "qwen3_8b", "kimi", "kimi_k25", "kimi_llama")
ANY_8B = ("+experiment=any", "name=x", f"target.path={ROOT / 'tests' / 'published' / 'qwen3_8b'}")
CHECKPOINTING = "train.activation_checkpointing=true"


@functools.cache
def planned(*overrides):
    return reckon(compose.load_config(list(overrides)))[0]


def printed(capsys, *overrides):
    plan(compose.load_config(list(overrides)))
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def counted(extracted, tmp_path_factory):
    """A tiny run after its first two stages, with what the first counts."""
    folder = shutil.copytree(extracted, tmp_path_factory.mktemp("counted") / "copy")
    file = folder / "run" / "data" / "manifest.json"
    manifest = json.loads(file.read_text()) | {"draft_vocab": {"size": 30}, "splits": {}}
    for split in ("train", "heldout"):
        rows = masks_of(folder, split)
        counts = {"conversations": len(rows), "tokens": sum(map(len, rows))}
        manifest["splits"][split] = {**counts, "assistant_tokens": int(sum(row.sum() for row in rows))}
    file.write_text(json.dumps(manifest))
    return folder


def masks_of(folder, split):
    rows = load_from_disk(str(folder / "run" / "data" / "dataset"))[split]
    return [np.asarray(row["loss_mask"]) for row in rows]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_recipe_is_planned_without_data_and_without_a_download(experiment, capsys):
    text = printed(capsys, *recipe(experiment), "run_dir=/nowhere/at/all")
    assert ("an EXAMPLE" if "kimi" in experiment else "2,000 conversations") in text  # such a recipe names sources
    for word in ("DRAFTER", "DATA", "STORE", "TIME", "MEMORY", "WHICH PROFILE", *(f"  {p.name}" for p in PROFILES)):
        assert f"\n{word} " in text


def test_the_simplest_profile_that_fits_is_named(capsys):
    def named(*overrides):
        return re.search(r"WHICH PROFILE +(\w+)", printed(capsys, *recipe("kimi"), *overrides))[1]

    assert named() == named("plan.device_gib=1000") == "ddp", "gpu would fit, too, and is one device alone"
    assert named("plan.devices=1", "train.batch_tokens=20480") == "gpu"
    peaks = {profile.name: planned(*recipe("kimi")).memory(profile).peak / 2**30 for profile in PROFILES}
    between = (peaks["ddp"] + peaks["zero1"]) / 2 / sections.SPARE
    assert named(f"plan.device_gib={between}") == "zero1"


def test_open_steps_are_as_training_would_take_them(capsys, counted):
    small, large = (planned(*ANY_8B, f"plan.tokens={tokens}") for tokens in (1e6, 3e8))
    assert [(one.batch_tokens, one.steps) for one in (small, large)] == [(2048, 2930), (120_064, 14_993)]
    assert "train.batch_tokens       120064" in printed(capsys, *ANY_8B, "plan.tokens=3e8")
    config = compose.load_config([*options(counted), "train.batch_tokens=null", "train.epochs=1000000"])
    split = Store(storage_of(config)).split("train")
    assert reckon(config)[0].batch_tokens == tokens_of_a_step(split, config.train) > STEP_TOKENS
    assert config.train.batch_tokens is None


def test_smaller_micro_batches_are_advised_first_then_recomputation_then_devices_that_share_them(capsys):
    def advised(gib):
        shown = printed(capsys, *recipe("llama31_8b"), f"plan.device_gib={gib}")
        return re.search(r"--profile \w+(?: \\\n     )?(.*) …|none leaves", shown)

    plan = planned(*recipe("llama31_8b"))
    least = [min(v.memory(p).peak for p in PROFILES[1:]) for v in sections._variants(plan)]
    assert least == sorted(least, reverse=True)
    options = [advised(1.001 * peak / 2**30 / sections.SPARE)[1] for peak in least]
    assert options == [
        "",
        " train.gradient_accumulation_steps=2",
        " train.gradient_accumulation_steps=2 train.activation_checkpointing=true",
        *(
            f" train.gradient_accumulation_steps={2 * n} train.context_parallel={n} train.activation_checkpointing=true"
            for n in (2, 4, 8)
        ),
    ]
    assert advised(0.99 * least[-1] / 2**30 / sections.SPARE)[0] == "none leaves"


@pytest.mark.parametrize(("experiment", "row"), [("llama31_8b", "`llama31_8b`"), ("kimi", "`kimi`, the MLA drafter")])
def test_the_page_on_launching_shows_what_is_printed_and_what_a_shared_conversation_takes(experiment, row):
    page = (ROOT / "docs" / "launch.md").read_text()
    plan = planned(*recipe(experiment), "run_dir=/nowhere/at/all")
    assert "\n".join(sections.profiles(plan)[: 2 + len(PROFILES)]) in page
    long = [f"{name}=131072" for name in ("data.max_length", "plan.sample_tokens", "train.batch_tokens")]
    ddp = next(profile for profile in PROFILES if profile.name == "ddp")
    for named, more in ((row, []), (f"`{experiment} {CHECKPOINTING}`", [CHECKPOINTING])):
        words = [*recipe(experiment), *long, *more]
        steps = [planned(*words, f"train.context_parallel={n}").memory(ddp).step / 2**30 for n in (1, 2, 4, 8)]
        assert "| ".join([f"| {named} ", *(f"{step:.1f} " for step in steps)]) + "|" in page


def test_the_launch_over_machines_has_an_address_for_them_and_deepspeed_its_own_launcher(capsys):
    machines = "--main_process_ip 10.0.0.1 --main_process_port 29500 --machine_rank 0 \\\n      --num_machines 2 "
    ddp = printed(capsys, *recipe("llama31_8b"), "plan.devices=16")
    assert f"configs/accelerate/ddp.yaml \\\n      {machines}--num_processes 16 train.py" in ddp
    zero = printed(capsys, *recipe("kimi_k25"), "plan.tokens=5e8", "plan.devices=16", "plan.device_gib=40")
    assert f"--deepspeed_multinode_launcher standard \\\n      {machines}" in zero


def test_a_device_alone_has_nobody_to_share_a_conversation_with(capsys):
    """What the step takes is in tests/model/test_context_parallel.py, against what torch allocates."""
    long = [*recipe("llama31_8b"), "data.max_length=131072", "train.batch_tokens=131072", "plan.sample_tokens=131072"]
    assert planned(*long, "train.context_parallel=4").micro(1) == planned(*long).micro(1)
    assert "context_parallel=3 does not divide" in message_of(planned, *long, "train.context_parallel=3")


@pytest.mark.parametrize("drafter", [["drafter.train_lm_head=false"], ["drafter.share_embedding=false"], MLA])
def test_its_matrices_are_those_of_the_trainers_optimizer(counted, drafter):
    plan = planned(*options(counted, "train.optimizer=muon", *drafter))
    D, V = plan.shape.hidden_size, plan.shape.vocab_size
    made = make_optimizer(Drafter(plan.shape, torch.zeros(V, D)), plan.config.train)
    assert sorted(plan.orthogonal()) == sorted(tuple(p.shape) for p in made.param_groups[0]["params"])


def test_stored_bytes_are_those_of_a_real_store(counted):
    """To the byte, but for the headers of its files."""
    for codec in ("bf16", "int8_channel"):
        plan = planned(*options(counted, f"store.aux_codec={codec}", f"store.last_codec={codec}"))
        states = plan.states()
        everything = sum(sample_size(mask, states)[1] for mask in masks_of(counted, "train"))
        assert plan.store_bytes(states) == pytest.approx(everything)
    plan = planned(*options(counted))
    shards = map(load_file, (counted / "run" / "store" / "shards").glob("train-*.safetensors"))
    written = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    assert plan.store_bytes(plan.states()) == pytest.approx(written)
    assert written > 10_000
    copied = load_file(counted / "run" / "store" / "target.safetensors")
    assert plan.copied_bytes() == sum(tensor.nbytes for name, tensor in copied.items() if name != "norm")
    assert planned(*options(counted, "plan.target_parameters=1e9")).copied_bytes() == plan.copied_bytes()


def test_what_was_counted_is_planned_with(counted, capsys):
    plan, masks = planned(*options(counted)), masks_of(counted, "train")
    assert plan.data.work.tokens == sum(map(len, masks))
    assert plan.data.work.conversations == len(masks)
    assert plan.data.longest == max(map(len, masks))
    assert plan.shape.draft_vocab_size == 30
    # As training packs whole conversations; full steps would be fewer.
    steps = order.schedule(list(map(len, masks)), 60, plan.config.seed, 3, None)
    assert plan.steps == len(steps) > math.ceil(3 * plan.data.work.tokens / 60)
    assert "as counted in" in printed(capsys, *options(counted))
    regenerated = options(counted, "data.prompts=prompts.jsonl", "regenerate=true")
    assert "the data exist already" in printed(capsys, *regenerated)
    text = printed(capsys, *regenerated, "plan.tokens=1e6")  # how many prompts would be wanted
    assert "plan.tokens, in conversations as counted in" in text
    assert "tokens to write" in text
    assert ", at the least" in text
    assert planned(*options(counted, "train.max_steps=2")).tokens == sum(
        len(masks[i]) for step in steps[:2] for i in step
    )
    assert not planned(*options(counted, "train.window_tokens=60")).packs  # which go by the store's shards
    # Tokens that are given scale what is counted.
    given, ratio = planned(*options(counted, "plan.tokens=1e6")), 1e6 / plan.data.work.tokens
    assert given.data.work.tokens == pytest.approx(1e6)
    assert given.training_flops() == pytest.approx(ratio * plan.training_flops())
    assert given.store_bytes(given.states()) == pytest.approx(ratio * plan.store_bytes(plan.states()))
    weights = load_file(next((counted / "target").glob("*.safetensors")))
    assert plan.target.sizes.active == sum(tensor.numel() for tensor in weights.values())
    assert planned(*options(counted, "plan.target_parameters=32e9")).target.sizes.active == 32e9


def test_devices_wait_for_the_one_that_has_most():
    """By hand: of three equal conversations one of two devices has two; of six, in two turns, each has two and one."""
    one = count_work([made_mask(1000, 0.5)], 7)
    for conversations, accumulated, busy in ((3, 1, 0.75), (6, 2, 1.0)):
        train = TrainConfig(batch_tokens=1000 * conversations, gradient_accumulation_steps=accumulated)
        dealt = deal([one], [1.0], 3000, train, replicas=2)
        assert (dealt.busy, dealt.largest) == (busy, pytest.approx(2 / 1.5))
    # Of as many tokens, but with all of the work.
    assert deal([one, one], [0.0, 1.0], 3000, TrainConfig(batch_tokens=2000), replicas=2).largest == 2


def test_of_unlike_conversations_the_largest_bounds_how_small_a_micro_batch_gets():
    """It takes more than its share of the tokens: with all of them answers, where others are prompts."""
    works = [count_work([made_mask(1000, share)], 7) for share in (0.1, 0.9)]
    plan = planned(*recipe("llama31_8b"), "plan.devices=8", "plan.device_gib=1")
    plan = replace(plan, data=replace(plan.data, each=works, work=add_up(works) * 1000, longest=1000))
    assert plan.micro_tokens(8) > plan.batch_tokens / 8 > 1000
    assert "none leaves a tenth of 1 GiB free" in sections.which(plan)[0]


def test_options_have_the_effect_that_they_should():
    llama = [*recipe("llama31_8b"), "run_dir=/nowhere/at/all", "plan.tokens=100_000_000"]
    whole = planned(*llama)
    frozen = planned(*llama, "drafter.train_lm_head=false")
    assert whole.state().trained - frozen.state().trained == frozen.state().frozen == 32000 * 4096
    assert frozen.training_flops() < whole.training_flops()
    windowed = [planned(*llama, f"drafter.sliding_window={width}").training_flops() for width in (64, 128, 100_000)]
    assert windowed[0] < windowed[1] < windowed[2] == whole.training_flops()

    short = planned(*llama, "train.max_steps=100")  # bounds the training, but not the store
    assert short.steps == 100
    assert short.training_flops() == pytest.approx(whole.training_flops() * 100 * 32768 / 1e8)
    assert short.extraction_flops() == whole.extraction_flops()
    some = planned(*llama, "train.slots_per_batch=4000")
    assert some.trained_share == pytest.approx(4000 / (whole.data.work.slots[0] * 32768 / 1e8))
    assert some.training_flops() < 0.4 * whole.training_flops()
    assert some.micro(8)[0].kept < 0.5 * whole.micro(8)[0].kept
    # A micro-batch is no shorter than a conversation.
    assert [whole.micro_tokens(1), whole.micro_tokens(8)] == [32768, 4096]
    assert planned(*llama, "train.gradient_accumulation_steps=16").micro_tokens(8) == 2048
    exact = whole.store_bytes(replace(whole.states(), aux_codec="bf16", last_codec="bf16"))
    # By default in int8; a channel has a scale in every conversation.
    assert whole.store_bytes(whole.states()) / exact == pytest.approx(0.510, abs=0.001)


def test_what_stage_1_would_refuse_is_refused_before_anything_is_spent(tmp_path):
    shutil.copytree(ROOT / "tests" / "published" / "qwen3_8b", tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    target = ["+experiment=any", f"target.path={tmp_path / 'target'}", "name=x", "run_dir=/nowhere/at/all"]
    for option, words, more in (
        ("data.prompts=", "data.prompts=absent.jsonl does not exist", ["regenerate=true", "plan.tokens=1e6"]),
        ("data.conversations=", "data.conversations=absent.jsonl does not exist", []),
        ("data.sources.a.path=", "data.sources: path=absent.jsonl does not exist", []),
    ):
        assert words in message_of(planned, *target, f"{option}absent.jsonl", *more)
    planned(*target)
    planned.cache_clear()
    (tmp_path / "target" / "chat_template.jinja").unlink()
    assert "has no chat template" in message_of(planned, *target)
