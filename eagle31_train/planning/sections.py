"""The plan as text, section by section; 80 columns."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from eagle31_train.checkpoint.contract import weight_shapes
from eagle31_train.planning.footprint import FP32
from eagle31_train.planning.planned import Planned
from eagle31_train.planning.profiles import PROFILES

GIB = 2**30
BUSY = 0.9  # share of the devices' time below which the plan says that they wait
SPARE = 0.9  # of a device's memory may be planned for: contexts, communication and fragments take the rest
PARTS = {"fc": "fc, fc_norm", "self_attn": "attention", "mlp": "mlp", "lm_head": "lm_head", "embed_tokens": "embedding"}


def drafter(plan: Planned) -> list[str]:
    """Parameters by part."""
    shape, d = plan.shape, plan.config.drafter
    sizes = dict.fromkeys([*PARTS.values(), "norms"], 0)
    for name, size in weight_shapes(shape).items():
        part = next((label for key, label in PARTS.items() if key in name), "norms")
        sizes[part] += math.prod(size)
    A, Vd, V = len(shape.aux_layers), shape.draft_vocab_size, shape.vocab_size
    of_keys = f", {shape.num_key_value_heads:,} of keys and values" if shape.architecture == "llama" else ""
    notes = {
        "fc, fc_norm": f"{A} × {shape.target_hidden_size:,} → {shape.hidden_size:,}",
        "attention": f"{shape.architecture}, {shape.num_attention_heads:,} heads{of_keys}",
        "mlp": f"{shape.hidden_size:,} → {shape.intermediate_size:,} → {shape.hidden_size:,}",
        "lm_head": f"{Vd:,} of {V:,} tokens" + ("" if d.train_lm_head else ", frozen"),
    }
    if plan.data.vocabulary is None and plan.config.data.draft_vocab_coverage is not None:
        notes["lm_head"] = "the whole vocabulary, until the data are counted"
    state, pieces = plan.state(), plan.target_pieces()
    lines = [_line(part, _si(size), notes.get(part, "")) for part, size in sizes.items() if size]
    lines.append(_line("trained", _si(state.trained), f"{_si(state.frozen)} more frozen" if state.frozen else ""))
    of_target = sum(pieces.values()) / plan.value
    precision = "bf16" if plan.value < FP32 else "fp32"
    lines.append(_line("of the target, frozen", _si(of_target), f"{' and '.join(pieces)}, {precision}"))
    return ["DRAFTER                     parameters", *lines]


def data(plan: Planned) -> list[str]:
    """Tokens, conversations, and the assistant's share."""
    d = plan.data
    work = d.work
    return [
        f"DATA   {d.origin}",
        _line("tokens", f"{work.tokens:,.0f}", f"training split; {d.heldout:.1%} more are held out"),
        _line(
            "conversations", f"{work.conversations:,.0f}", f"{work.tokens / work.conversations:,.0f} tokens on average"
        ),
        _line("by the assistant", f"{work.assistant / work.tokens:.1%}", f"{work.slots[0]:,.0f} slots to draft from"),
    ]


def store(plan: Planned) -> list[str]:
    """Bytes on disk, also with other codecs."""
    tokens, both = plan.data.work.tokens, 1 + plan.data.heldout
    own = plan.states()
    kinds = {f"{own.aux_codec}, {own.last_codec}": own, "bf16, bf16": plan.states("bf16", "bf16")}
    rows = []
    for name, states in kinds.items():
        size = plan.store_bytes(states)
        rows.append(_line(name, f"{size / tokens / 1024:.2f} KiB", f"a token, {_bytes(size * both)} in all"))
    pieces = 2 * plan.target.vocab_size * plan.target.hidden_size * 2
    return ["STORE of hidden states", *rows, _line("target's pieces", _bytes(pieces), "bf16, once")]


def steps(plan: Planned) -> list[str]:
    """Optimizer steps."""
    t = plan.config.train
    epoch = math.ceil(plan.data.work.tokens / t.batch_tokens)
    limit = f", at most train.max_steps={t.max_steps:,}" if t.max_steps is not None else ""
    return [
        "STEPS   with full batches; packing leaves one or two percent of them empty",
        _line("one pass", f"{epoch:,}", f"of {t.batch_tokens:,} tokens"),
        _line("in all", f"{plan.steps:,}", f"train.epochs={t.epochs}{limit}"),
    ]


def time(plan: Planned) -> list[str]:
    """FLOPs and hours."""
    p, tokens = plan.config.plan, plan.data.work.tokens
    rate = p.devices * p.peak_tflops * 1e12 * p.utilisation
    rows = []
    for name, flops, per, share in (
        ("extraction", plan.extraction_flops(), tokens * (1 + plan.data.heldout), 1.0),
        ("training", plan.training_flops(), plan.tokens, plan.busy),
    ):
        rows.append(_line(name, _duration(flops / rate / share), f"{_si(flops)}FLOP, {_si(flops / per)}FLOP a token"))
    if plan.busy < BUSY:
        rows += [
            f"  A step has some {plan.conversations:,.0f} conversations, and none is split: at least",
            f"  {1 - plan.busy:.0%} of the {p.devices} devices' time is spent waiting. Raise train.batch_tokens.",
        ]
    if again := plan.newton_schulz_flops():
        spent = _duration(again * p.devices / rate)
        rows.append(_line("Muon's updates", spent, f"{_si(again / plan.steps)}FLOP a step, on each device"))
    assumed = f"{_devices(p.devices)} at {p.utilisation:.0%} of {p.peak_tflops:g} TFLOP/s"
    return [f"TIME   if {assumed}, which nobody has measured", *rows]


