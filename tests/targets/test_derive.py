"""Shapes that follow from targets' config.json, beside published drafters' own, from cards and trainers' files;
docs/targets.md shows both."""

import copy
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from made import message_of
from published_targets import recipe
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from eagle31_train.checkpoint.contract import weight_shapes
from eagle31_train.common.errors import UserError
from eagle31_train.compose import load_config
from eagle31_train.config import Config, DataConfig, DrafterConfig, EvaluateConfig, ExtractConfig, TargetConfig
from eagle31_train.planning.inputs import count_parameters, weight_bytes
from eagle31_train.targets import derive, description
from eagle31_train.targets.description import describe_target, doubts, read_raw, text_config
from eagle31_train.targets.readout import find_parts, read_norm

pytestmark = pytest.mark.core
PUBLISHED = Path(__file__).resolve().parent.parent / "published"
YARN = {"rope_type": "yarn", "beta_slow": 1.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
GPT_OSS = {**YARN, "factor": 32.0, "beta_fast": 32.0, "truncate": False}
KIMI = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# Target of docs/targets.md → its configuration, and what the page has no column for.
DRAFTERS = {
    "Llama-3.1-8B": ("llama31_8b", {"rope_scaling": LLAMA3}),
    "Qwen3-8B": ("qwen3_8b", {"rope_scaling": None}),
    "Qwen3-30B-A3B": ("qwen3_30b_a3b", {"rope_scaling": None}),
    "gpt-oss-20b": ("gpt_oss_20b", {"rope_scaling": GPT_OSS}),
    "gpt-oss-120b": ("gpt_oss_120b", {"rope_scaling": GPT_OSS}),
    "DeepSeek V3": ("deepseek_v3", {"rope_scaling": {**KIMI, "factor": 40.0, "beta_fast": 32.0}}),
    "Kimi K2": ("kimi_k2", {"rope_scaling": {**KIMI, "factor": 32.0, "beta_fast": 1.0}}),
    "Kimi K2.5, K2.6, MLA": ("kimi_k25", {"rope_scaling": {**KIMI, "factor": 64.0, "beta_fast": 32.0}, **LATENT}),
}


# Kind → the width of a drafter's MLP by transformers' defaults of its configuration, and where it is from.
EXPERTS = {
    "qwen2_moe": (4 * 1408 + 5632, "4 experts of a token × moe_intermediate_size + shared_expert_intermediate_size"),
    "granitemoehybrid": (2 * 11008 + 1024, "2 experts of a token × intermediate_size + shared_intermediate_size"),
    "mixtral": (2 * 14336, "2 experts of a token × intermediate_size"),
    "aria": (4 * 4096, "4 experts of a token × intermediate_size"),
    "ernie4_5_moe": (12288, "intermediate_size"),  # from here on the first layers are dense
    "afmoe": (6144, "intermediate_size"),
    "hy_v3": (13312, "intermediate_size"),
}


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 16, "vocab_size": 100}


def described(raw):
    return description.description_of(raw, text_config(raw), "it")


@pytest.mark.parametrize("kind", EXPERTS)
def test_the_mlp_is_as_wide_as_dense_layers_or_a_tokens_experts_shared_ones_included(kind):
    if kind not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know it")
    target = described({"model_type": kind})
    assert (target.intermediate_size, target.sources["intermediate_size"]) == EXPERTS[kind]


def test_experts_may_be_given_layer_by_layer_and_alternate_with_dense_layers():
    """The first as in Hunyuan-A13B's config.json."""
    raw = {"model_type": "hunyuan_v1_moe", **SMALL, "intermediate_size": 48, "num_experts": 8}
    raw |= {"moe_topk": [2, 2], "moe_intermediate_size": [48, 48], "num_shared_expert": [1, 1]}
    assert described(raw).intermediate_size == (2 + 1) * 48
    assert count_parameters(text_config(raw)).chosen == 2 / 8
    assert described({"model_type": "qwen2_moe", "decoder_sparse_step": 2}).intermediate_size == 5632


