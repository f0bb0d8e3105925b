"""A draft from the hub, broken: its config.json, its safetensors and their index."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import make_mla_shape, make_shape
from hypothesis import strategies as st
from mutating import ENDLESS, UNREADABLE, Acting, cases, documents, outcome, parts, spoil, texts, torn, with_header
from safetensors.torch import save
from spelling import random_tensors, speculators

from eagle31_train.checkpoint import contract
from eagle31_train.checkpoint.config_json import config_json
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.common.errors import UserError
from eagle31_train.model import vocab

SIZES = {"aux_layers": [1, 2], "vocab_size": 40, "draft_vocab_size": 12}
SIZES["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SHAPES = {"llama": make_shape(**SIZES), "mla": make_mla_shape(**SIZES)}
# Of a drafter that is whole.
TARGET = SimpleNamespace(embedding=torch.nn.Embedding(40, 16), head=torch.nn.Linear(16, 40, bias=False), depth=4)
CONFIGS = {name: config_json(shape, "float32", "a/target") for name, shape in SHAPES.items()}
CONFIGS["speculators"] = speculators(CONFIGS["llama"])
NAMES = ["eagle_config", "rope_scaling", "rope_parameters", "type", "layer_ids", "rope_theta", "layer_types"]
NAMES += ["quantization_config", "logit_scale", "partial_rotary_factor", "attention_factor", "speculators_model_type"]


def tensors_of(shape):
    kept = vocab.DraftVocab(torch.arange(0, 36, 3).numpy(), 40)
    return random_tensors(shape) | {"d2t": torch.from_numpy(kept.d2t), "t2d": torch.from_numpy(kept.t2d)}


FILES = {name: save(tensors_of(SHAPES.get(name, SHAPES["llama"]))) for name in CONFIGS}


def read(folder):
    """All that is done with a draft before it drafts."""
    checkpoint = DrafterCheckpoint.open(folder, target_layers=lambda: 4)
    assert checkpoint.tensors
    checkpoint.check_fits(TARGET)
    contract.caveats(checkpoint.shape, 4096)
    return checkpoint.load(TARGET, torch.float32, torch.float32)


@pytest.fixture
def draft(tmp_path):
    """Writes a draft of one of the kinds, with files of a case in the place of its own; the folder."""

    def write(kind, **files):
        for path in tmp_path.iterdir():
            path.unlink()
        good = {"config__json": json.dumps(CONFIGS[kind]).encode(), "model__safetensors": FILES[kind]}
        for name, data in (good | files).items():
            (tmp_path / name.replace("__", ".")).write_bytes(data)
        return tmp_path

    return write


KINDS = st.sampled_from(sorted(CONFIGS))


def configs(kind):
    return texts(documents([CONFIGS[kind]], NAMES)).map(lambda data: (kind, data))


@cases(KINDS.flatmap(configs), quick=60, thorough=20_000)
def test_config_json(case, draft):
    outcome(lambda: read(draft(case[0], config__json=case[1])))


@st.composite
def headers(draw, kind):
    header, data = parts(FILES[kind])
    if draw(st.integers(0, 3)) == 0:
        return kind, draw(torn(FILES[kind]))
    dtypes = ["F8_E4M3", "F8_E8M0", "F4", "BOOL", "I64", "F64", "BF16", "U8", "C64"]
    names = ["model.norm.weight", "layers.0.fc.weight", "midlayer.self_attn.qkv_proj.weight", "embed_tokens.weight"]
    text = draw(texts(documents([header], names, dtypes)))
    length = draw(st.sampled_from([len(text)] * 8 + [0, 2**63, 10**9, len(text) + 8]))
    return kind, length.to_bytes(8, "little") + text + data


@cases(KINDS.flatmap(headers), quick=130, thorough=15_000)
def test_safetensors(case, draft):
    outcome(lambda: read(draft(case[0], model__safetensors=case[1])))


def test_a_tensor_of_impossibly_many_rows_is_refused(draft):
    header, data = parts(FILES["llama"])
    file = with_header(header | {"lm_head.bias": ENDLESS}, data)
    assert isinstance(outcome(lambda: read(draft("llama", model__safetensors=file))), UserError)


WHOLE = {"metadata": {"total_size": 9}, "weight_map": dict.fromkeys(parts(FILES["llama"])[0], "model.safetensors")}


@cases(texts(documents([WHOLE], ["weight_map"], ["config.json", "model.safetensors"])), quick=60, thorough=8_000)
def test_index(case, draft):
    outcome(lambda: read(draft("llama", model__safetensors__index__json=case)))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", [*UNREADABLE, "folder"])
def test_links_to_nowhere_and_to_what_never_ends(name, kind, draft):
    folder = draft("llama")
    spoil(folder / name, kind)
    assert isinstance(outcome(lambda: read(folder)), UserError)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_no_pickle_is_opened(name, draft, tmp_path):
    folder, made = draft("llama"), tmp_path / "made"
    (folder / "model.safetensors").unlink()
    torch.save(Acting(made), folder / name)
    problem = outcome(lambda: read(folder))
    assert isinstance(problem, UserError)
    assert not made.exists()
    if name.endswith(".bin"):
        assert "pickles (pytorch_model.bin) are never opened" in str(problem)
        torch.load(folder / name, weights_only=False)
        assert made.exists(), "it would have"


@pytest.mark.parametrize("kind", CONFIGS)
def test_whole_drafts_are_read(kind, draft):
    assert not isinstance(outcome(lambda: read(draft(kind))), UserError)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("llama", {"vocab_size": 10**15, "draft_vocab_size": 10**15}, r"config\.json gives (draft_)?vocab_size"),
        ("mla", {"rope_scaling": CONFIGS["mla"]["rope_scaling"] | {"mscale": 1e308}}, "an mscale must be from"),
        ("mla", {"qk_rope_head_dim": 7}, "must be even, since RoPE rotates pairs"),
        ("llama", {"head_dim": 7}, "must be even, since RoPE rotates pairs"),
    ],
)
def test_sizes_that_no_draft_has_are_refused_by_name(kind, change, said, draft):
    config = json.dumps(CONFIGS[kind] | change).encode()
    assert re.search(said, str(outcome(lambda: read(draft(kind, config__json=config)))))
