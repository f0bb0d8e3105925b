"""Speculators 0.9.0 trained by its own trainer as one of our runs was: `python -m benchmarks.peer_training --like RUN`.

Everything that both must share is read from our run: the conversations and the target's states (its store), the draft
vocabulary, the drafter's shape, the unroll, the tokens of a step, the number of steps and the seed. All the rest is
the peer's: its trainer, sampler, optimizer (Muon), learning rate, schedule, loss weights and initial weights. What
stands after `--` goes to its command line as it is: `-- --optimizer adamw --ttt-step-loss-decay 0.8`.

Its trainer knows accelerators only. On a CPU it is told where the model lies, autocasts to bf16 as it does on a GPU,
and has nothing to wait for; its loss is its own pure-torch one, as its fused ones are Triton kernels, and its
attention SDPA. Nothing else of it is changed.

OUT/draft is its checkpoint, in its own format; OUT/peer.json says how it came to be. The same command goes on from the
last whole epoch, by the peer's own resumption, which rounds weights and moments to bf16; `resumed` says that it did,
and `seconds` are the last launch's.
Runs in the environment of `benchmarks/install_peers.sh`.
"""

import argparse
import json
import logging
import os
import shutil
import sys
import time
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

from benchmarks import machine, peer_store, run_main
from eagle31_train import artifacts
from eagle31_train.config import DrafterShape
from eagle31_train.errors import UserError
from eagle31_train.machine import versions
from eagle31_train.model import vocab
from eagle31_train.store import Store

NAME = "eagle31"  # of our backend among the peer's
RESULT, METRICS = "peer.json", "metrics.jsonl"


@dataclass(frozen=True)
class Ours:
    """What a run of ours says that a peer must share. options: as resolved, of all stages."""

    folder: Path
    options: dict[str, Any]
    shape: DrafterShape
    steps: int | None

    @classmethod
    def read(cls, folder: Path) -> "Ours":
        """A training run, finished or under way.

        Raises:
            UserError: there is none, or it is none that the peer can train.
        """
        train = folder / "train"
        if not (train / "config.yaml").is_file():
            raise UserError(f"{train / 'config.yaml'} is missing: --like names a run folder that train.py has written")
        options = yaml.safe_load((train / "config.yaml").read_text())
        if not (shapes := sorted(train.glob("checkpoints/step-*/drafter.json"))):
            raise UserError(f"{train / 'checkpoints'} holds no checkpoint yet: wait for the first one")
        shape = DrafterShape(**json.loads(shapes[-1].read_text()))
        if shape.architecture != "llama" or shape.rope_scaling:
            raise UserError(f"{shapes[-1]}: speculators trains plain Llama drafters only: give a run of one")
        manifest = train / artifacts.MANIFEST
        steps = json.loads(manifest.read_text())["steps"] if manifest.is_file() else None
        return cls(folder, options, shape, steps)

    @property
    def data(self) -> Path:
        """Stage 1's folder."""
        return Path(self.options["data_dir"] or self.folder / "data")

    @property
    def store(self) -> Path:
        """Stage 2's folder."""
        return Path(self.options["store_dir"] or self.folder / "store")


