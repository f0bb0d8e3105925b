"""Measuring: real decoding and the drafts from every place agree, mistakes in either are refused, and nothing of a
prompt depends on what is decoded beside it."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from configured import configured
from planting import instead_of, replaced

from eagle31_train.common.errors import UserError
from eagle31_train.evaluation import decoding, measurer
from eagle31_train.evaluation.decoding import Limits, decode_plain
from eagle31_train.evaluation.measurement import rounds
from eagle31_train.evaluation.measurer import Measurer, seed_of
from eagle31_train.evaluation.sampling import TARGET, Sampling, stream
from eagle31_train.targets import cached
from eagle31_train.targets.cached import CachedTarget
from tests.evaluation.conftest import PROMPTS, workload_of

TOKENS = 10
ENDS = {12, 31, 36}  # of which some outputs that are drawn have one
GREEDY = workload_of()


def measurer_of(model, *options, ends=(), tokens=TOKENS, seed=0):
    usual = ("max_speculative_tokens=5", "batch_size=3", "timed_prompts=1", "drift=false")
    config = configured(*(f"evaluate.{option}" for option in usual), *options)
    return Measurer(model, Limits(tokens, frozenset(ends)), config.evaluate, seed)


def said(model, prompt, count=TOKENS):
    """What the target says after a prompt."""
    return decode_plain(CachedTarget(model, [1]), [prompt], Limits(count, ()))[0].tokens


@pytest.mark.parametrize("draft_tokens", [1, 5])
def test_drafters_of_every_kind_are_counted_alike_in_both_ways(model, candidates, draft_tokens):
    measurer = measurer_of(model, f"evaluate.num_speculative_tokens={draft_tokens}")
    found = measurer.measure(GREEDY, candidates)
    for measurement in found.values():
        for one in measurement.counts:
            assert one.seen == {draft_tokens: rounds(one.accepted, draft_tokens)}
            assert len(one.accepted) == one.tokens - 1
        assert measurement.outputs == [said(model, prompt) for prompt in PROMPTS]
        assert max(max(one.accepted) for one in measurement.counts) >= 3, "drafts that never agree would show nothing"
    reached = [[one.accepted for one in measurement.counts] for measurement in found.values()]
    assert reached[0] != reached[1] != reached[2]


COUNTED_WRONGLY = [  # the accepted tokens of each verification
    lambda accepted: accepted.__setitem__(0, accepted[0] + 1),  # one token more
    lambda accepted: accepted.pop(),  # one verification less
    lambda accepted: accepted.insert(0, 0),  # one more
]


@pytest.mark.parametrize("mistake", COUNTED_WRONGLY)
def test_a_mistake_in_the_counts_of_real_decoding_is_refused(model, candidates, monkeypatch, mistake):
    @replaced(monkeypatch, measurer, "decode_speculative")
    def wrong(right, *arguments):
        found = right(*arguments)
        mistake(found[0].accepted)
        return found

    with pytest.raises(UserError, match=r"prompt p\d, other, verification \d+ of 3 draft tokens: real decoding"):
        measurer_of(model).measure(GREEDY, candidates[2:])


@instead_of(measurer, "unroll")
def shifted_unroll(right, *arguments):
    accepted, drift = right(*arguments)
    return [*accepted[1:], 0], drift


@instead_of(decoding.DraftDecoder, "propose")
def drafts_in_another_order(right, *arguments):
    return right(*arguments).roll(1, 1)


@pytest.mark.parametrize("plant", [shifted_unroll, drafts_in_another_order])
def test_a_mistake_in_the_drafts_of_either_way_is_refused(model, candidates, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(UserError, match="narrowest choice"):
        measurer_of(model).measure(GREEDY, candidates[:1])


@pytest.mark.parametrize("step", [1, 2])
def test_of_equally_good_drafts_rounding_is_told_and_not_refused(model, candidates, monkeypatch, capsys, step):
    asked = []

    @replaced(monkeypatch, measurer, "decode_speculative")
    def unlucky(right, *arguments):
        """As if a draft of one prompt had gone wrong at this step."""
        found = right(*arguments)
        for one, prompt in zip(found, arguments[3], strict=True):
            if struck in ([], [prompt]) and max(one.accepted, default=0) >= step:
                struck[:] = [prompt]
                kept.append(list(one.accepted))
                at = next(i for i, count in enumerate(one.accepted) if count >= step)
                parts.append(at + sum(one.accepted[:at]))
                one.accepted[at:] = [step - 1] + [0] * (len(one.accepted) - at - 1)
        return found

    struck, kept, parts = [], [], []
    monkeypatch.setattr(measurer, "narrowest", lambda _, __, one, *at: asked.append((one.prompt, *at)) or gap)
    gap = 1e-6
    found = measurer_of(model).measure(GREEDY, candidates[:1])["llama"]
    assert asked == [(struck[0], parts[0], step)], "the step where they part decides, whatever ties later ones have"
    assert "rounding decided between equals" in capsys.readouterr().out
    at = PROMPTS.index(struck[0])
    assert rounds(found.counts[at].accepted, 3) == kept[0], "the drafts from every place count"
    gap = 1e-3
    with pytest.raises(UserError, match=rf"prompt p{at}, .*narrowest choice 0.001\); rounding .* does not explain it"):
        measurer_of(model).measure(GREEDY, candidates[:1])


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "depth"), [(0.3, 1.0, None, 1), (0.6, 0.8, None, 4), (0.6, 1.0, 4, 3)]
)
def test_draws_are_the_same_with_every_drafter(model, candidates, temperature, top_p, top_k, depth):
    """And at every depth: what is drawn without a drafter, whichever rows end before others."""
    workload = workload_of(PROMPTS[:4], temperature=temperature, top_p=top_p, top_k=top_k)
    found = measurer_of(model, f"evaluate.num_speculative_tokens={depth}", ends=ENDS).measure(workload, candidates)
    outputs = [measurement.outputs for measurement in found.values()]
    assert all(one.seen == {depth: rounds(one.accepted, depth)} for m in found.values() for one in m.counts)
    seeds, how = [seed_of(0, prompt) for prompt in workload.prompts], Sampling(temperature, top_p, top_k=top_k)
    limits = Limits(TOKENS, ENDS)
    drawn = [one.tokens for one in decode_plain(CachedTarget(model, [1]), PROMPTS[:4], limits, how, seeds)]
    assert all(each == drawn for each in outputs)
    assert len(set(map(len, drawn))) > 2
    assert outputs[0] != [said(model, prompt) for prompt in PROMPTS[:4]], "nothing was drawn"
    assert measurer_of(model, seed=1).measure(workload, candidates[:1])["llama"].outputs != outputs[0]


def test_drawn_drafts_are_decoded_at_every_depth_for_every_prompt(model, candidates):
    options = ("evaluate.draft_sampling=probabilistic", "evaluate.max_speculative_tokens=4")
    once = [dataclasses.replace(one, verified=1) for one in candidates[:2]]
    found = measurer_of(model, *options, tokens=14).measure(workload_of(temperature=0.5), once)
    for measurement in found.values():
        for one in measurement.counts:
            assert sorted(one.seen) == [1, 2, 3, 4], "what is not decoded is not known"
            assert one.accepted == []
            assert all(0 <= count <= depth for depth, counts in one.seen.items() for count in counts)
            assert all(counts for counts in one.seen.values())
        assert measurement.tokens == len(measurement.outputs[0])  # of the one that was timed
    assert any(max(counts) > 1 for one in found["llama"].counts for counts in one.seen.values())


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_nothing_depends_on_what_is_decoded_beside_a_prompt(model, candidates, temperature):
    workload = workload_of(PROMPTS[:4], temperature=temperature)
    backwards = dataclasses.replace(workload, prompts=workload.prompts[::-1])
    drift = "evaluate.drift=true"
    alone = measurer_of(model, "evaluate.batch_size=1", drift).measure(workload, candidates[:2])
    together = measurer_of(model, "evaluate.batch_size=3", drift).measure(backwards, candidates[1::-1])
    for name, measurement in together.items():
        assert measurement.outputs[::-1] == alone[name].outputs
        for one, other in zip(measurement.counts[::-1], alone[name].counts, strict=True):
            assert (one.id, one.source, one.accepted, one.seen) == (other.id, other.source, other.accepted, other.seen)
            assert one.drift.sink == pytest.approx(other.drift.sink, rel=1e-4)


@pytest.mark.parametrize("temperature", [0, 0.5])
def test_an_output_that_differs_is_refused_by_how_much(model, candidates, monkeypatch, temperature):
    """Of logits, or of what the draws make of them at a temperature."""

    @replaced(monkeypatch, measurer, "decode_speculative")
    def other(right, *arguments):
        found = right(*arguments)
        found[0].tokens[4] = (found[0].tokens[4] + 1) % 50
        return found

    workload = workload_of(PROMPTS[:1], temperature=temperature)
    with pytest.raises(UserError, match=r"prompt p0, output token 4: .* does not explain it") as error:
        measurer_of(model).measure(workload, candidates[:1])
    ours, theirs = map(int, re.search(r"speculation gives (\d+), plain decoding (\d+)", str(error.value)).groups())
    monkeypatch.undo()
    told = measurer_of(model).measure(workload, candidates[:1])["llama"].outputs[0]
    race = model(torch.tensor([PROMPTS[0] + told[:4]])).logits[0, -1].double().numpy()
    if temperature:
        race = race - temperature * np.log(stream(seed_of(0, workload.prompts[0]), 4, TARGET).standard_exponential(50))
    assert race.argmax() == theirs
    assert f"differ by {race[theirs] - race[ours]:.3g})" in str(error.value)


@pytest.mark.parametrize(("prompts", "most"), [(5, 1), (20, 2)])
def test_a_few_outputs_may_differ_by_ties_and_are_not_verified(model, candidates, monkeypatch, capsys, prompts, most):
    """Of more it is a mistake, however near the scores; in other dtypes none is a tie."""
    workload = workload_of([[number + 1, 7] for number in range(prompts)])
    plain = measurer_of(model).measure(workload, candidates[:1])["llama"]

    @replaced(monkeypatch, measurer, "decode_speculative")
    def tied(right, *arguments):
        found = right(*arguments)
        for one, (first, _) in zip(found, arguments[3], strict=True):
            if first <= struck:
                one.tokens[4] = (one.tokens[4] + 1) % 50
                one.accepted[:] = [0, 0]
        return found

    monkeypatch.setattr(measurer, "TIE", 1e9)
    struck = most
    found = measurer_of(model).measure(workload, candidates[:1])["llama"]
    assert [bool(one.seen) for one in found.counts] == [number >= most for number in range(prompts)]
    assert [one.accepted for one in found.counts] == [one.accepted for one in plain.counts]
    assert found.outputs == plain.outputs
    told = r"prompt p\d, output token 4: .*this prompt does not count as verified"
    assert len(re.findall(told, capsys.readouterr().out)) == most
    with pytest.raises(UserError, match=r"use evaluate\.dtype=float32"):
        measurer_of(model, "evaluate.dtype=bfloat16").measure(workload, candidates[:1])
    struck += 1
    with pytest.raises(UserError, match=f"made, llama: {struck} of {prompts} outputs differ from plain decoding"):
        measurer_of(model).measure(workload, candidates[:1])


def test_each_drafter_decodes_as_many_prompts_for_real_as_it_is_asked_to(model, candidates):
    """And is counted on all of them alike; it has a speed where it decoded what is timed."""
    asked = [dataclasses.replace(one, verified=count) for one, count in zip(candidates, (2, 0), strict=False)]
    found = measurer_of(model).measure(GREEDY, asked)
    for measurement, count in zip(found.values(), (2, 0), strict=True):
        assert [bool(one.seen) for one in measurement.counts] == [number < count for number in range(len(PROMPTS))]
        assert (measurement.tokens > 0, measurement.speculative > 0) == (count > 0, count > 0)
    whole = measurer_of(model).measure(GREEDY, candidates[:2])
    for name, measurement in found.items():
        assert [one.accepted for one in measurement.counts] == [one.accepted for one in whole[name].counts]


def test_a_target_that_decodes_alone_is_asked_so(model, candidates, monkeypatch):
    together = measurer_of(model).measure(GREEDY, candidates[:1])
    for module in (measurer, cached):
        monkeypatch.setattr(module, "why_alone", lambda _: "no position_ids")
    alone = measurer_of(model).measure(GREEDY, candidates[:1])
    for name, measurement in alone.items():
        assert [one.accepted for one in measurement.counts] == [one.accepted for one in together[name].counts]


def test_timed_prompts_are_decoded_alone_and_other_outputs_told_for_as_many_tokens(model, candidates, monkeypatch):
    """A token takes 2 s by plain decoding, 1 s with a drafter, whose drawn outputs are of other lengths."""
    decoded, lengths = [], {"decode_plain": 0, "decode_speculative": 0}
    for name, cost in (("decode_plain", 2.0), ("decode_speculative", 1.0)):

        @replaced(monkeypatch, measurer, name)
        def seen(right, *given, name=name, cost=cost, **options):
            answers = right(*given, **options)
            alone = len(answers) == 1
            decoded.append((name, len(answers)))
            lengths[name] += alone * sum(len(one.tokens) for one in answers)
            return [dataclasses.replace(one, seconds=cost * len(one.tokens) if alone else 100.0) for one in answers]

    options = ("evaluate.draft_sampling=probabilistic", "evaluate.max_speculative_tokens=3", "evaluate.timed_prompts=4")
    workload = workload_of([*PROMPTS, [5, 6], [8]], temperature=1.0)
    (found,) = measurer_of(model, *options, ends=ENDS).measure(workload, candidates[:1]).values()
    assert [count for name, count in decoded if name == "decode_plain"] == [1, 1, 1, 1, 3]
    assert lengths["decode_plain"] * 3 != lengths["decode_speculative"], "at each of three depths"
    assert found.tokens == lengths["decode_plain"] == sum(map(len, found.outputs[:4]))
    assert found.plain == 2 * found.tokens
    assert found.speculative == pytest.approx(found.tokens)


def test_what_lies_beyond_an_output_takes_none_of_its_time(target, monkeypatch):
    passes, right = [], target.read_plain
    monkeypatch.setattr(target, "read_plain", lambda rows: passes.append(rows) or right(rows))
    monkeypatch.setattr(decoding, "_now", lambda _: float(len(passes)))
    for count in (1, 2):
        passes.clear()
        found = decode_plain(target, PROMPTS[:count], Limits(6, ()), beyond=5)
        assert [one.seconds for one in found] == [6 / count] * count
        assert len(passes) == 11