def test_rope_is_that_of_full_attention_where_layers_differ_or_of_the_others_where_it_has_none():
    wide, narrow = ({"rope_type": "default", "rope_theta": theta} for theta in (5e5, 2e4))
    for full, theta in ((wide, 5e5), (None, 2e4)):
        text = SimpleNamespace(rope_parameters={"sliding_attention": narrow, "full_attention": full})
        assert description._rope(text) == (theta, {})


def target_of(name):
    return TargetConfig(path=str(PUBLISHED / name))


def cells(shape):
    """Columns of the table in docs/targets.md."""
    scaling = shape.rope_scaling or {}
    heads = f"{shape.num_attention_heads}/{shape.num_key_value_heads} × {shape.head_dim}"
    rope = f"{shape.rope_theta:,.0f}" + (f", {scaling['rope_type']} × {scaling['factor']:g}" if scaling else "")
    eps = f"{shape.rms_norm_eps:.0e}".replace("e-0", "e-")
    return [f"{shape.intermediate_size:,}", heads, eps, rope, f"{shape.max_position_embeddings:,}"]


@pytest.mark.parametrize("target", DRAFTERS)
def test_the_shape_is_the_pages_and_what_a_published_drafters_is_unlike_is_bold(target):
    name, further = DRAFTERS[target]
    architecture = "mla" if "q_lora_rank" in further else "llama"
    config = load_config([f"target.path={PUBLISHED / name}", f"drafter.architecture={architecture}"])
    read = describe_target(config.target)
    shape, _ = derive.planned_drafter(config, read, 32000)
    assert {field: getattr(shape, field) for field in further} == further
    assert (shape.hidden_size, shape.vocab_size) == (read.hidden_size, read.vocab_size)
    page = (PUBLISHED.parent.parent / "docs" / "targets.md").read_text().splitlines()
    at = next(at for at, line in enumerate(page) if line.startswith(f"| {target} | derived |"))
    derived, published = ([cell.strip() for cell in line.split("|")[3:-1]] for line in page[at : at + 2])
    assert derived == [*cells(shape), ", ".join(map(str, description.pick_layers(None, read.num_hidden_layers)))]
    for ours, theirs in zip(derived[:-1], published[:-1], strict=True):
        assert theirs == ours or (theirs == f"**{theirs.strip('*')}**" and theirs.strip("*") != ours)


def test_kimis_recipe_makes_the_published_drafter_for_k26():
    """lightseekorg/kimi-k2.6-eagle3.1-mla: of the whole vocabulary, and a number of its YaRN is not the target's."""
    config = load_config(recipe("kimi"))
    assert config.data.draft_vocab_size is None
    shape, _ = derive.planned_drafter(config, describe_target(config.target), 163840)
    assert shape.rope_scaling == {**KIMI, "factor": 64.0, "beta_fast": 1.0}
    assert (shape.norm_output, shape.norm_before_residual, shape.aux_layers) == (True, False, [2, 30, 58])
    assert sum(map(math.prod, weight_shapes(shape).values())) == 1_841_220_608, "as in its table"


# Billions, as the cards say: DeepSeek V3 37 B active, Kimi K2 32 B, gpt-oss 3.6 B and 5.1 B without the embedding.
ACTIVE = {"llama31_8b": 8.03, "qwen3_8b": 8.19, "qwen3_30b_a3b": 3.35, "gpt_oss_20b": 4.19, "gpt_oss_120b": 5.71}
ACTIVE |= {"deepseek_v3": 37.6, "kimi_k2": 32.9, "kimi_k25": 32.9, "mistral_7b": 7.24}


@pytest.mark.parametrize("name", ACTIVE)
def test_parameters_that_a_token_runs_through(name):
    counted = count_parameters(text_config(read_raw(target_of(name))))
    assert counted.active / 1e9 == pytest.approx(ACTIVE[name], rel=3e-3)


