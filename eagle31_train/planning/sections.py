"""The plan as text, section by section."""

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

from tqdm import tqdm

from eagle31_train.checkpoint.contract import weight_shapes
from eagle31_train.common import order
from eagle31_train.common.artifacts import MANIFEST
from eagle31_train.planning.devices import GIB
from eagle31_train.planning.footprint import Profile
from eagle31_train.planning.inputs import prompts_at_hand
from eagle31_train.planning.planned import Planned
from eagle31_train.planning.work import newton_schulz_flops

# Shards in the memory of an extracting process: one being written, and the samples of it and of the next one. From a
# GPU, samples come in pinned blocks of up to twice their size.
SHARDS = 1 + 2 * 2
TIMED_STEP = 0.118  # seconds; the shortest step that was timed: 8,192 tokens on an H100 (docs/benchmarks.md)
BUSY = 0.9  # share of the devices' time below which the plan says that they wait
MACHINE = 8  # most devices assumed in one machine, all of which `eagle31 run` uses
SPARE = 0.9  # share of a device's memory to plan for; contexts, communication and fragmentation take the rest
PARTS = {"fc": "fc, fc_norm", "self_attn": "attention", "mlp": "mlp", "lm_head": "lm_head", "embed_tokens": "embedding"}
MORE = [
    "  More prompts and steps make a better drafter: for a 135M target 420 and 480 gave an acceptance length of 1.54",
    "  on MT-Bench and Alpaca, 2,781 and 1,778 gave 1.75.",
    "  Set plan.tokens=3e8 to see under `prompts` how many give that many tokens.",
]
LONGER = 4  # limits of more times the planned length get a warning
COLUMNS = ("weights", "moments", "copies", "target", "step", "update", "peak", "host")


def drafter(plan: Planned) -> list[str]:
    shape, state = plan.shape, plan.state()
    sizes = dict.fromkeys([*PARTS.values(), "norms"], 0.0)
    for name, size in weight_shapes(shape).items():
        part = next((label for key, label in PARTS.items() if key in name), "norms")
        sizes[part] += math.prod(size)
    sizes |= {"trained": state.trained, "frozen": state.frozen}
    sizes["of the target, frozen"] = plan.target_pieces() / plan.value
    return [
        f"DRAFTER   {shape.architecture}, {shape.draft_vocab_size:,} of {shape.vocab_size:,} tokens",
        *(_line(part, _si(size), "parameters") for part, size in sizes.items() if size),
    ]


def target(plan: Planned) -> list[str]:
    """Return the memory of the target's weights in each stage that runs it itself, with the KV cache of answers, and a
    remedy where they do not fit."""
    c, count, sizes = plan.config, plan.devices.count, plan.target.sizes
    stored, loaded = plan.target.weight_bytes, plan.target.loaded_bytes
    spread = count if c.target.device_map else 1
    given = c.plan.target_parameters is not None
    counted = "perhaps more in all (plan.target_parameters)" if given else "as its class in transformers has them"
    lines = [
        "TARGET'S WEIGHTS on a device",
        _line("parameters", _si(sizes.all), f"{_si(sizes.active)} active per token, {counted}"),
    ]
    if loaded > stored:
        lines.append(_line("unpacked", f"{loaded:g} bytes each", "MXFP4 in transformers without the package kernels"))
    if c.regenerate and not c.data.generate.server:
        remedy = "data.generate.server=vllm, target.device_map=auto, or a smaller data.generate.batch_size"
        lines.append(_weights(plan, "answers", loaded / spread, remedy, _answers_cache(plan) / spread))
    if c.extract.engine == "vllm":
        shared = c.extract.engine_args.get("tensor_parallel_size", 1)
        wider = "extract.engine_args.tensor_parallel_size=N" if shared < count else "more devices, or larger ones"
        lines.append(_weights(plan, "extraction", stored / shared, wider))
    else:
        lines.append(_weights(plan, "extraction", loaded / spread, "extract.engine=vllm, or target.device_map=auto"))
    if c.evaluate.backend == "transformers":  # quantized weights stay as they are
        decoded = loaded if loaded < 2 else 4 if c.evaluate.dtype == "float32" else 2
        remedy = "evaluate.backend=vllm, or target.device_map=auto"
        lines.append(_weights(plan, "evaluation", decoded / spread, remedy))
    return lines


