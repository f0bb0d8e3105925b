"""What our engine asks of vLLM and makes of its answers, on an imitation; of real vLLM it is tests/vllm/test_engine.py.

The imitation ends conversations in reverse, one per step, and writes each one's states a step later, as on a GPU.
"""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from made import message_of
from pipeline import HIDDEN, LAYERS, make_run, tiny_config
from planting import replaced
from safetensors.torch import save_file
from transformers import AutoConfig

from eagle31_train.targets import vllm_engine
from eagle31_train.targets.vllm_engine import FOLDER, TOP, VllmEngine, states_folder
from eagle31_train.targets.vllm_states import CANNOT
from eagle31_train.targets.vllm_states import LAYERS as KEY

CONVERSATIONS = [torch.tensor(ids) for ids in ([5, 6, 7], [9, 9], [1, 2, 3, 4])]


def states_of(layer, tokens):
    """What the imitated target has as the input of a layer, [T, H]."""
    return (100.0 * layer + torch.as_tensor(tokens)[:, None]).expand(-1, HIDDEN).contiguous()


class Imitation:
    """vllm.LLM, as far as the engine uses it."""

    def __init__(self, **arguments):
        self.arguments = arguments
        self.model_config = SimpleNamespace(max_model_len=arguments["max_model_len"])
        self.llm_engine, self.running, self.unwritten, self.asked = self, [], [], 0
        self.writes, self.flushes = True, 0

    def collective_rpc(self, name, args=()):
        if name == "open_states":
            self.folder = Path(args[0])
        else:
            assert name == "flush_states"
            assert self.flushes < 9, "the engine waits for ever"
            self.flushes += 1
            self.write()

    def enqueue(self, prompts, sampling, use_tqdm):
        self.sampling, self.began = sampling, self.asked
        self.asked += len(prompts)
        names = [f"{self.began + i}-{'a1b2'[i % 4]}" for i in range(len(prompts))]  # vLLM's numbers go on
        self.running = list(zip(names, [prompt["prompt_token_ids"] for prompt in prompts], strict=True))
        return names

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        self.write()
        name, tokens = self.running.pop()
        self.unwritten.append((name, tokens))
        logs = [None, *[self.distribution(p, tokens[p + 1]) for p in range(len(tokens) - 1)]]
        done = SimpleNamespace(request_id=name, finished=True, prompt_logprobs=logs)
        return [done, *[SimpleNamespace(request_id=other, finished=False) for other, _ in self.running]]

    def write(self):
        """The states of conversations that ended before this step."""
        for name, tokens in self.unwritten * self.writes:
            taken = sorted(set(self.arguments["additional_config"][KEY]))
            layers = torch.stack([states_of(layer, tokens) for layer in taken])
            file = self.folder / f"{name.partition('-')[0]}.safetensors"
            save_file({"hidden_states": layers, "token_ids": torch.tensor(tokens)}, file)
        self.unwritten = []

    @staticmethod
    def distribution(position, actual):
        """After a position: the actual token first, as vLLM has it, though it is not among the likeliest."""
        ranks = {500 + actual: 99} | {10 * position + rank: rank for rank in range(TOP, 0, -1)}
        return {token: SimpleNamespace(rank=rank, logprob=-0.5 * rank) for token, rank in ranks.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("run")
    make_run(made)
    return made


@pytest.fixture
def start(folder, tmp_path, monkeypatch):
    """A function that starts the engine with some options; `start.read` has what vLLM's reader was asked for."""

    def get_config(path, trust_remote_code, revision):
        call.read = path, trust_remote_code, revision
        return AutoConfig.from_pretrained(path)

    def call(*options):
        return VllmEngine(tiny_config(folder, "extract.engine=vllm", *options))

    call.llm = Imitation
    parts = SimpleNamespace(LLM=lambda **given: call.llm(**given), SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", parts)
    monkeypatch.setitem(sys.modules, "vllm.transformers_utils.config", SimpleNamespace(get_config=get_config))
    monkeypatch.setattr(vllm_engine, "RAM_DISK", tmp_path)
    return call


@pytest.mark.parametrize("layers", [[1, 3, 5], [0, 2, LAYERS]])
def test_each_conversation_gets_its_own_states_layer_by_layer(start, layers):
    engine = start(f"target.aux_layers={layers}".replace(" ", ""))
    for _ in range(2):
        found = {index: (aux, last) for index, aux, last in engine.run(CONVERSATIONS)}
        assert sorted(found) == [0, 1, 2]
        for index, tokens in enumerate(CONVERSATIONS):
            aux, last = found[index]
            assert torch.equal(aux, torch.stack([states_of(layer, tokens) for layer in engine.layers], 1))
            assert torch.equal(last, states_of(LAYERS, tokens))
        assert list(engine._folder.iterdir()) == [], "states of a large target would fill the memory"
    sampling = engine._llm.sampling
    assert (sampling.max_tokens, sampling.temperature) == (1, 0.0)


def test_there_is_room_for_the_states_of_a_shard_and_of_the_longest_conversation(start, monkeypatch):
    asked = []

    @replaced(monkeypatch, vllm_engine, "states_folder")
    def noted(right, size):
        asked.append(size)
        return right(size)

    for shard, longest in (64, 500), (500, 64):
        start("target.aux_layers=[1,3,5]", f"extract.shard_tokens={shard}", f"data.max_length={longest}")
    assert min(asked) >= 500 * (3 + 1) * HIDDEN * 4, "three layers and the last state, in float32"


def test_states_of_other_tokens_are_refused(start, monkeypatch):
    engine = start()

    @replaced(monkeypatch, Imitation, "write")
    def exchanged(right, self):
        self.unwritten = [(name, tokens[::-1]) for name, tokens in self.unwritten]
        right(self)

    with pytest.raises(RuntimeError, match="the states of other tokens"):
        list(engine.run(CONVERSATIONS))


def test_the_gate_gets_the_likeliest_tokens_after_each_position(start):
    found = start().reference(CONVERSATIONS[2], torch.tensor([0, 2]))
    ranks = torch.arange(1, TOP + 1)
    assert torch.equal(found.ids, torch.stack([ranks, 20 + ranks]))
    assert torch.equal(found.own, (-0.5 * ranks).expand(2, -1))


def test_vllm_gets_room_for_the_longest_conversation_and_for_the_token_that_it_generates(start):
    assert start("data.max_length=4").longest == 4
    engine = start("data.max_length=3")
    message = message_of(list, engine.run(CONVERSATIONS))
    assert message.startswith("a conversation of 4 tokens is too long for extract.engine=vllm")
    assert start("data.max_length=1000").longest == 127, "of the target's 128 positions"
    assert start("data.max_length=1000", "extract.engine_args.max_model_len=50").longest == 49


def test_vllm_loads_the_target_that_was_asked_for(start, folder, monkeypatch):
    options = "target.revision=v2", "target.trust_remote_code=true", "target.dtype=bfloat16", "seed=7"
    own = "extract.engine_args.additional_config={theirs: 1}", "extract.engine_args.max_num_seqs=5"
    given = start(*options, *own)._llm.arguments
    wanted = {"model": str(folder / "target"), "revision": "v2", "trust_remote_code": True, "dtype": "bfloat16"}
    wanted |= {"seed": 7, "max_num_seqs": 5, "additional_config": {"theirs": 1, KEY: [1, 3, 5, LAYERS]}}
    assert {name: given[name] for name in wanted} == wanted
    assert start.read == (wanted["model"], True, "v2")
    # Of a cached prefix there would be no states.
    assert not given["enable_prefix_caching"]
    monkeypatch.setattr(vllm_engine, "out_of_reach", lambda _: "no network")
    monkeypatch.setattr(vllm_engine, "checkpoint_folder", lambda _: folder / "target")
    (folder / "link").symlink_to("target")
    assert start(f"target.path={folder / 'link'}")._llm.arguments["model"] == wanted["model"], "vLLM would retry"


def test_what_the_engine_sets_itself_or_would_write_over_is_refused_and_so_are_several_processes(start, monkeypatch):
    for name in ("worker_cls", "enable_prefix_caching", "pipeline_parallel_size"):
        message = message_of(start, f"extract.engine_args.{name}=1")
        assert message == f"extract.engine_args.{name} cannot be set, as eagle31 sets it itself: remove it"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    eager = "target.aux_layers=[0,2]", "extract.engine_args.enforce_eager=true"
    assert "vLLM overwrites the input of layer 0" in message_of(start, *eager)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start one process per machine (extract.part)" in message_of(start)


@pytest.mark.parametrize(
    ("method", "error", "said"),
    [
        ("enqueue", ValueError("too many tokens"), "vLLM refuses a conversation (too many tokens): check extract."),
        ("write", RuntimeError(f"Worker failed: {CANNOT}: No space left"), "or lower extract.shard_tokens"),
        ("step", RuntimeError("CUDA out of memory"), "lower gpu_memory_utilization or"),
        ("__init__", AssertionError("unknown architecture"), "and extract.engine_args={}: unknown architecture"),
    ],
)
def test_what_vllm_says_is_passed_on_with_advice(start, monkeypatch, method, error, said):
    @replaced(monkeypatch, Imitation, method)
    def fails(*_, **__):
        raise error

    assert said in message_of(lambda: list(start().run(CONVERSATIONS)))


def test_a_worker_that_fails_otherwise_or_writes_nothing_ends_the_extraction(start, monkeypatch):
    engine = start()
    engine._llm.writes = False
    with pytest.raises(RuntimeError, match="finished 3 conversations, but wrote no states"):
        list(engine.run(CONVERSATIONS))
    engine = start()
    replaced(monkeypatch, engine._llm, "step")(lambda *_: (_ for _ in ()).throw(RuntimeError("left out tokens")))
    with pytest.raises(RuntimeError, match="left out tokens"):
        list(engine.run(CONVERSATIONS))


# ---------------------------------------------------------------- where vLLM's worker leaves states


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Memory with 10 bytes free, and a disk with 100."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    for folder in (memory, disk):
        folder.mkdir()
    monkeypatch.setattr(vllm_engine, "RAM_DISK", memory)
    monkeypatch.setattr(vllm_engine.tempfile, "gettempdir", lambda: str(disk))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10 if folder == memory else 100))
    return memory, disk


def test_states_lie_in_memory_if_they_fit_else_on_the_disk(places):
    assert [states_folder(size).parent for size in (10, 11)] == list(places)
    assert "TMPDIR" in message_of(states_folder, 101)


def test_folders_of_killed_processes_go_and_those_in_use_stay(places):
    memory, _ = places
    left, foreign = memory / f"{FOLDER}-left", memory / "other"
    for folder in (left, foreign):
        folder.mkdir()
    used = states_folder(1)
    assert sorted(memory.iterdir()) == sorted([used, foreign])
    states_folder(1)
    assert used.is_dir()
