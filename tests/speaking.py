"""Small random targets of several families, as folders like a user's, and the command that makes a drafter of one.

They say nothing, but not just anything: some forty words, always onwards, so that questions and answers end, and are
read back as they were written.
"""

import sys
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from families import FAMILIES, make_tokenizer
from pipeline import save_quietly
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

from eagle31_train import __main__, run
from eagle31_train.targets.chat import ChatTemplate

SYLLABLES = ("ka", "lo", "mi", "nu", "re", "ta"), ("ba", "de", "fo", "gu", "si", "zo")
WORDS = ["".join(syllables) for syllables in product(*SYLLABLES)]
MARKUP = ["user", "assistant", "analysis", "final", "[INST] [/INST]"]
REACH, FOLLOWERS = 9, 6  # how far ahead of a word those lie that may follow it, and how many these are
HIDDEN = 128
GAIN = 0.5  # of what the layers add, by which the context chooses among the followers
COMMON = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2}  # heads as vLLM's CPU kernels want


def sizes(model_type: str, layers: int, mlp: int, eps: float, positions: int, rope: dict, **more: Any) -> dict:
    """What is unlike the others' in a family's configuration; `rope` with the kind and theta of RoPE."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "intermediate_size": mlp,
        "rms_norm_eps": eps,
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", **rope},
        **more,
    }


LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "rope_theta": 1.5e5}
LLAMA3["original_max_position_embeddings"], YARN["original_max_position_embeddings"] = 128, 64
# Family → its sizes, and the chat format that it speaks.
TARGETS = {
    "llama-tied": (sizes("llama", 7, 192, 1e-5, 1024, LLAMA3, tie_word_embeddings=True), "llama3"),
    "qwen3": (sizes("qwen3", 4, 160, 1e-6, 768, {"rope_theta": 1e6}, head_dim=64), "qwen3"),
    "qwen3-moe": (sizes("qwen3_moe", 5, 160, 1e-6, 768, {"rope_theta": 1e6}, head_dim=64, **EXPERTS), "qwen3"),
    "mistral-sliding": (sizes("mistral", 6, 144, 1e-5, 512, {"rope_theta": 1e4}, sliding_window=16), "mistral"),
    "gpt-oss": (sizes("gpt_oss", 6, 64, 1e-5, 512, YARN, head_dim=64, sliding_window=16, **LOCAL), "gpt_oss"),
}


def make(name: str, folder: Path) -> Path:
    """Write a target of TARGETS; returns its folder."""
    fields, chat = TARGETS[name]
    words = [*(f"{word} {word}" for word in WORDS), *MARKUP]
    tokenizer = make_tokenizer(FAMILIES[chat], words, 500)
    template = ChatTemplate(tokenizer, tokenizer.convert_tokens_to_ids(FAMILIES[chat]["end"]), tokenizer.chat_template)
    options = {**COMMON, "tie_word_embeddings": False, **fields, "vocab_size": -(-len(tokenizer) // 64) * 64}
    tokens = {"bos_token_id": None, "eos_token_id": template.end_ids[0], "pad_token_id": None}
    config = CONFIG_MAPPING[fields["model_type"]](**options, **tokens)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for of, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        small = parameter.dim() == 1 or "bias" in of
        parameter.data = 0.1 * noise + ("norm" in of) if small else noise * GAIN / parameter.shape[-1] ** 0.5
    teach(model, grammar(template, generator), generator)
    model.generation_config = GenerationConfig(eos_token_id=template.end_ids)
    tokenizer.save_pretrained(folder)
    return save_quietly(model, folder)


def grammar(template: ChatTemplate, generator: torch.Generator) -> dict[int, list[int]]:
    """Which tokens may follow a token: words a later word, the last ones an end, of the user's turn or the answer's."""
    vocabulary = template.tokenizer.get_vocab()
    bare, spaced = ([vocabulary[before + word] for word in WORDS] for before in ("", "Ġ"))
    question, answer = {"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}
    before, _, after = template.render([question], add_generation_prompt=True).partition("QUESTION")
    header = []
    if "<|channel|>" in vocabulary:  # an answer begins with the name of its channel
        header = template.encode(template.render([question, answer]).partition("ANSWER")[0])
        header = header[len(template.prompt_ids([question])) - 1 :]
    end = template.encode(after)
    last = [template.end_ids[0] if header else end[0], template.end_ids[0]]
    follow = {first: [second] for part in (header, end) for first, second in pairwise(part)}
    follow |= dict.fromkeys([template.encode(before)[-1], header[-1] if header else end[-1]], bare[:REACH])
    for i, words in enumerate(zip(bare, spaced, strict=True)):
        later = [
            spaced[i + 1 + j] for j in torch.randperm(REACH, generator=generator).tolist() if i + 1 + j < len(WORDS)
        ]
        follow |= dict.fromkeys(words, later[:FOLLOWERS] if i + REACH < len(WORDS) else last[i % 2 :][:1])
    return follow


def teach(model: Any, follow: dict[int, list[int]], generator: torch.Generator) -> None:
    """Make those that may follow a token the likeliest; what the layers add of the context chooses among them.

    In lm_head; where that is the embedding, in the last layer's MLP, whose keys are the tokens' embeddings.
    """
    embedding = model.get_input_embeddings().weight
    embedding.data = 0.3 * torch.randn(embedding.shape, generator=generator)
    tokens = sorted({*follow, *chain.from_iterable(follow.values())})  # none is a bit of another
    embedding.data[tokens] = torch.linalg.qr(embedding.data[tokens].T)[0].T * HIDDEN**0.5
    if not model.config.tie_word_embeddings:
        head = torch.zeros_like(embedding)
        for token, after in follow.items():
            head[after] += 16 / HIDDEN * embedding[token]
        head *= getattr(model.config, "logits_scaling", None) or 1  # by which a Granite divides
        model.lm_head.weight.data = head
        return
    mlp, tokens = model.model.layers[-1].mlp, list(follow)
    mlp.gate_proj.weight.data[: len(tokens)] = mlp.up_proj.weight.data[: len(tokens)] = embedding[tokens] * 8 / HIDDEN
    for i, token in enumerate(tokens):
        mlp.down_proj.weight.data[:, i] = (embedding[follow[token]].sum(0) - embedding[token]) / 20
    model.model.norm.weight.data *= 0.2


# On a CPU in seconds, and in float32, in which speculation must change nothing.
SMALL = ["target.dtype=float32", "target.device=cpu", "train.precision=no", "train.wandb=disabled"]
SMALL += ["data.self_prompts.count=20", "data.self_prompts.max_new_tokens=32", "data.heldout=0.4"]
SMALL += ["data.generate.max_new_tokens=32", "train.ttt_length=3", "train.max_steps=24", "train.epochs=24"]
SMALL += ["train.batch_tokens=256", "train.lr=1e-2", "evaluate.num_prompts=4", "evaluate.max_new_tokens=16"]
SMALL += ["evaluate.max_speculative_tokens=3"]


def run_all_stages(target: Path, name: str, folder: Path, *options: str) -> Path:
    """`eagle31 run` of a target's path alone, in `folder`; returns the run's folder."""
    return run_stages(folder, f"target.path={target}", f"name={name}", *SMALL, *options) / name


def run_stages(folder: Path, *options: str) -> Path:
    """`eagle31 run` in `folder`; returns the folder of its runs.

    The stages, which `run` starts as processes, are called with their command lines in this one.
    """

    def finished(command: list[str], _: dict[str, str]) -> int:
        first = next(i for i, word in enumerate(command) if word in run.STAGES)
        AcceleratorState._reset_state(True)
        here.setattr(sys, "argv", ["eagle31", *command[first:]])
        __main__.main()
        return 0  # a stage that fails raises SystemExit

    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        here.setenv("ACCELERATE_USE_CPU", "true")
        here.setattr(sys, "path", [*sys.path])
        here.setattr(run, "finished", finished)
        here.setattr(sys, "argv", ["eagle31 run", *options])
        run.main()
    AcceleratorState._reset_state(True)
    return folder / "runs"
