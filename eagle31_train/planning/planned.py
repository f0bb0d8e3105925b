"""The numbers of a plan: what follows from a configuration, its target, its drafter and its data together."""

import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from eagle31_train.checkpoint.contract import weight_shapes
from eagle31_train.combinations import check_context_parallel
from eagle31_train.common import order
from eagle31_train.common.locations import CONFIGS
from eagle31_train.config import OWN_SERVER, Config, DrafterShape
from eagle31_train.planning import footprint, inputs
from eagle31_train.planning.dealing import Dealt, deal
from eagle31_train.planning.devices import Devices, devices_to_plan
from eagle31_train.planning.footprint import FP32, Activations, Memory, Profile, State
from eagle31_train.planning.inputs import Data, Target, weight_bytes
from eagle31_train.planning.work import NOT_MAPS, Work, extraction_flops, training_flops
from eagle31_train.store.codec import CODECS
from eagle31_train.store.shard_plan import TOKEN_BYTES, Shape
from eagle31_train.targets.derive import complete, default_batch_tokens, default_weight_decay, planned_drafter, row

OF_USE = 0.75  # share of the target's own prompts that are usable: 24 of 32 for SmolLM2-135M (docs/log.md)
CACHE_BYTES = 2  # per value of the KV cache


@dataclass(frozen=True)
class Answering:
    """What the target has to write, and the least time that this takes."""

    batch: int  # answers under way at once
    devices: int
    prompts: float  # to be answered, held-out ones too
    written: float  # tokens of prompts that the target writes itself, refused ones and answers between them included
    answers: float  # tokens
    weights: float  # bytes that one decode step reads
    cache: float  # bytes of keys and values that it reads
    step: float  # seconds of one decode step
    seconds: float  # to write everything, with every step full, and to read each prompt once
    flops: float  # of the same


