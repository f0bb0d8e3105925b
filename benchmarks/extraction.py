"""What extraction costs beside the target's bare forward pass: `make bench-store`.

Shard by shard of a run's own data, in turns in one process, on the same padded batches:

    bare     the transformers decoder's ordinary call with its attention mask, without lm_head, hooks or cache
    no mask  the same without the mask, which a causal decoder does not need for padding at the end
    states   our engine: the same with its taps, every conversation's states handed out
    CODECS   the whole extraction of the shard: states, top1, encoding, writing, checksum, fsync

Ratios are medians over shards of bare seconds / seconds. The fidelity gate, which runs some conversations of three
shards once more, is off.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from benchmarks import machine, run_main
from eagle31_train import compose
from eagle31_train.common import artifacts
from eagle31_train.common.allocator import keep_freed_memory
from eagle31_train.common.errors import UserError
from eagle31_train.config import Config
from eagle31_train.reporting.markdown import grid
from eagle31_train.rows import samples
from eagle31_train.store import PlannedShard, StoreWriter, make_plan, shape_of
from eagle31_train.store.backends import open_storage
from eagle31_train.targets import extraction
from eagle31_train.targets.hf import TransformersEngine, batches_by_length

PAIRS = ["bf16:bf16", "fp8:fp8", "int8:int8", "int4:int8"]


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():  # wait for all that was queued
        torch.cuda.synchronize()
    return time.perf_counter() - began


def store_of(pair: str, config: Config, engine: TransformersEngine, masks: dict[str, Any], folder: Path) -> StoreWriter:
    """Begin a store with one pair of codecs, in its own folder."""
    aux, last = pair.split(":")
    config = replace(config, store=replace(config.store, aux_codec=aux, last_codec=last))
    states = extraction.describe(engine, config)
    provenance = {"fingerprint": artifacts.fingerprint(states), "inputs": {}, "states": states}
    plan = make_plan(masks, config.extract.shard_tokens, shape_of(states))
    place = folder / f"{aux}-{last}"
    return StoreWriter(open_storage(str(place), place, 0), provenance, plan)


def stage(engine: TransformersEngine, writer: StoreWriter, rows: Dataset, planned: PlannedShard) -> float:
    """Return the seconds to extract and commit a shard as the stage does."""

    def run() -> None:
        chosen = rows.select(range(planned.first, planned.end))
        states, _ = extraction.run_shard(engine, chosen, writer.shape, planned, None)
        writer.write(planned, states.wait())

    return seconds_of(run)


@torch.no_grad()
def bare(engine: TransformersEngine, tokens: Sequence[Tensor], masked: bool) -> float:
    """Return the seconds of the decoder alone over the engine's own batches."""
    decoder: Callable[..., Any] = engine.target.decoder
    batches = batches_by_length([len(row) for row in tokens], engine.batch_tokens)
    device = engine.target.embedding.weight.device
    padded = [pad_sequence([tokens[i] for i in batch], batch_first=True).to(device) for batch in batches]
    ones = [pad_sequence([torch.ones_like(tokens[i]) for i in batch], batch_first=True).to(device) for batch in batches]

    def run() -> None:
        for ids, mask in zip(padded, ones, strict=True):
            decoder(input_ids=ids, attention_mask=mask if masked else None, use_cache=False)

    return seconds_of(run)


def states_only(engine: TransformersEngine, tokens: Sequence[Tensor]) -> float:
    """Return the seconds of our engine with nothing done to the states."""
    return seconds_of(lambda: [None for _ in engine.run(tokens)])


