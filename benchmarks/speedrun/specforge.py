"""SpecForge 0.2.0's own trainer on our store: its controller, EAGLE-3 strategy, optimizer and schedule, offline.

Shared with ours: the conversations and the target's states, the draft vocabulary, the sizes of the drafter's layer, the
seed, EAGLE 3.1's fc_norm. All the rest is its authors' (a job's options are fields of its TrainingConfig): bf16 weights
with fp32 masters, the whole target head in bf16, initial weights, a sample a step. What it calls norm_output feeds the
state before the norm to the next step, so that its drafts are served with EAGLE 3.1's norm_output off.

On a CPU: SDPA, its loss's own reference implementation in place of a Triton kernel, no FSDP wrapper around the single
process, and samples read in its own process. Compilation takes place before the clock runs.
"""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

with warnings.catch_warnings():  # it warns that flash-attn is missing
    warnings.simplefilter("ignore")
    import specforge.algorithms.eagle3.model as eagle3
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

from specforge.algorithms.eagle3.data import build_offline_collator, normalize_offline_sample
from specforge.config.schema import TrainingConfig
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
from specforge.training.controller import TrainerController, TrainerCore
from specforge.training.strategies.base import Eagle3TrainStrategy

from benchmarks.contenders.llama import llama_config
from benchmarks.contenders.specforge import TorchLoss
from benchmarks.speedrun import peer_store
from benchmarks.speedrun.job import Clock, Job, write_draft
from eagle31_train.model import vocab
from eagle31_train.store import Store

WARM_UP = 3  # batches of different lengths: the compiler's second graph serves all others


class Samples:
    """The batches of each epoch, in its own order, as the controller takes them. `tokens` counts those handed out."""

    def __init__(self, store: Store, batch_size: int, seed: int, eps: float) -> None:
        self.split, self.batch_size, self.seed = store.split("train"), batch_size, seed
        weight = store.target["norm"].float()
        self.norm = lambda states: torch.nn.functional.rms_norm(states, weight.shape, weight, eps)
        self.collate = build_offline_collator()
        self.epoch = self.tokens = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[TrainBatch]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.split), generator=generator).tolist()
        for at in range(0, len(order) - self.batch_size + 1, self.batch_size):
            chosen = order[at : at + self.batch_size]
            self.tokens += sum(self.split.lengths[index] for index in chosen)
            yield self.batch(chosen)

    def batch(self, chosen: list[int]) -> TrainBatch:
        """Return samples, padded to the longest."""
        raw = [peer_store.specforge_sample(self.split.read(index), self.norm) for index in chosen]
        tensors = self.collate([normalize_offline_sample(one, max(self.split.lengths)) for one in raw])
        return TrainBatch([str(index) for index in chosen], "eagle3", tensors, {"target_repr": "hidden_state"})


def build(job: Job, store: Store, training: TrainingConfig) -> tuple[eagle3.OnlineEagle3Model, TargetHead]:
    """Return its model and the target's head, with the weights that its trainer begins with."""
    eagle3.LogSoftmaxLoss = TorchLoss
    shape, kept = job.drafter_shape, vocab.read(Path(job.data) / "vocab.safetensors")
    config = llama_config(
        shape,
        draft_vocab_size=shape.draft_vocab_size,
        target_hidden_size=shape.target_hidden_size,
        fc_norm=True,
        norm_output=True,
    )
    torch.manual_seed(job.seed)
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    draft.embed_tokens.weight.data.copy_(store.target["embed_tokens"][: shape.vocab_size])
    draft.t2d.copy_(torch.from_numpy(kept.t2d))
    draft.d2t.copy_(torch.from_numpy(kept.d2t))
    draft.freeze_embedding()
    model = eagle3.OnlineEagle3Model(draft, length=training.ttt_length, attention_backend="sdpa").bfloat16()
    head = TargetHead(job.target)
    head.fc.weight.data.copy_(store.target["lm_head"])
    head.freeze_weights()
    return model, head.eval().bfloat16()


def train(job: Job, clock: Clock) -> None:
    training = TrainingConfig(**job.given)
    store, shape = Store(Path(job.store)), job.drafter_shape
    model, head = build(job, store, training)
    draft = model.draft_model

    def optimizer(module: Any) -> BF16Optimizer:
        return BF16Optimizer(
            module,
            lr=training.learning_rate,
            max_grad_norm=training.max_grad_norm,
            total_steps=job.steps,
            warmup_ratio=training.warmup_ratio,
            lr_scheduler=training.lr_scheduler,
        )

    backend = FSDPTrainingBackend(ParallelConfig(), optimizer_factory=optimizer)
    strategy = Eagle3TrainStrategy(backend.prepare_model(model, wrap=False, optimizer_target=draft), target_head=head)
    samples = Samples(store, training.batch_size, job.seed, shape.rms_norm_eps)
    kept = vocab.read(Path(job.data) / "vocab.safetensors")
    served = replace(shape, fc_norm=True, norm_output=False, norm_before_residual=False)

    def save(folder: Path) -> None:
        weights = {name: tensor for name, tensor in draft.named_parameters() if name != "embed_tokens.weight"}
        write_draft(folder, served, weights, kept, "bfloat16", Path(job.target).name)

    for at in range(0 if job.count else WARM_UP):  # only steps are counted
        strategy.forward_loss(samples.batch([at % len(samples.split)])).loss.backward()
    model.zero_grad(set_to_none=True)
    controller = TrainerController(
        TrainerCore(strategy, backend, accumulation_steps=training.accumulation_steps),
        run_id="speedrun",
        output_dir=str(job.folder / "output"),
        log_interval=training.log_interval,
        max_steps=job.steps,
        total_steps=job.steps,
        num_epochs=1_000_000_000,
        ack_fn=lambda _samples, step: clock.step(step, samples.tokens, save),
    )
    clock.begin(save)
    clock.run()
    controller.fit(samples)
