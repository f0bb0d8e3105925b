"""The vLLM engine's states are the transformers engine's, within what the target's own rounding does.

Of the real target, and of a random one of Kimi's kind (MLA and experts), which also runs in chunks, over two processes,
wrapped and in INT4. How large rounding makes distances is measured here, too. They are relative, per position and
layer: |a - b| / |b|.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kimi_like import quantized, wrapped
from pipeline import contents, write_data
from safetensors.torch import load_file
from serving import PROMPTS, lines_of
from transformers import AutoTokenizer

from eagle31_train.config import TargetConfig
from eagle31_train.store import Store
from eagle31_train.targets import toy
from eagle31_train.targets.fidelity import compare
from eagle31_train.targets.hf import HiddenStateTarget, Reference, TransformersEngine, load_model

pytestmark = pytest.mark.vllm

VLLM = ["extract.engine=vllm", "extract.engine_args.enforce_eager=true"]
MLA = "extract.engine_args.attention_backend=CPU_MLA"  # on CPUs with AMX vLLM takes one that has no float32
CACHE = "extract.engine_args.kv_cache_memory_bytes=134217728"  # vLLM fills it with zeros first
RECIPE = ["name=kimi", "target.device=cpu", "drafter.intermediate_size=32", "drafter.num_attention_heads=4"]
CHUNKS = ["extract.engine_args.max_num_batched_tokens=96", "extract.engine_args.max_num_seqs=5"]
TIGHT = [  # room for one of the long ones: others are thrown out and begun again
    "extract.engine_args.num_gpu_blocks_override=40",
    "extract.engine_args.scheduler_reserve_full_isl=false",
    "extract.engine_args.long_prefill_token_threshold=40",
]
TWO_PROCESSES = "extract.engine_args.tensor_parallel_size=2"


def joined(engine, conversations):
    """Per conversation [T, A + 1, H] float64: auxiliary states and the last one."""
    run = {index: torch.cat([aux, last[:, None]], 1) for index, aux, last in engine.run(conversations)}
    return [run[index].double() for index in range(len(conversations))]


def from_vllm(states, count):
    """The same of a file of inside.py."""
    return [torch.cat([states[f"aux.{i}"], states[f"last.{i}"][:, None]], 1).double() for i in range(count)]


def distances(ours, theirs):
    """[positions, A + 1]."""
    return torch.cat([(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in zip(ours, theirs, strict=True)])


def quantiles(distance):
    """Median and 90 % per layer; of more, single positions that happen to be touchy decide."""
    return distance.quantile(torch.tensor([0.5, 0.9], dtype=distance.dtype), dim=0)


def assert_within(ours, theirs, noise, times):
    """ours is as near to theirs as rounding alone brings them apart, `times` over."""
    found, allowed = quantiles(distances(ours, theirs)), times * quantiles(noise)
    assert (found <= allowed).all(), f"{found} is more than {allowed}"


@dataclass(frozen=True)
class Case:
    """A target, what it is asked, and how far apart its states may be: so many times its rounding in float32."""

    target: Path
    depth: int  # layers
    layers: list[int]  # whose inputs are taken
    conversations: list[torch.Tensor]
    max_length: int
    times: int

    def request(self, file: Path, *options: str, target: Path | None = None, **more) -> dict:
        """For inside.py; `target` is another one of the same layers."""
        layers = f"target.aux_layers={self.layers}".replace(" ", "")
        where = [f"target.path={target or self.target}", layers, f"data.max_length={self.max_length}"]
        return {
            "options": [*RECIPE, *where, *VLLM, MLA, CACHE, *options],
            "conversations": [row.tolist() for row in self.conversations],
            "too_long": [1] * (self.max_length + 1),
            "file": str(file),
            **more,
        }

    def by_transformers(self, dtype="float32", target=None, layers=None):
        """The transformers engine in a dtype; float64 with the same weights."""
        config = TargetConfig(path=str(target or self.target), device="cpu", dtype="bfloat16")
        model = load_model(config, "float32" if dtype == "float64" else dtype)
        if model.config.model_type == "deepseek_v3":
            model.set_experts_implementation("eager")  # the others have no float64
        model = model.double() if dtype == "float64" else model
        return TransformersEngine(HiddenStateTarget(model, layers or self.layers), batch_tokens=1)


@pytest.fixture(scope="module")
def smollm2(real_target):
    """Three conversations are equally long, so that they could be mixed up."""
    tokenizer = AutoTokenizer.from_pretrained(real_target)
    lines = lines_of(PROMPTS / "smollm2_conversations.jsonl")[:60]
    rows = [tokenizer.apply_chat_template(json.loads(line)["messages"], return_dict=False) for line in lines]
    long = [row for row in rows if len(row) >= 150]  # vLLM's blocks have 128
    lengths = [150, 150, 100, 37, 3, 2, 150, 130]
    conversations = [torch.tensor(row[:length]) for row, length in zip(long[:8], lengths, strict=True)]
    return Case(real_target, 30, [0, 2, 15, 27], conversations, 256, times=3)  # 0: the embeddings


@pytest.fixture(scope="module")
def kimi_like(tmp_path_factory):
    """All layers that vLLM gives; the last is the state before the final norm.

    vLLM's MLA on a CPU approximates exp: its states are further from transformers' than these are from float64's.
    """
    target = toy.make(tmp_path_factory.mktemp("target") / "toy", num_hidden_layers=6)
    generator = torch.Generator().manual_seed(0)
    lengths = [250, 250, 100, 37, 3, 2, 500, 180, 1]
    conversations = [torch.randint(0, 990, (length,), generator=generator) for length in lengths]
    return Case(target, 6, [1, 2, 3, 4, 5, 6], conversations, 512, times=20)


@pytest.fixture(scope="module")
def int4(kimi_like, tmp_path_factory):
    """(INT4, the bf16 weights that it stands for), or None where vLLM has no product of INT4 weights."""
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        return None
    folder = tmp_path_factory.mktemp("int4")
    return quantized(kimi_like.target, folder / "int4", folder / "meant"), folder / "meant"


@pytest.fixture(scope="module", params=["smollm2", "kimi_like"])
def case(request):
    return request.getfixturevalue(request.param)


# A test of this target alone, in the process of the others of it.
of_kimi_like = pytest.mark.parametrize("case", ["kimi_like"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def answers(case, ask, int4, tmp_path_factory):
    """Name → (states, answer) of vLLM, see inside.py."""
    folder = tmp_path_factory.mktemp("states")
    asked = {"plain": case.request(folder / "plain", "target.dtype=float32", exchange=True)}
    if case.max_length == 512:
        inside = wrapped(case.target, folder / "wrapped")
        options = ["target.dtype=float32", *CHUNKS, *TIGHT]
        asked["in chunks, wrapped"] = case.request(folder / "chunks", *options, target=inside)
        if int4:
            asked["INT4"] = case.request(folder / "int4", "target.dtype=bfloat16", target=int4[0])
    found = ask("states", list(asked.values()))
    return {name: (load_file(one["file"]), answer) for (name, one), answer in zip(asked.items(), found, strict=True)}


@pytest.fixture(scope="module")
def exact(case):
    """transformers' states in float32, and how far these are from float64's."""
    states = joined(case.by_transformers(), case.conversations)
    return states, distances(states, joined(case.by_transformers("float64"), case.conversations))


def test_states_in_float32_are_those_of_transformers_within_its_rounding(case, answers, exact):
    states, answer = answers["plain"]
    assert (answer["name"], answer["layers"]) == ("vllm", case.layers)
    ours, (theirs, noise) = from_vllm(states, len(case.conversations)), exact
    assert_within(ours, theirs, noise, case.times)
    assert [len(row) for row in ours] == [len(row) for row in case.conversations]
    if case.depth in case.layers:  # the input of layer N is the last state before the norm
        assert all(torch.equal(row[:, case.layers.index(case.depth)], row[:, -1]) for row in ours)


@pytest.mark.parametrize("mistake", ["the next layer", "after the norm", "conversations mixed up", "positions shifted"])
def test_planted_mistakes_are_seen(mistake, case, answers, exact):
    ours, (theirs, noise) = from_vllm(answers["plain"][0], len(case.conversations)), exact
    if mistake == "the next layer" and case.depth in case.layers:
        wrong = [torch.cat([row[:, 1:-1], row[:, -2:]], 1) for row in theirs]
    elif mistake == "the next layer":
        wrong = joined(case.by_transformers(layers=[layer + 1 for layer in case.layers]), case.conversations)
    elif mistake == "after the norm":
        norm = case.by_transformers().target.final_norm
        wrong = [torch.cat([row[:, :-1], norm(row[:, -1:].float()).double()], 1) for row in theirs]
    elif mistake == "conversations mixed up":
        wrong = [theirs[1], theirs[0], *theirs[2:]]
    else:
        wrong = [row.roll(1, 0) for row in theirs]
    with pytest.raises(AssertionError):
        assert_within(ours, wrong, noise, case.times)


def test_asked_again_vllm_gives_the_same_bits_and_leaves_nothing(case, answers):
    states, answer = answers["plain"]
    for index in range(len(case.conversations)):
        assert torch.equal(states[f"last.{index}"], states[f"twice.{index}"])
    assert answer["left"] == []
    assert not Path(answer["folder"]).exists()
    refusal = f"a conversation of {case.max_length + 1} tokens is too long for extract.engine=vllm"
    assert answer["refusal"].startswith(refusal)


def test_planted_in_the_worker_an_exchange_of_two_conversations_is_refused(answers):
    assert answers["plain"][1]["exchanged"] == "vLLM gave the states of other tokens than it was asked for"


def test_the_gates_reference_is_the_targets_own_choice(case, answers):
    states, _ = answers["plain"]
    engine = case.by_transformers()
    own = engine.reference(case.conversations[0], states["positions"]).own
    torch.testing.assert_close(states["logs"], own.log_softmax(-1).gather(1, states["ids"]), rtol=1e-3, atol=1e-3)
    rebuilt = engine.readout.logits(states["last.0"][states["positions"]])
    agreement, kl = compare(Reference(states["logs"], states["ids"]), rebuilt)
    assert (agreement, abs(kl) < 1e-5) == (1.0, True)


@of_kimi_like
def test_chunks_of_long_ones_among_others_and_work_done_again_inside_a_multimodal_wrapper(case, answers, exact):
    states, _ = answers["in chunks, wrapped"]
    assert_within(from_vllm(states, len(case.conversations)), *exact, case.times)


@of_kimi_like
def test_tensor_parallelism_gives_the_states_of_one_process(case, ask, exact, tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("vLLM wants a core for each process")
    request = case.request(tmp_path / "states", "target.dtype=float32", TWO_PROCESSES, *CHUNKS)
    [answer] = ask("states", [request], VLLM_CPU_OMP_THREADS_BIND=f"{cores[0]}|{cores[1]}")
    assert_within(from_vllm(load_file(request["file"]), len(case.conversations)), *exact, case.times)
    assert answer["left"] == []


@of_kimi_like
def test_of_a_quantized_target_the_states_are_the_quantized_ones(case, answers, int4):
    if int4 is None:
        pytest.skip("vLLM's product of INT4 weights on a CPU takes AVX-512, which this one has not")
    ours = from_vllm(answers["INT4"][0], len(case.conversations))
    meant = joined(case.by_transformers(target=int4[1]), case.conversations)
    noise = distances(joined(case.by_transformers("bfloat16", int4[1]), case.conversations), meant)
    unquantized = joined(case.by_transformers(), case.conversations)
    assert_within(ours, meant, noise, 2)
    with pytest.raises(AssertionError):
        assert_within(ours, unquantized, noise, 2)


# ---------------------------------------------------------------- whole extractions


def command(*program, exits=0):
    """Run a program in the project's folder, and fail with what it said unless it exits so."""
    env = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "WORLD_SIZE")}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    words = [str(part) for part in program]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], env=env, text=True, capture_output=True, check=False)
    assert done.returncode == exits, f"{program}:\n{done.stdout[-1000:]}\n{done.stderr[-4000:]}"


