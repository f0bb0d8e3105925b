"""What is planned: a configuration, its target, drafter and data, and the numbers that follow from them together."""

import json
import math
from dataclasses import dataclass

from eagle31_train.checkpoint.contract import weight_shapes
from eagle31_train.config import Config, DrafterShape
from eagle31_train.errors import UserError
from eagle31_train.locations import CONFIGS
from eagle31_train.planning.footprint import FP32, Activations, Step, activations
from eagle31_train.planning.inputs import Data, Target
from eagle31_train.planning.profiles import PROFILES, Memory, Profile, Setting, State, memory
from eagle31_train.planning.work import extraction_flops, training_flops
from eagle31_train.store.codec import CODECS
from eagle31_train.store.shard_plan import TOKEN_BYTES, Shape


@dataclass(frozen=True)
class Planned:
    """What the sections print."""

    config: Config
    target: Target
    shape: DrafterShape
    data: Data

    @property
    def value(self) -> int:
        """Bytes of a value in the precision of the products; `auto` is bf16 on the devices that are planned."""
        return FP32 if self.config.train.precision == "no" else 2

    @property
    def tokens(self) -> float:
        """That the training reads, over all epochs."""
        t, all_epochs = self.config.train, self.config.train.epochs * self.data.work.tokens
        return all_epochs if t.max_steps is None else min(all_epochs, t.max_steps * t.batch_tokens)

    @property
    def steps(self) -> int:
        """Optimizer steps at the least: with every batch full."""
        return math.ceil(self.tokens / self.config.train.batch_tokens)

    @property
    def trained_share(self) -> float:
        """Of the slots of a step, with train.slots_per_batch."""
        t, work = self.config.train, self.data.work
        of_a_step = work.slots[0] * min(1, t.batch_tokens / work.tokens)
        return min(1.0, t.slots_per_batch / of_a_step) if t.slots_per_batch and of_a_step else 1.0

    @property
    def conversations(self) -> float:
        """Of one step, on average."""
        work = self.data.work
        return max(1.0, min(1.0, self.config.train.batch_tokens / work.tokens) * work.conversations)

    @property
    def busy(self) -> float:
        """Share of the devices' time that a step's conversations fill if all are equally long: none is split."""
        devices = self.config.plan.devices
        return self.conversations / (devices * math.ceil(self.conversations / devices))

    def training_flops(self) -> float:
        """Of all steps."""
        work = (self.data.work * (self.tokens / self.data.work.tokens)).of_slots(self.trained_share)
        return sum(training_flops(self.shape, work, self.config.drafter.train_lm_head).values())

    def extraction_flops(self) -> float:
        """Of the training and the held-out split."""
        work, target = self.data.work * (1 + self.data.heldout), self.target.description
        return extraction_flops(self.target.sizes.active, target.num_hidden_layers, target.hidden_size, work)

    def states(self) -> Shape:
        """What decides the size of stored states."""
        s = self.config.store
        return Shape(self.shape.target_hidden_size, len(self.shape.aux_layers), s.aux_codec, s.last_codec)

    def store_bytes(self, states: Shape) -> float:
        """Of the training split: per token ids and masks, per attended position A states, per taught one a state."""
        work, (aux, last) = self.data.work, states.row_bytes
        return work.tokens * TOKEN_BYTES + work.positions * aux + work.taught * last

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
        """Sizes of the matrices that Muon updates, which are not those with a row for each token."""
        if self.config.train.optimizer != "muon":
            return []
        sizes = {name: size for name, size in weight_shapes(self.shape).items() if len(size) == 2}
        return [(s[0], s[1]) for name, s in sizes.items() if not name.startswith(("lm_head", "embed_tokens"))]

    def profiles(self) -> list[Profile]:
        """Those that can be launched, whatever they take."""
        optimizer, several = self.config.train.optimizer, self.config.plan.devices > 1
        return [profile for profile in PROFILES if profile.takes(optimizer) and (several or not profile.several)]

    def micro_tokens(self, devices: int) -> int:
        """Tokens of the largest micro-batch: its share of a step, or a longest conversation."""
        t = self.config.train
        return max(
            math.ceil(t.batch_tokens / (devices * t.gradient_accumulation_steps)),
            min(self.data.longest, t.batch_tokens),
        )

    def micro(self, devices: int) -> tuple[Activations, float]:
        """Of one micro-batch: bytes while it is worked out, and as it comes."""
        t, s = self.config.train, self.config.store
        work = (self.data.work * (self.micro_tokens(devices) / self.data.work.tokens)).of_slots(self.trained_share)
        decodes = bool(CODECS[s.aux_codec].block) or self.value == FP32
        step = Step(self.value, decodes, t.activation_checkpointing, self.config.drafter.train_lm_head, t.lk > 0)
        aux, last = self.states().row_bytes
        return activations(self.shape, work, step), work.positions * aux + work.taught * last

    def memory(self, profile: Profile) -> Memory:
        """Of one device."""
        devices = self.config.plan.devices if profile.several else 1
        micro, batch = self.micro(devices)
        bucket, overlap = read_bucket(profile)
        several = self.config.train.gradient_accumulation_steps > 1
        return memory(
            profile, Setting(self.state(), devices, self.target_pieces(), micro, batch, bucket, overlap, several)
        )


def read_bucket(profile: Profile) -> tuple[int, bool]:
    """Elements of DeepSpeed's reduce bucket, and whether there are two, by a profile's file in configs/deepspeed."""
    if not profile.deepspeed:
        return 0, False
    file = CONFIGS / "deepspeed" / f"{profile.name}.json"
    settings = json.loads(file.read_text(encoding="utf-8"))["zero_optimization"]
    size, overlap = settings.get("reduce_bucket_size"), settings.get("overlap_comm")
    if not isinstance(size, int | float) or not isinstance(overlap, bool):
        raise UserError(f"{file}: the plan needs numbers, and it has reduce_bucket_size={size}, overlap_comm={overlap}")
    return int(size), overlap
