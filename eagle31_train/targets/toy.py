"""A toy of Kimi's kind: a random DeepSeek-V3 target with Kimi's text format, for trying the whole path on a CPU.

    python -m eagle31_train.targets.toy

Made by transformers' own class: MLA with YaRN, one dense layer, then experts with a shared one. After every word one of
three others follows, which of them the context decides. So a drafter can learn it within a minute.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Generator, Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from eagle31_train.common import artifacts, locations
from eagle31_train.provenance import LAYOUTS
from eagle31_train.targets.embedded import command, make_folder

OUT = locations.MODELS / "kimi-toy"
PROMPTS = locations.STAGES / "data_prep" / "prompts"
CORPUS = [PROMPTS / f"{name}.jsonl" for name in ("prompts", "kimi_chinese", "kimi_agent")]  # the tokenizer's words
TEMPLATE = Path(__file__).with_name("kimi_toy.jinja")
SIZES = Path(__file__).with_name("kimi_toy.json")
MADE_BY = "eagle31_train.targets.toy"

SPECIAL = [
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|start_header_id|>", "<|end_header_id|>",
    "[EOT]", "<|im_system|>", "<|im_middle|>", "[UNK]", "[PAD]",
]  # fmt: skip
PLAIN = [  # added tokens that are not special, since answers contain them as text
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<think>", "</think>",
]  # fmt: skip
BPE = 1500  # tokens of the tokenizer before SPECIAL and PLAIN
VOCAB = 1536  # rows of the model: a few more than tokens, as in Kimi
WORDS = 96  # words that thoughts are made of, and as many for answers
FOLLOWERS = 3  # words that may follow each of them
REACH = 6  # how far ahead the followers are: a thought has about thirty words


def main(argv: list[str] | None = None) -> None:
    command(make, OUT, "Make the random target of +experiment=kimi_toy.", argv)


def make(out: Path = OUT, seed: int = 0, **changes: Any) -> Path:
    """Write the target to `out`: bf16 weights, tokenizer with chat template, configuration with `changes`. Do nothing
    if `out` is that target already. UserError if it holds something else."""
    recipe = {"made_by": MADE_BY, "layout": LAYOUTS["toy_target"], "seed": seed, "changes": changes}
    recipe["files"] = [artifacts.file_sha256(file) for file in (*CORPUS, TEMPLATE)]

    def fill(folder: Path) -> dict[str, Any]:
        tokenizer = make_tokenizer()
        make_model(tokenizer, seed, **changes).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {}

    return make_folder(out, "made_by", recipe, fill)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the repository's prompts, and add Kimi's markers."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator((line for file in CORPUS for line in file.read_text("utf-8").splitlines()), trainer)
    backend.add_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in PLAIN])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
        bos_token="[BOS]",
        eos_token="[EOS]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, **changes: Any) -> DeepseekV3ForCausalLM:
    """Make random bf16 weights, the same for the same seed, whose greedy answers have thoughts, words and an end.

    The configuration is Kimi's with smaller sizes (kimi_toy.json). kv_lora_rank and qk_rope_head_dim are Kimi's own:
    vLLM's MLA takes no others on a CPU. YaRN starts from few positions, so that conversations of some hundred tokens
    lie beyond them as Kimi's longest do.
    """
    fields: dict[str, Any] = {"vocab_size": VOCAB, **json.loads(SIZES.read_text(encoding="utf-8"))}
    for name in ("bos", "eos", "pad"):
        fields[f"{name}_token_id"] = tokenizer.convert_tokens_to_ids(f"[{name.upper()}]")
    config = DeepseekV3Config(**{**fields, "dtype": torch.bfloat16, **changes})
    model = DeepseekV3ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        if "rotary" in name:
            continue
        random = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() == 1:  # norms, and the bias that selects experts
            tensor.data = 0.1 * random + ("norm" in name)
        else:
            # Gain over a layer that keeps its input's scale: the context counts, but the last word counts most.
            gain = 0.5 if "o_proj" in name or "down_proj" in name else 3.0 if "gate.weight" in name else 1.0
            tensor.data = random * gain / tensor.shape[-1] ** 0.5
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    model.model.embed_tokens.weight.data = embedding
    model.lm_head.weight.data = _head(embedding, _grammar(tokenizer, generator), generator)
    ends = [tokenizer.convert_tokens_to_ids(name) for name in ("[EOS]", "<|im_end|>")]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=config.pad_token_id)
    return model.bfloat16()


def _head(embedding: Tensor, followers: dict[int, list[int]], generator: Generator) -> Tensor:
    """Return lm_head [V, D]. A token's row sums the embeddings that it may follow, and a random part orthogonal to all.

    So the context chooses among the followers of a token. Tokens that follow none stay zero.
    """
    own = torch.randn(embedding.shape, generator=generator)
    basis = torch.linalg.qr(embedding[sorted(followers)].T)[0]
    head = torch.zeros_like(embedding)
    for token, after in followers.items():
        head[after] += 0.13 * embedding[token]
    named = sorted({follower for after in followers.values() for follower in after})
    head[named] += 0.16 * (own - own @ basis @ basis.T)[named]
    return head


def _grammar(tokenizer: PreTrainedTokenizerFast, generator: Generator) -> dict[int, list[int]]:
    """Return which tokens may follow which: thoughts are made of one half of the words, answers of the other.

    Each of these tokens is a whole word with the space before it, so that text is tokenized back to the same ids.
    """
    vocabulary = tokenizer.get_vocab()
    begins = _spelt(tokenizer, [t for t in vocabulary if re.fullmatch("[A-Z][a-z]+", t)])
    words = _spelt(tokenizer, [t for t in vocabulary if re.fullmatch("Ġ[a-z]+", t)])
    order = torch.randperm(len(words), generator=generator).tolist()

    def some(of: Sequence[int]) -> list[int]:
        return [of[i] for i in torch.randperm(len(of), generator=generator)[:FOLLOWERS].tolist()]

    thought, answer = ([words[i] for i in order[k * WORDS : (k + 1) * WORDS]] for k in range(2))
    halves = [begins[k::2] for k in range(2)]
    think, close, end, middle = (vocabulary[name] for name in ("<think>", "</think>", "<|im_end|>", "<|im_middle|>"))
    result: dict[int, list[int]] = {}
    for kind, capitals, before, last in (
        (thought, halves[0], (think,), close),
        (answer, halves[1], (middle, close), end),
    ):
        opening = some(capitals)
        result |= dict.fromkeys(before, opening)
        result |= {token: some(kind[:REACH]) for token in opening}
        # Only forward, so that no answer loops.
        result |= {token: some(kind[i + 1 : i + 1 + REACH]) or [last] for i, token in enumerate(kind)}
    return result


def _spelt(tokenizer: PreTrainedTokenizerFast, tokens: list[str]) -> list[int]:
    """Return the ids, in ascending order, of those tokens whose text is tokenized back into just that token."""
    vocabulary = tokenizer.get_vocab()
    ids = sorted(vocabulary[token] for token in tokens)
    return [i for i in ids if tokenizer.encode(tokenizer.decode([i]), add_special_tokens=False) == [i]]


if __name__ == "__main__":
    main()
