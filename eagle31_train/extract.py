"""STAGE 2: run the target over the conversations and store its hidden states.

    python -m eagle31_train.extract +experiment=smollm2
    accelerate launch --num_processes 8 -m eagle31_train.extract +experiment=qwen3_8b
    python -m eagle31_train.extract +experiment=kimi extract.parts=4 extract.part=0    # 1, 2, 3 on other machines

Reads run_dir/data, writes the store (see `store/`). A killed run goes on at the first shard that is
not committed. Several processes share the shards and meet through the store's files alone: nothing
else connects them, and the store has the same bytes whatever their number. Where no launcher spans the
machines, `extract.part` and `extract.parts` share the shards among commands in the same way.

The target's own logits are computed only by the fidelity gate; `top1`, its arg-max over the full
vocabulary, is computed once, from the states before they are rounded, at the positions that teach,
which spares every later training epoch that product with the whole lm_head.
"""

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

from eagle31_train import artifacts, cli
from eagle31_train.codec import Encoded, check_codec, encode
from eagle31_train.document import Document
from eagle31_train.fidelity import Figures, Gate, report, summary
from eagle31_train.locks import alone
from eagle31_train.schema import Config, UserError, byte_count
from eagle31_train.store import Place, StoreWriter, finished, make_plan, place_of, shape_of
from eagle31_train.store.plan import SPLITS, PlannedShard, Shape
from eagle31_train.targets.engine import Engine, too_long
from eagle31_train.targets.hf import ranks, require_path
from eagle31_train.targets.make import make_engine
from eagle31_train.targets.readout import Readout
from eagle31_train.tokenizer import from_pretrained, vocabulary_fingerprint

LAYOUT = 2  # raise it when the same inputs give other files
LOGIT_ROWS = 512  # rows of [rows, V] logits alive at once
LOOK_EVERY = 30.0  # seconds between looks at what other processes have committed: a remote store lists slowly
# Arguments of vLLM that decide where and how fast it runs, and not what it computes beyond rounding.
RESOURCES = {
    "tensor_parallel_size", "enable_expert_parallel", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "distributed_executor_backend",
    "disable_log_stats",
}  # fmt: skip


@dataclass(frozen=True)
class Process:
    """Which of all processes that share the shards this is, and whether it speaks for its launch."""

    rank: int
    ranks: int
    speaks: bool


def extract(config: Config) -> None:
    """Run the stage, as one of `WORLD_SIZE` processes of one of `extract.parts` launches.

    Raises:
        UserError: missing or damaged input, or input for another target, output of other inputs, a failed fidelity
            gate, a full disk, no such part, another process at this one's shards.
    """
    process = process_of(config)
    check_codec(config.store.aux_codec, "store.aux_codec")
    check_codec(config.store.last_codec, "store.last_codec")
    inputs = inputs_of(config)
    fingerprint = artifacts.fingerprint(inputs)
    place = place_of(config)
    if finished(place, fingerprint, inputs, config.overwrite):
        if process.speaks:
            print(f"extract: up to date ({place.location})")
        return
    who = f"another process extracts the same shards of {place.location} now"
    with alone(Path(config.run_dir) / f".extracting-{process.rank}", who):
        _extract(config, process, place, {"fingerprint": fingerprint, "inputs": inputs})


def _extract(config: Config, process: Process, place: Place, made_of: dict[str, Any]) -> None:
    """What this process has to do of a store that is not finished."""
    began = time.perf_counter()
    splits, made = load_data(config), _data_manifest(config)
    check_words(config, made)
    engine = make_engine(config)
    states = describe(engine, config)
    check_rows(config, made, states["vocab_size"])
    masks = {split: splits[split]["loss_mask"] for split in SPLITS}
    plan = make_plan(masks, config.extract.shard_tokens, shape_of(states))
    longest = max((length for lengths in plan.lengths.values() for length in lengths), default=0)
    if engine.longest is not None and longest > engine.longest:
        raise too_long(engine, longest)
    writer = StoreWriter(
        place,
        {**made_of, "states": states},
        plan,
        rank=process.rank,
        ranks=process.ranks,
        overwrite=config.overwrite,
        max_bytes=byte_count(config.store.max_bytes, "store.max_bytes") if config.store.max_bytes else None,
        patience=config.store.patience,
    )
    first = process.rank == 0
    if first:
        writer.write_target(engine.readout.weights())
    gate = Gate(engine, config.extract, len(plan.shards))
    wanted = extract_shards(engine, splits, writer, gate, process.speaks)
    lines = writer.gather() if wanted and first else None
    if lines is not None:
        found = report([line.fidelity for line in lines if line.fidelity is not None])
        manifest = writer.finish({"fidelity": found, "seconds": time.perf_counter() - began})
        print(
            f"extract: {manifest['tokens']:,} tokens, {manifest['bytes_per_token']:,.0f} bytes each, "
            f"in {place.location}; {summary(found)}"
        )
    elif process.speaks and wanted and not first:
        print(f"extract: extract.part={config.extract.part} is done; part 0 finishes {place.location}")
    elif process.speaks:
        print(f"extract: the training that follows {place.location} wants no more of it: stopped, unfinished")


