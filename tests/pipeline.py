"""A run folder for a tiny random target, made by hand as the stages before leave it."""

import json
import random
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from data_prep.dataset import FEATURES
from eagle31_train.common import artifacts
from eagle31_train.common.artifacts import checksum
from eagle31_train.compose import load_config
from eagle31_train.model import vocab
from eagle31_train.store.format import SHARDS, TARGET_LINE, TRAJECTORIES_LINE
from eagle31_train.store.sealed import seal, unseal

LAYERS, HIDDEN, VOCAB = 6, 32, 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
AUX = [1, 3, 5]
END = 3
KEPT = [i for i in range(VOCAB) if i % 5]
LENGTHS = {"train": [12, 7, 25, 9, 18, 3, 30, 11, 8, 16, 14, 21], "heldout": [10, 14, 6, 13]}


def tiny_llama(seed=0, **changes):
    """A random Llama whose final norm is not ones and whose logits have clear winners.

    lm_head is a permutation of the embedding: every token's most likely successor stands out, so
    that rounding the states does not change it, and a drafter can learn it in a few steps.
    """
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 128, "tie_word_embeddings": False, **changes})
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 1.0 if name.endswith("embed_tokens.weight") else 0.15
        parameter.data = noise * scale + (1.0 if parameter.dim() == 1 else 0.0)
    if not model.config.tie_word_embeddings:
        order = torch.randperm(VOCAB, generator=generator)
        model.lm_head.weight.data += model.get_input_embeddings().weight.data[order]
    return model


def write_data(run_dir, lengths=LENGTHS, seed=0, kept=KEPT, target_size=VOCAB, model=None):
    """run_dir/data with random tokens: a question, an answer, and sometimes a second turn; or, with a `model`,
    answers of one length that it writes itself."""
    rng = random.Random(seed)
    folder = Path(run_dir) / "data"
    splits = {}
    for split, sizes in lengths.items():
        rows = {
            "id": [f"{split}-{i}" for i in range(len(sizes))],
            "source": ["made"] * len(sizes),
            "input_ids": [[rng.randrange(VOCAB) for _ in range(size)] for size in sizes],
            "loss_mask": [[i >= 3 and not size - 6 <= i < size - 4 for i in range(size)] for size in sizes],
        }
        if model is not None:
            [size] = set(sizes)
            rows["input_ids"] = answered(model, [ids[:3] for ids in rows["input_ids"]], size)
            rows["loss_mask"] = [[i >= 3 for i in range(size)] for size in sizes]
        splits[split] = Dataset.from_dict(rows, features=FEATURES)
    # An empty split would be given no file, and then not load.
    DatasetDict(splits).save_to_disk(str(folder / "dataset"), num_shards=dict.fromkeys(splits, 1))
    vocab.write(folder / "vocab.safetensors", vocab.DraftVocab(np.array(kept, dtype=np.int64), target_size))
    inputs = {"seed": seed, "lengths": lengths, "tokenizer": "made", "template": "made", "vocab_size": target_size}
    artifacts.write_json(
        folder / "manifest.json",
        {
            "fingerprint": artifacts.fingerprint(inputs),
            "inputs": inputs,
            "dataset_fingerprint": artifacts.fingerprint([inputs, "rows"]),
            "end_ids": [END],
            "files": artifacts.list_files(folder, [file for file in folder.rglob("*") if file.is_file()]),
        },
    )


LAST = "checkpoints/step-000007"


def finish_training(run_dir, **more):
    """The manifest of a training on run_dir/data that has left that checkpoint; `more` of what it says."""
    train, data = run_dir / "train", run_dir / "data"
    trained_on = artifacts.read_json(data / "manifest.json", "the test")["dataset_fingerprint"]
    vocab_sha256 = artifacts.file_sha256(data / "vocab.safetensors")
    inputs = {"store": "f" * 16, "data": trained_on, "vocab": vocab_sha256[:16], "train": {"lr": 0.001}}
    files = artifacts.list_files(train, (train / LAST).iterdir())
    manifest = {"fingerprint": "e" * 16, "inputs": inputs, "files": files, "checkpoint": LAST, "steps": 7}
    artifacts.write_json(train / "manifest.json", manifest | more)


