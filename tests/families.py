"""The golden conversations of data_prep: families of chat formats, each with its markup, template and cases."""

import json
from pathlib import Path
from typing import Any

import yaml
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from eagle31_train.rows.formats import Row, parse
from eagle31_train.targets.chat import ChatTemplate

HERE = Path(__file__).parent / "data_prep"
WORDS = ["the quick brown fox jumps over the lazy dog", "user assistant system hello world, how are you? 你好世界 再见"]
FAMILIES = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (HERE / "golden").glob("*.yaml")}


def byte_pairs(words: list[str], size: int, special: tuple[str, ...] = ()) -> Backend:
    """A byte-level BPE of so many tokens, trained on these words: every text can be spelt. `special` come first."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(words * 5, trainer)
    return backend


def make_tokenizer(family: dict, words: list[str] = WORDS, size: int = 400) -> PreTrainedTokenizerFast:
    """A tokenizer trained on these words, with the family's markup added, and its template."""
    backend = byte_pairs(words, size)
    backend.add_special_tokens(family["special"])
    backend.add_tokens([AddedToken(token, normalized=False) for token in family.get("added", [])])
    template = (HERE / "templates" / family["template"]).read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=family["end"][0], chat_template=template)


def load(family: dict, args: dict) -> ChatTemplate:
    """The family's template, with a tokenizer for it."""
    tokenizer = make_tokenizer(family)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in family["end"] if token in tokenizer.get_vocab()]
    return ChatTemplate(tokenizer, ends, tokenizer.chat_template, args)


def write_rows(path: Path, rows: list[dict]) -> str:
    """A file of JSON lines; returns its path, as an option takes it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def says(content: str | None, **more: Any) -> dict:
    """An answer."""
    return {"role": "assistant", "content": content, **more}


def row_of(case: dict) -> Row:
    """A case as data_prep reads it."""
    row = parse({"messages": case["messages"], "tools": case.get("tools")}, "messages", "f:1", "f-1")
    assert row.problem is None
    return row


def by_pieces(template: ChatTemplate, pieces: list) -> tuple[list[int], list[bool]]:
    """Token ids and loss mask of pieces of text, each (supervised, text)."""
    ids, mask = [], []
    for supervised, text in pieces:
        piece = template.encode(text)
        ids += piece
        mask += [bool(supervised)] * len(piece)
    return ids, mask
