"""Prompts that are left out by name: every workload does without them, and a near-tie's message gives the option."""

import re
import shlex

import numpy as np
import pytest

from eagle31_train.evaluate import stage_inputs
from eagle31_train.measure import measuring
from eagle31_train.measure.measuring import seed_of
from eagle31_train.measure.sampling import TARGET, stream
from eagle31_train.measure.suites import leaving_out
from eagle31_train.schema import UserError
from tests.measure.conftest import PROMPTS, workload_of
from tests.measure.prompting import Place
from tests.measure.test_measuring import SPECULATE, measurer_of


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_prompts_that_are_named_are_left_out_of_every_workload(place):
    file = place.write("q.jsonl", {"prompt": "hello"}, {"prompt": "x", "id": "c1"}, {"prompt": "y", "id": 81})
    given = [f"evaluate.suites.s.path={file}", "evaluate.perturbations=[context_2,temperature_0.7]"]
    before = place.workloads(*given)
    found = place.workloads(*given, "evaluate.leave_out=[c1,81]")
    gone = {"heldout": ["c1"], "s": ["c1", "81"]}  # every set's own
    for one, other in zip(before, found, strict=True):
        assert other.left_out == dict.fromkeys(gone[one.suite], "evaluate.leave_out names it")
        # Contexts, too, are what they were: other measurements need not be another's.
        kept = {p.id: p for p in one.prompts if p.id not in gone[one.suite]}
        assert {p.id: p for p in other.prompts} == kept
    few = place.workloads(*given, "evaluate.leave_out=[c1]", "evaluate.num_prompts=3")
    assert [[p.id for p in one.prompts] for one in few[:3]] == [["c0", "c3", "c2"]] * 3, "another takes its place"
    with pytest.raises(UserError, match=r"evaluate\.leave_out names all 3 prompts of s: leave out fewer"):
        place.workloads(*given, "evaluate.leave_out=[c1,q-1,81]")


def test_an_evaluation_is_another_one_only_where_something_is_left_out(place):
    """One that was made before there was such an option stays what it is."""
    data = {"fingerprint": "f"}
    plain, some, same = (
        stage_inputs(place.config(*more), data, {})
        for more in ([], ["evaluate.leave_out=[a,b]"], ["evaluate.leave_out=[b,a]"])
    )
    assert "leave_out" not in str(plain)
    assert plain != some == same


def test_a_prompt_that_is_left_out_does_not_come_back_under_another_id(place):
    """As it would where the target answered each question several times."""
    file = place.write("q.jsonl", *({"prompt": text} for text in ("hello", "world", "hello")))
    (found,) = place.workloads(f"evaluate.prompts={file}", "evaluate.leave_out=[q-1]", data=None)
    assert ([p.id for p in found.prompts], list(found.left_out)) == (["q-2"], ["q-1"])


def test_without_data_a_prompt_that_is_left_out_changes_no_context_of_others(place):
    file = place.write("own.jsonl", *({"prompt": f"{text} " * 9} for text in ("foxes", "rivers", "dogs")))
    given = [f"evaluate.prompts={file}", "evaluate.perturbations=[context_1]"]
    before, after = (place.workloads(*given, *more, data=None)[1] for more in ([], ["evaluate.leave_out=[own-2]"]))
    assert after.prompts == [before.prompts[0], before.prompts[2]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("s-l2", "'s-l2', which is the id of no prompt: did you mean 's-1'"),
        ("zzzz", "there are c0, c1, c2, c3, s-1, …"),
    ],
)
def test_an_id_of_no_prompt_is_refused(place, name, message):
    file = place.write("s.jsonl", {"prompt": "hello"})
    with pytest.raises(UserError, match=f"evaluate.leave_out has {message}" if name == "s-l2" else message):
        place.workloads(f"evaluate.suites.s.path={file}", f"evaluate.leave_out=[c2,{name}]", "evaluate.num_prompts=1")


IDS = [
    "p0",
    "HumanEval/0",
    "81",
    "007",
    "1e5",
    "true",
    "null",
    "a b",
    "x#1",
    "it's",
    'say "so"',
    "a\\",
    'b\\"',
    "草",
    "a,b]",
    "",
]


@pytest.mark.parametrize("ids", [[name] for name in IDS] + [IDS, ["a", "b"]])
def test_the_option_that_leaves_prompts_out_is_read_back_from_a_shell(place, ids):
    (word,) = shlex.split(leaving_out(ids))
    assert place.config(word).evaluate.leave_out == ids


@pytest.mark.parametrize(("temperature", "gap", "tie"), [(0, -9e-5, True), (0, 2e-4, False), (0.5, 9e-5, True)])
def test_a_near_tie_of_the_target_names_the_option_that_goes_on_without_it(
    model, candidates, monkeypatch, temperature, gap, tie
):
    def other(*arguments):
        found = SPECULATE(*arguments)
        for one, prompt in zip(found, arguments[3], strict=True):
            if prompt == PROMPTS[1]:
                one.tokens[4] = (one.tokens[4] + 1) % 50
        return found

    def logit_gap(target, prefix, theirs, ours):
        """Such that what decides, of logits or of draws at a temperature, is apart by that much of logits."""
        if not temperature:
            return gap
        draws = stream(seed_of(0, workload.prompts[1]), 4, TARGET).standard_exponential(max(ours, theirs) + 1)
        return gap + temperature * float(np.log(draws[theirs] / draws[ours]))

    workload = workload_of(temperature=temperature)
    monkeypatch.setattr(measuring, "decode_speculative", other)
    monkeypatch.setattr(measuring, "logit_gap", logit_gap)
    option = "'evaluate.leave_out=[\"7 b\",p1]'"
    words = (
        f"rounding chose between equals: add {option} to the command"
        if tie
        else f"likely a mistake, which {option} would"
    )
    with pytest.raises(UserError, match=rf"prompt p1, output token 4: speculation .*{re.escape(words)}") as error:
        measurer_of(model, "evaluate.leave_out=['7 b']").measure(workload, candidates[:1])
    assert "\n" not in str(error.value)
    assert ("chose between equals" in str(error.value)) == tie
    with pytest.raises(UserError, match=r"differ by .*; evaluate\.dtype=bfloat16 rounds differently"):
        measurer_of(model, "evaluate.dtype=bfloat16").measure(workload, candidates[:1])