def _weights(plan: Planned, stage: str, each: float, remedy: str, cache: float = 0.0) -> str:
    """Return a stage's line. each: bytes per weight on one device; cache: bytes of the KV cache on it."""
    p, taken = plan.devices, (each * plan.target.sizes.all + cache) / GIB
    batch = plan.config.data.generate.batch_size
    note = f"of it {cache / GIB:.1f} GiB KV cache, for {batch} answers at once" if cache else ""
    if taken > SPARE * p.gib:
        note = f"TOO MUCH for {p.gib:.4g} GiB: use {remedy}"
    return _line(stage, f"{taken:.1f} GiB", note)


def _answers_cache(plan: Planned) -> float:
    """Return the bytes of one batch's KV cache, as if every answer had the greatest length."""
    work, g = plan.data.work, plan.config.data.generate
    longest = (work.tokens - work.assistant) / work.conversations + g.max_new_tokens
    return g.batch_size * longest * plan.cache_bytes


def data(plan: Planned) -> list[str]:
    work = plan.data.work
    return [
        f"DATA   {plan.data.origin}",
        _line("tokens", f"{work.tokens:,.0f}", f"training split; {plan.data.heldout:.1%} more are held out"),
        _line("conversations", f"{work.conversations:,.0f}"),
        _line("by the assistant", f"{work.assistant / work.tokens:.1%}", f"{work.slots[0]:,.0f} slots to draft from"),
    ]


def answering(plan: Planned) -> list[str]:
    config, work = plan.config, plan.data.work
    own, d = config.writes_prompts, config.data
    if not config.regenerate:
        return ["ANSWERS   none: the conversations are used as they are (regenerate=false)"]
    if config.plan.tokens is None and (counted := config.data_folder / MANIFEST).is_file():
        return [f"ANSWERS   none: the data exist already ({counted})"]
    most = d.generate.max_new_tokens * d.self_prompts.turns
    prompt, answer = (work.tokens - work.assistant) / work.conversations, min(work.assistant / work.conversations, most)
    what = plan.answering(work.conversations * (1 + plan.data.heldout), prompt, answer)
    share, each = config.plan.decode_utilisation, f"{d.generate.samples} × {answer:,.0f} tokens of answer to each"
    lines = [
        f"ANSWERS   by {'a server' if d.generate.server else 'this process'}, {what.batch} at once, "
        f"devices: {what.devices}",
        _line("prompts", f"{what.prompts:,.0f}", each),
        _line(
            "tokens to write", _si(what.written + what.answers), "with the prompts, some of which are not used" * own
        ),
        _line("at best", _time(what.seconds), f"{_si(what.flops)}FLOP"),
        f"    a step of {what.batch} takes {1000 * what.step:.3g} ms: {_si(what.weights)}B of weights and "
        f"{_si(what.cache)}B of KV cache",
        _line("expected", _time(what.seconds / share), f"at {share:.0%} of that speed (plan.decode_utilisation)"),
    ]
    if most > LONGER * answer:
        lines.append(
            f"  LONG ANSWERS   an answer may have {most:,} tokens: if yours are longer, raise plan.sample_tokens, "
            "those of a conversation"
        )
    there = prompts_at_hand(config)
    if there is not None and there < 0.99 * what.prompts:
        more = "data.self_prompts.count" if own else "data.generate.samples"
        lines.append(f"  NOT ENOUGH   there are only {there:,} prompts: add more, or raise {more}")
    return lines + MORE * (config.plan.tokens is None)


