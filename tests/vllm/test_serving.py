"""Real vLLM serves the exported drafter, and counts what the evaluator counts: equalities, not tolerances."""

from pathlib import Path

import pytest
import torch
from serving import AT_OTHER_DEPTHS, DEPTH, OTHER_DEPTHS, RUNS, WINDOW, counters_told

from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.config import TargetConfig
from eagle31_train.evaluation.decoding import Limits, decode_speculative
from eagle31_train.model.decode import DraftDecoder
from eagle31_train.model.drafter import Drafter
from eagle31_train.targets.cached import CachedTarget
from eagle31_train.targets.hf import load_model

pytestmark = pytest.mark.vllm


def named(requests, values):
    """Values by what they belong to, so that a failure says which prompt."""
    return {f"{i} {one['id']} ({one['kind']})": v for i, (one, v) in enumerate(zip(requests, values, strict=True))}


def test_the_requests_reach_the_edges(requests):
    kinds = [one["kind"] for one in requests]
    assert kinds.count("whole") >= 20
    assert kinds.count("limit") >= 3
    assert kinds.count("end") >= 3


@pytest.mark.parametrize("draft_tokens", [DEPTH, 0])
def test_outputs_are_the_evaluators_with_the_drafter_and_without(draft_tokens, requests, answers):
    found = answers[draft_tokens]["outputs"]
    asked = requests[: len(found)]
    assert named(asked, found) == named(asked, [one["output"] for one in asked])


def headline(evaluated: dict) -> dict:
    """Counts at DEPTH draft tokens."""
    (numbers,) = evaluated["result"]["workloads"][0]["drafters"].values()
    return numbers["by_depth"][str(DEPTH)]


def test_counts_are_the_evaluators(evaluated, requests, answers):
    counted = answers[DEPTH]["counters"]
    assert named(requests, counted) == named(requests, [one["counters"] for one in requests])
    assert_told(evaluated, counted, DEPTH)
    told, prompts = headline(evaluated), len(evaluated["per_prompt"])
    assert sum(c["drafts"] for c in counted[:prompts]) == told["drafts"]
    assert sum(c["proposed"] for c in counted[:prompts]) == DEPTH * told["drafts"]
    per_position = [
        sum(column) for column in zip(*(c["accepted_per_position"] for c in counted[:prompts]), strict=True)
    ]
    assert per_position == told["accepted_per_position"]


def assert_told(evaluated: dict, counted: list[dict], draft_tokens: int) -> None:
    """The evaluator tells these counts from one output of the target."""
    told = [counters_told(prompt, draft_tokens) for prompt in evaluated["per_prompt"][: len(counted)]]
    assert dict(enumerate(counted[: len(told)])) == dict(enumerate(told))


@pytest.mark.parametrize("draft_tokens", OTHER_DEPTHS)
def test_counts_at_other_depths_are_told_from_one_output_of_the_target(draft_tokens, evaluated, requests, answers):
    found = answers[draft_tokens]
    assert found["outputs"][:AT_OTHER_DEPTHS] == [one["output"] for one in requests[:AT_OTHER_DEPTHS]]
    assert_told(evaluated, found["counters"], draft_tokens)


CHAINS = [name for name, (_, options) in RUNS.items() if "drafter.parallel=true" not in options]


@pytest.mark.runs(*CHAINS)
def test_the_model_runner_of_gpus_gives_the_same(ask_second_runner, finished_run, target, requests):
    """Few requests, since it is slow on a CPU. It has no parallel drafting."""
    some = [one for kind in ("whole", "limit", "end") for one in [i for i in requests if i["kind"] == kind][:3]]
    asked = {"target": target, "draft": str(finished_run / "export"), "draft_tokens": DEPTH, "requests": some}
    [found] = ask_second_runner("decode", [asked])
    assert found["second_runner"]
    assert named(some, found["outputs"]) == named(some, [one["output"] for one in some])
    assert named(some, found["counters"]) == named(some, [one["counters"] for one in some])