def layer_config(shape: DrafterShape) -> dict[str, Any]:
    """The one layer, as the peer's --draft-config has it."""
    from benchmarks.contenders.llama import llama_config

    return {**llama_config(shape).to_diff_dict(), "model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def command(ours: Ours, chosen: argparse.Namespace, ratio: float, epochs: int) -> list[str]:
    """The peer's command line: what both share, what a CPU needs, and what the user gave."""
    shape, out = ours.shape, chosen.out

    def switch(name: str, on: bool) -> str:
        return f"--{name}" if on else f"--no-{name}"

    shared: dict[str, Any] = {
        "speculator-type": "eagle3",
        "verifier-name-or-path": ours.options["target"]["path"],
        "draft-config": out / "layer.json",
        "draft-vocab-size": shape.draft_vocab_size,
        "data-path": out / "data",
        "train-data-ratio": repr(ratio),
        "total-seq-len": chosen.batch_tokens,
        "ttt-steps": ours.options["train"]["ttt_length"],
        "seed": chosen.seed,
        "max-steps": chosen.steps,
        "epochs": epochs,
        "save-path": out / "checkpoints",
        "log-dir": out / "logs",
        "log-freq": chosen.log_every,
        "hidden-states-backend": NAME,
        "our-store": ours.store,
        "on-missing": "raise",
        "num-workers": 0,
        "mask-token-id": 0,  # EAGLE 3 masks nothing: only looked up, and for that a tokenizer would be needed
        "draft-attn-impl": "sdpa",
        "loss-implementation": "eager",
    }
    words = [word for name, value in shared.items() for word in (f"--{name}", str(value))]
    words += ["--target-layer-ids", *map(str, shape.aux_layers), "--no-norm-before-fc"]
    words += [switch("norm-before-residual", shape.norm_before_residual), switch("norm-output", shape.norm_output)]
    words += ["--fc-norm"] if shape.fc_norm else []
    words += ["--lr", str(chosen.lr)] if chosen.lr is not None else []
    return [*words, *chosen.theirs]


def register() -> None:
    """Name our store among the peer's backends; before its trainer is imported, which lists their options."""
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


class Metrics(logging.Handler):
    """What the trainer logs, a line of JSON each."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Only its dictionaries of numbers."""
        if isinstance(record.msg, dict) and {"train", "val"} & record.msg.keys():
            with self.path.open("a") as file:
                file.write(json.dumps({"step": getattr(record, "step", None), **record.msg}, default=str) + "\n")


def train(words: list[str], metrics: Path) -> None:
    """The peer's own command, on whatever device there is."""
    register()
    from speculators.train import checkpointer, cli
    from speculators.train.config import TrainConfig
    from speculators.train.trainer import Trainer, metric_logger

    class Here(Trainer):
        """Its trainer, which takes a number for an accelerator's, told that there is none."""

        local_rank = property(lambda _self: "cpu", lambda _self, _number: None)
        device_type = property(lambda _self: "cpu", lambda _self, _name: None)

        def __init__(self, *arguments: Any, **named: Any) -> None:
            metric_logger.addHandler(Metrics(metrics))  # the command sets up its logging before this
            super().__init__(*arguments, **named)

    config = TrainConfig.resolve(words)
    if torch.accelerator.is_available():
        cli.main(config)
        return
    with (
        mock.patch.object(cli, "Trainer", Here),
        mock.patch.object(checkpointer, "get_current_device", return_value="cpu"),
        mock.patch.object(torch.accelerator, "synchronize"),
    ):
        cli.main(config)


def finish(out: Path, epochs: int, steps: int) -> Path:
    """OUT/draft from the last checkpoint, once that has all its steps.

    Raises:
        UserError: the training was interrupted, or left out samples, which its trainer does without stopping.
    """
    last = out / "checkpoints" / str(epochs - 1)
    state = last / "training_state.json"
    done = json.loads(state.read_text())["global_step"] if state.is_file() else 0
    if done != steps:
        raise UserError(f"{out}: the peer stopped before step {steps}: run the same command again")
    logged = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    if any(line.get("train", {}).get("error_records") for line in logged):
        raise UserError(f"{out / METRICS}: the peer left samples out (error_records): remove {out}, and see its log")
    draft = out / "draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(last / name, draft / name)
    return draft


def prepare(ours: Ours, chosen: argparse.Namespace) -> dict[str, Any]:
    """The data folder and layer.json of the peer; what `peer_store.write` counted."""
    shutil.rmtree(chosen.out / "data", ignore_errors=True)
    store, kept = Store(ours.store), vocab.read(ours.data / "vocab.safetensors")
    counted = peer_store.write(store, kept, chosen.out / "data", chosen.validate)
    (chosen.out / "layer.json").write_text(json.dumps(layer_config(ours.shape), indent=1))
    lengths = store.split("train").lengths
    tokens: list[int] = []
    for epoch in count():
        tokens += peer_store.batches(lengths, chosen.batch_tokens, chosen.seed, epoch)
        if len(tokens) >= chosen.steps:
            # Its trainer takes one step too many in every epoch that is left: it is given no more than are needed.
            return {**counted, "epochs": epoch + 1, "tokens_trained": list(accumulate(tokens))[chosen.steps - 1]}
    raise AssertionError


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--like", type=Path, required=True, metavar="RUN", help="the run folder of ours to train like")
    parser.add_argument("--out", type=Path, required=True, help="a new folder, or one of the same training to go on")
    parser.add_argument("--steps", type=int, help="optimizer steps; default: as many as RUN took")
    parser.add_argument(
        "--batch-tokens", type=int, help="most tokens of a step; default: RUN's, of which it fills less"
    )
    parser.add_argument("--lr", type=float, help="its learning rate (of Muon and AdamW); default: its own, 1e-3")
    parser.add_argument("--seed", type=int, help="default: RUN's")
    parser.add_argument("--threads", type=int, help="of torch; default: OMP_NUM_THREADS, or all cores")
    parser.add_argument("--log-every", type=int, default=10, metavar="STEPS", help="lines of OUT/metrics.jsonl")
    parser.add_argument("--validate", type=int, default=16, help="held-out samples of its validation after each epoch")
    parser.add_argument("theirs", nargs="*", metavar="-- …", help="further options of the peer's own trainer")
    return parser.parse_args()


def main() -> None:
    """Train, and say what came of it."""
    chosen = options()
    ours = Ours.read(chosen.like)
    chosen.steps = ours.steps if chosen.steps is None else chosen.steps
    chosen.seed = ours.options["seed"] if chosen.seed is None else chosen.seed
    chosen.batch_tokens = chosen.batch_tokens or ours.options["train"]["batch_tokens"]
    if not chosen.steps or chosen.steps < 1:
        raise UserError(f"{chosen.like} has not finished, so that its steps are not known: give --steps (1 or more)")
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    wanted = {
        "store": Store(ours.store).fingerprint,
        "like": ours.options | {"run_dir": None, "evaluate": None, "plan": None},
        **{name: getattr(chosen, name) for name in ("steps", "batch_tokens", "lr", "seed", "theirs")},
        "versions": versions(("speculators", "torch", "transformers")),
    }
    result, inputs = chosen.out / RESULT, chosen.out / "inputs.json"
    if inputs.is_file() and json.loads(inputs.read_text()) != json.loads(json.dumps(wanted)):
        raise UserError(f"{chosen.out} was made with other options: give another --out, or remove it")
    if result.is_file():
        print(f"{chosen.out} is finished: remove it to train again")
        return
    resumed = (chosen.out / "checkpoints" / "0").is_dir()
    chosen.out.mkdir(parents=True, exist_ok=True)
    inputs.write_text(json.dumps(wanted, indent=1))
    if not resumed:  # what a first attempt logged before it was killed is no part of this training
        (chosen.out / METRICS).unlink(missing_ok=True)
    counted = prepare(ours, chosen)
    words = command(ours, chosen, peer_store.ratio(counted["samples"]), counted["epochs"])
    began, worked = time.perf_counter(), time.process_time()
    train(words, chosen.out / METRICS)
    draft = finish(chosen.out, counted["epochs"], chosen.steps)
    found = {
        "command": [sys.executable, "-m", "benchmarks.peer_training", *sys.argv[1:]],
        "theirs": words,
        "machine": machine.describe(),
        "steps": chosen.steps,
        "resumed": resumed,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - worked,
        **counted,
    }
    artifacts.write_text(result, json.dumps(found, indent=1) + "\n")
    print(f"{draft}: {chosen.steps} steps, {counted['tokens_trained']:,} tokens, {found['seconds']:,.0f} s")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    run_main(main)
