"""What extraction costs beside the target's bare forward pass: `make bench-store`.

Shard by shard of a run's own data, in turns in one process, on the same padded batches:

    bare     the transformers decoder's ordinary call with its attention mask, without lm_head, hooks or cache
    no mask  the same without the mask, which a causal decoder does not need for padding at the end
    states   our engine: the same with its taps, every conversation's states handed out
    CODECS   the whole extraction of the shard: states, top1, encoding, writing, checksum, fsync

The whole extraction is the stage's own functions. Its parts are timed where the stage calls them; what is left over is
reading the data set and cutting states to what is kept. Ratios are medians over shards of bare seconds / seconds.
The fidelity gate, which runs some conversations of three shards once more, is off.
"""

import argparse
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks import machine, run_main, store_plot, turns
from eagle31_train import artifacts, cli
from eagle31_train.config import Config
from eagle31_train.errors import UserError
from eagle31_train.store import PlannedShard, StoreWriter, make_plan, shape_of, shard, writer
from eagle31_train.store.backends import open_storage
from eagle31_train.targets import extraction
from eagle31_train.targets.hf import HiddenStateTarget, TransformersEngine, batches_by_length

PAIRS = ["bf16:bf16", "fp8:fp8", "int8:int8", "int4:int8"]
PARTS = {
    "states": (HiddenStateTarget, "states"),
    "top1": (extraction, "top1_of"),
    "encode": (shard, "encode"),
    "join": (shard, "concatenate"),
    "save": (shard, "save_file"),
    "checksum": (writer, "checksum"),
    "fsync": (artifacts, "fsync_path"),
}


class Extraction:
    """The stage, shard by shard, with one pair of codecs, into a folder of its own."""

    def __init__(self, config: Config, engine: TransformersEngine, masks: dict[str, Any], folder: Path) -> None:
        states = extraction.describe(engine, config)
        self.engine, self.shape = engine, shape_of(states)
        provenance = {"fingerprint": artifacts.fingerprint(states), "inputs": {}, "states": states}
        plan = make_plan(masks, config.extract.shard_tokens, self.shape)
        self.writer = StoreWriter(open_storage(str(folder), folder, 0), provenance, plan)

    def run(self, rows: Dataset, planned: PlannedShard) -> dict[str, float]:
        """Extract and commit a shard: seconds in all and of each part."""
        with turns.clocked(**PARTS) as parts:
            total = turns.seconds_of(partial(self._run, rows, planned))
        return {"total": total, **dict.fromkeys(PARTS, 0.0), **parts}

    def _run(self, rows: Dataset, planned: PlannedShard) -> None:
        chosen = rows.select(range(planned.first, planned.end))
        documents, _ = extraction.run_shard(self.engine, chosen, self.shape, None)
        self.writer.write(planned, documents)


@torch.no_grad()
def bare(engine: TransformersEngine, tokens: Sequence[Tensor], masked: bool) -> dict[str, float]:
    """Seconds of the decoder alone over the engine's own batches."""
    decoder: Callable[..., Any] = engine.target.decoder
    batches = batches_by_length([len(row) for row in tokens], engine.batch_tokens)
    device = engine.target.embedding.weight.device
    padded = [pad_sequence([tokens[i] for i in batch], batch_first=True).to(device) for batch in batches]
    ones = [torch.ones_like(row) for row in tokens]
    masks = [pad_sequence([ones[i] for i in batch], batch_first=True).to(device) for batch in batches]

    def run() -> None:
        for ids, mask in zip(padded, masks, strict=True):
            decoder(input_ids=ids, attention_mask=mask if masked else None, use_cache=False)

    return {"total": turns.seconds_of(run)}


def states_only(engine: TransformersEngine, tokens: Sequence[Tensor]) -> dict[str, float]:
    """Seconds of our engine with nothing done to the states."""
    with turns.clocked(states=PARTS["states"]) as parts:
        total = turns.seconds_of(lambda: [None for _ in engine.run(tokens)])
    return {"total": total, **parts}


def with_codecs(config: Config, pair: str) -> Config:
    """The configuration with AUX:LAST codecs."""
    aux, last = pair.split(":")
    return replace(config, store=replace(config.store, aux_codec=aux, last_codec=last))


def first_shards(shards: Sequence[PlannedShard], tokens: int) -> list[PlannedShard]:
    """The first shards, of at least so many tokens together where there are as many."""
    chosen: list[PlannedShard] = []
    for planned in shards:
        if sum(s.tokens for s in chosen) >= tokens:
            break
        chosen.append(planned)
    return chosen


