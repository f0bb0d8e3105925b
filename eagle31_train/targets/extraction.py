"""Stage 2, extraction: conversations → the target's hidden states in a store (`eagle31_train/extract.py`).

`top1`, the target's arg-max over the full vocabulary, is computed once, at the supervised positions, from the states
before the codec rounds them. So training needs no product with the whole lm_head.

Shapes: T tokens of one conversation; A auxiliary layers; H hidden.
"""

import importlib.util
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle31_train import provenance
from eagle31_train.common import artifacts
from eagle31_train.common.background import Background
from eagle31_train.common.console import Progress, is_main, note, rank, ranks, refuse_lone_process
from eagle31_train.common.errors import UserError
from eagle31_train.common.locks import alone
from eagle31_train.common.transfers import each_tensor, to_device, to_host
from eagle31_train.common.units import byte_count
from eagle31_train.config import ANSWERED, Config
from eagle31_train.model import vocab
from eagle31_train.provenance import Provenance
from eagle31_train.rows import samples
from eagle31_train.store import Storage, StoreWriter, finished, make_plan, shape_of, storage_of
from eagle31_train.store.codec import encode
from eagle31_train.store.document import Document
from eagle31_train.store.format import TARGET, Line
from eagle31_train.store.shard_plan import SPLITS, PlannedShard, Shape
from eagle31_train.targets.chat import ChatTemplate, rendered_otherwise
from eagle31_train.targets.description import changed_since, describe_target
from eagle31_train.targets.fidelity import Figures, Gate, report
from eagle31_train.targets.hf import Engine, check_length, load_engine
from eagle31_train.targets.pretrained import load_tokenizer, vocabulary_fingerprint
from eagle31_train.targets.readout import Readout
from eagle31_train.targets.vllm_engine import VllmEngine

if TYPE_CHECKING:
    from datasets import Dataset

LOGIT_ROWS = 512  # rows of [rows, V] logits alive at once
FOREIGN = 0.5  # if the target would itself write a smaller share of the answer tokens, they are hardly its own
NOT_FINITE = "the target's hidden states are not finite (NaN, infinite or nearly so): check target.dtype"
OUTSIDE = 0.2  # if a larger share of its choices is outside the draft vocabulary, that was counted on other words

# What the first process does with the target before it stores states.
Prelude = Callable[[Config, Engine, StoreWriter, dict[str, "Dataset"]], None]


def extract(config: Config, prelude: Prelude | None = None) -> None:
    """Run the stage, as one of `WORLD_SIZE` processes of one of `extract.parts` launches.

    UserError for missing or damaged input, or input for another target; output of other inputs; a failed fidelity gate;
    a full disk; no such part; another process that extracts the same shards.
    """
    rank, ranks = rank_of(config)
    made_from = provenance.of_store(config, provenance.read_data(config))
    storage = storage_of(config)
    if finished(storage, made_from, config.overwrite):
        if is_main():
            note(f"extract: up to date ({storage.location})")
        return
    who = f"another process is extracting the same shards of {storage.location}"
    with alone(storage.lock(f"extracting-{rank}"), who, "store_dir=…"):
        _extract(config, rank, ranks, storage, made_from, prelude)