def store(plan: Planned) -> list[str]:
    states = plan.states()
    size, kinds = plan.store_bytes(states), f"{states.aux_codec}, {states.last_codec}"
    each = size / plan.data.work.tokens
    tokens = max(plan.config.extract.shard_tokens, plan.config.data.max_length)
    t, one = plan.config.train, plan.checkpoint_bytes()
    checkpoints = t.keep_checkpoints + t.keep_best + 1
    return [
        "STORE of hidden states, and other disk space",
        _line(kinds, f"{_si(size * (1 + plan.data.heldout))}B", f"{each / 1024:.2f} KiB a token"),
        _line("embedding, lm_head", f"{_si(plan.copied_bytes())}B", "copied from the target"),
        _line("checkpoints", f"{_si(checkpoints * one)}B", f"{checkpoints} of {_si(one)}B, one of them being written"),
        _line("memory, at most", f"{_si(SHARDS * tokens * each)}B", "of each extracting process, besides the target"),
    ]


def time(plan: Planned) -> list[str]:
    p, utilisation = plan.devices, plan.config.plan.utilisation
    rate = p.count * p.tflops * 1e12 * utilisation
    matrices = [round(newton_schulz_flops([shape])) for shape in plan.orthogonal()]
    shares = order.share(range(len(matrices)), matrices, p.count)
    most = max(sum(matrices[index] for index in some) for some in shares)  # all devices wait for the one that has most
    rows = {
        "extraction": (plan.extraction_flops(), 1.0),
        "training": (plan.training_flops(), plan.busy),
        "Muon's updates": (plan.steps * most * p.count, 1.0),
    }
    used = f"{utilisation:.0%} of {p.count} x {p.tflops:g} TFLOP/s"
    lines = [
        f"TIME   if {used} is used; training reached 39 to 51% of an H100",
        _line("steps", f"{plan.steps:,}", f"of {plan.batch_tokens:,} tokens" + ", at the least" * (not plan.packs)),
        *(_line(name, _time(n / rate / share), f"{_si(n)}FLOP") for name, (n, share) in rows.items() if n),
    ]
    step = rows["training"][0] / rate / rows["training"][1] / max(plan.steps, 1)
    if 0 < step < TIMED_STEP:
        lines += [
            f"  SHORT STEPS   of {1000 * step:.2g} ms each; the shortest timed one took {1000 * TIMED_STEP:.0f} ms, so",
            "  expect more: kernel launches and gradient exchange come on top",
        ]
    if plan.busy < BUSY:
        looked = len(plan.data.each)
        known = f"{looked:,} lengths were counted" if looked > 1 else "assumed equally long"
        lines += [
            f"  With {plan.conversations:,.0f} conversations in a step ({known}), devices wait {1 - plan.busy:.0%}",
            "  of the time: use fewer devices, which are as fast, or raise train.batch_tokens (the drafter then",
            "  learns less from a small corpus)",
        ]
    if (longest := plan.data.longest) > plan.batch_tokens:
        lines.append(
            f"  TOO LONG   a step cannot hold a conversation of {longest:,} tokens: set train.batch_tokens={longest}"
        )
    return lines


def profiles(plan: Planned) -> list[str]:
    rows = {}
    for profile in plan.profiles():
        m = plan.memory(profile)
        rows[profile.name] = (m.weights, m.moments, m.copies, m.target, m.step, m.exchange, m.peak, m.host)
    devices = plan.devices.count
    # The most expensive micro-batch, expressed in tokens; none has more than a step.
    micro, alone = (min(plan.micro_tokens(n), plan.batch_tokens) for n in (devices, 1))
    context = plan.context(devices)
    shared = f", each shared by {context} devices" if context > 1 else ""
    return [
        f"MEMORY of each of {devices} devices, GiB, by profile of configs/accelerate",
        " " * 16 + "".join(f"{name:>8}" for name in COLUMNS),
        *(f"  {name:<14}" + "".join(f"{x / GIB:8.1f}" for x in row) for name, row in rows.items()),
        f"  Micro-batches of {micro:,} tokens{shared}; gpu: one device alone, {alone:,}.",
    ]


