"""STAGE 2: run the target over the conversations and store its hidden states.

    python -m eagle31_train.extract +experiment=smollm2

Reads run_dir/data, writes run_dir/store (see `store.py`). A killed run goes on at the first shard
that is not committed. The target's own logits are computed only by the fidelity gate; `top1`, its
arg-max over the full vocabulary, is computed from the *stored* states, once, at the positions that
teach, which spares every later training epoch that product with the whole lm_head.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from tqdm import tqdm

from eagle31_train import artifacts, cli
from eagle31_train.fidelity import Figures, Gate, rebuilt_logits, report, summary
from eagle31_train.schema import Config, Document, UserError
from eagle31_train.store import StoreWriter, plan_shards
from eagle31_train.targets.hf import HiddenStateTarget, load_model

SPLITS = ("train", "heldout")
LAYOUT = 1  # raise it when the same inputs give other files
LOGIT_ROWS = 512  # rows of [rows, V] logits alive at once


def extract(config: Config) -> None:
    """Run the stage.

    Raises:
        UserError: missing or damaged input, output of other inputs, or a failed fidelity gate.
    """
    began = time.perf_counter()
    data_dir = config.data_folder
    data = artifacts.read_json(data_dir / artifacts.MANIFEST, "python -m data_prep")
    inputs = {
        "layout": LAYOUT,
        # Not the draft vocabulary: the states do not depend on it.
        "data": data["dataset_fingerprint"],
        "tokenizer": data["inputs"]["tokenizer"],
        "template": data["inputs"]["template"],
        "target": {
            "name": config.target.name,
            "revision": config.target.revision,
            "weights": artifacts.weights_fingerprint(config.target.path),
            "dtype": config.target.dtype,
            "aux_layers": config.target.aux_layers,
        },
        "shard_tokens": config.extract.shard_tokens,
    }
    fingerprint = artifacts.fingerprint(inputs)
    folder = config.store_folder
    if artifacts.finished(folder, fingerprint, inputs, config.overwrite, checksums=False):
        print(f"extract: up to date ({folder})")
        return
    if damage := artifacts.first_damaged(data_dir, data.get("files", {})):
        raise UserError(f"{damage}: run `python -m data_prep` again")
    splits = DatasetDict.load_from_disk(str(data_dir / "dataset"))

    target = HiddenStateTarget(load_model(config.target), config.target.aux_layers)
    writer = StoreWriter(folder, {**inputs, **describe(target)}, config.overwrite)
    norm, _ = target.norm_weight()
    weights = {"embed_tokens": target.embedding.weight, "norm": norm}
    if not target.tied():
        weights["lm_head"] = target.head_weight()
    writer.write_target(weights)

    gate = Gate(target, config.extract)
    total = sum(len(row) for split in SPLITS for row in splits[split]["input_ids"])
    with tqdm(total=total, unit="tok", unit_scale=True, desc="extract", smoothing=0.05) as bar:
        for number, (name, split, first, end) in enumerate(shards_of(splits, config.extract.shard_tokens)):
            rows = splits[split].select(range(first, end))
            if not writer.has(name):
                recorded = gate.samples(number)
                check = gate if recorded or not gate.passed else None
                documents, figures = run_shard(target, rows, config.extract.batch_tokens, check, bar)
                writer.write_shard(name, split, first, documents, figures if recorded else None)
            else:
                size = sum(len(row) for row in rows["input_ids"])
                bar.update(size)
                bar.initial += size  # resumed tokens count in the total, not in the rate

    manifest: dict[str, Any] = {
        "fingerprint": fingerprint,
        "inputs": inputs,
        "samples": {split: len(splits[split]) for split in SPLITS},
        "tokens": total,
        "bytes_per_token": sum(s.bytes for s in writer.shards) / total,
        "fidelity": report([s.fidelity for s in writer.shards if s.fidelity]),
        "seconds": time.perf_counter() - began,
    }
    writer.finish(manifest)
    print(
        f"extract: {total:,} tokens, {manifest['bytes_per_token']:,.0f} bytes each, in {folder}; "
        f"{summary(manifest['fidelity'])}"
    )


def describe(target: HiddenStateTarget) -> dict[str, Any]:
    """Provenance beyond the inputs: what the stored states mean."""
    _, norm_kind = target.norm_weight()
    return {
        "aux_layers": target.layers,
        "aux_convention": "input of layer i; 0 = embeddings, N = output of the last layer before the final norm",
        "last_hidden_state": "before the final norm",
        "norm": {"kind": norm_kind, "eps": target.norm_eps(), "stored": "effective weight"},
        "tied_lm_head": target.tied(),
        "hidden_size": target.embedding.weight.shape[1],
        "vocab_size": target.head_weight().shape[0],
        "state_dtype": "bfloat16",
    }


def shards_of(splits: DatasetDict, shard_tokens: int) -> Iterator[tuple[str, str, int, int]]:
    """Every shard of the store: file name, split, first and end sample."""
    for split in SPLITS:
        lengths = [len(row) for row in splits[split]["input_ids"]]
        for number, (first, end) in enumerate(plan_shards(lengths, shard_tokens)):
            yield f"shards/{split}-{number:05d}.safetensors", split, first, end


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group samples of similar length so that padded batches stay under `batch_tokens`."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        # Ascending lengths: the newest sample is the longest, and sets the padded width.
        if batches and (len(batches[-1]) + 1) * lengths[index] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def run_shard(
    target: HiddenStateTarget, rows: Dataset, batch_tokens: int, gate: Gate | None, bar: tqdm
) -> tuple[list[Document], Figures | None]:
    """The states of a shard's samples, in their order, and what the gate finds in its first batch."""
    figures: Figures | None = None
    tokens = [torch.tensor(row) for row in rows["input_ids"]]
    masks = [torch.tensor(row, dtype=torch.bool) for row in rows["loss_mask"]]
    documents: list[Document | None] = [None] * len(tokens)
    device = target.embedding.weight.device
    for batch in batches_by_length([len(row) for row in tokens], batch_tokens):
        padded = torch.nn.utils.rnn.pad_sequence([tokens[i] for i in batch], batch_first=True).to(device)
        attention = torch.nn.utils.rnn.pad_sequence(
            [torch.ones(len(tokens[i]), dtype=torch.long) for i in batch], batch_first=True
        ).to(device)
        states = target.states(padded, attention)
        last = states.last.bfloat16()
        if gate is not None and figures is None:
            figures = gate.check(padded, attention, last)
        for row, index in enumerate(batch):
            length = len(tokens[index])
            documents[index] = Document(
                tokens[index],
                masks[index],
                top1_of(target, last[row, :length], masks[index]),
                states.aux[row, :length].bfloat16().cpu(),
                last[row, :length].cpu(),
            )
            bar.update(length)
    return [document for document in documents if document is not None], figures


def top1_of(target: HiddenStateTarget, last: Tensor, loss_mask: Tensor) -> Tensor:
    """[T] int64: arg-max of the target's distribution where the next token is the assistant's, else -1."""
    teaches = torch.zeros(len(last), dtype=torch.bool)
    teaches[:-1] = loss_mask[1:]
    where = teaches.nonzero()[:, 0]
    top1 = torch.full((len(last),), -1, dtype=torch.int64)
    for rows in where.split(LOGIT_ROWS):
        top1[rows] = rebuilt_logits(target, last[rows.to(last.device)]).argmax(-1).cpu()
    return top1


if __name__ == "__main__":
    cli.run(extract, "Stage 2: run the target over the conversations and store its hidden states.")