def _extract(
    config: Config, rank: int, ranks: int, storage: Storage, made_from: Provenance, prelude: Prelude | None
) -> None:
    """Extract this process's part of an unfinished store."""
    began = time.perf_counter()
    data = provenance.read_data(config, whole=True)
    splits = {split: samples.load(config.data_folder / "dataset", split) for split in SPLITS}
    other = f"{config.data_folder} was not made for target.path={config.target.path}, but for a target with another"
    remedy = "correct data_dir or target.path, or run `eagle31 data` for this target"
    vocabulary = data.get("vocabulary")  # None in data of an earlier version
    # For another target the ids mean other words, which the gate cannot notice.
    if vocabulary and vocabulary_fingerprint(load_tokenizer(config.target)) != vocabulary:
        raise UserError(f"{other} tokenizer: {remedy}")
    engine = make_engine(config)
    states = describe(engine, config)
    if data["inputs"]["vocab_size"] != states["vocab_size"]:
        raise UserError(f"{other} number of tokens: {remedy}")
    if is_main() and (change := changed_since(data.get("target") or {}, describe_target(config.target))):
        note(
            f"extract: WARNING: {config.data_folder} was made with another config.json of the target, from which the "
            f"drafter will be derived ({change}): run `eagle31 data` again"
        )
    if is_main():
        _tell_of_other_answers(config, data, made_from.inputs["target"]["weights"])
    masks = {split: samples.column(splits[split], "loss_mask") for split in SPLITS}
    plan = make_plan(masks, config.extract.shard_tokens, shape_of(states))
    check_length(engine, max((length for lengths in plan.lengths.values() for length in lengths), default=0))
    writer = StoreWriter(
        storage,
        {**made_from.record(), "states": states},
        plan,
        rank=rank,
        ranks=ranks,
        overwrite=config.overwrite,
        max_bytes=byte_count(config.store.max_bytes, "store.max_bytes") if config.store.max_bytes else None,
        patience=config.store.patience,
        remedy=made_from.remedy,
    )
    if rank == 0:
        if prelude is not None:
            prelude(config, engine, writer, splits)
        writer.write_tensors(TARGET, engine.readout.weights())
    gate = Gate(engine, config.extract, len(plan.shards))
    draft_tokens = vocab.read(config.data_folder / "vocab.safetensors").t2d
    wanted = extract_shards(engine, splits, writer, gate, draft_tokens)
    if wanted and rank == 0 and (lines := writer.gather()) is not None:
        _finish(writer, lines, draft_tokens, began)
    elif is_main() and wanted and rank > 0:
        note(f"extract: extract.part={config.extract.part} is done; part 0 finishes {storage.location}")
    elif is_main():
        note(f"extract: the training that follows {storage.location} needs no more of it: stopped, unfinished")


def _tell_of_other_answers(config: Config, data: dict[str, Any], weights: str) -> None:
    """Warn if the target has changed since stage 1: its chat template or end tokens, or the weights that answered."""
    folder, target = config.data_folder, config.target
    again = "run `eagle31 data` again, or use the target of the data"
    with suppress(UserError):  # a target without a template, which has none to compare
        if data.get("vocabulary") and (change := rendered_otherwise(ChatTemplate.load(target), data)):
            note(
                f"extract: WARNING: {target.name} renders or ends conversations otherwise than in {folder} "
                f"({change}): {again}"
            )
    record = folder.parent / Path(ANSWERED).with_suffix(".manifest.json")
    answers: dict[str, Any] = {}
    with suppress(UserError):  # what is missing or damaged here is not needed
        answers = artifacts.read_json(record, provenance.DATA)
    wrote, files = answers.get("inputs", {}), answers.get("files", {})
    sha256 = files.get(ANSWERED, {}).get("sha256") if isinstance(files, dict) else None
    of_these = wrote.get("target") == target.name and data["inputs"].get("sources") == [[ANSWERED, sha256]]
    # A server's answers are without weights: it is known by its name alone.
    if of_these and wrote.get("weights") not in (None, weights):
        note(f"extract: WARNING: the weights or config.json of {target.name} have changed since it answered: {again}")


def _finish(writer: StoreWriter, lines: Sequence[Line], draft_tokens: NDArray, began: float) -> None:
    """Complete a store that has all its shards, and report what it holds."""
    counts = [line.agreement for line in lines if line.agreement is not None]
    agreement = Agreement.of_all(count[:MEASURES] for count in counts)
    drafted = Agreement.of_all(count[:MEASURES] for count in counts if count[MEASURES:] == [checksum(draft_tokens)])
    fidelity = report([line.fidelity for line in lines if line.fidelity is not None])
    manifest = writer.finish(lines, {"fidelity": fidelity, "seconds": time.perf_counter() - began})
    compared = "fidelity: not compared (extract.gate_batches=0)"
    if fidelity["batches"]:
        top1, kl = fidelity["top1_agreement"], fidelity["kl"]
        compared = f"fidelity: top-1 {top1:.2%}, KL {kl:.2g} over {fidelity['positions']} positions"
    size = f"{manifest['tokens']:,} tokens, {manifest['bytes_per_token']:,.0f} bytes each"
    note("\n".join([f"extract: {size}, in {writer.storage.location}; {compared}", *agreement.lines(drafted)]))


def rank_of(config: Config) -> tuple[int, int]:
    """Return (rank, ranks) among all processes that share the shards, by the launcher's environment and the part."""
    refuse_lone_process()
    part, parts = config.extract.part, config.extract.parts
    if part >= parts:
        raise UserError(f"extract.part={part}: with extract.parts={parts}, parts are numbered from 0 to {parts - 1}")
    return part * ranks() + rank(), parts * ranks()