def chances(model, drafter, ids, prompt: list[int], token: int) -> tuple[torch.Tensor, ...]:
    """With what probability the draft after the prompt and a token is accepted, if it is the likeliest one and if it is
    drawn; and the target's distribution [V] there."""
    model.reset(1)
    aux, _ = model.read([prompt], 1)
    decoder, logits = DraftDecoder(drafter, ids, len(prompt) + 1), []
    decoder.extend(aux[0], torch.tensor([*prompt[1:], token]))
    [(likeliest, _)] = decoder.unroll(1, lambda _, drafted: logits.append(drafted) or drafted.argmax(-1))
    p = model.read([[token]], 1)[1][0, -1].double().softmax(-1)
    q = torch.zeros_like(p).index_copy(0, ids, logits[0][0].double().softmax(-1))
    return p[likeliest[0]], torch.minimum(p, q).sum(), p


@pytest.mark.runs("Llama, tied embeddings")
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_sampled_answers_and_drafts_have_the_evaluators_chances(
    method, ask_second_runner, finished_run, target, requests
):
    """In the second model runner: the first cannot sample beside a drafter on a CPU."""
    prompts, export = [one["prompt"] for one in requests if one["kind"] == "whole"], finished_run / "export"
    asked = {"target": target, "draft": str(export), "method": method, "prompts": prompts, "times": 10}
    [found] = ask_second_runner("sample", [asked])
    model, drafter, ids = loaded(export, target)
    pairs = [(prompt, *two) for prompt, answers in zip(prompts, found["outputs"], strict=True) for two in answers]
    reckoned = [chances(model, drafter, ids, prompt, first) for prompt, first, _ in pairs]
    *told, p = map(torch.stack, zip(*reckoned, strict=True))
    shares = dict(zip(("greedy", "probabilistic"), told, strict=True))
    sigma = {name: (share * (1 - share)).sum().sqrt() for name, share in shares.items()}
    assert abs(found["accepted"] - shares[method].sum()) < 4 * sigma[method]
    assert abs(shares["probabilistic"].sum() - shares["greedy"].sum()) > 8 * max(sigma.values()), "they differ"

    seconds = p.log().gather(1, torch.tensor([second for *_, second in pairs])[:, None])[:, 0]
    mean = (p * p.log()).sum(-1)
    variance = (p * p.log().square()).sum(-1) - mean.square()
    assert abs((seconds - mean).sum()) < 4 * variance.sum().sqrt(), "the answers are the target's"


def test_the_drafter_is_of_use(evaluated):
    """Or equal counts would say little."""
    assert headline(evaluated)["acceptance_length"][0] > 1.02  # an untrained drafter has 1.0


def loaded(export: Path, target: str) -> tuple[CachedTarget, Drafter, torch.Tensor]:
    """The target, the exported drafter, and the target's ids of its tokens."""
    draft = DrafterCheckpoint.open(export, target_layers=lambda: 8)
    model = CachedTarget(load_model(TargetConfig(path=target, device="cpu"), "float32"), draft.shape.aux_layers)
    drafter = Drafter(draft.shape, model.embedding.weight.data)
    drafter.load_state_dict(draft.tensors)
    drafter.eval().requires_grad_(False)
    return model, drafter, torch.from_numpy(draft.vocab.target_ids)


@pytest.mark.runs(*(name for name, (_, options) in RUNS.items() if WINDOW[0] in options))
@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_that_is_one_position_off_would_change_vllms_counts(off, finished_run, target, requests, answers):
    """What MLA can get wrong: test_mla_config.py."""
    model, drafter, ids = loaded(finished_run / "export", target)
    if drafter.shape.sliding_window is None:
        pytest.skip("it has no window")

    def decoded(request):
        limits = Limits(request["max_new_tokens"], frozenset(request["end_ids"]))
        (found,) = decode_speculative(model, drafter, ids, [request["prompt"]], DEPTH, limits)
        return [sum(count > position for count in found.accepted) for position in range(DEPTH)]

    theirs = [counters["accepted_per_position"] for counters in answers[DEPTH]["counters"]]
    assert [decoded(one) for one in requests[:2]] == theirs[:2]
    for layer in drafter.stack:
        layer.self_attn.window += off
    assert any(decoded(one) != counted for one, counted in zip(requests, theirs, strict=True))
