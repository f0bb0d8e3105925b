"""Whole steps on fake CUDA tensors: `python fake_cuda_cases.py NAMES` prints {name: what came of it} as one line of
JSON; NAMES are a list of JSON.

A process of its own, since it gives torch a device that it must not have in other tests. See benchmarks/fake_cuda.py.
"""

import gc
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
from plan_cases import SMALL_MLA, shape_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import fake_cuda
from benchmarks.fake_cuda import DEVICE, Count, FakeStep, Options
from benchmarks.gpu_step import drafter_of
from benchmarks.shapes import Case
from eagle31_train.model import norm
from eagle31_train.model.decode import DraftDecoder
from eagle31_train.model.rope import Rope
from eagle31_train.planning.footprint import Step, activations
from eagle31_train.planning.work import count_work
from eagle31_train.store import document
from eagle31_train.store.shard_plan import PlannedShard, Shape
from eagle31_train.targets import extraction as stage
from eagle31_train.targets.hf import HiddenStateTarget, TransformersEngine
from eagle31_train.targets.readout import Readout
from train import step as arithmetic

GQA, MLA = shape_of(), shape_of(**SMALL_MLA)
KIMI, LLAMA = (Case(name, 8192, 0.35).drafter() for name in ("kimi", "llama8b"))


def conversation(tokens: int, turns: int, share: float) -> torch.Tensor:
    """[tokens] bool: so many prompts, each with an answer that is `share` of the two."""
    place = torch.arange(tokens) % (tokens // turns) * turns / tokens
    return place >= 1 - share


SHORT = [conversation(48, 3, 0.5), conversation(20, 1, 0.4), torch.ones(7, dtype=torch.bool)]


def outcome(count: Count) -> dict[str, Any]:
    """What a test wants to know of a step."""
    between = count.total(lambda phase, place, name: name not in fake_cuda.PRODUCTS | fake_cuda.FLASH)
    flash = count.total(lambda phase, place, name: name in fake_cuda.FLASH)
    return {
        **asdict(between),
        "flash": flash.operations,
        "on_host": count.on_host,
        "onto_itself": count.onto_itself,
        "dtypes": sorted(str(dtype) for dtype in count.dtypes),
        "names": sorted({name for _, _, name in count.sums}),
    }


def step(shape: Any, masks: Any = SHORT, **options: Any) -> dict[str, Any]:
    return outcome(FakeStep(shape, masks, Options(**{"ttt_length": 2, **options})).run())


def planned(shape: Any, tokens: int, turns: int, **options: Any) -> dict[str, Any]:
    """Bytes that a step of one conversation keeps and takes at most, counted and by the plan."""
    masks, how = [conversation(tokens, turns, 0.35)], Options(codec="int8", **options)
    count, work = FakeStep(shape, masks, how).run(), count_work([mask.numpy() for mask in masks], how.ttt_length)
    reckoned = activations(shape, work, Step(recompute=how.recompute))
    alone = activations(shape, work, Step(recompute=how.recompute, flash=False))  # as if attention took nothing
    return {
        "kept": count.after_forward,
        "peak": count.peak,
        "planned kept": reckoned.after_forward,
        "planned peak": reckoned.peak,
        "without attention": alone.peak,
    }


def decoder(shape: Any) -> dict[str, Any]:
    """Drafts of two sequences of unlike length."""
    made, right = FakeStep(shape, SHORT, Options(precision="no")), F.scaled_dot_product_attention

    def attention(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> Any:
        assert mask is None or q.shape[1] == k.shape[1], "CUDA would hold the scores of all heads"
        return right(q, k, v, mask, **options)

    with made.mode, DEVICE, patch.object(F, "scaled_dot_product_attention", attention), Count() as count:
        decode = DraftDecoder(made.objective.drafter, made.objective.teacher.target_ids, 32, sequences=2)
        for counts in ([9, 4], [1, 3]):
            aux = torch.empty(sum(counts), 3, shape.target_hidden_size)
            decode.extend(aux, torch.zeros(sum(counts), dtype=torch.int64), counts)
            proposed = decode.propose(4)
            assert (proposed.shape, proposed.device) == ((2, 4), DEVICE)
    return outcome(count)


def extraction(to_host: Callable[[torch.Tensor], torch.Tensor] = stage.to_host) -> dict[str, Any]:
    """A shard of three conversations on its way here. Where tokens and masks are looked at they are the host's, and not
    fake: that is left out."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 300}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    rows: Any = {"input_ids": [[1] * 16] * 3, "loss_mask": [[True] * 16] * 3}

    def nonzero(mask: torch.Tensor) -> torch.Tensor:
        assert mask.device.type == "cpu", "the host would wait for how many there are"
        return torch.zeros(7, 1, dtype=torch.int64)

    with (
        FakeTensorMode(),
        Count() as count,
        patch.object(torch.Tensor, "nonzero", nonzero),
        patch.object(torch.Tensor, "pin_memory", lambda x: x),
        patch.object(document, "attended_positions", lambda _: 9),
        patch.object(torch.cuda, "current_stream"),
        patch.object(stage, "to_host", to_host),
    ):
        with DEVICE:
            model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
            norm = torch.ones(64)
        target = HiddenStateTarget(model, [1, 2, 3])
        readout = Readout(target.embedding.weight, norm, "w", 1e-5, target.head.weight, 4)
        shard = PlannedShard("shards/train-00000.safetensors", "train", 0, 0, 3, 48, 10**6)
        engine = TransformersEngine(target, readout, batch_tokens=32)
        stage.run_shard(engine, rows, Shape(64, 3, "int8_channel", "bf16"), shard, None)
    return outcome(count)


def planted(owner: Any, name: str, wrong: Callable[[Any], Any]) -> dict[str, Any]:
    """A step in which `owner.name` is `wrong` of what it was."""
    with patch.object(owner, name, wrong(getattr(owner, name))):
        return step(GQA, kernels="plain")


def added(x: Any) -> Any:
    x[:] += 1
    return x


PLANTED: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "a wait": (arithmetic, "step_weights", lambda right: lambda n, gamma: right(n, gamma) * (n.sum().item() > 0)),
    "numbers of the host": (
        arithmetic, "step_weights", lambda right: lambda n, gamma: right(n, gamma) * torch.tensor([1.0] * 2).to(DEVICE)
    ),
    "another device": (arithmetic, "step_weights", lambda right: lambda n, gamma: right(n, gamma).cpu()),
    "another dtype": (Rope, "forward", lambda right: lambda self, x, positions: right(self, x, positions).float()),
    "a copy onto itself": (arithmetic, "step_weights", lambda right: lambda n, gamma: added(right(n, gamma))),
    "double precision": (norm, "rms_norm", lambda right: lambda x, *rest: right(x.double(), *rest).to(x.dtype)),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "fused": {},
    "plain": {"kernels": "plain"},
    "fp32": {"precision": "no"},
    **{codec: {"codec": codec} for codec in ("int8_channel", "fp8", "int4")},
    "muon": {"optimizer": "muon"},
    "recomputed": {"recompute": True},
    "lk": {"lk": 0.5},
    "cross entropy": {"loss": "ce"},
    "frozen head": {"train_lm_head": False},
    "some slots": {"slots": 20},
}
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    f"gqa, {name}": lambda options=options: step(GQA, **options) for name, options in OPTIONS.items()
}
CASES |= {
    "gqa, eagle 3": lambda: step(shape_of(fc_norm=False, norm_output=False)),
    "gqa, own embedding": lambda: step(shape_of(share_embedding=False)),
    "mla, fused": lambda: step(MLA),
    "gqa, drafting": lambda: decoder(GQA),
    "mla, drafting": lambda: decoder(MLA),
    "gqa of two layers, drafting": lambda: decoder(shape_of(num_layers=2)),
    "extraction": extraction,
    "planted: copies": lambda: extraction(torch.Tensor.cpu),
    "long gqa, 14 turns": lambda: planned(LLAMA, 8192, 14),
    "long mla, 14 turns": lambda: planned(KIMI, 8192, 14, ttt_length=4),
    "long mla, 30 turns, recomputed": lambda: planned(KIMI, 8192, 30, ttt_length=4, recompute=True),
}
CASES |= {f"planted: {name}": lambda plant=plant: planted(*plant) for name, plant in PLANTED.items()}


def traffic(text: str, kernels: str) -> dict[str, Any]:
    """A step of a case of benchmarks.gpu_model."""
    case = Case.parse(text)
    return step(drafter_of(case), case.masks, ttt_length=case.unroll, kernels=kernels)


# Of the cases of `make bench-gpu-model`: operators but products and attention, and their GB.
TRAFFIC = {
    "llama8b:2x4096:0.35, fused": (1119, 78.2),
    "llama8b:2x4096:0.35, plain": (2495, 205.1),
    "kimi:1x20480:0.35, fused+FA3": (779, 354.0),
}
CASES |= {name: lambda name=name: traffic(*name.split(", ")) for name in TRAFFIC}


def main() -> None:
    """Run the cases that are asked for; what one raises is what came of it."""
    fake_cuda.enter()
    gc.freeze()
    came: dict[str, Any] = {}
    for name in json.loads(sys.argv[1]):
        try:
            came[name] = CASES[name]()
        except Exception as error:
            came[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    print(json.dumps(came))


if __name__ == "__main__":
    main()