def make_engine(config: Config) -> Engine:
    """Return the engine that `extract.engine` names; UserError if it is not installed, or cannot load the target."""
    arguments = config.extract.engine_args
    if config.extract.engine == "transformers":
        if arguments:
            raise UserError(
                f"extract.engine_args={arguments} are only for vLLM: set extract.engine=vllm, or remove them"
            )
        return load_engine(config.target, config.extract.batch_tokens)
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "extract.engine=vllm needs vLLM in this environment: pip install vllm (on a CPU: "
            "tests/vllm/install.sh DIR makes an environment, DIR/bin/python -m eagle31_train.extract runs in it)"
        )
    return VllmEngine(config)


def describe(engine: Engine, config: Config) -> dict[str, Any]:
    """Describe the stored states, for the store's records."""
    readout = engine.readout
    return {
        "aux_layers": engine.layers,
        "aux_convention": "input of layer i; 0 = embeddings, N = output of the last layer before the final norm",
        "last_hidden_state": "before the final norm",
        "norm": {"kind": readout.norm_kind, "eps": readout.eps, "stored": "effective weight"},
        **({} if readout.soft_cap is None else {"soft_cap": readout.soft_cap}),
        "tied_lm_head": readout.tied,
        "hidden_size": readout.embedding.shape[1],
        "vocab_size": readout.head.shape[0],
        "aux_codec": config.store.aux_codec,
        "last_codec": config.store.last_codec,
    }


class Agreement(NamedTuple):
    """Counts of supervised positions where the answer is the target's own, or the target's choice cannot be drafted.

    own: positions whose next token is the target's arg-max. outside: those whose arg-max cannot be drafted. bare:
    conversations with nothing to train: no arg-max can be drafted, or no answer is supervised.
    """

    positions: int = 0
    own: int = 0
    outside: int = 0
    conversations: int = 0
    bare: int = 0

    @classmethod
    def of(cls, document: Document, draft_tokens: NDArray) -> "Agreement":
        """Count one conversation; draft_tokens: [V] bool."""
        where = document.supervised
        top1 = document.top1[where]
        inside = draft_tokens[top1.numpy()]
        own = int((top1 == document.tokens[where + 1]).sum())
        return cls(len(where), own, int((~inside).sum()), 1, int(not inside.any()))

    @classmethod
    def of_all(cls, counts: Iterable[Sequence[int]]) -> "Agreement":
        """Sum several, each given as its numbers in this order."""
        return cls(*map(sum, zip(*counts, strict=True)))

    def lines(self, drafted: "Agreement") -> list[str]:
        """Return the lines to print; none if nothing was counted. drafted: the counts of those shards that were
        compared with the current draft vocabulary."""
        lines = []
        own, outside = self.own / max(self.positions, 1), drafted.outside / max(drafted.positions, 1)
        if self.positions:
            lines.append(f"extract: the target would itself write {own:.1%} of the {self.positions:,} answer tokens")
        if drafted.positions:
            some = (
                f"the {drafted.positions:,} compared with it" if drafted.positions < self.positions else "its choices"
            )
            lines[-1] += f"; {outside:.1%} of {some} lie outside the draft vocabulary"
        if drafted.bare:
            count = f"{drafted.bare:,} of {drafted.conversations:,} conversations"
            lines.append(f"extract: {count} have nothing to train on")
        if self.positions and own < FOREIGN:
            lines.append(
                "extract: WARNING: few of these answers are the target's own, so a drafter learns little: did they "
                "come from others (regenerate=false), other weights, another chat template, or a high temperature?"
            )
        if outside > OUTSIDE:
            lines.append(
                "extract: WARNING: many of the target's choices can never be drafted: raise data.draft_vocab_size, or "
                "count the draft vocabulary on the target's own answers"
            )
        return lines


MEASURES = len(Agreement._fields)


def checksum(draft_tokens: NDArray) -> int:
    """Return a checksum of a draft vocabulary, [V] bool. Each shard's counts end with it: the vocabulary may change."""
    return zlib.crc32(np.packbits(draft_tokens).tobytes())