@dataclass(frozen=True)
class Planned:
    config: Config
    target: Target
    shape: DrafterShape
    data: Data
    devices: Devices

    @property
    def value(self) -> int:
        """Bytes of a value in the precision of the products; `auto` is bf16 on the devices that are planned."""
        return FP32 if self.config.train.precision == "no" else 2

    @property
    def batch_tokens(self) -> int:
        assert self.config.train.batch_tokens is not None, "`reckon` fills it in"
        return self.config.train.batch_tokens

    @property
    def tokens(self) -> float:
        if self.packs:
            return float(sum(self._packed))
        t, all_epochs = self.config.train, self.config.train.epochs * self.data.work.tokens
        return all_epochs if t.max_steps is None else min(all_epochs, t.max_steps * self.batch_tokens)

    @property
    def packs(self) -> bool:
        """Whether the steps are known: every conversation's length is known, and fits into a step. With windows of a
        store they are not, since a window consists of whole shards."""
        known = self.data.lengths is not None and self.data.longest <= self.batch_tokens
        return known and self.config.train.window_tokens is None

    @property
    def steps(self) -> int:
        """Optimizer steps as training packs them or, if that is not known, the fewest, with every step full."""
        return len(self._packed) if self.packs else math.ceil(self.tokens / self.batch_tokens)

    @cached_property
    def _packed(self) -> list[int]:
        """The tokens of every step."""
        lengths, t = self.data.lengths or [], self.config.train
        steps = order.schedule(lengths, self.batch_tokens, self.config.seed, t.epochs, t.max_steps)
        return [sum(lengths[i] for i in step) for step in steps]

    @property
    def trained_share(self) -> float:
        """Share of a step's slots that is trained, with train.slots_per_batch."""
        t, work = self.config.train, self.data.work
        of_a_step = work.slots[0] * min(1, self.batch_tokens / work.tokens)
        return min(1.0, t.slots_per_batch / of_a_step) if t.slots_per_batch and of_a_step else 1.0

    @property
    def conversations(self) -> float:
        """Conversations of one step, on average."""
        work = self.data.work
        return max(1.0, min(1.0, self.batch_tokens / work.tokens) * work.conversations)

    def dealt(self, devices: int) -> Dealt:
        """Return how evenly steps are shared out among so many devices."""
        if devices not in self._dealt:
            each, conversations = self.data.each, self.data.work.conversations
            flops = [self._flops(one) for one in each]
            self._dealt[devices] = deal(each, flops, conversations, self.config.train, self.replicas(devices))
        return self._dealt[devices]

    @cached_property
    def _dealt(self) -> dict[int, Dealt]:
        return {}

    @property
    def busy(self) -> float:
        """Share of the planned devices' time in which they have something to do."""
        return self.dealt(self.devices.count).busy

    def training_flops(self) -> float:
        return self._flops(self.data.work * (self.tokens / self.data.work.tokens))

    def _flops(self, work: Work) -> float:
        parts = training_flops(self.shape, work.of_slots(self.trained_share), self.config.drafter.train_lm_head)
        return sum(parts.values())

    def extraction_flops(self) -> float:
        """FLOPs of running the target over the training and the held-out split."""
        work, target = self.data.work * (1 + self.data.heldout), self.target.description
        return extraction_flops(self.target.sizes.multiplied, target.num_hidden_layers, target.hidden_size, work)

    def answering(self, conversations: float, prompt: float, answer: float) -> Answering:
        """Plan the answers for `conversations` of both splits, each with `prompt` and `answer` tokens.

        A decode step reads the weights once for the whole batch, and each answer's keys and values. It takes at least
        as long as these bytes at the memory's bandwidth, and as its FLOPs at the peak rate.
        """
        p, generate, own = self.devices, self.config.data.generate, self.config.data.self_prompts
        sizes, t = self.target.sizes, self.target.description
        batch = generate.concurrency if generate.server else generate.batch_size
        devices = answering_devices(self.config, p.count)
        prompts, answers, written = conversations / generate.samples, conversations * answer, 0.0
        if self.config.writes_prompts:
            turn = min(own.max_new_tokens, prompt / own.turns)
            # Before each later turn an answer is written, which is not kept.
            written = prompts * (own.turns * turn / OF_USE + (own.turns - 1) / own.turns * answer)
        context = prompt + answer / 2  # answers are half written on average, and each gets a token in every step
        # Of the experts, only those that some token of the step is sent to.
        stored = self.target.weight_bytes if generate.server else self.target.loaded_bytes
        weights = stored * (sizes.dense + sizes.experts * (1 - (1 - sizes.chosen) ** batch))
        cache = batch * context * self.cache_bytes
        token = 2 * sizes.multiplied + 4 * t.num_hidden_layers * t.hidden_size * context
        bandwidth, rate = p.bandwidth * 1e9 * devices, p.tflops * 1e12 * devices
        step = max((weights + cache) / bandwidth, batch * token / rate)
        reading = 2 * sizes.multiplied * prompt * conversations
        seconds = (written + answers) / batch * step + reading / rate
        flops = (written + answers) * token + reading
        return Answering(batch, devices, prompts, written, answers, weights, cache, step, seconds, flops)

    @property
    def cache_bytes(self) -> int:
        """Bytes per token of the target's KV cache: keys and values of every head, or MLA's latent and rotated key."""
        t = self.target.description
        values = 2 * t.num_key_value_heads * t.head_dim
        if t.mla:
            values = int(t.mla["kv_lora_rank"] or 0) + int(t.mla["qk_rope_head_dim"] or 0)
        return CACHE_BYTES * t.num_hidden_layers * values

    def states(self) -> Shape:
        s = self.config.store
        return Shape(self.shape.target_hidden_size, len(self.shape.aux_layers), s.aux_codec, s.last_codec)

    def store_bytes(self, states: Shape) -> float:
        """Bytes of the training split: ids and masks per token, A states per attended position, one per teacher row,
        and the scales of each conversation's channels."""
        work, (aux, last) = self.data.work, states.row_bytes
        rows = work.positions * aux + work.targets * last + work.conversations * states.document_bytes
        return work.tokens * TOKEN_BYTES + rows

    def copied_bytes(self) -> float:
        """Bytes of the target's embedding and lm_head in the store, in its dtype. A target whose parameters are given,
        not counted, is taken to have both."""
        untied = self.target.sizes.embedding > 0 or self.config.plan.target_parameters is not None
        values = (1 + untied) * self.shape.vocab_size * self.shape.target_hidden_size
        return values * weight_bytes({}, self.config.target.dtype)

    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint of the training: weights and moments, in fp32."""
        state = self.state()
        return FP32 * (state.trained + state.frozen + state.moments)

    def target_pieces(self) -> float:
        """Bytes of the target's embedding and lm_head that training keeps, in the precision of the products."""
        shape = self.shape
        rows = shape.draft_vocab_size + shape.vocab_size * shape.share_embedding
        return self.value * rows * shape.target_hidden_size

    def state(self) -> State:
        """Trained tensors as the optimizer groups them: matrices, then norms."""
        shapes = weight_shapes(self.shape)
        frozen = [] if self.config.drafter.train_lm_head else ["lm_head.weight"]
        trained = [size for name, size in shapes.items() if name not in frozen]
        groups = ([math.prod(s) for s in trained if len(s) > 1], [math.prod(s) for s in trained if len(s) == 1])
        return State(groups, sum(math.prod(shapes[name]) for name in frozen), self.orthogonal())

    def orthogonal(self) -> list[tuple[int, int]]:
        """Sizes of the matrices that Muon updates."""
        if self.config.train.optimizer != "muon":
            return []
        sizes = {name: size for name, size in weight_shapes(self.shape).items() if len(size) == 2}
        return [(s[0], s[1]) for name, s in sizes.items() if not name.startswith(NOT_MAPS)]

    def profiles(self) -> list[Profile]:
        """Return the profiles that can be launched. Muon needs whole matrices, which DeepSpeed cuts up."""
        muon, several = self.config.train.optimizer == "muon", self.devices.count > 1
        return [p for p in footprint.PROFILES if several >= p.several and not (muon and p.deepspeed)]

    def context(self, devices: int) -> int:
        """Return how many of the devices share a micro-batch; a single device shares with none."""
        return self.config.train.context_parallel if devices > 1 else 1

    def replicas(self, devices: int) -> int:
        return devices // self.context(devices)

    def micro_tokens(self, devices: int) -> int:
        """Return the tokens of the largest micro-batch: its share of a step, more for unequal conversations if they
        have been counted, and at least a longest conversation."""
        t, share = self.config.train, self.batch_tokens / self.replicas(devices)
        uneven = self.dealt(devices).largest if len(self.data.each) > 1 else 1.0
        return max(
            math.ceil(uneven * share / t.gradient_accumulation_steps),
            min(self.data.longest, self.batch_tokens),
        )

    def micro(self, devices: int) -> tuple[Activations, float]:
        """Return the bytes of one micro-batch on one of the devices: its activations, and the batch as loaded."""
        t, s = self.config.train, self.config.store
        work = (self.data.work * (self.micro_tokens(devices) / self.data.work.tokens)).of_slots(self.trained_share)
        decodes = bool(CODECS[s.aux_codec].block) or self.value == FP32
        head, context = self.config.drafter.train_lm_head, self.context(devices)
        step = footprint.Step(self.value, decodes, t.activation_checkpointing, head, t.lk > 0, context=context)
        aux, last = self.states().row_bytes
        return footprint.activations(self.shape, work, step), (work.positions * aux + work.targets * last) / context

    def memory(self, profile: Profile) -> Memory:
        devices = self.devices.count if profile.several else 1
        (micro, batch), (bucket, overlap) = self.micro(devices), read_bucket(profile)
        state, pieces = self.state(), self.target_pieces()
        accumulates = self.config.train.gradient_accumulation_steps > 1
        return footprint.memory(profile, state, devices, pieces, micro, batch, bucket, overlap, accumulates)


