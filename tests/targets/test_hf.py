"""Targets in transformers against plain calls of the model; those that are refused; readouts of checkpoints."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from made import message_of
from pipeline import HIDDEN, LAYERS, VOCAB, save_quietly, tiny_llama
from planting import replaced
from random_targets import LATENT, LONG, SIZES, random_target, randomised
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Mistral3Config, Mistral3ForConditionalGeneration
from transformers.integrations import sdpa_attention

from eagle31_train.common.errors import UserError
from eagle31_train.config import TargetConfig
from eagle31_train.model.linear import since_ampere
from eagle31_train.targets import description, hf, pretrained
from eagle31_train.targets.description import describe_target
from eagle31_train.targets.hf import HiddenStateTarget, TransformersEngine, load_model
from eagle31_train.targets.readout import readout_from_checkpoint

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = [5, 13, 1, 8, 21, 13]
EVERY = list(range(LAYERS + 1))


def mistral3():
    """A multimodal target: two names of its checkpoint end as the final norm's does."""
    text = {**SIZES, "model_type": "mistral", "max_position_embeddings": 64}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    return randomised(Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision)))


MODELS = {
    "llama": tiny_llama,
    "tied": partial(tiny_llama, tie_word_embeddings=True),
    "gemma": partial(random_target, "gemma"),
    "soft-capped": partial(random_target, "gemma2", sliding_window=4),
    "sliding": partial(random_target, "mistral", sliding_window=4),
    "experts": partial(random_target, "mixtral", num_local_experts=4),
    "latent": partial(random_target, "deepseek_v3", LATENT),
    "qwen3": partial(random_target, "qwen3"),
    "multimodal": mistral3,
    "scaled": partial(random_target, "granite", logits_scaling=8.0),
    "scaled and tied": partial(random_target, "granite", logits_scaling=8.0, tie_word_embeddings=True),
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
BY_LENGTH = {
    "dynamic": partial(tiny_llama, rope_parameters=DYNAMIC, max_position_embeddings=16),
    "longrope": partial(tiny_llama, rope_parameters=LONG, max_position_embeddings=64),
}


def conversations(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def check_against_plain_calls(engine, model, tokens):
    """Every conversation once, under its own index, with the states and logits of running it alone with its mask."""
    seen = set()
    for index, aux, last in engine.run(tokens):
        row = tokens[index][None]
        plain = model(input_ids=row, attention_mask=torch.ones_like(row), output_hidden_states=True, use_cache=False)
        hidden = plain.hidden_states
        for at, layer in enumerate(engine.layers[:-1]):
            torch.testing.assert_close(aux[:, at], hidden[layer][0], rtol=1e-4, atol=1e-4, msg=f"layer {layer}")
        # transformers' newest entry is after the final norm; the stored one is before it.
        normed = model.get_decoder().norm(last)
        torch.testing.assert_close(normed, hidden[-1][0], rtol=1e-4, atol=1e-4, msg="the last hidden state")
        torch.testing.assert_close(engine.readout.logits(last), plain.logits[0], rtol=1e-4, atol=1e-4, msg="logits")
        assert torch.equal(aux[:, -1], last)
        assert aux.shape == (len(row[0]), len(engine.layers), HIDDEN)
        seen.add(index)
    assert seen == set(range(len(tokens)))


@pytest.mark.core
@pytest.mark.parametrize("batch_tokens", [1, 30, 10**6])
@pytest.mark.parametrize("name", MODELS)
def test_aux_layer_i_is_the_input_of_layer_i_and_last_is_before_the_final_norm(name, batch_tokens, monkeypatch):
    monkeypatch.setattr(description, "NO_EMBEDDINGS", set())  # vLLM lacks layer 0 of some of these
    model = MODELS[name]()
    engine = TransformersEngine(HiddenStateTarget(model, EVERY), batch_tokens=batch_tokens)
    check_against_plain_calls(engine, model, conversations())


@pytest.mark.parametrize("fields", [{"output_multiplier": 0.5}, {"model_type": "hyperclovax", "logits_scaling": 0.5}])
def test_logits_that_a_target_multiplies_are_not_divided(fields):
    """As Muse and HyperCLOVA X do, which older releases of transformers do not know."""
    model = tiny_llama()
    vars(model.config).update(fields)
    model.lm_head.register_forward_hook(lambda _module, _args, logits: 0.5 * logits)
    check_against_plain_calls(TransformersEngine(HiddenStateTarget(model, [1, LAYERS])), model, conversations())


class Looks(TorchDispatchMode):
    """Counts how often Python looks at a value, for which it would wait where that is a GPU's."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero")
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_pass_waits_for_no_value(name):
    """Of transformers' own looks only this test knows: they are not made where tensors are fake."""
    target, tokens = HiddenStateTarget(MODELS[name](), [1]), torch.ones(3, 13, dtype=torch.int64)
    with Looks() as ours:
        target.states(tokens, None)
    with Looks() as plain:
        target.decoder(input_ids=tokens, use_cache=False)
    assert ours.count == 0
    assert plain.count > 0, "transformers does not look any more: hf.unpacked_rows can go"


def outputs_for_inputs(_engine, patch):
    def on_output(self, hook, with_kwargs):
        assert with_kwargs
        return self.register_forward_hook(lambda module, _args, output: hook(module, (output,), {}))

    patch.setattr(nn.Module, "register_forward_pre_hook", on_output)


def off_by_one_layer(engine, _patch):
    layers = engine.target.decoder.layers
    engine.target._taps = [layers[min(layer + 1, LAYERS - 1)] for layer in engine.layers]


def after_the_norm(engine, patch):
    @replaced(patch, engine.target, "states")
    def wrong(right, *given):
        aux, last = right(*given)
        return aux, engine.target.final_norm(last)


def wrong_order(engine, _patch):
    right = engine.run
    engine.run = lambda tokens: ((5 if i == 1 else 1 if i == 5 else i, aux, last) for i, aux, last in right(tokens))


@pytest.mark.parametrize(
    ("plant", "what"),
    [
        *((plant, "layer 0") for plant in (outputs_for_inputs, off_by_one_layer, wrong_order)),
        (after_the_norm, "last hidden state"),
    ],
)
def test_planted_mistakes_are_seen(plant, what, monkeypatch):
    model = tiny_llama()
    engine = TransformersEngine(HiddenStateTarget(model, EVERY))
    plant(engine, monkeypatch)
    with pytest.raises(AssertionError, match=what):
        check_against_plain_calls(engine, model, conversations())


def test_layers_that_hand_on_several_streams_are_refused(monkeypatch):
    """Stored as they come, no reader would take them."""
    target = HiddenStateTarget(tiny_llama(), [1, 2])
    caught = {tap: torch.zeros(1, 3, 4, HIDDEN) for tap in range(3)}
    monkeypatch.setattr(target, "_tapped", lambda _: nullcontext(caught))
    with pytest.raises(UserError, match=r"states of shape \[4, \d+\], several streams instead of one"):
        target.states(torch.ones(1, 3, dtype=torch.int64), None)


@pytest.mark.parametrize("name", BY_LENGTH)
def test_where_rope_follows_the_length_neighbours_and_predecessors_do_not_change_states(name):
    """Lengths below, at and above the 16 positions from which on factors change."""
    tokens = conversations([16, 40, 7, 24, 16])
    model = BY_LENGTH[name]()
    assert hf.rope_by_length(model.config)
    engine = TransformersEngine(HiddenStateTarget(model, [1, 3, 5]), batch_tokens=1000)
    list(engine.run([tokens[1]]))  # what was longer before
    together = {index: (aux, last) for index, aux, last in engine.run(tokens)}
    for index, row in enumerate(tokens):
        # A model that has seen nothing else.
        alone = TransformersEngine(HiddenStateTarget(BY_LENGTH[name](), [1, 3, 5]))
        [(_, aux, last)] = alone.run([row])
        torch.testing.assert_close(together[index], (aux, last), rtol=1e-4, atol=1e-4)
        # And the gate's reference is of the same factors: not of a padded row, nor of the longest so far.
        own = engine.reference(row, torch.arange(len(row) - 1)).own
        torch.testing.assert_close(own, engine.readout.logits(last[:-1]), rtol=1e-4, atol=1e-3)


@given(st.lists(st.integers(1, 40), max_size=7), st.integers(1, 100), st.integers(0, 50))
def test_batches_take_the_least_time_of_all_that_keep_to_the_bound(lengths, batch_tokens, cost):
    def time(batches):
        sizes = [len(batch) * max(lengths[i] for i in batch) for batch in batches]
        kept = all(size <= batch_tokens or len(batch) == 1 for size, batch in zip(sizes, batches, strict=True))
        return sum(sizes) + cost * len(batches) if kept else float("inf")

    def groupings(rows):
        """Every way to cut sorted rows; none that mixes them is better."""
        yield [rows] if rows else []
        yield from ([rows[:n], *rest] for n in range(1, len(rows)) for rest in groupings(rows[n:]))

    batches = hf.batches_by_length(lengths, batch_tokens, cost)
    rows = sorted(range(len(lengths)), key=lengths.__getitem__)
    assert sorted(i for batch in batches for i in batch) == sorted(rows)
    assert time(batches) == min(map(time, groupings(rows)))


def test_the_gates_reference_is_the_models_ordinary_call_with_a_mask_at_the_wanted_positions(monkeypatch):
    model, rows, masks = tiny_llama(), [], []
    right = model.forward

    def newer(logits_to_keep=0, **inputs):
        masks.append(inputs["attention_mask"])
        return right(**inputs, logits_to_keep=logits_to_keep)

    monkeypatch.setattr(model, "forward", newer)
    model.lm_head.register_forward_hook(lambda _module, _args, logits: rows.append(logits.shape[1]))
    tokens, positions = conversations()[4], torch.tensor([0, 7, 19])
    reference = TransformersEngine(HiddenStateTarget(model, [1])).reference(tokens, positions)
    assert reference.ids is None
    assert rows == [3]
    assert masks[0].min() == 0, "a mask of ones is dropped, and the unmasked path would be compared with itself"
    torch.testing.assert_close(reference.own, tiny_llama()(tokens[None]).logits[0, positions], rtol=1e-4, atol=1e-4)


def test_the_gate_asks_for_positions_on_the_cpu_as_the_last_layer_may_be_on_another_device(monkeypatch):
    engine, asked = TransformersEngine(HiddenStateTarget(tiny_llama(), [1])), []

    def spread(input_ids, logits_to_keep, **_):
        asked.extend([input_ids.device.type, logits_to_keep.device.type])
        return SimpleNamespace(logits=torch.zeros(1, len(logits_to_keep), VOCAB))

    monkeypatch.setattr(HiddenStateTarget, "device", torch.device("meta"))  # of the embedding
    monkeypatch.setattr(engine.target.model, "forward", spread)
    engine.reference(conversations()[4], torch.tensor([0, 7]))
    assert asked == ["meta", "cpu"]


def test_a_file_and_layers_that_the_target_lacks_or_vllm_reorders_are_refused():
    assert "is a file: set it to the file's folder" in message_of(describe_target, TargetConfig(path=__file__))
    for layers in ([3, 1], [1, 1, 2], [], [-1, 2], [1, LAYERS + 1]):
        assert "target.aux_layers=" in message_of(HiddenStateTarget, tiny_llama(), layers)


def test_each_process_loads_a_target_straight_to_its_gpu_which_is_the_current_one(monkeypatch):
    """Where quantized weights are unpacked and their kernels run; one that does not fit is told where else it would."""
    steps = []

    def loads(kind, target, **options):
        if "dtype" in options:
            steps.append(options["device_map"])
            raise pretrained.not_loaded(target, torch.OutOfMemoryError("CUDA out of memory"))

    for name, value in {"WORLD_SIZE": "8", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", steps.append)
    monkeypatch.setattr(hf, "from_pretrained", loads)
    target = TargetConfig(path="org/name", dtype="bfloat16")
    assert "it does not fit: use data.generate.server=vllm" in message_of(load_model, target)
    assert steps == [torch.device("cuda:3"), {"": torch.device("cuda:3")}]


def test_shared_keys_are_repeated_where_cudas_flash_kernel_does_not_take_them(monkeypatch):
    hf._spare_scores()
    keys = {dtype: SimpleNamespace(device=torch.device("cuda:0"), dtype=dtype, shape=(1, 2, 9, 64)) for dtype in FLOATS}
    on_cpu = torch.zeros(1, 2, 9, 64)
    for capability, shared in (((8, 0), FLOATS[1:]), ((7, 5), ())):
        since_ampere.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert tuple(d for d in FLOATS if sdpa_attention.use_gqa_in_sdpa(None, keys[d], keys[d])) == shared
        assert sdpa_attention.use_gqa_in_sdpa(None, on_cpu, on_cpu)
        assert not sdpa_attention.use_gqa_in_sdpa(on_cpu, on_cpu, on_cpu), "as ever, with a mask"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    since_ampere.cache_clear()
    assert not sdpa_attention.use_gqa_in_sdpa(None, keys[torch.bfloat16], keys[torch.bfloat16])
    since_ampere.cache_clear()


def test_a_target_whose_weights_are_not_all_there_is_refused(tmp_path):
    """Whatever transformers makes up in their place would be learnt, and passes every later check."""
    file = save_quietly(tiny_llama(), tmp_path / "target") / "model.safetensors"
    weights = load_file(file)
    config = TargetConfig(path=str(file.parent), dtype="float32", device="cpu")
    for name in ("lm_head.weight", "model.norm.weight"):
        others = {key: weights[key] for key in weights if key != name}
        for spoilt in (others, {**others, name: torch.ones(9)}):
            save_file(spoilt, file, metadata={"format": "pt"})
            assert f"1 of its weights are missing or of another size, such as {name}" in message_of(load_model, config)
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "only a git-lfs pointer" in message_of(load_model, config)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_readout_of_a_checkpoint_is_that_of_the_loaded_model(tmp_path, name, dtype):
    folder = save_quietly(MODELS[name](), tmp_path / "target")
    config = TargetConfig(path=str(folder), dtype=dtype, device="cpu")
    loaded = HiddenStateTarget(load_model(config), [1]).readout
    read = readout_from_checkpoint(config, hf.DTYPES[dtype])
    for field in ("embedding", "norm", "head"):
        ours, theirs = getattr(read, field), getattr(loaded, field)
        assert torch.equal(ours, theirs), field
        assert ours.dtype == theirs.dtype
    for field in ("norm_kind", "eps", "depth", "soft_cap", "tied"):
        assert getattr(read, field) == getattr(loaded, field), field
    assert read.norm_kind == ("1+w" if name in ("gemma", "soft-capped") else "w")
    assert read.tied == (name in ("tied", "gemma", "soft-capped", "multimodal"))  # a scaled head is none's embedding
    assert read.soft_cap == (30.0 if name == "soft-capped" else None)
    assert read.weights().keys() == {"embed_tokens", "norm"} | (set() if read.tied else {"lm_head"})
    rows = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
    assert torch.equal(read.logits(rows), replace(loaded, packed=None).logits(rows))  # which sums in another order


def test_a_hub_out_of_reach_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/{revision}/{filename}")
    monkeypatch.setattr(pretrained, "TRIES", 0)
    words = r"target\.path=some/target: .* the hub cannot be reached \(.*refused\), .* and set HF_HOME to that cache"
    for read in (describe_target, load_model):
        with pytest.raises(UserError, match=words):
            read(TargetConfig(path="some/target", dtype="float32"))
    assert capsys.readouterr().err == ""
