"""A training whose input is the same on every machine, to the bit, and its losses as they were once measured.

    python tests/golden.py            # from the project's root: train it anew and write tests/train/golden.json

Do that only where the mathematics was meant to change, and say so in the commit. Nothing of the input is computed in
floating point but by operations that IEEE 754 rounds alike everywhere.
"""

import json
import os
import platform
import random
import sys
from pathlib import Path

import numpy as np
import torch
from made import Made, plan_of, states_of
from pipeline import tiny_config

from eagle31_train.common import artifacts
from eagle31_train.model import vocab
from eagle31_train.store.document import Document

FILE = Path(__file__).parent / "train" / "golden.json"
STEPS, VOCAB, HIDDEN, LAYERS = 100, 48, 16, [1, 2, 3]
KEPT = [token for token in range(VOCAB) if token % 6]
DATA = "golden"
# Beside those of a tiny run.
OPTIONS = [
    "target.aux_layers=[1,2,3]",
    "drafter.intermediate_size=24",
    "drafter.head_dim=4",
    "train.ttt_length=4",
    "train.epochs=40",
    f"train.max_steps={STEPS}",
    "train.batch_tokens=160",
    "train.lr=0.002",
    "train.weight_decay=0.01",
    "train.checkpoint_every=100",
]


class Chance(random.Random):
    """Python's own random numbers, which no version or machine changes."""

    def tensor(self, *size: int) -> torch.Tensor:
        """Between -1 and 1, in steps that bf16 holds exactly."""
        numbers = [self.getrandbits(7) - 64 for _ in range(int(np.prod(size)))]
        return (torch.tensor(numbers, dtype=torch.float32) / 64).view(size)


def make_run(folder: Path) -> Path:
    """run_dir with data and a store: sentences in which tokens mostly have one successor; a target that knows it."""
    chance = Chance(31)
    successor = chance.sample(range(VOCAB), VOCAB)
    embed, head, norm = chance.tensor(VOCAB, HIDDEN), chance.tensor(VOCAB, HIDDEN), chance.tensor(HIDDEN) / 4 + 1

    def document(length: int) -> Document:
        tokens = [chance.randrange(VOCAB)]
        while len(tokens) < length:
            tokens.append(successor[tokens[-1]] if chance.random() < 0.8 else chance.randrange(VOCAB))
        ids = torch.tensor(tokens)
        expected = torch.tensor(successor)[ids]
        last = head[expected] + chance.tensor(length, HIDDEN) / 4
        aux = torch.stack([embed[ids] / 2, (embed[ids] + head[expected]) / 4, head[expected] / 2], 1)
        mask = [4 <= place < length - 6 or place > length - 4 for place in range(length)]
        aux = aux + chance.tensor(length, len(LAYERS), HIDDEN) / 8
        return Document.of(ids, torch.tensor(mask), expected, aux.bfloat16(), last.bfloat16())

    made = Made(hidden=HIDDEN, shard_tokens=100)
    made.documents = {
        "heldout": [document(chance.randrange(12, 40)) for _ in range(4)],
        "train": [document(chance.randrange(12, 60)) for _ in range(16)],
    }
    made.states = states_of(LAYERS, HIDDEN, VOCAB)
    made.plan = plan_of(made.documents, made.shard_tokens, made.states)
    made.provenance = {"fingerprint": DATA, "inputs": {"data": DATA, "target": {}}, "states": made.states}
    made.weights = {"embed_tokens": embed.bfloat16(), "norm": norm, "lm_head": head.bfloat16()}
    made.write(folder / "store")
    (folder / "data").mkdir()
    vocab.write(folder / "data" / "vocab.safetensors", vocab.DraftVocab(np.array(KEPT, dtype=np.int64), VOCAB))
    artifacts.write_json(folder / "data" / "manifest.json", {"dataset_fingerprint": DATA, "inputs": {}})
    return folder


def losses(folder: Path, *options: str) -> list[float]:
    """Train in an empty folder, on the CPU, with options besides; the loss of every step."""
    from train.loop import train

    train(tiny_config(folder, *OPTIONS, f"run_dir={make_run(folder)}", *options))
    rows = [json.loads(line) for line in (folder / "train" / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def main() -> None:
    """Measure them and write the file."""
    import tempfile

    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measured = losses(Path(folder))
    made_with = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    FILE.write_text(json.dumps({"made_with": made_with, "losses": measured}, indent=1) + "\n")
    print(f"{FILE}: {measured[0]:.6f} to {measured[-1]:.6f}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