def answering_devices(config: Config, planned: int) -> int:
    """Return how many devices answer. A server of the user's is assumed to have all that are planned."""
    server = config.data.generate.server
    if server != OWN_SERVER:
        return planned if server else 1
    from eagle31_train.evaluation.serving import engine  # imports everything that decodes

    return engine.devices_of(engine.answering_arguments(config, planned, 0))


def read_bucket(profile: Profile) -> tuple[int, bool]:
    """Return the elements of DeepSpeed's reduce bucket, and whether there are two, from configs/deepspeed."""
    if not profile.deepspeed:
        return 0, False
    file = CONFIGS / "deepspeed" / f"{profile.name}.json"
    settings = json.loads(file.read_text(encoding="utf-8"))["zero_optimization"]
    return int(settings["reduce_bucket_size"]), settings["overlap_comm"]


def reckon(config: Config) -> tuple[Planned, list[str]]:
    """Return the plan, and the table of where the drafter's options come from. UserError if the target cannot be read,
    no such drafter can be made for it, or train.context_parallel does not divide plan.devices."""
    devices = devices_to_plan(config.plan)
    check_context_parallel(config.train.context_parallel, devices.count, "plan.devices")
    target, data = inputs.read_target(config), inputs.read_data(config)
    V = target.description.vocab_size
    shape, rows = planned_drafter(config, target.description, min(V, data.vocabulary or V))
    config = complete(config, asdict(target.description))
    if (t := config.train).batch_tokens is None:
        t = replace(t, batch_tokens=default_batch_tokens(data.work.tokens, t.epochs, data.longest))
        rows.append(row("train.batch_tokens", t.batch_tokens, f"the default for {data.work.tokens:,.0f} tokens"))
    plan = Planned(replace(config, train=t), target, shape, data, devices)
    if t.init_from:
        rows.append("  train.init_from: it sets the drafter's open options; the plan does not read it")
    if t.weight_decay is None:
        decay = default_weight_decay(t.optimizer, shape.hidden_size, plan.steps)
        rows.append(row("train.weight_decay", decay, f"{t.optimizer}'s default for {plan.steps:,} steps"))
    return plan, rows