@pytest.mark.parametrize(("kind", "text"), [("qwen3_vl", "qwen3_vl_text"), ("qwen2_5_vl", "qwen2_5_vl_text")])
def test_a_text_model_without_a_class_of_its_own_is_counted_in_the_whole(kind, text):
    inner = {"model_type": text, **SMALL, "intermediate_size": 96, "tie_word_embeddings": False}
    raw = {"model_type": kind, "text_config": inner, "vision_config": {"depth": 1}}
    counted = count_parameters(text_config(raw), description.whole_config(raw))
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96  # and norms and biases
    assert counted.active == pytest.approx(2 * layer + 2 * 100 * 64, rel=0.02)


@pytest.mark.parametrize(
    ("quantization", "size"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, 0.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1.0),
        ({"quant_method": "fbgemm_fp8"}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, 2.0),
        ({"config_groups": {"a": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 4}}}}, 1.0),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        (None, 2.0),
    ],
)
def test_bytes_of_a_weight_are_as_it_is_quantized(quantization, size):
    assert weight_bytes(quantization, "bfloat16") == size


def test_given_options_stay_and_contradictions_are_named():
    target = describe_target(target_of("gpt_oss_20b"))
    options = DrafterConfig(rope_theta=10000.0, num_attention_heads=16, intermediate_size=999)
    filled, rows = derive.derive(options, target)
    said = {name: source for name, _, source in (re.split("  +", row.strip()) for row in rows)}
    assert (filled.rope_theta, filled.rope_scaling, filled.num_attention_heads) == (10000.0, {}, 16)
    assert (filled.num_key_value_heads, filled.head_dim) == (None, None)  # as many keys as heads, sharing the width
    assert said["rope_theta"] == "given, UNLIKE the target's 150000.0"
    assert said["rope_scaling"] == "given, UNLIKE the target's yarn, factor 32"
    assert said["intermediate_size"] == "given"
    # A part of a scaling goes over the target's, and another type replaces it.
    linear = {"rope_type": "linear", "factor": 2}
    for given, taken in (({"beta_fast": 1.0}, {**GPT_OSS, "beta_fast": 1.0}), (linear, linear)):
        assert derive.derive(DrafterConfig(rope_scaling=given), target)[0].rope_scaling == taken


def test_room_for_thoughts_ends_where_the_targets_positions_do_and_takes_nothing_away():
    target = describe_target(target_of("qwen3_8b"))

    def room(positions, scaling=target.rope_scaling, **data):
        known = replace(target, max_position_embeddings=positions, rope_scaling=scaling)
        return derive.room_for_thoughts(DataConfig(**data), known)

    assert room(6144) == room(2048, {"rope_type": "linear", "factor": 3.0}) == {derive.ANSWER: 4096, derive.WHOLE: 6144}
    assert room(6143) == {}
    assert room(9000, max_length=9000) == {derive.ANSWER: 4096, derive.WHOLE: 9000}


def test_of_a_part_of_a_shape_that_is_given_the_rest_follows():
    narrow = derive.derive(DrafterConfig(hidden_size=1024), describe_target(target_of("qwen3_8b")))[0]
    assert (narrow.num_attention_heads, narrow.num_key_value_heads) == (32, 8)
    assert narrow.head_dim is None, "the heads share its width"
    latent = describe_target(target_of("deepseek_v3"))
    assert derive.derive(DrafterConfig(architecture="mla"), latent)[0].q_lora_rank == 1536
    given = derive.derive(DrafterConfig(architecture="mla", kv_lora_rank=256), latent)[0]
    assert (given.kv_lora_rank, given.v_head_dim) == (256, 128)
    assert given.q_lora_rank is None, "which means queries of full rank"