EXTRACT = """
import itertools, os, sys
from eagle31_train import cli, extract
from eagle31_train.store import StoreWriter

def write(*given):
    if next(count) == int(sys.argv[1]):
        os._exit(9)  # as a kill ends it, uncleaned
    right(*given)

right, count, StoreWriter.write = StoreWriter.write, itertools.count(), write
cli.run(extract.extract, "", sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [True, False])
@of_kimi_like
def test_a_killed_extraction_is_carried_on(case, quantized, vllm_python, int4, tmp_path):
    if quantized and int4 is None:
        pytest.skip("vLLM's product of INT4 weights on a CPU takes AVX-512, which this one has not")
    target = [f"target.path={int4[0]}", "target.dtype=bfloat16"]
    if not quantized:
        target = [f"target.path={case.target}", "target.dtype=float32"]
    stores = []
    for name, ends in (("whole", ["-1"]), ("killed", ["2", "-1"])):
        folder = tmp_path / name
        write_data(folder / "run", target_size=toy.VOCAB)
        options = [*RECIPE, *target, *VLLM, MLA, f"run_dir={folder / 'run'}", "target.aux_layers=[1,4,6]"]
        for end in ends:
            words = [end, *options, "extract.shard_tokens=60"]
            command(vllm_python, "-c", EXTRACT, *words, exits=0 if end == "-1" else 9)
        stores.append(folder / "run" / "store")
    assert contents(stores[0] / "shards") == contents(stores[1] / "shards")
    assert len(list((stores[0] / "shards").glob("*.safetensors"))) > 3
    store = Store(stores[1])
    assert "enforce_eager" not in store.inputs["engine"]["args"], "eager or compiled, the states are the same"
    assert store.manifest["fidelity"]["top1_agreement"] >= 0.99
    assert store.manifest["fidelity"]["positions"] > 30
