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
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from benchmarks import machine, run_main
from benchmarks.plot import drawn
from eagle31_train import artifacts, cli
from eagle31_train.allocator import keep_freed_memory
from eagle31_train.config import Config
from eagle31_train.errors import UserError
from eagle31_train.reporting.markdown import grid
from eagle31_train.store import PlannedShard, StoreWriter, make_plan, shape_of, shard, writer
from eagle31_train.store.backends import open_storage
from eagle31_train.targets import arriving, extraction
from eagle31_train.targets.hf import HiddenStateTarget, TransformersEngine, batches_by_length

PAIRS = ["bf16:bf16", "fp8:fp8", "int8:int8", "int4:int8"]
COLOURS = {
    "states": "C0", "top1": "C1", "encode": "C2", "join": "C3", "save": "C4", "checksum": "#7fb2f0", "fsync": "#e8c65a",
    "rest": "C5",
}  # fmt: skip
PARTS = {  # each with where the stage calls it
    "states": (HiddenStateTarget, "states"),
    "top1": (extraction, "top1_of"),
    "encode": (arriving, "encode_unchecked"),
    "join": (shard, "concatenate"),
    "save": (shard, "save_file"),
    "checksum": (writer, "checksum"),
    "fsync": (artifacts, "fsync_path"),
}