def test_a_window_is_the_targets_where_every_layer_has_it():
    """As vLLM has it: of gpt-oss, whose every other layer sees all, a drafter is told of none."""
    raw = json.loads((PUBLISHED / "gpt_oss_20b" / "config.json").read_text())
    types = raw["layer_types"]
    windows = [described({**raw, "layer_types": given}).sliding_window for given in (types, ["sliding_attention"] * 24)]
    assert windows == [None, 128]
    assert described({"model_type": "mistral", "sliding_window": 512}).sliding_window == 512, "layers of one type"


def test_a_scaling_that_stretches_the_base_is_not_taken_in_part():
    hunyuans = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}
    target = replace(describe_target(target_of("qwen3_8b")), rope_scaling=hunyuans)
    filled, rows = derive.derive(DrafterConfig(), target)
    assert filled.rope_scaling == {}
    assert any("dynamic with alpha, with which no drafter can be served" in row for row in rows)


@pytest.mark.parametrize("depth", range(1, 13))
def test_default_layers_are_valid_for_any_depth_and_vllms_where_these_are(depth):
    layers = description.pick_layers(None, depth, ["deepseek_v3"])
    vllms = [2, depth // 2, depth - 3]
    assert layers == (vllms if vllms == sorted(set(vllms)) and depth > 5 else layers)
    assert len(layers) == min(3, depth)
    assert description.default_layers(depth) == layers


def test_a_training_that_goes_on_keeps_what_it_was_begun_with():
    """The second time as the first, also with a part of a scaling; an earlier default stays."""
    target = f"target.path={PUBLISHED / 'gpt_oss_20b'}"
    config = load_config([target, "drafter.rope_scaling.beta_fast=1"])
    first = derive.complete(config, None)
    begun = asdict(first.drafter)
    assert first.drafter.rope_scaling == {**GPT_OSS, "beta_fast": 1}
    assert derive.complete(config, None, begun) == first
    other = derive.complete(load_config([target, "drafter.rope_scaling.beta_fast=2"]), None, begun)
    assert other.drafter.rope_scaling["beta_fast"] == 2, "what is given now counts, and is not passed over"
    assert derive.complete(config, None, {**begun, "rms_norm_eps": 1e-4}).drafter.rms_norm_eps == 1e-4
    assert derive.complete(load_config([target]), None, {**begun, "rope_scaling": {}}).drafter.rope_scaling == {}


def test_an_open_learning_rate_is_of_the_drafters_width_and_shown_and_weight_decay_of_the_steps():
    target = f"target.path={PUBLISHED / 'gpt_oss_20b'}"
    rates = [["muon", "train.lr=null"], ["muon", "train.lr=2e-3"], ["adamw", "train.lr=null"]]
    rates += [["muon", "train.lr=null", f"drafter.hidden_size={width}"] for width in (64, 576, 7168)]
    configs = [load_config([target, f"train.optimizer={optimizer}", *words]) for optimizer, *words in rates]
    assert [derive.complete(config, None).train.lr for config in configs] == [1.3e-3, 2e-3, 1e-4, 3e-3, 3e-3, 8.5e-4]
    tables = [derive.planned_drafter(config, describe_target(config.target), 1000)[1] for config in configs[:2]]
    shown = [("0.0013", "muon's default for a drafter 2,880 wide")]
    assert [re.findall(r"train\.lr +(\S+) +(.*)", "\n".join(rows)) for rows in tables] == [shown, []]
    decays = {("muon", 576, 540): 1.0, ("muon", 576, 8): 1.0, ("muon", 576, 1200): 0.45, ("muon", 4096, 1200): 1.2}
    decays["adamw", 576, 540] = 0.0
    assert {given: derive.default_weight_decay(*given) for given in decays} == decays


def test_steps_are_small_unless_there_would_be_too_many_or_a_conversation_is_longer():
    # of so many tokens, epochs, tokens of the longest conversation
    steps = {(700_000, 6, 900): 2048, (5_120_000, 6, 2048): 2048, (5_120_100, 6, 2048): 2304}
    steps |= {(700_000, 6, 2049): 2304, (700_000, 6, 6144): 6144, (3e8, 6, 2048): 120_064, (3e8, 1, 2048): 20_224}
    assert {given: derive.default_batch_tokens(*given) for given in steps} == steps


def written(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return TargetConfig(path=str(folder))


NO_DRAFTER = "is a {}, for which eagle31 makes no drafter: EAGLE reads .*{}$"
DRAFTER = "is a drafter, not a target: set target.path to the model that it drafts"
NO_TARGETS = [
    ({"model_type": "cohere2"}, NO_DRAFTER.format("cohere2", "names no rms_norm_eps")),
    ({"model_type": "lfm2"}, NO_DRAFTER.format("lfm2", "class has none")),
    ({"model_type": "mixtral", "intermediate_size": 0}, "does not say moe_intermediate_size, which a drafter needs$"),
    # transformers raises what is no AttributeError for its head_dim, which is wider in every sixth layer.
    ({"model_type": "gemma4_text"}, "its layers differ in head_dim, so eagle31 makes no drafter for it$"),
    ({"model_type": "inkling_text"}, "is a inkling_text, for which eagle31 makes no drafter: it has not been tried$"),
    ({"model_type": "paligemma"}, "is a paligemma, for which eagle31 makes no drafter: it has not been tried$"),
    *(({"model_type": kind}, "its layers pass on 4 streams of states") for kind in ("hy_v4", "deepseek_v4")),
    ({"model_type": "qwen3", "draft_vocab_size": 200}, DRAFTER),
    ({"model_type": "qwen3", "architectures": ["Eagle3Speculator"]}, DRAFTER),
]


@pytest.mark.parametrize(("config", "said"), NO_TARGETS)
def test_what_no_drafter_can_be_made_for_is_refused_in_one_line_before_its_answers(tmp_path, config, said):
    if config["model_type"] not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know it")
    with pytest.raises(UserError, match=rf"^target\.path=.*{said}"):
        describe_target(written(tmp_path, config))


@pytest.mark.slow
def test_every_kind_whose_parts_cannot_be_read_is_refused_by_its_configuration_and_no_other():
    """Of all causal LMs of transformers that can be made with their defaults, without weights."""
    read, refused = set(), set()
    for kind in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} & {*CONFIG_MAPPING}):
        try:
            config = CONFIG_MAPPING[kind]()
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except Exception:  # defaults that make no model
            continue
        try:
            norm = copy.deepcopy(find_parts(model).norm).to_empty(device="cpu")
            for parameter in norm.parameters():
                torch.nn.init.normal_(parameter)
            read_norm(norm)
            read.add(kind)
        except UserError:
            refused.add(kind)
    assert len(read) > 50  # 55 with transformers 5.1
    unmade = {"lfm2_moe", "nemotron"}  # by their defaults
    assert refused > (description.NO_PARTS & {*CONFIG_MAPPING}) - unmade
    told = dict.fromkeys(read | refused, "")
    for kind in told:
        try:
            described({"model_type": kind})
        except UserError as error:
            told[kind] = str(error)
    assert {kind for kind in refused if not told[kind]} == set()
    refused = {kind for kind in read if "for which eagle31 makes no drafter" in told[kind]}
    assert {kind for kind in refused if "streams of states" not in told[kind]} <= description.NOT_DERIVED


