"""What is learnt of conversations in the formats of five families, piece by piece, as golden/*.yaml has it."""

from pathlib import Path

import pytest
import yaml
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from data_prep.messages import parse
from data_prep.template import ChatTemplate
from data_prep.turns import samples

HERE = Path(__file__).parent
WORDS = ["the quick brown fox jumps over the lazy dog", "user assistant system hello world, how are you? 你好世界 再见"]
FAMILIES = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (HERE / "golden").glob("*.yaml")}
CASES = [
    pytest.param(f, i, id=f"{f}-{i}") for f, family in sorted(FAMILIES.items()) for i in range(len(family["cases"]))
]


def load(family: dict, args: dict) -> ChatTemplate:
    """A byte-level tokenizer with the family's markup as added tokens, and its template."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(WORDS * 5, trainer)
    backend.add_special_tokens(family["special"])
    backend.add_tokens([AddedToken(token, normalized=False) for token in family.get("added", [])])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=family["end"][0])
    ends = [tokenizer.convert_tokens_to_ids(token) for token in family["end"] if token in tokenizer.get_vocab()]
    template = (HERE / "templates" / family["template"]).read_text(encoding="utf-8")
    return ChatTemplate(tokenizer, ends, template, args)


def learn(template: ChatTemplate, case: dict):
    row = parse({"messages": case["messages"], "tools": case.get("tools")}, "messages", "f:1", "f-1")
    assert row.problem is None
    return samples(template, row.messages, 10_000, row.tools)


def by_pieces(template: ChatTemplate, pieces: list) -> tuple[list[int], list[bool]]:
    ids, mask = [], []
    for learnt, text in pieces:
        piece = template.encode(text)
        ids += piece
        mask += [bool(learnt)] * len(piece)
    return ids, mask


def in_pieces(template: ChatTemplate, sample) -> list:
    """A sample as readable pieces: what pytest shows when one differs."""
    pieces = []
    for token, learnt in zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if not pieces or pieces[-1][0] != learnt:
            pieces.append([learnt, []])
        pieces[-1][1].append(token)
    return [[int(learnt), template.decode(ids)] for learnt, ids in pieces]


def joined(pieces: list) -> list:
    """Pieces with neighbours of one kind put together."""
    whole = []
    for learnt, text in pieces:
        if whole and whole[-1][0] == learnt:
            whole[-1][1] += text
        else:
            whole.append([learnt, text])
    return whole


@pytest.mark.parametrize(("family", "number"), CASES)
def test_golden(family, number):
    case = FAMILIES[family]["cases"][number]
    template = load(FAMILIES[family], case.get("args", {}))
    found = learn(template, case)
    assert found.refused == []
    assert [in_pieces(template, sample) for _, sample in found.samples] == [joined(p) for p in case["samples"]]
    for (_, sample), pieces in zip(found.samples, case["samples"], strict=True):
        ids, mask = by_pieces(template, pieces)
        assert sample.input_ids.tolist() == ids
        assert sample.loss_mask.tolist() == mask
    assert found.inserted == case.get("inserted", 0)
    assert found.split == (len(case["samples"]) > 1)