def measure(config: Config, pairs: Sequence[str], tokens: int, folder: Path) -> dict[str, Any]:
    """Every contender on every shard; the first shard once more before, to warm up."""
    splits = extraction.load_data(config)
    masks = {split: splits[split]["loss_mask"] for split in splits}
    engine = extraction.make_engine(config)
    if not isinstance(engine, TransformersEngine):
        raise UserError("this measures extract.engine=transformers")
    stages = {p: Extraction(with_codecs(config, p), engine, masks, folder / p.replace(":", "-")) for p in pairs}
    rows = splits["train"]
    chosen = first_shards(next(iter(stages.values())).writer.plan.of("train"), tokens)
    found: dict[str, list[dict[str, float]]] = {}
    padded = 0
    for number, planned in enumerate(chosen):
        conversations = [torch.tensor(row) for row in rows[planned.first : planned.end]["input_ids"]]
        lengths = [len(row) for row in conversations]
        padded += sum(len(b) * max(lengths[i] for i in b) for b in batches_by_length(lengths, engine.batch_tokens))
        contenders: dict[str, Callable[[], dict[str, float]]] = {
            "bare": partial(bare, engine, conversations, True),
            "no mask": partial(bare, engine, conversations, False),
            "states": partial(states_only, engine, conversations),
            **{pair: partial(stage.run, rows, planned) for pair, stage in stages.items()},
        }
        what = f"shard {number + 1} of {len(chosen)}"
        for name, rounds in turns.in_turns(contenders, 1, what, warm=int(number == 0), first=number).items():
            found.setdefault(name, []).extend(rounds)
    return {
        "shards": [planned.tokens for planned in chosen],
        "padded": padded,
        "batch_tokens": engine.batch_tokens,
        "assistant_share": statistics.mean(map(statistics.mean, masks["train"])),
        "dtype": config.target.dtype,
        "seconds": found,
    }


def numbers(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per contender: tokens/s, its speed over the bare pass's, and how its time splits up."""
    reference = [one["total"] for one in result["seconds"]["bare"]]
    rows = []
    for name, rounds in result["seconds"].items():
        total = sum(one["total"] for one in rounds)
        shares = {part: sum(one[part] for one in rounds) / total for part in rounds[0] if part != "total"}
        ratios = [ours / one["total"] for ours, one in zip(reference, rounds, strict=True)]
        rows.append(
            {
                "name": name,
                "tokens_per_second": sum(result["shards"]) / total,
                "of_bare": statistics.median(ratios),
                "spread": [min(ratios), max(ratios)],
                "parts": {**shares, "rest": 1 - sum(shares.values())} if shares else {},
            }
        )
    return rows


def table(result: dict[str, Any]) -> str:
    """In markdown."""
    parts = [*PARTS, "rest"]
    rows = [
        [
            row["name"],
            f"{row['tokens_per_second']:,.0f}",
            f"{row['of_bare']:.1%}",
            "{:.0%}–{:.0%}".format(*row["spread"]),
            *(f"{row['parts'][part]:.2%}" if part in row["parts"] else "" for part in parts),
        ]
        for row in numbers(result)
    ]
    head = ["", "tokens/s", "of bare", "over shards", *parts]
    tokens = sum(result["shards"])
    return f"{tokens:,} tokens, {result['padded'] / tokens - 1:.1%} padding\n\n{turns.markdown(head, rows)}"


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--experiment", default="smollm2", help="whose data and target; its data stage must be done")
    parser.add_argument("--options", nargs="*", default=[], metavar="KEY=VALUE", help="further options of the stages")
    parser.add_argument("--codecs", nargs="+", default=PAIRS, metavar="AUX:LAST")
    parser.add_argument("--tokens", type=int, default=100_000, help="whole shards of at least so many tokens together")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/bench/extraction.tmp"), help="for the stores; removed"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench/extraction"), help="without .json and .png")
    parser.add_argument("--quick", action="store_true", help="a smoke test on two small shards")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.tokens = 1600
        chosen.options = [*chosen.options, "extract.shard_tokens=1024", "extract.batch_tokens=1024"]
    return chosen


def main() -> None:
    """Measure; the table and files in the end."""
    chosen = options()
    if chosen.folder.exists():
        raise UserError(f"--folder {chosen.folder} exists: name a new folder, which is removed in the end")
    config = cli.load_config([f"+experiment={chosen.experiment}", *chosen.options])
    here = machine.describe()
    try:
        result = measure(config, chosen.codecs, chosen.tokens, chosen.folder)
    finally:
        shutil.rmtree(chosen.folder, ignore_errors=True)
    artifacts.write_json(chosen.out.with_suffix(".json"), {"machine": here, "experiment": chosen.experiment, **result})
    store_plot.extraction(numbers(result), here, chosen.out.with_suffix(".png"))
    print(machine.summary(here))
    print(table(result))
    print(f"written: {chosen.out}.json and .png")


if __name__ == "__main__":
    run_main(main)