def which(plan: Planned) -> list[str]:
    """Return the simplest profile that fits; if none does, try smaller micro-batches, recomputation, more sharing."""
    p = plan.devices
    simplest = [profile for profile in plan.profiles() if profile.several == (p.count > 1)]
    peaks: list[float] = []
    for variant in _variants(plan):
        for profile in simplest:
            peaks.append(variant.memory(profile).peak / GIB)
            if peaks[-1] <= SPARE * p.gib:
                given, asked = (vars(one.config.train) for one in (plan, variant))
                options = [f"train.{name}={value}".lower() for name, value in asked.items() if value != given[name]]
                return [
                    f"WHICH PROFILE   {profile.name}: {peaks[-1]:.1f} of {p.gib:.4g} GiB, a tenth stays free",
                    f"  {_launch(profile, p.count, options)} …",
                ]
    frozen = ", or set drafter.train_lm_head=false" * plan.config.drafter.train_lm_head
    return [
        f"WHICH PROFILE   none leaves a tenth of {p.gib:.4g} GiB free; the smallest takes {min(peaks):.1f}.",
        f"  Plan more devices, lower data.draft_vocab_size or data.max_length{frozen}.",
    ]


def _launch(profile: Profile, devices: int, options: list[str]) -> str:
    """Return the command that trains under a profile, on one machine or, if it has too few devices, on each."""
    lines = [f"eagle31 run --profile {profile.name}"]
    if devices > MACHINE:
        lines = [f"accelerate launch --config_file configs/accelerate/{profile.name}.yaml"]
        if profile.deepspeed:  # otherwise DeepSpeed looks for a hostfile, and trains on one
            lines.append("--deepspeed_multinode_launcher standard")
        lines.append("--main_process_ip 10.0.0.1 --main_process_port 29500 --machine_rank 0")
        machines = math.ceil(devices / MACHINE)
        options = [f"--num_machines {machines} --num_processes {devices} train.py", *options]
    return " \\\n      ".join([*lines, " ".join(options)] if options else lines)


def _variants(plan: Planned) -> Iterator[Planned]:
    """Yield the plan as it is, then with less and less memory, in ways that do not change what is learnt."""
    devices = plan.devices.count

    def halved(one: Planned) -> Planned | None:
        """Halve the micro-batches. Return None if none gets smaller, since no conversation is divided."""
        smaller = _changed(one, gradient_accumulation_steps=2 * one.config.train.gradient_accumulation_steps)
        return smaller if smaller.micro_tokens(devices) < one.micro_tokens(devices) else None

    yield plan
    while (smaller := halved(plan)) is not None:
        yield (plan := smaller)
    if not plan.config.train.activation_checkpointing:
        yield (plan := _changed(plan, activation_checkpointing=True))
    while devices % (context := 2 * plan.config.train.context_parallel) == 0:
        plan = _changed(plan, context_parallel=context)
        while (smaller := halved(plan)) is not None:  # there are fewer groups of devices now
            plan = smaller
        yield plan


def _changed(plan: Planned, **options: Any) -> Planned:
    """Return the plan with other options of train.*."""
    return replace(plan, config=replace(plan.config, train=replace(plan.config.train, **options)))


def _line(label: str, value: str, note: str = "") -> str:
    return f"  {label:<22}{value:>14}   {note}".rstrip()


def _si(count: float) -> str:
    return tqdm.format_sizeof(count)  # three digits and a prefix


def _time(seconds: float) -> str:
    day = 24 * 3600
    return str(timedelta(seconds=round(seconds))) if seconds < 1e6 * day else f"{seconds / day:.1e} days"


def text(plan: Planned) -> str:
    title = [f"Plan of {plan.config.name}: a drafter for {plan.config.target.name}", f"for {plan.devices}"]
    blocks = [section(plan) for section in (drafter, target, data, answering, store, time, profiles, which)]
    return "\n\n".join("\n".join(block) for block in [title, *blocks])