def told(target, backend):
    return doubts(Config(name="t", target=target, regenerate=True, evaluate=EvaluateConfig(backend=backend)))


def test_layers_with_which_stage_4_cannot_decode_are_named_before_it(tmp_path):
    target = written(tmp_path, {"model_type": "qwen3_next"})
    cannot = "stage 4 cannot decode with the target's layers of type"
    assert f"{cannot} linear_attention: " in told(target, "transformers")["EVALUATION"]
    assert told(target, "vllm") == {}
    unknown = written(tmp_path, {"model_type": "of_tomorrow", "layers_block_type": ["mamba", "attention"]})
    assert f"{cannot} mamba: " in told(unknown, "transformers")["EVALUATION"]
    assert told(written(tmp_path, {"model_type": "qwen3"}), "transformers") == {}


def test_quantized_weights_that_cannot_be_read_here_are_said_before_any_stage(tmp_path, monkeypatch):
    text = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    target = written(tmp_path, {"model_type": "llava", "text_config": text})
    monkeypatch.setattr(description, "find_spec", lambda name: None)
    assert "needs optimum and gptqmodel" in told(target, "transformers")["LOADING"]
    target = written(tmp_path, text)
    for there, lacking in (set(), "optimum and gptqmodel"), ({"optimum"}, "gptqmodel"):
        monkeypatch.setattr(description, "find_spec", lambda name, there=there: name in there or None)
        doubt = told(target, "transformers")["LOADING"]
        assert f"needs {lacking} to read gptq weights: install it" in doubt
        assert doubt.endswith(": data.generate.server=vllm extract.engine=vllm evaluate.backend=vllm")
    by_vllm = {"extract": ExtractConfig(engine="vllm"), "evaluate": EvaluateConfig(backend="vllm")}
    given = DataConfig(conversations="c.jsonl")
    assert "LOADING" not in doubts(Config(name="t", target=target, data=given, **by_vllm))
    config = Config(name="t", target=target, regenerate=True, **by_vllm)
    assert doubts(config)["LOADING"].endswith("let vLLM run the target: data.generate.server=vllm")
    monkeypatch.setattr(description, "find_spec", lambda name: name)
    assert told(target, "transformers") == {}


