"""What is inside a store, complete or begun, as text for people."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError, safe_open

from eagle31_train.place import Place
from eagle31_train.schema import UserError
from eagle31_train.store.head import Head, read_head
from eagle31_train.store.ledger import EXTRACT
from eagle31_train.store.plan import TOKEN_BYTES, PlannedShard

REMOTE_SHARDS = 2  # how many shards of a remote store are fetched to see how their bytes split up
BAR = 32  # columns of a histogram's longest bar
BINS = 8


@dataclass
class Rows:
    """What some shards hold: tokens, positions that slots attend to, and positions that teach."""

    shards: int = 0
    tokens: int = 0
    attended: int = 0
    taught: int = 0


def describe(place: Place) -> str:
    """Everything worth knowing of a store, some twenty lines.

    Raises:
        UserError: there is no store, or its small files are damaged.
    """
    head, found = read_head(place)
    if head is None:
        raise UserError(f"{found[0].text}: see `python -m eagle31_train.store verify {place.location}`")
    rows = [*_state(head), *_contents(head), *_provenance(head)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    if found:
        lines.append(f"{'damaged':<{width}}  see `python -m eagle31_train.store verify {place.location}`")
    for split, lengths in head.plan.lengths.items():
        lines += ["", f"tokens of a sample, {split}:", *histogram(lengths)]
    return "\n".join(lines)


def _state(head: Head) -> list[tuple[str, str]]:
    there, planned, used = len(head.lines), len(head.plan.shards), len(head.consumed)
    state = f"{there} of {planned} committed" + (f", {used} of them used up by a training" if used else "")
    if head.manifest is None:
        state += f"; unfinished, `{EXTRACT}` goes on with it"
    return [("store", head.place.location), ("shards", state)]


def _contents(head: Head) -> list[tuple[str, str]]:
    lengths = head.plan.lengths
    samples = ", ".join(f"{len(values):,} {split}" for split, values in lengths.items())
    tokens = ", ".join(f"{sum(values):,} {split}" for split, values in lengths.items())
    found = [("samples", samples), ("tokens", tokens)]
    done = [shard for shard in head.plan.shards if shard.name in head.lines]
    held, of = sum(head.lines[shard.name].size for shard in done), sum(shard.tokens for shard in done)
    if of:
        found.append(("bytes", f"{human(held)}, {held / of:,.0f} per token"))
    rows = _rows(head, done)
    if rows.tokens:
        attended, taught = rows.attended / rows.tokens, rows.taught / rows.tokens
        aux, last = head.shape.row_bytes
        parts = {"ids": TOKEN_BYTES, "auxiliary states": attended * aux, "last hidden states": taught * last}
        split_up = ", ".join(f"{name} {size:,.0f}" for name, size in parts.items())
        partly = f" (measured in {rows.shards} shards)" if rows.shards < len(done) else ""
        found += [
            ("per token", split_up + partly),
            (
                "taught",
                f"{taught:.1%} of positions; slots attend to {attended:.1%}",
            ),
        ]
    return found


def _rows(head: Head, done: Sequence[PlannedShard]) -> Rows:
    """What lies in the shards that are there; of a remote store's, in some of them."""
    rows = Rows()
    for shard in [shard for shard in done if head.place.size(shard.name) is not None][: _most(head.place)]:
        try:
            with safe_open(head.place.local(shard.name), framework="pt") as file:
                sizes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            continue  # `verify` names it
        rows.shards += 1
        rows.tokens += shard.tokens
        rows.attended += sizes["aux.values"][0]
        rows.taught += sizes["last.values"][0]
    return rows


def _most(place: Place) -> int | None:
    return REMOTE_SHARDS if place.remote else None


def _provenance(head: Head) -> list[tuple[str, str]]:
    inputs, states = head.provenance["inputs"], head.provenance["states"]
    target, engine, norm = inputs.get("target", {}), inputs.get("engine", {}), states.get("norm", {})
    layers = ", ".join(map(str, states["aux_layers"]))
    arguments = "".join(f", {name}={value}" for name, value in engine.get("args", {}).items())
    revision = f", revision {target['revision']}" if target.get("revision") else ""
    tied = "lm_head is the embedding" if states.get("tied_lm_head") else "lm_head of its own"
    found = [
        ("target", f"{target.get('name')}{revision}, {target.get('dtype')}, weights {target.get('weights')}"),
        ("auxiliary", f"layers {layers} ({states.get('aux_convention')}), as {head.shape.aux_codec}"),
        ("last hidden", f"{states.get('last_hidden_state')}, as {head.shape.last_codec}"),
        ("width", f"{states['hidden_size']:,}; vocabulary {states['vocab_size']:,}, {tied}"),
        ("final norm", ", ".join(f"{name} {value}" for name, value in norm.items())),
        ("engine", f"{engine.get('name')}{arguments}"),
        ("data", f"{inputs.get('data')}, template {inputs.get('template')}"),
        ("fidelity", _fidelity(head.manifest)),
        ("fingerprint", str(head.provenance["fingerprint"])),
    ]
    return [(name, value) for name, value in found if value]


def _fidelity(manifest: dict[str, Any] | None) -> str:
    report = (manifest or {}).get("fidelity")
    if report is None:
        return ""
    if not report["batches"]:
        return "not compared (extract.gate_batches=0)"
    return f"top-1 {report['top1_agreement']:.2%}, KL {report['kl']:.2g} nats over {report['positions']:,} positions"


def histogram(lengths: Sequence[int]) -> list[str]:
    """A few lines with bars: how many samples have how many tokens."""
    if not lengths:
        return ["  none"]
    low, high = min(lengths), max(lengths)
    step = max(1, -(-(high - low + 1) // BINS))
    counts = [0] * -(-(high - low + 1) // step)
    for length in lengths:
        counts[(length - low) // step] += 1
    width = len(f"{high:,}")
    lines = []
    for index, count in enumerate(counts):
        first = low + index * step
        bar = "█" * round(BAR * count / max(counts)) or ("▏" if count else "")
        lines.append(f"  {first:>{width},} to {min(high, first + step - 1):>{width},}  {bar:<{BAR}} {count:,}")
    return lines


def human(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