@contextmanager
def clocked(**functions: tuple[Any, str]) -> Iterator[dict[str, float]]:
    """While it lasts, the seconds spent in functions, each (owner, name) as it is looked up where the stage calls it:
    what is timed is the stage's own code, unchanged."""
    seconds: dict[str, float] = defaultdict(float)

    def timed(part: str, inner: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                seconds[part] += time.perf_counter() - began

        return call

    patches = [
        mock.patch.object(owner, name, timed(part, getattr(owner, name))) for part, (owner, name) in functions.items()
    ]
    for patch in patches:
        patch.start()
    try:
        yield seconds
    finally:
        for patch in patches:
            patch.stop()


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Extraction:
    """The stage, shard by shard, with one pair of codecs, into a folder of its own."""

    def __init__(
        self, config: Config, pair: str, engine: TransformersEngine, masks: dict[str, Any], folder: Path
    ) -> None:
        aux, last = pair.split(":")
        config = replace(config, store=replace(config.store, aux_codec=aux, last_codec=last))
        states = extraction.describe(engine, config)
        self.engine, self.shape = engine, shape_of(states)
        provenance = {"fingerprint": artifacts.fingerprint(states), "inputs": {}, "states": states}
        plan = make_plan(masks, config.extract.shard_tokens, self.shape)
        place = folder / f"{aux}-{last}"
        self.writer = StoreWriter(open_storage(str(place), place, 0), provenance, plan)

    def run(self, rows: Dataset, planned: PlannedShard) -> dict[str, float]:
        """Extract and commit a shard: seconds in all and of each part."""
        with clocked(**PARTS) as parts:
            total = seconds_of(partial(self._run, rows, planned))
        return {"total": total, **dict.fromkeys(PARTS, 0.0), **parts}

    def _run(self, rows: Dataset, planned: PlannedShard) -> None:
        chosen = rows.select(range(planned.first, planned.end))
        states, _ = extraction.run_shard(self.engine, chosen, self.shape, planned, None)
        self.writer.write(planned, states.wait())


@torch.no_grad()
def bare(engine: TransformersEngine, tokens: Sequence[Tensor], masked: bool) -> dict[str, float]:
    """Seconds of the decoder alone over the engine's own batches."""
    decoder: Callable[..., Any] = engine.target.decoder
    batches = batches_by_length([len(row) for row in tokens], engine.batch_tokens)
    device = engine.target.embedding.weight.device
    padded = [pad_sequence([tokens[i] for i in batch], batch_first=True).to(device) for batch in batches]
    ones = [pad_sequence([torch.ones_like(tokens[i]) for i in batch], batch_first=True).to(device) for batch in batches]

    def run() -> None:
        for ids, mask in zip(padded, ones, strict=True):
            decoder(input_ids=ids, attention_mask=mask if masked else None, use_cache=False)

    return {"total": seconds_of(run)}


def states_only(engine: TransformersEngine, tokens: Sequence[Tensor]) -> dict[str, float]:
    """Seconds of our engine with nothing done to the states."""
    with clocked(states=PARTS["states"]) as parts:
        total = seconds_of(lambda: [None for _ in engine.run(tokens)])
    return {"total": total, **parts}


def measure(config: Config, pairs: Sequence[str], tokens: int, folder: Path) -> dict[str, Any]:
    """Every contender on the first shards, of at least so many tokens together where there are as many; the first shard
    once more before, to warm up."""
    splits = DatasetDict.load_from_disk(str((config.data_folder / "dataset").absolute()))
    masks = {split: list(extraction.loss_masks(splits[split])) for split in splits}
    engine = extraction.make_engine(config)
    if not isinstance(engine, TransformersEngine):
        raise UserError("this measures extract.engine=transformers")
    stages = {pair: Extraction(config, pair, engine, masks, folder) for pair in pairs}
    rows, shards = splits["train"], stages[pairs[0]].writer.plan.of("train")
    ends = accumulate(planned.tokens for planned in shards)
    chosen = [planned for planned, end in zip(shards, ends, strict=True) if end - planned.tokens < tokens]
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
        names = list(contenders)
        names = names[number % len(names) :] + names[: number % len(names)]  # who begins goes round
        for name in tqdm(names, desc=f"shard {number + 1} of {len(chosen)}", leave=False):
            if number == 0:
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
    return f"{tokens:,} tokens, {result['padded'] / tokens - 1:.1%} padding\n\n{grid(head, rows)}"


def picture(result: dict[str, Any], info: dict[str, Any], path: Path) -> None:
    """Time of every contender in units of the bare forward pass, split into parts where they are known."""
    rows = numbers(result)
    with drawn(8, 3.2, "Extraction beside the target's bare forward pass", info, path) as figure:
        axis = figure.subplots()
        for row in rows:
            left, whole = 0.0, 1 / row["of_bare"]
            for part, share in (row["parts"] or {"states": 1.0}).items():
                axis.barh(row["name"], share * whole, left=left, color=COLOURS[part])
                left += share * whole
            axis.annotate(f" {row['of_bare']:.1%} of its speed", (whole, row["name"]), va="center", fontsize=7)
        for part, colour in COLOURS.items():
            axis.barh([rows[0]["name"]], [0], color=colour, label=part)
        axis.axvline(1 / 0.9, color="gray", linestyle="--", linewidth=1)
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set(xlabel="time, bare forward pass = 1 (dashed: the goal, 90 % of its speed)", xlim=(0, 1.35))
        figure.legend(loc="outside right upper")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--experiment", default="smollm2", help="whose data and target; its data stage must be done")
    parser.add_argument("--options", nargs="*", default=[], metavar="KEY=VALUE", help="further options of the stages")
    parser.add_argument("--codecs", nargs="+", default=PAIRS, metavar="AUX:LAST")
    parser.add_argument("--tokens", type=int, default=100_000, help="whole shards of at least so many tokens together")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/extraction"), help="without .json and .png")
    parser.add_argument("--quick", action="store_true", help="a smoke test on two small shards")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.tokens = 1600
        chosen.options = [*chosen.options, "extract.shard_tokens=1024", "extract.batch_tokens=1024"]
    return chosen


def main() -> None:
    chosen = options()
    keep_freed_memory()  # as every stage does
    config = cli.load_config([f"+experiment={chosen.experiment}", *chosen.options])
    here = machine.describe()
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=chosen.out.parent) as folder:  # for the stores
        result = measure(config, chosen.codecs, chosen.tokens, Path(folder))
    artifacts.write_json(chosen.out.with_suffix(".json"), {"machine": here, "experiment": chosen.experiment, **result})
    picture(result, here, chosen.out.with_suffix(".png"))
    print(machine.summary(here))
    print(table(result))
    print(f"written: {chosen.out}.json and .png")


if __name__ == "__main__":
    run_main(main)