def test_a_config_that_vllm_alone_is_told_of_is_doubtful(tmp_path):
    given = EvaluateConfig(backend="vllm", vllm_args={"hf_overrides": {"rope_theta": 1e6}})
    config = Config(name="t", target=written(tmp_path, {"model_type": "qwen3"}), evaluate=given)
    assert doubts(config)["CONFIG"].startswith("evaluate.vllm_args.hf_overrides affect only vLLM")


def test_an_adapter_is_no_target(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    target = TargetConfig(path=str(tmp_path))
    said = "is a LoRA adapter: set target.path to its base, whose drafter also serves the adapter"
    assert said in message_of(read_raw, target)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "holds a LoRA adapter beside a model" in message_of(read_raw, target)


# Kind → that of its text model, if it is multimodal: vLLM serves the whole. InternVL's text model is a Qwen 2, which
# vLLM serves with EAGLE 3, but not in InternVL.
SERVED = {"llama": None, "mistral3": "mistral", "qwen3_vl": "qwen3_vl_text"}
DOUBTED = {"internvl": "qwen2", "glm4v": "glm4v_text", "gemma3": "gemma3_text", "llava": "mixtral"}
DOUBTED |= dict.fromkeys(["mixtral", "glm4", "granitemoe"])


@pytest.mark.parametrize("kind", SERVED | DOUBTED)
def test_which_targets_vllms_own_class_serves_no_drafter_of_is_said(tmp_path, kind):
    text, raw = (SERVED | DOUBTED)[kind], {"model_type": kind, "logits_scaling": 6.0 if "granite" in kind else 1.0}
    target = written(tmp_path, raw | ({"text_config": {"model_type": text}} if text else {}))
    doubt, named = told(target, "vllm").get("SERVING"), kind if kind in description.NO_EAGLE3 else text
    if kind in SERVED:
        assert doubt is None
        return
    assert f"own class for {named} takes no EAGLE 3 draft" in doubt
    assert ("leaves out logits_scaling" in doubt) == (kind == "granitemoe")
    config = load_config([f"target.path={target.path}", "target.aux_layers=[0,2]"])
    with pytest.raises(UserError, match=rf"vLLM cannot provide the input of layer 0 of a {named}: remove 0$"):
        derive.planned_drafter(config, describe_target(target_of("qwen3_8b")), 32000)
