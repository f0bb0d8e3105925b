"""The vLLM engine on the real target: the transformers engine's states, within what the target's own rounding does.

How large rounding makes distances is measured here, too.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from datasets import DatasetDict
from engines import ROOT, assert_within, command, distances, from_vllm, joined, shown
from safetensors.torch import load_file

from eagle31_train.config import TargetConfig
from eagle31_train.store import Store
from eagle31_train.targets.hf import HiddenStateTarget, TransformersEngine, load_model

pytestmark = pytest.mark.vllm

AUX = [2, 15, 27]
LENGTHS = [250, 250, 100, 37, 3, 2, 250, 180]  # of what is compared; equal ones could be mixed up unseen otherwise


def prepared(folder, real_target, count, max_length):
    """The options of a small run, whose data are there: of the first `count` conversations."""
    source = ROOT / "data_prep" / "prompts" / "smollm2_conversations.jsonl"
    some = folder / "conversations.jsonl"
    some.write_text("".join(source.read_text(encoding="utf-8").splitlines(keepends=True)[:count]), encoding="utf-8")
    common = [
        "+experiment=smollm2",
        f"target.path={real_target}",
        f"run_dir={folder / 'run'}",
        f"data.conversations={some}",
        f"data.max_length={max_length}",
        "data.heldout=0.2",
        "extract.shard_tokens=1024",
    ]
    command(sys.executable, "-m", "data_prep", *common)
    return common


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, real_target):
    return prepared(tmp_path_factory.mktemp("engine"), real_target, 24, 256)


@pytest.fixture(scope="module")
def conversations(arguments):
    run_dir = next(option for option in arguments if option.startswith("run_dir=")).removeprefix("run_dir=")
    rows = DatasetDict.load_from_disk(f"{run_dir}/data/dataset")["train"]["input_ids"]
    long = [row for row in rows if len(row) >= max(LENGTHS)]
    return [torch.tensor(row[:length]) for row, length in zip(long[: len(LENGTHS)], LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def vllm(arguments, vllm_python, conversations, tmp_path_factory):
    """(states, answer) of the vLLM engine in float32, see run_engine.py."""
    folder = tmp_path_factory.mktemp("states")
    asked, states, answer = (folder / name for name in ("request.json", "states.safetensors", "answer.json"))
    more = ["target.dtype=float32", "extract.engine=vllm", "extract.engine_args.enforce_eager=true"]
    request = {
        "options": [*arguments, *more],
        "conversations": [row.tolist() for row in conversations],
        "too_long": [1] * 257,
    }
    asked.write_text(json.dumps(request))
    command(vllm_python, Path(__file__).with_name("run_engine.py"), asked, states, answer)
    return load_file(states), json.loads(answer.read_text())


@pytest.fixture(scope="module")
def engine_of(real_target):
    """The transformers engine in a dtype; float64 with the same weights."""

    def make(dtype):
        config = TargetConfig(path=str(real_target), device="cpu", dtype="bfloat16")
        model = load_model(config, "float32" if dtype == "float64" else dtype)
        return TransformersEngine(
            HiddenStateTarget(model.double() if dtype == "float64" else model, AUX), batch_tokens=1
        )

    return make


@pytest.fixture(scope="module")
def exact(engine_of, conversations):
    """The transformers engine in float32 and in float64."""
    return joined(engine_of("float32"), conversations), joined(engine_of("float64"), conversations)


# Each engine has a rounding of its own (thus up to twice the noise of one), and vLLM's kernels approximate exp.
TIMES = 3


def test_states_in_float32_are_those_of_transformers_within_its_rounding(vllm, exact, conversations, tell):
    states, answer = vllm
    assert (answer["name"], answer["layers"]) == ("vllm", AUX)
    ours, (plain, wide) = from_vllm(states, len(conversations)), exact
    noise = distances(plain, wide)
    tell(
        "relative distance of states, median and 90 % of positions, per layer:",
        shown("float32: transformers to float64 (its rounding)", noise, AUX),
        shown("float32: vLLM to transformers", distances(ours, plain), AUX),
        shown("float32: vLLM to float64", distances(ours, wide), AUX),
    )
    assert_within(ours, plain, noise, TIMES)
    assert_within(ours, wide, noise, TIMES)


@pytest.mark.parametrize("mistake", ["the next layer", "after the norm", "conversations mixed up", "positions shifted"])
def test_planted_mistakes_are_seen(mistake, vllm, exact, engine_of, conversations):
    ours, (plain, wide) = from_vllm(vllm[0], len(conversations)), exact
    assert_within(ours, plain, distances(plain, wide), TIMES)
    if mistake == "the next layer":
        model = engine_of("float32").target.model
        engine = TransformersEngine(HiddenStateTarget(model, [layer + 1 for layer in AUX]), batch_tokens=1)
        wrong = joined(engine, conversations)
    elif mistake == "after the norm":
        norm = engine_of("float32").target.final_norm
        wrong = [torch.cat([row[:, :-1], norm(row[:, -1:].float()).double()], 1) for row in plain]
    elif mistake == "conversations mixed up":
        wrong = [plain[1], plain[0], *plain[2:]]
    else:
        wrong = [row.roll(1, 0) for row in plain]
    with pytest.raises(AssertionError):
        assert_within(ours, wrong, distances(plain, wide), TIMES)


def test_a_whole_extraction_in_bfloat16_is_as_near_to_float32_as_transformers(
    tmp_path, real_target, vllm_python, engine_of, tell
):
    options = prepared(tmp_path, real_target, 12, 160)  # few: bf16 is ten times as slow on a CPU without it
    more = ["target.dtype=bfloat16", "extract.engine=vllm", "extract.engine_args.enforce_eager=true"]
    said = command(vllm_python, "-m", "eagle31_train.extract", *options, *more)
    store = Store(tmp_path / "run" / "store")
    assert store.inputs["engine"] == {"name": "vllm", "args": {}}, "eager or compiled, the states are the same"
    figures = store.manifest["fidelity"]
    assert figures["top1_agreement"] >= 0.99
    assert figures["positions"] > 100
    split = store.split("train")
    documents = split.read_all(range(4))
    tokens = [document.tokens for document in documents]
    plain, exact = joined(engine_of("bfloat16"), tokens), joined(engine_of("float32"), tokens)

    def kept(rows):
        """As the store keeps them: both kinds of states, where it does."""
        where = [document.supervised[document.supervised < document.attended] for document in documents]
        return [row[at] for row, at in zip(rows, where, strict=True)]

    ours = []
    for document in documents:
        at = document.supervised[document.supervised < document.attended]
        last = document.last.decode()[: len(at)]
        ours.append(torch.cat([document.aux.decode()[at], last[:, None]], 1).double())
    plain, exact = kept(plain), kept(exact)
    tell(
        said.splitlines()[-1],
        shown("bfloat16: transformers to float32 (its rounding)", distances(plain, exact), AUX),
        shown("bfloat16: vLLM to float32", distances(ours, exact), AUX),
        shown("bfloat16: vLLM to transformers", distances(ours, plain), AUX),
    )
    # As near to the exact states as transformers, and to it no further than two such roundings apart.
    assert_within(ours, exact, distances(plain, exact), 1.5)
    assert_within(ours, plain, distances(plain, exact), 2)