def measure(config: Config, pairs: Sequence[str], tokens: int, folder: Path) -> dict[str, Any]:
    """Time every contender on the first shards, which have at least `tokens` tokens together if there are so many. The
    first shard, and on a GPU every shard, runs once before to warm up."""
    splits = DatasetDict.load_from_disk(str((config.data_folder / "dataset").absolute()))
    masks = {split: list(samples.column(splits[split], "loss_mask")) for split in splits}
    engine = extraction.make_engine(config)
    if not isinstance(engine, TransformersEngine):
        raise UserError("this measures only the engine of transformers: set extract.engine=transformers")
    writers = {pair: store_of(pair, config, engine, masks, folder) for pair in pairs}
    rows, shards = splits["train"], writers[pairs[0]].plan.of("train")
    ends = accumulate(planned.tokens for planned in shards)
    chosen = [planned for planned, end in zip(shards, ends, strict=True) if end - planned.tokens < tokens]
    found: dict[str, list[float]] = {}
    padded = 0
    for number, planned in enumerate(chosen):
        conversations = [torch.tensor(row) for row in rows[planned.first : planned.end]["input_ids"]]
        lengths = [len(row) for row in conversations]
        padded += sum(len(b) * max(lengths[i] for i in b) for b in batches_by_length(lengths, engine.batch_tokens))
        contenders: dict[str, Callable[[], float]] = {
            "bare": partial(bare, engine, conversations, True),
            "no mask": partial(bare, engine, conversations, False),
            "states": partial(states_only, engine, conversations),
            **{pair: partial(stage, engine, writer, rows, planned) for pair, writer in writers.items()},
        }
        names = list(contenders)
        names = names[number % len(names) :] + names[: number % len(names)]  # each begins in turn
        for name in tqdm(names, desc=f"shard {number + 1} of {len(chosen)}", leave=False):
            if number == 0 or torch.cuda.is_available():  # on a GPU every new shape costs time once
                contenders[name]()
            found.setdefault(name, []).append(contenders[name]())
    return {
        "shards": [planned.tokens for planned in chosen],
        "padded": padded,
        "batch_tokens": engine.batch_tokens,
        "assistant_share": statistics.mean(float(mask.mean()) for mask in masks["train"]),
        "dtype": config.target.dtype,
        "seconds": found,
    }


def table(result: dict[str, Any]) -> str:
    """Return a row per contender: tokens/s, and its speed over the bare pass's, with the extremes over shards."""
    seconds, tokens = result["seconds"], sum(result["shards"])
    rows = []
    for name, ours in seconds.items():
        ratios = [bare / own for bare, own in zip(seconds["bare"], ours, strict=True)]
        spread = f"{min(ratios):.0%}–{max(ratios):.0%}"
        rows.append([name, f"{tokens / sum(ours):,.0f}", f"{statistics.median(ratios):.1%}", spread])
    padding = result["padded"] / tokens - 1
    return f"{tokens:,} tokens, {padding:.1%} padding\n\n{grid(['', 'tokens/s', 'of bare', 'over shards'], rows)}"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--experiment", default="smollm2", help="whose data and target; its data stage must be done")
    parser.add_argument("--options", nargs="*", default=[], metavar="KEY=VALUE", help="further options of the stages")
    parser.add_argument("--codecs", nargs="+", default=PAIRS, metavar="AUX:LAST")
    parser.add_argument("--tokens", type=int, default=100_000, help="whole shards of at least so many tokens together")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/extraction.json"))
    parser.add_argument("--quick", action="store_true", help="a smoke test on two small shards")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.tokens = 1600
        chosen.options = [*chosen.options, "extract.shard_tokens=1024", "extract.batch_tokens=1024"]
    return chosen


def main() -> None:
    chosen = options()
    keep_freed_memory()  # as every stage does
    config = compose.load_config([f"+experiment={chosen.experiment}", *chosen.options])
    here = machine.describe()
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=chosen.out.parent) as folder:  # for the stores
        result = measure(config, chosen.codecs, chosen.tokens, Path(folder))
    artifacts.write_json(chosen.out, {"machine": here, "experiment": chosen.experiment, **result})
    print(machine.summary(here))
    print(table(result))
    print(f"written: {chosen.out}")


if __name__ == "__main__":
    run_main(main)