def process_of(config: Config) -> Process:
    """This process, by the launcher's environment and the part.

    Raises:
        UserError: there is no such part.
    """
    part, parts = config.extract.part, config.extract.parts
    if parts < 1:
        raise UserError(f"extract.parts={parts} must be 1 or more: it is the number of commands that share the store")
    if not 0 <= part < parts:
        raise UserError(
            f"extract.part={part} is no part: they are numbered from 0, and with extract.parts={parts} the last is "
            f"{parts - 1}"
        )
    rank, count = int(os.environ.get("RANK", 0)), ranks()
    return Process(part * count + rank, parts * count, speaks=rank == 0)


def inputs_of(config: Config) -> dict[str, Any]:
    """What the store depends on, option by option."""
    data = _data_manifest(config)
    arguments = {name: value for name, value in config.extract.engine_args.items() if name not in RESOURCES}
    return {
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
        # Engines differ by their rounding, and quantization by more: one store holds the states of one.
        "engine": {"name": config.extract.engine, "args": arguments},
        "codecs": {"aux": config.store.aux_codec, "last": config.store.last_codec},
        "shard_tokens": config.extract.shard_tokens,
    }


def load_data(config: Config) -> DatasetDict:
    """Stage 1's conversations, once their files are known to be whole."""
    folder = config.data_folder
    if damage := artifacts.first_damaged(folder, _data_manifest(config).get("files", {})):
        raise UserError(f"{damage}: run `python -m data_prep` again")
    return DatasetDict.load_from_disk(str(folder / "dataset"))


def check_words(config: Config, made: dict[str, Any]) -> None:
    """Refuse conversations of another tokenizer: to this target their ids are other words, and the gate cannot tell.

    Raises:
        UserError: they are, or the target has no tokenizer to compare with.
    """
    wanted = made.get("vocabulary")
    if wanted is None:  # of an earlier version, which did not say
        return
    require_path(config.target)
    if vocabulary_fingerprint(from_pretrained(AutoTokenizer, config.target)) != wanted:
        raise _other_target(config, "with another tokenizer than it has")


def check_rows(config: Config, made: dict[str, Any], vocab_size: int) -> None:
    """Refuse conversations for a target of other than `vocab_size` tokens.

    Raises:
        UserError: they are.
    """
    if (made_for := made["inputs"]["vocab_size"]) != vocab_size:
        raise _other_target(config, f"for a target with {made_for} tokens, and it has {vocab_size}")


def _other_target(config: Config, how: str) -> UserError:
    return UserError(
        f"{config.data_folder} was not made for target.path={config.target.path} but {how}: correct data_dir or "
        "target.path, or run `python -m data_prep` for this target"
    )


def _data_manifest(config: Config) -> dict[str, Any]:
    """What stage 1 says of its conversations."""
    return artifacts.read_json(config.data_folder / artifacts.MANIFEST, "python -m data_prep")


def describe(engine: Engine, config: Config) -> dict[str, Any]:
    """What the stored states mean."""
    readout = engine.readout
    return {
        "aux_layers": engine.layers,
        "aux_convention": "input of layer i; 0 = embeddings, N = output of the last layer before the final norm",
        "last_hidden_state": "before the final norm",
        "norm": {"kind": readout.norm_kind, "eps": readout.eps, "stored": "effective weight"},
        "tied_lm_head": readout.tied,
        "hidden_size": readout.embedding.shape[1],
        "vocab_size": readout.head.shape[0],
        "aux_codec": config.store.aux_codec,
        "last_codec": config.store.last_codec,
    }


