"""A small tokenizer under SmolLM2's chat template."""

from pathlib import Path

from families import byte_pairs
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle31_train.targets.chat import ChatTemplate

TEMPLATE = Path(__file__).parent / "data_prep" / "templates" / "smollm2.jinja"
SPECIAL = ["<|begin_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]
WORDS = [
    "the quick brown fox jumps over the lazy dog, and what is the question here?",
    "Here are some texts from our archive. They may have nothing to do with my question.",
    "user assistant system Text 1 Text 2 hello hello world, how are you? Größe, 你好",
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, so that cutting a text between tokens may change what they are."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs(WORDS, 420, tuple(SPECIAL)),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        additional_special_tokens=SPECIAL,
        chat_template=TEMPLATE.read_text(),
    )


def whole_words(words: list[str], **more: str) -> PreTrainedTokenizerFast:
    """Each of these words is a token, and the first stands for all others."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=words[0], **more)


def make_template() -> ChatTemplate:
    tokenizer = make_tokenizer()
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id], tokenizer.chat_template)
