"""A tokenizer, a target and a server small enough to be made on the spot."""

from pathlib import Path

import pytest
from answering import answering, completion
from families import byte_pairs
from transformers import PreTrainedTokenizerFast

from eagle31_train.targets.chat import ChatTemplate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["the quick brown fox jumps over the lazy dog", "user assistant system hello hello world, how are you?"]


def make_tokenizer(*more: str) -> PreTrainedTokenizerFast:
    """Common words, and those in `more`, are one token."""
    backend = byte_pairs([*WORDS, *more], 400, ("<|pad|>", "<|im_start|>", "<|im_end|>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=CHATML
    )


@pytest.fixture(scope="session")
def breaks_tokenizer() -> PreTrainedTokenizerFast:
    """As GPT-2's: two line breaks are one token at the end of a text, and two tokens before a word."""
    return make_tokenizer("a\n\n")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def chatml(tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id], tokenizer.chat_template)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with its tokenizer, as a directory. It writes ASCII alone: random bytes would seldom be text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("target")
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=448,  # more rows than the tokenizer has tokens, as many targets have
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    written = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    text = [token for token, piece in enumerate(written) if piece.isascii() and not piece.startswith("<|")]
    never = sorted({*range(448)} - {*text, tokenizer.eos_token_id})
    # A state's first number is about the same wherever it stands, so that a weight on it is what a bias would be.
    model.model.embed_tokens.weight.data[:, 0] = 0.05
    model.lm_head.weight.data[:, 0] = 0.0
    model.lm_head.weight.data[never, 0] = -100.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def server(tokenizer):
    """A server that gives the status and bytes that its `reply` has for a request's body."""
    with answering(lambda handler, body: handler.send(*handler.server.reply(body))) as server:
        server.reply = lambda body: completion(tokenizer.encode("an answer<|im_end|>"))
        yield server