class Arriving:
    """States of a shard on their way from the target's devices to host memory, while the target runs on.

    Nothing waits for a GPU: each sample's states are encoded there and their copies queued. No value is looked at, not
    even to see whether all are finite, before the whole shard has arrived.
    """

    def __init__(self, shape: Shape, shard: PlannedShard) -> None:
        self._shape, self._shard = shape, shard
        self._documents: dict[int, tuple[Document, list[Tensor]]] = {}  # each with flags: are its states finite?
        self._queued: dict[torch.device, torch.cuda.Event] = {}  # the last copy from each device

    def add(self, index: int, document: Document) -> None:
        """Encode the states of the shard's sample `index` on the device where they are, and queue their copies."""
        aux, aux_finite = encode(document.aux.values, self._shape.aux_codec)
        last, last_finite = encode(document.last.values, self._shape.last_codec)
        aux, last, top1 = each_tensor(aux, to_host), each_tensor(last, to_host), to_host(document.top1)
        here = replace(document, top1=top1, aux=aux, last=last)
        self._documents[index] = here, [to_host(aux_finite), to_host(last_finite)]
        for device in {document.top1.device, document.aux.device, document.last.device}:
            if device.type == "cuda":
                self._queued[device] = torch.cuda.current_stream(device).record_event()

    def wait(self) -> list[Document]:
        """Wait for all documents and return them in order; UserError that names a sample that is not finite."""
        for event in self._queued.values():
            event.synchronize()
        order = sorted(self._documents)
        for index in order:
            if not all(self._documents[index][1]):
                raise UserError(f"{self._shard.name}: sample {self._shard.first + index}: {NOT_FINITE}")
        return [self._documents[index][0] for index in order]


def extract_shards(
    engine: Engine, splits: dict[str, "Dataset"], writer: StoreWriter, gate: Gate, draft_tokens: NDArray
) -> bool:
    """Commit this process's shards. Return False if a training that follows the store needs no more before the last.
    draft_tokens: [V] bool, the tokens of the draft vocabulary."""
    shards = writer.mine()
    total = sum(shard.tokens for shard in shards)
    shards = [shard for shard in shards if not writer.has(shard)]
    committed = total - sum(shard.tokens for shard in shards)  # by an earlier run: part of the total, not of the rate
    options: dict[str, Any] = {"unit": "tok", "unit_scale": True, "smoothing": 0.05}
    with (
        Progress(desc="extract", total=total, initial=committed, disable=not is_main(), **options) as progress,
        Background("store") as background,
    ):

        def passed(tokens: int) -> None:
            progress.update(tokens)
            background.check()

        for shard in shards:
            if not writer.wait_for_quota(shard, background.check):
                return False
            rows = splits[shard.split].select(range(shard.first, shard.end))
            recorded = shard.number in gate.sampled
            active_gate = gate if recorded or not gate.passed else None
            arriving, figures = run_shard(engine, rows, writer.shape, shard, active_gate, passed)
            # Written while the target runs over the next shard: at most two are in memory.
            background.start(commit, writer, shard, arriving, draft_tokens, figures if recorded else None)
    return True


def commit(
    writer: StoreWriter, shard: PlannedShard, arriving: Arriving, draft_tokens: NDArray, figures: Figures | None
) -> None:
    """Write a shard once its states have arrived."""
    documents = arriving.wait()
    counts = Agreement.of_all(Agreement.of(document, draft_tokens) for document in documents)
    writer.write(shard, documents, figures, [*counts, checksum(draft_tokens)])


def run_shard(
    engine: Engine,
    rows: "Dataset",
    shape: Shape,
    shard: PlannedShard,
    gate: Gate | None,
    passed: Callable[[int], None] = lambda _: None,
) -> tuple[Arriving, Figures | None]:
    """Run the target over a shard's rows of the data. Return the documents, and the gate's figures.

    passed: called with the number of tokens of each sample that the target has run over (on a GPU: that is queued).
    """
    tokens = [torch.tensor(row) for row in rows["input_ids"]]
    masks = [torch.tensor(row, dtype=torch.bool) for row in rows["loss_mask"]]
    arriving = Arriving(shape, shard)
    for index, aux, last in engine.run(tokens):
        top1 = top1_of(engine.readout, last, masks[index])
        # Encode right away: a GPU then holds the states of one batch, not those of a whole shard.
        arriving.add(index, Document.of(tokens[index], masks[index], top1, aux, last))
        passed(len(tokens[index]))
    return arriving, gate.check(arriving.wait()) if gate else None


def top1_of(readout: Readout, last: Tensor, loss_mask: Tensor) -> Tensor:
    """Return [T] int64 on the device of `last`: the target's arg-max where the next token is the assistant's, or -1."""
    where = to_device(loss_mask[1:].nonzero()[:, 0], last.device)
    top1 = torch.full((len(last),), -1, dtype=torch.int64, device=last.device)
    for rows in where.split(LOGIT_ROWS):
        top1[rows] = readout.best(last[rows]).to(last.device, non_blocking=True)
    return top1
