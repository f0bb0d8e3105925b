"""Speculators 0.9.0's own trainer on our store.

Shared with ours: the conversations and the target's states, the draft vocabulary, the sizes of the drafter's layer, the
seed. All the rest is its authors': trainer, sampler, loss mask, norms of the drafter, optimizer, rates and schedule,
initial weights, frozen lm_head. A job's options are those of its command line, without the dashes.

Its trainer supports only accelerators. For a CPU we set the model's device and replace the synchronization; it
autocasts to bf16 as on a GPU. Its loss is its own pure-torch one, as its fused ones are Triton kernels, its attention
is SDPA, and it reads data in its own process. It does not validate, and writes no checkpoints of its own.
"""

import argparse
import json
from itertools import accumulate, count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from speculators.train import checkpointer, cli
from speculators.train.config import TrainConfig
from speculators.train.trainer import Trainer

from benchmarks.contenders.llama import llama_config
from benchmarks.speedrun import peer_store
from benchmarks.speedrun.job import Clock, Job
from eagle31_train.common.errors import UserError
from eagle31_train.model import vocab
from eagle31_train.store import Store

NAME = "eagle31"  # of our backend, among the peer's
SEQUENCE = "total-seq-len"  # the option for the most tokens of a step


def command(job: Job, ratio: float, epochs: int) -> list[str]:
    """Return the peer's command line: what is shared, what a CPU needs, and the job's options."""
    shape, out = job.drafter_shape, job.folder
    shared: dict[str, Any] = {
        "speculator-type": "eagle3",
        "verifier-name-or-path": job.target,
        "draft-config": out / "layer.json",
        "draft-vocab-size": shape.draft_vocab_size,
        "data-path": out / "data",
        "train-data-ratio": repr(ratio),
        "seed": job.seed,
        "max-steps": job.steps,
        "epochs": epochs,
        "save-path": out / "checkpoints",
        "log-dir": out / "logs",
        "log-freq": 50,
        "hidden-states-backend": NAME,
        "our-store": job.store,
        "on-missing": "raise",
        "num-workers": 0,
        "mask-token-id": 0,  # EAGLE 3 masks nothing, but looking up a default would need a tokenizer
        "draft-attn-impl": "sdpa",
        "loss-implementation": "eager",
        **job.given,
    }
    words = [word for name, value in shared.items() for word in (f"--{name}", str(value)) if word]
    return [*words, "--target-layer-ids", *map(str, shape.aux_layers)]


def register() -> None:
    """Register our store as one of the peer's backends. Call it before parsing its options, which include theirs."""
    from hs_connectors import HiddenStatesBackend

    if NAME in HiddenStatesBackend.registry:
        return

    @HiddenStatesBackend.register(NAME)
    class Backend(HiddenStatesBackend):
        @staticmethod
        def add_train_args(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--our-store", type=str, default=None, help="a store of eagle31_train.extract")

        @staticmethod
        def add_launch_args(parser: argparse.ArgumentParser) -> None:
            pass

        @staticmethod
        def from_train_args(args: argparse.Namespace, data_path: str) -> peer_store.Samples:  # noqa: ARG004
            return peer_store.Samples(Path(args.our_store))

        @staticmethod
        def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
            raise NotImplementedError


def timed(clock: Clock, tokens: list[int]) -> type[Trainer]:
    """Return its trainer, timed, and made to use the CPU instead of an accelerator's number. tokens: trained on in all
    after each step."""

    class Timed(Trainer):
        local_rank = property(lambda _self: "cpu", lambda _self, _number: None)
        device_type = property(lambda _self: "cpu", lambda _self, _name: None)

        def train_epoch(self, epoch: int, **_: Any) -> None:
            def after() -> None:
                clock.step(self.global_step, tokens[self.global_step - 1], self.leave)

            clock.begin(self.leave)
            clock.run()
            super().train_epoch(epoch, step_callback=after)
            clock.pause()

        def leave(self, folder: Path) -> None:
            """Write a checkpoint as its own checkpointer does, without the optimizers' state."""
            weights = checkpointer.convert_float_dtype(self.model.state_dict(), torch.bfloat16)
            self.model.save_pretrained(folder, state_dict=weights)
            checkpointer.patch_config_dtype(folder / "config.json", torch.bfloat16)

        def maybe_save_checkpoint(self, *_: Any, **__: Any) -> None:
            """Do nothing: `leave` saves."""

        def val_epoch(self, _epoch: int) -> None:
            """Do nothing: validation is not used."""

    return Timed


def train(job: Job, clock: Clock) -> None:
    register()
    store, kept = Store(Path(job.store)), vocab.read(Path(job.data) / "vocab.safetensors")
    samples = peer_store.write(store, kept, job.folder / "data", validate=1)
    layer = {**llama_config(job.drafter_shape).to_diff_dict(), "model_type": "llama"}
    (job.folder / "layer.json").write_text(json.dumps({**layer, "architectures": ["LlamaForCausalLM"]}))
    longest = TrainConfig.resolve(command(job, 0.5, 1)).data.total_seq_len
    lengths = store.split("train").lengths
    if longest < max(lengths):  # its trainer cuts them silently
        raise UserError(f"{SEQUENCE}={longest} would cut samples of up to {max(lengths)} tokens: set that or more")
    batches: list[int] = []
    for epoch in count():
        batches += peer_store.batches(lengths, longest, job.seed, epoch)
        if len(batches) >= job.steps:
            break
    # It takes one step too many in every remaining epoch, so request no more epochs than are needed.
    config = TrainConfig.resolve(command(job, peer_store.ratio(samples), epoch + 1))
    with (
        mock.patch.object(cli, "Trainer", timed(clock, list(accumulate(batches)))),
        mock.patch.object(checkpointer, "get_current_device", return_value="cpu"),
        mock.patch.object(torch.accelerator, "synchronize"),
    ):
        cli.main(config)
