"""What is inside a store, complete or begun, as text for people."""

from statistics import median
from typing import Any

from eagle31_train.errors import UserError
from eagle31_train.store.backends import Storage
from eagle31_train.store.format import EXTRACT
from eagle31_train.store.head import Head
from eagle31_train.store.shard_plan import Plan, shape_of
from eagle31_train.store.verify import inspect


def describe(storage: Storage) -> str:
    """Everything worth knowing of a store, some twenty lines.

    Raises:
        UserError: there is no store, or its small files are damaged.
    """
    head, problems = inspect(storage)
    verify = f"see `python -m eagle31_train.store verify {storage.location}`"
    if head.plan is None or head.provenance is None:
        raise UserError(f"{problems[0].text}: {verify}")
    rows = [*_contents(head, head.plan), *_provenance(head.provenance, head.manifest)]
    rows += [("damaged", verify)] if problems else []
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _contents(head: Head, plan: Plan) -> list[tuple[str, str]]:
    done = [shard for shard in plan.shards if shard.name in head.lines]
    state = f"{len(done)} of {len(plan.shards)} committed"
    state += f", {len(head.consumed)} of them used up by a training" if head.consumed else ""
    state += f"; unfinished, `{EXTRACT}` goes on with it" if head.manifest is None else ""
    rows = [("store", head.storage.location), ("shards", state)]
    for split, lengths in plan.lengths.items():
        text = f"{len(lengths):,} samples, {sum(lengths):,} tokens"
        if lengths:
            text += f"; of a sample: {min(lengths):,} to {max(lengths):,} tokens, median {median(lengths):,.0f}"
        rows.append((split, text))
    if tokens := sum(shard.tokens for shard in done):
        size = sum(head.lines[shard.name].size for shard in done)
        rows.append(("bytes", f"{human(size)}, {size / tokens:,.0f} per token"))
    return rows


def _provenance(provenance: dict[str, Any], manifest: dict[str, Any] | None) -> list[tuple[str, str]]:
    inputs, states = provenance["inputs"], provenance["states"]
    target, engine, norm = inputs.get("target", {}), inputs.get("engine", {}), states.get("norm", {})
    shape = shape_of(states)
    layers = ", ".join(map(str, states["aux_layers"]))
    arguments = "".join(f", {name}={value}" for name, value in engine.get("args", {}).items())
    revision = f", revision {target['revision']}" if target.get("revision") else ""
    tied = "lm_head is the embedding" if states.get("tied_lm_head") else "lm_head of its own"
    rows = [
        ("target", f"{target.get('name')}{revision}, {target.get('dtype')}, weights {target.get('weights')}"),
        ("auxiliary", f"layers {layers} ({states.get('aux_convention')}), as {shape.aux_codec}"),
        ("last hidden", f"{states.get('last_hidden_state')}, as {shape.last_codec}"),
        ("width", f"{states['hidden_size']:,}; vocabulary {states['vocab_size']:,}, {tied}"),
        ("final norm", ", ".join(f"{name} {value}" for name, value in norm.items())),
        ("engine", f"{engine.get('name')}{arguments}"),
        ("data", f"{inputs.get('data')}, template {inputs.get('template')}"),
        ("fidelity", _fidelity((manifest or {}).get("fidelity"))),
        ("fingerprint", str(provenance["fingerprint"])),
    ]
    return [(name, value) for name, value in rows if value]


def _fidelity(report: dict[str, Any] | None) -> str:
    if report is None:
        return ""
    if not report["batches"]:
        return "not compared (extract.gate_batches=0)"
    return f"top-1 {report['top1_agreement']:.2%}, KL {report['kl']:.2g} nats over {report['positions']:,} positions"


def human(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
