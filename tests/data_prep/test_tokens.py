"""Masks from the ids alone: a tokenizer in Python that comes with its target and reports no offsets."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from families import FAMILIES, by_pieces, row_of
from made import message_of

from data_prep.masks import samples
from data_prep.tokens import Tokens
from eagle31_train.common.errors import Refused
from eagle31_train.config import TargetConfig
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.pretrained import end_ids, load_tokenizer

HERE = Path(__file__).parent
KIMI = FAMILIES["kimi"]
# Merges that end inside a character of three bytes, and one that reaches from a character into the next.
MERGED = [b"\xe4\xbd", b"\xa0\xe5", b"\xe4\xb8", b"\xf0\x9f", b"th", b"the", b" t", b"er", b"in", b"ant", b"</", b"|>"]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Of a target whose tokenizer is Python code of its own."""
    folder = tmp_path_factory.mktemp("bytes")
    shutil.copy(HERE / "bytes_tokenizer.py", folder / "tokenization_bytes.py")
    (folder / "ranks.json").write_text(json.dumps([token.decode("latin-1") for token in MERGED]))
    base = 256 + len(MERGED)
    added = {
        str(base + i): {"content": token, "special": "think" not in token, "normalized": False}
        for i, token in enumerate(KIMI["special"])
    }
    config = {
        "tokenizer_class": "BytesTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_bytes.BytesTokenizer", None]},
        "added_tokens_decoder": added,
        "eos_token": "<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 512}))
    shutil.copy(HERE / "templates" / KIMI["template"], folder / "chat_template.jinja")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        template = ChatTemplate.load(TargetConfig(path=str(folder), trust_remote_code=True))
    assert not template.tokenizer.is_fast
    return template


@pytest.mark.parametrize("number", range(len(KIMI["cases"])))
def test_golden_without_offsets(template, number):
    case = KIMI["cases"][number]
    template, row = replace(template, template_args=case.get("args", {})), row_of(case)
    found = samples(template, row.messages, 10_000, row.tools)
    for (_, sample), pieces in zip(found.samples, case["samples"], strict=True):
        assert (sample.input_ids.tolist(), sample.loss_mask.tolist()) == by_pieces(template, pieces)


def test_a_place_between_markers_is_found_or_refused(template, monkeypatch):
    ids = template.encode("你好")
    assert "\ufffd" in template.decode(ids[:2]), "characters are spread over tokens"
    assert template.decode(ids) == "你好"
    tokens = Tokens(template, "<|im_end|>the ant<|im_middle|>你好")
    assert tokens.boundary(0) == 0
    assert tokens.boundary(len("<|im_end|>")) == 1
    assert template.decode(tokens.ids[: tokens.boundary(len("<|im_end|>the "))]) == "<|im_end|>the "
    assert tokens.boundary(len(tokens.text)) == len(tokens.ids)
    for inside in (3, len("<|im_end|>th"), len("<|im_end|>the ant<|im_middle|>你")):
        with pytest.raises(Refused, match="a boundary inside a token"):
            tokens.boundary(inside)
    encode = ChatTemplate.encode
    monkeypatch.setattr(ChatTemplate, "encode", lambda self, text: encode(self, text.replace("好", "")))
    with pytest.raises(Refused, match="does not reproduce the text"):
        Tokens(template, "<|im_end|>你好")


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_a_tokenizer_that_transformers_makes_up_is_none(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert "has no tokenizer files: copy" in message_of(load_tokenizer, TargetConfig(path=str(tmp_path)))


@pytest.mark.parametrize("config", [{"eos_token_id": [5, 7]}, {"text_config": {"eos_token_id": 7}}])
def test_answers_end_where_the_targets_files_say(tiny_target, tmp_path, config):
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    own = load_tokenizer(TargetConfig(path=str(folder)))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 3]}')
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    assert end_ids(own, TargetConfig(path=str(folder))) == sorted({own.eos_token_id, 0, 3})
    (folder / "generation_config.json").unlink()  # then transformers and vLLM read the other
    assert end_ids(own, TargetConfig(path=str(folder)))[-1] == 7