ANOTHER = {"name": "some/target", "revision": None, "weights": "0" * 16, "dtype": "bfloat16"}


def write_store(run_dir, target=ANOTHER):
    """Of run_dir/store as much as tells of which target it is."""
    manifest = {"fingerprint": "f" * 16, "inputs": {"target": target}}
    artifacts.write_bytes(run_dir / "store" / "manifest.json", seal(manifest))


@torch.no_grad()
def answered(model, rows, length):
    """Rows of tokens, with those that a model goes on with, greedily and one at a time, until there are `length`."""
    ids = torch.tensor(rows)
    while ids.shape[1] < length:
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids.tolist()


def make_run(folder, seed=0, **changes):
    """folder/target and folder/run/data."""
    save_quietly(tiny_llama(seed, **changes), folder / "target")
    write_data(folder / "run")


def save_quietly(model, folder):
    """save_pretrained without its progress bar; returns the folder."""
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder


def options(folder, *more):
    """The command line of a tiny run under `folder`."""
    return [
        "name=tiny",
        f"run_dir={folder / 'run'}",
        f"target.path={folder / 'target'}",
        "target.dtype=float32",
        "target.device=cpu",
        f"target.aux_layers={json.dumps(AUX).replace(' ', '')}",
        "extract.shard_tokens=40",
        "extract.batch_tokens=64",
        "drafter.intermediate_size=32",
        "drafter.num_attention_heads=4",
        "drafter.num_key_value_heads=2",
        "drafter.head_dim=8",
        "drafter.rms_norm_eps=1e-5",
        "drafter.rope_theta=10000.0",
        "drafter.max_position_embeddings=2048",
        "train.ttt_length=3",
        "train.epochs=3",
        "train.batch_tokens=60",
        "train.lr=0.01",
        "train.precision=no",
        "train.wandb=disabled",
        "evaluate.max_new_tokens=24",
        *more,
    ]


# A drafter with MLA instead.
WIDTHS = ["q_lora_rank=12", "kv_lora_rank=8", "qk_nope_head_dim=6", "qk_rope_head_dim=4", "v_head_dim=5"]
MLA = [f"drafter.{one}" for one in ("architecture=mla", "num_key_value_heads=null", "head_dim=null", *WIDTHS)]


def tiny_config(folder, *more):
    return load_config(options(folder, *more))


def contents(folder):
    """Every file under a folder: relative name → bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def timeless(store):
    """Every file of a store's folder, its manifest without the time it took."""
    files = contents(store)
    manifest = json.loads(files["manifest.json"])
    assert manifest.pop("seconds") > 0
    del manifest["check"]
    return {**files, "manifest.json": json.dumps(manifest)}


def reseal(store):
    """Let the lines and the manifest of a store list its files as they are now, as if written so."""

    def now(name, size):
        return {size: (store / name).stat().st_size, "checksum": checksum(store / name)}

    own = [str(path.relative_to(store)) for path in store.glob("shards/*.json")]
    for name in (SHARDS, TARGET_LINE, TRAJECTORIES_LINE, *own):
        if (file := store / name).exists():
            lines = [unseal(line) for line in file.read_bytes().splitlines(keepends=True)]
            file.write_bytes(b"".join(seal(line | now(line["name"], "size")) for line in lines))
    if (file := store / artifacts.MANIFEST).exists():
        manifest = unseal(file.read_bytes())
        manifest["files"] = {name: now(name, "bytes") for name in manifest["files"]}
        file.write_bytes(seal(manifest))


def assert_equal(ours, theirs):
    assert_close(ours, theirs, 0)


def assert_close(ours, theirs, tolerance):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def flip_bit(path, at=None):
    """Of the byte at `at`, or in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 4
    path.write_bytes(content)