def extract_shards(engine: Engine, splits: DatasetDict, writer: StoreWriter, gate: Gate, shown: bool) -> bool:
    """Commit this process's shards; false if a training that follows the store wants no more before the last."""
    with Progress(writer, writer.place, shown) as progress:
        for shard in writer.mine():
            if writer.has(shard):
                progress.skip(shard)
                continue
            if not writer.wait_for_room(shard):
                return False
            rows = splits[shard.split].select(range(shard.first, shard.end))
            recorded = gate.samples(shard.number)
            checked = gate if recorded or not gate.passed else None
            documents, figures = run_shard(engine, rows, writer.shape, checked, progress)
            writer.write(shard, documents, figures if recorded else None)
            progress.look_around()
    return True


def run_shard(
    engine: Engine, rows: Dataset, shape: Shape, gate: Gate | None, progress: "Progress"
) -> tuple[list[Document], Figures | None]:
    """The documents of a shard's samples, in their order, and what the gate finds in some of them."""
    tokens = [torch.tensor(row) for row in rows["input_ids"]]
    masks = [torch.tensor(row, dtype=torch.bool) for row in rows["loss_mask"]]
    made: dict[int, Document] = {}
    for index, aux, last in engine.run(tokens):
        made[index] = document_of(tokens[index], masks[index], aux, last, engine.readout, shape)
        progress.done(len(tokens[index]))
    documents = [made[index] for index in range(len(tokens))]
    return documents, gate.check(documents) if gate else None


def document_of(
    tokens: Tensor, loss_mask: Tensor, aux: Tensor, last: Tensor, readout: Readout, shape: Shape
) -> Document:
    """One sample with the states that are kept of aux [T, A, H] and last [T, H], encoded where they are."""
    whole = Document(tokens, loss_mask, top1_of(readout, last, loss_mask), aux, last)
    assert isinstance(whole.attended_states, Tensor)
    assert isinstance(whole.taught_states, Tensor)
    return replace(
        whole,
        aux=_on_cpu(encode(whole.attended_states, shape.aux_codec)),
        last=_on_cpu(encode(whole.taught_states, shape.last_codec)),
    )


def top1_of(readout: Readout, last: Tensor, loss_mask: Tensor) -> Tensor:
    """[T] int64: arg-max of the target's distribution where the next token is the assistant's, else -1."""
    where = loss_mask[1:].nonzero()[:, 0]
    top1 = torch.full((len(last),), -1, dtype=torch.int64)
    for rows in where.split(LOGIT_ROWS):
        top1[rows] = readout.best(last[rows.to(last.device)]).cpu()
    return top1


def _on_cpu(encoded: Encoded) -> Encoded:
    # A GPU holds the states of one batch at a time, not those of a shard.
    return replace(encoded, values=encoded.values.cpu(), scale=encoded.scale.cpu())


class Progress:
    """One bar over all processes' tokens, shown by the first: its own as they come, the others' as they commit.

    In another part, where the launch's first process shows it, a bar over that process's own.
    """

    def __init__(self, writer: StoreWriter, place: Place, shown: bool) -> None:
        self._place = place
        mine = writer.mine()
        names = {shard.name for shard in mine}
        self._others = [shard for shard in writer.plan.shards if shard.name not in names] if writer.rank == 0 else []
        self._bar = tqdm(
            total=sum(shard.tokens for shard in [*mine, *self._others]),
            unit="tok",
            unit_scale=True,
            desc="extract",
            smoothing=0.05,
            disable=not shown,
        )
        self._looked = time.monotonic()
        if self._bar.disable:
            return
        for shard in [shard for shard in self._others if writer.has(shard)]:
            self.skip(shard)
            self._others.remove(shard)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def done(self, tokens: int) -> None:
        """So many tokens of this process are through the target."""
        self._bar.update(tokens)

    def skip(self, shard: PlannedShard) -> None:
        """A shard of an earlier run: it counts in the total, not in the rate."""
        self._bar.update(shard.tokens)
        if not self._bar.disable:
            self._bar.initial += shard.tokens

    def look_around(self) -> None:
        """Count what other processes have committed since the last look, if that was a while ago."""
        if self._bar.disable or not self._others or time.monotonic() - self._looked < LOOK_EVERY:
            return
        self._looked = time.monotonic()
        there = set(self._place.names("shards"))
        for shard in [shard for shard in self._others if shard.line in there]:
            self._bar.update(shard.tokens)
            self._others.remove(shard)


if __name__ == "__main__":
    cli.run(extract, __doc__ or "")
