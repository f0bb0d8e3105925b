"""A tokenizer in Python alone, in the manner of tiktoken's: byte pairs by rank, and no offsets."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizer


class BytesTokenizer(PreTrainedTokenizer):
    """Tokens are bytes and merges of them, spelt as Latin-1 so that each is a text."""

    vocab_files_names = {"ranks_file": "ranks.json"}  # noqa: RUF012 (as transformers has it)

    def __init__(self, ranks_file, **kwargs):
        merged = json.loads(Path(ranks_file).read_text())
        self.ranks = {bytes([i]).decode("latin-1"): i for i in range(256)}
        self.ranks.update({token: 256 + i for i, token in enumerate(merged)})
        self.spelt = {i: token for token, i in self.ranks.items()}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.ranks)

    def get_vocab(self):
        return {**self.ranks, **self.added_tokens_encoder}

    def _tokenize(self, text, **kwargs):
        parts = list(text.encode().decode("latin-1"))
        while len(parts) > 1:
            pairs = [self.ranks.get(parts[i] + parts[i + 1], 1 << 30) for i in range(len(parts) - 1)]
            if min(pairs) == 1 << 30:
                break
            i = pairs.index(min(pairs))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return parts

    def _convert_token_to_id(self, token):
        return self.ranks[token]

    def _convert_id_to_token(self, index):
        return self.spelt[index]

    def convert_tokens_to_string(self, tokens):
        added = self.added_tokens_encoder
        data = b"".join(token.encode() if token in added else token.encode("latin-1") for token in tokens)
        return data.decode("utf-8", "replace")