def micro_batch(plan: Planned, devices: int) -> list[str]:
    """What one micro-batch takes, with and without recomputation."""
    names = ("kept for the backward", "weights as bf16", "lm_head's gradient", "in the loss", "in the backward")
    both = [plan.micro(devices, recompute) for recompute in (False, True)]
    columns = [[a.kept, a.copies, a.head, a.loss, a.backward] for a, _ in both]
    rows = [
        f"  {name:<24}{ordinary / GIB:>10.2f}{again / GIB:>24.2f}"
        for name, ordinary, again in zip(names, *columns, strict=True)
    ]
    tokens = plan.micro_tokens(devices)
    head = f"MICRO-BATCH of {tokens:,} tokens, GiB{'activation checkpointing':>40}"
    return [head, *rows, f"  {'its states':<24}{both[0][1] / GIB:>10.2f}{both[1][1] / GIB:>24.2f}"]


COLUMNS = ("weights", "moments", "copies", "target", "step", "update", "peak", "host")


def profiles(plan: Planned) -> list[str]:
    """Memory of one device under every launch profile."""
    p = plan.config.plan
    rows = {}
    for profile in plan.profiles():
        m = plan.memory(profile, plan.config.train.activation_checkpointing)
        rows[profile.name] = (m.weights, m.moments, m.copies, m.target, m.step, m.exchange, m.peak, m.host)
    digits = 2 if max(map(max, rows.values())) < 10 * GIB else 1
    whose = "the device" if p.devices == 1 else f"each of {p.devices} devices"
    lines = [
        f"MEMORY of {whose}, GiB, by profile of configs/accelerate",
        " " * 16 + "".join(f"{name:>8}" for name in COLUMNS),
        *(f"  {name:<14}" + "".join(f"{x / GIB:8.{digits}f}" for x in row) for name, row in rows.items()),
    ]
    state = plan.state()
    saved = FP32 * (state.trained + state.frozen + state.moments)
    lines += [
        "  weights to target: there all the time, exact. step: the worst moment of a",
        "  micro-batch; update: exchanging gradients, and the optimizer. The larger of",
        f"  these estimates counts. host: of every process; the main one takes {saved / GIB:.1f} more",
        "  to save.",
    ]
    if len(plan.profiles()) < len(PROFILES) and p.devices > 1:
        lines.append("  zero*: not with train.optimizer=muon, which needs whole matrices.")
    if p.devices > 1:
        alone = plan.micro_tokens(1)
        lines.append(f"  gpu: one device alone, {alone:,} tokens at a time.")
    return lines


def which(plan: Planned) -> list[str]:
    """The simplest profile that fits; if none does, with smaller micro-batches, and then with recomputation."""
    p = plan.config.plan
    simplest = [profile for profile in plan.profiles() if profile.several == (p.devices > 1)]
    for options, variant in _variants(plan):
        peaks = {
            profile: variant.memory(profile, variant.config.train.activation_checkpointing).peak for profile in simplest
        }
        for profile, peak in peaks.items():
            if peak <= SPARE * p.device_gib * GIB:
                count = f"--num_processes {p.devices} " if profile.several else ""
                return [
                    f"WHICH PROFILE   {profile.name}, the simplest that leaves a tenth free: {peak / GIB:.1f} of "
                    f"{p.device_gib:g} GiB",
                    f"  accelerate launch --config_file configs/accelerate/{profile.name}.yaml \\",
                    f"      {count}train.py{''.join(f' {option}' for option in options)} …",
                ]
    return [
        f"WHICH PROFILE   none fits into {p.device_gib:g} GiB with a tenth free; the least takes "
        f"{min(peaks.values()) / GIB:.1f}",
        f"  with {' '.join(options) or 'these options'}.",
        "  Plan more devices, lower data.draft_vocab_size or data.max_length,",
        "  or set drafter.train_lm_head=false.",
    ]


def _variants(plan: Planned) -> Iterator[tuple[list[str], Planned]]:
    """The plan as it is; then with less memory, step by step, in ways that change nothing of what is learnt."""
    t, options = plan.config.train, []
    yield [], plan
    devices = plan.config.plan.devices
    while plan.micro_tokens(devices) > plan.data.longest:
        t = replace(t, gradient_accumulation_steps=2 * t.gradient_accumulation_steps)
        plan = replace(plan, config=replace(plan.config, train=t))
        options = [f"train.gradient_accumulation_steps={t.gradient_accumulation_steps}"]
        yield options, plan
    if not t.activation_checkpointing:
        plan = replace(plan, config=replace(plan.config, train=replace(t, activation_checkpointing=True)))
        yield [*options, "train.activation_checkpointing=true"], plan


# ---------------------------------------------------------------- numbers for people


def _line(label: str, value: str, note: str = "") -> str:
    return f"  {label:<22}{value:>14}   {note}".rstrip()


def _si(count: float) -> str:
    """Three digits and a prefix: 425 M, 12.3 P."""
    prefixes = ["", "k", "M", "G", "T", "P", "E", "Z"]
    power = 0
    while count >= 999.5 and power < len(prefixes) - 1:
        count, power = count / 1000, power + 1
    digits = 0 if not power or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {prefixes[power]}"


def _devices(count: int) -> str:
    return f"{count} device{'s' if count > 1 else ''}"


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:,.1f} h"


def _bytes(count: float) -> str:
    return f"{_si(count)}B"


SECTIONS = (drafter, data, store, steps, time)


def text(plan: Planned) -> str:
    """The whole plan."""
    devices = plan.config.plan.devices
    title = f"Plan of {plan.config.name}: a drafter for {plan.config.target.name}"
    blocks: Sequence[list[str]] = [
        [title],
        *(section(plan) for section in SECTIONS),
        micro_batch(plan, devices),
        profiles(plan),
        which(plan),
    ]
    return "\n\n".join("\n".join(block) for block in blocks)
