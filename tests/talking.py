"""Small tokenizers under the chat templates of several families."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eagle31_train.evaluation.rendering import Rendering

FOLDER = Path(__file__).parent / "data_prep" / "templates"
FAMILIES = {name: (FOLDER / f"{name}.jinja").read_text() for name in ("smollm2", "llama3", "qwen3")}
FAMILIES["chatml"] = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The system message stands in the first question, and a default one in its place.
FAMILIES["inside"] = (
    "{% set given = messages[0].content if messages[0].role == 'system' else 'Be brief.' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}<s>[INST] "
    "{% if loop.first %}<<SYS>>{{ given }}<</SYS>>\n\n{% endif %}{{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
SPECIAL = ["<|begin_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]
WORDS = [
    "the quick brown fox jumps over the lazy dog, and what is the question here?",
    "Here are some texts from our archive. They may have nothing to do with my question.",
    "user assistant system Text 1 Text 2 hello hello world, how are you? Größe, 你好",
]


def make_tokenizer(family: str = "smollm2") -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, so that cutting a text between tokens may change what they are."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(WORDS * 5, trainer)
    bos = {"llama3": "<|begin_of_text|>", "inside": "<s>"}.get(family, "<|im_start|>")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token="<|im_end|>",
        additional_special_tokens=SPECIAL,
        chat_template=FAMILIES[family],
    )


def make_rendering(family: str = "smollm2") -> Rendering:
    return Rendering(make_tokenizer(family))
