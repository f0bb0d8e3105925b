"""What a codec loses of a target's states: `python -m benchmarks.codecs RUN/store`, of a store in bf16.

Every conversation's states are encoded and decoded again, and compared with what is stored:

* auxiliary states: the mean over positions of their relative error, by layer; and the same without the layer's eight
  greatest channels, beside which the others may be lost unseen;
* last hidden states: the KL divergence of the distribution rebuilt from them from that of the stored ones, and how
  often their arg-max is the same.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine, run_main
from eagle31_train.api import OpenStore, open_store
from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.model.loss import Teacher
from eagle31_train.store.codec import CODECS, encode

GREATEST = 8
Row = dict[str, Any]


def decoded(states: Tensor, codec: str) -> Tensor:
    return encode(states, codec)[0].decode().float()


def error(rounded: Tensor, exact: Tensor) -> float:
    """Return the mean over positions of the relative error, of states [N, H]."""
    return ((rounded - exact).norm(dim=-1) / exact.norm(dim=-1)).mean().item()


def measure(store: OpenStore, split: str, conversations: int) -> list[Row]:
    """Return a row per codec: bytes of a state of `store`'s width, errors by auxiliary layer, KL, top-1 agreement."""
    states, target = store.store.states, store.store.target
    if (states["aux_codec"], states["last_codec"]) != ("bf16", "bf16"):
        raise UserError("the store's codecs have already rounded its states: extract with bf16 for both")
    head = target.get("lm_head", target["embed_tokens"]).float()
    readout = Teacher(target["norm"], states["norm"]["eps"], head, torch.arange(len(head)), states.get("soft_cap"))
    samples = [store.sample(split, index) for index in range(min(conversations, store.count(split)))]
    rows = []
    for codec, how in CODECS.items():
        aux = {layer: [0.0, 0.0] for layer in store.aux_layers}
        kl = same = 0.0
        count = sum(len(sample.aux) > 0 for sample in samples)
        for sample in samples:
            if not len(sample.aux):
                continue
            lossy = decoded(sample.aux, codec)
            for index, layer in enumerate(store.aux_layers):
                rounded, exact = lossy[:, index], sample.aux[:, index].float()
                others = exact.abs().mean(0).argsort()[:-GREATEST]
                aux[layer][0] += error(rounded, exact) / count
                aux[layer][1] += error(rounded[:, others], exact[:, others]) / count
            wanted, found = (
                readout.logits(last).log_softmax(-1) for last in (sample.last, decoded(sample.last, codec))
            )
            kl += (wanted.exp() * (wanted - found)).sum(-1).mean().item() / count
            same += (wanted.argmax(-1) == found.argmax(-1)).float().mean().item() / count
        rows.append(
            {"codec": codec, "row_bytes": how.row_bytes(states["hidden_size"]), "aux": aux, "kl": kl, "top1": same}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--split", default="heldout", choices=("heldout", "train"))
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/codecs.json"))
    chosen = parser.parse_args()
    rows = measure(open_store(chosen.store), chosen.split, chosen.conversations)
    print(machine.summary(machine.describe()))
    for row in rows:
        layers = ", ".join(f"{layer}: {all_:.2%} ({others:.2%})" for layer, (all_, others) in row["aux"].items())
        last = f"KL {row['kl']:.5f}, {row['top1']:.2%}"
        print(f"{row['codec']:<13} {row['row_bytes']:>6,} bytes a state; aux {layers}; {last}")
    artifacts.write_json(chosen.out, {"machine": machine.describe(), "rows": rows})


if __name__ == "__main__":
    run_main(main)
