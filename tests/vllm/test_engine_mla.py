"""The vLLM engine on targets of Kimi's kind: MLA and experts, in chunks, over two processes, wrapped, in INT4.

The target is random, in float32 as a rule; what vLLM's own rounding does there is measured in `test_engine.py`, too.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from engines import assert_within, command, distances, from_vllm, joined, shown
from kimi_like import quantized, wrapped
from pipeline import contents, write_data
from safetensors.torch import load_file

from eagle31_train.config import TargetConfig
from eagle31_train.store import Store
from eagle31_train.targets.engine import Reference
from eagle31_train.targets.fidelity import compare
from eagle31_train.targets.hf import HiddenStateTarget, TransformersEngine, load_model
from eagle31_train.targets.toy import VOCAB, make

pytestmark = pytest.mark.vllm

DEPTH = 6
AUX = [1, 2, 3, 4, 5, 6]  # all that vLLM gives of such a target; the last is the state before the final norm
LENGTHS = [250, 250, 100, 37, 3, 2, 500, 180, 1]
RECIPE = ["name=kimi", "target.device=cpu", "drafter.intermediate_size=32", "drafter.num_attention_heads=4"]
EAGER = "extract.engine_args.enforce_eager=true"
CHUNKS = ["extract.engine_args.max_num_batched_tokens=96", "extract.engine_args.max_num_seqs=5"]
TIGHT = [  # room for one of the long ones: others are thrown out and begun again
    "extract.engine_args.num_gpu_blocks_override=40",
    "extract.engine_args.scheduler_reserve_full_isl=false",
    "extract.engine_args.long_prefill_token_threshold=40",
]
# vLLM's attention on a CPU approximates exp: its states are further from transformers' than these are from float64's.
TIMES = 20


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make(tmp_path_factory.mktemp("target") / "toy", num_hidden_layers=DEPTH)


@pytest.fixture(scope="module")
def conversations():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 990, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module")
def ask(vllm_python, conversations, tmp_path_factory):
    """Run the engine on a target: (states, answer) of run_engine.py."""

    def run(target, *options, environment=None, **more):
        folder = tmp_path_factory.mktemp("states")
        asked, states, answer = (folder / name for name in ("request.json", "states.safetensors", "answer.json"))
        layers = f"target.aux_layers={AUX}".replace(" ", "")
        common = [
            f"target.path={target}",
            layers,
            "extract.engine=vllm",
            EAGER,
            "data.max_length=512",
        ]
        request = {
            "options": [*RECIPE, *common, *options],
            "conversations": [row.tolist() for row in conversations],
            "too_long": [1] * 513,
            **more,
        }
        asked.write_text(json.dumps(request))
        program = Path(__file__).with_name("run_engine.py")
        command(vllm_python, program, asked, states, answer, **(environment or {}))
        return load_file(states), json.loads(answer.read_text())

    return run


@pytest.fixture(scope="module")
def plain(ask, target):
    return ask(target, "target.dtype=float32", exchange=True)


def transformers_engine(target, dtype="float32", layers=AUX):
    model = load_model(TargetConfig(path=str(target), device="cpu"), "float32" if dtype == "float64" else dtype)
    model.set_experts_implementation("eager")  # the others have no float64
    return TransformersEngine(
        HiddenStateTarget(model.double() if dtype == "float64" else model, layers), batch_tokens=1
    )


@pytest.fixture(scope="module")
def exact(target, conversations):
    """transformers' states in float32, and how far these are from float64's."""
    states = joined(transformers_engine(target), conversations)
    return states, distances(states, joined(transformers_engine(target, "float64"), conversations))


def test_states_are_those_of_transformers_within_rounding(plain, exact, conversations, tell):
    ours, (theirs, noise) = from_vllm(plain[0], len(conversations)), exact
    tell(
        "MLA and experts, relative distance of states, median and 90 % of positions, per layer:",
        shown("float32: transformers to float64 (its rounding)", noise, AUX),
        shown("float32: vLLM to transformers", distances(ours, theirs), AUX),
    )
    assert_within(ours, theirs, noise, TIMES)
    for row, length in zip(ours, LENGTHS, strict=True):
        assert len(row) == length
        assert torch.equal(row[:, AUX.index(DEPTH)], row[:, -1]), (
            "the input of layer N is the last state before the norm"
        )


@pytest.mark.parametrize("mistake", ["the next layer", "after the norm", "conversations mixed up", "positions shifted"])
def test_planted_mistakes_are_seen(mistake, plain, exact, target, conversations):
    ours, (theirs, noise) = from_vllm(plain[0], len(conversations)), exact
    if mistake == "the next layer":
        wrong = [torch.cat([row[:, 1:DEPTH], row[:, -2:]], 1) for row in theirs]
    elif mistake == "after the norm":
        norm = transformers_engine(target).target.final_norm
        wrong = [torch.cat([row[:, :-1], norm(row[:, -1:].float()).double()], 1) for row in theirs]
    elif mistake == "conversations mixed up":
        wrong = [theirs[1], theirs[0], *theirs[2:]]
    else:
        wrong = [row.roll(1, 0) for row in theirs]
    with pytest.raises(AssertionError):
        assert_within(ours, wrong, noise, TIMES)


def test_asked_again_vllm_gives_the_same_bits_and_leaves_nothing(plain, conversations):
    states, answer = plain
    for index in range(len(conversations)):
        assert torch.equal(states[f"last.{index}"], states[f"twice.{index}"])
    assert answer["left"] == []
    assert not Path(answer["folder"]).exists()
    assert answer["refusal"].startswith("a conversation of 513 tokens is too long for extract.engine=vllm")


def test_planted_in_the_worker_an_exchange_of_two_conversations_is_refused(plain):
    assert plain[1]["exchanged"] == "vLLM gave the states of other tokens than it was asked for"


def test_the_gates_reference_is_the_targets_own_choice(plain, target, conversations):
    states, _ = plain
    engine = transformers_engine(target)
    own = engine.reference(conversations[0], states["positions"]).own
    torch.testing.assert_close(states["logs"], own.log_softmax(-1).gather(1, states["ids"]), rtol=1e-3, atol=1e-3)
    rebuilt = engine.readout.logits(states["last.0"][states["positions"]])
    agreement, kl = compare(Reference(states["logs"], states["ids"]), rebuilt)
    assert (agreement, abs(kl) < 1e-5) == (1.0, True)


def test_chunks_of_long_ones_among_others_and_work_done_again_inside_a_multimodal_wrapper(
    ask, target, exact, conversations, tmp_path
):
    states, _ = ask(wrapped(target, tmp_path / "wrapped"), "target.dtype=float32", *CHUNKS, *TIGHT)
    assert_within(from_vllm(states, len(conversations)), *exact, TIMES)


def test_tensor_parallelism_gives_the_states_of_one_process(ask, target, exact, conversations):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("vLLM wants a core for each process")
    bind = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}"}
    two = "extract.engine_args.tensor_parallel_size=2"
    states, answer = ask(target, "target.dtype=float32", two, *CHUNKS, environment=bind)
    assert_within(from_vllm(states, len(conversations)), *exact, TIMES)
    assert answer["left"] == []


@pytest.fixture(scope="module")
def int4(target, tmp_path_factory):
    """(INT4, the bf16 weights that it stands for)."""
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM's product of INT4 weights on a CPU takes AVX-512, which this one has not")
    folder = tmp_path_factory.mktemp("int4")
    return quantized(target, folder / "int4", folder / "meant"), folder / "meant"


def test_of_a_quantized_target_the_states_are_the_quantized_ones(ask, int4, target, conversations, tell):
    states, _ = ask(int4[0], "target.dtype=bfloat16")
    ours, count = from_vllm(states, len(conversations)), len(conversations)
    meant = joined(transformers_engine(int4[1]), conversations)
    noise = distances(joined(transformers_engine(int4[1], "bfloat16"), conversations), meant)
    unquantized = joined(transformers_engine(target), conversations)
    tell(
        "INT4, bfloat16:",
        shown("transformers to float32 (its rounding)", noise, AUX),
        shown("vLLM to what INT4 means, in float32", distances(ours, meant), AUX),
        shown("vLLM to the weights before INT4", distances(ours, unquantized), AUX),
    )
    assert count == len(meant)
    assert_within(ours, meant, noise, 2)
    with pytest.raises(AssertionError):
        assert_within(ours, unquantized, noise, 2)


EXTRACT = """
import sys
sys.path[:0] = ["tests", "."]
from extracting import one
one(0, 1, sys.argv[2:], None if sys.argv[1] == "all" else int(sys.argv[1]))
"""


def test_a_killed_extraction_of_a_quantized_target_is_carried_on(vllm_python, int4, tmp_path):
    stores = []
    for name, ends in (("whole", ["all"]), ("killed", ["2", "all"])):
        folder = tmp_path / name
        write_data(folder / "run", target_size=VOCAB)
        options = [*RECIPE, f"run_dir={folder / 'run'}", f"target.path={int4[0]}", "target.aux_layers=[1,4,6]"]
        options += [
            "target.dtype=bfloat16",
            "extract.engine=vllm",
            EAGER,
            "extract.shard_tokens=60",
        ]
        for end in ends:
            command(vllm_python, "-c", EXTRACT, end, *options, exits=0 if end == "all" else 9)
        stores.append(folder / "run" / "store")
    assert contents(stores[0] / "shards") == contents(stores[1] / "shards")
    assert len(list((stores[0] / "shards").glob("*.safetensors"))) > 3
    figures = Store(stores[1]).manifest["fidelity"]
    assert figures["top1_agreement"] >= 0.99
    assert figures["positions"] > 30
