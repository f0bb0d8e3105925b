"""Which workloads a configuration asks for, what their prompts depend on, and what was trained on."""

# ruff: noqa: F811 (fixtures)

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from eagle31_train.errors import UserError
from eagle31_train.evaluation import evaluating
from eagle31_train.evaluation.trajectories import digest
from eagle31_train.evaluation.workloads import inputs, trained_prompts
from tests.evaluation.prompting import GOOD, MANIFEST, QUESTIONS, place  # noqa: F401 (fixtures)


def test_each_set_as_it_is_and_under_each_perturbation(place):
    file = place.write("more.jsonl", {"prompt": "hello"}, {"prompt": "world"})
    found = place.workloads(
        f"evaluate.suites.more.path={file}",
        "evaluate.perturbations=[system_long,temperature_0.7]",
        "evaluate.num_prompts=3",
        "evaluate.temperature=0.2",
        "evaluate.top_p=0.9",
    )
    assert [(w.name, w.suite, w.perturbation, len(w.prompts), w.temperature, w.top_p) for w in found] == [
        ("heldout", "heldout", None, 3, 0.2, 0.9),
        ("heldout · system_long", "heldout", "system_long", 3, 0.2, 0.9),
        ("heldout · temperature_0.7", "heldout", "temperature_0.7", 3, 0.7, 0.9),
        ("more", "more", None, 2, 0.2, 0.9),
        ("more · system_long", "more", "system_long", 2, 0.2, 0.9),
        ("more · temperature_0.7", "more", "temperature_0.7", 2, 0.7, 0.9),
    ]
    for plain, system, warm in (found[:3], found[3:]):
        assert [p.id for p in plain.prompts] == [p.id for p in system.prompts] == [p.id for p in warm.prompts]
        assert all(len(long.ids) > 400 + len(p.ids) for p, long in zip(plain.prompts, system.prompts, strict=True))
        assert warm.prompts == plain.prompts
    assert place.texts(found[1]) == place.texts(found[0]) == [QUESTIONS[0], QUESTIONS[1], QUESTIONS[2]]


def test_what_does_not_fit_is_named_with_the_reason(place):
    answered = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    asked = [[{"role": "user", "content": text}] for text in (QUESTIONS[0], QUESTIONS[1], "so long " * 200)]
    place.write_heldout([asked[0], answered, *asked[1:]])
    plain, long = place.workloads("evaluate.perturbations=[context_2]", longest=600)
    assert ([p.id for p in plain.prompts], list(plain.left_out)) == (["c0", "c1", "c2"], ["c3"])
    assert ([p.id for p in long.prompts], list(long.left_out)) == (["c0", "c2"], ["c1"])
    assert "more than 600 tokens" in plain.left_out["c3"]
    assert "cannot be told from its tokens" in long.left_out["c1"]
    with pytest.raises(UserError, match=r"has none of 3 prompts left: .*more than 300 tokens"):
        place.workloads("evaluate.perturbations=[context_2]", longest=300)


def test_contexts_are_filled_with_held_out_answers_of_others(place):
    found = place.workloads("evaluate.perturbations=[context_2]")
    for prompt in found[1].prompts:
        text = place.tokenizer.decode(prompt.ids)
        assert [f"answer {i} " in text for i in range(4)] == [f"c{i}" != prompt.id for i in range(4)]
        assert text.count("<|im_end|>") == 2  # the template's: system and user
        assert abs(len(prompt.ids) - 400) <= 1
    place.write_heldout([[{"role": "user", "content": text}] for text in QUESTIONS], "again " * 40 + "{}")
    with pytest.raises(UserError, match="there is no other text to put before it"):  # answers that loop
        place.workloads("evaluate.perturbations=[context_2]")


# ---------------------------------------------------------------- left out by name


def test_inputs_tell_what_the_prompts_are_made_of(place):
    file, copy = place.write("rows.jsonl", GOOD), place.write("copy.jsonl", GOOD)
    before, moved = (inputs(place.config(f"evaluate.suites.s.path={at}")) for at in (file, copy))
    assert before == moved, "wherever it lies"
    place.write("rows.jsonl", GOOD, GOOD)
    assert inputs(place.config(f"evaluate.suites.s.path={file}")) != before
    template = place.folder / "target" / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another #}")
    assert inputs(place.config(f"evaluate.suites.s.path={copy}")) != before


# ---------------------------------------------------------------- what was trained on


@pytest.mark.parametrize("rows", [7, 2500])  # more than are read at a time
def test_samples_are_known_by_their_prompts(tmp_path, rows):
    generator = np.random.default_rng(0)
    asked = [generator.integers(0, 50_000, size=generator.integers(3, 9)).tolist() for _ in range(rows)]
    answers = [generator.integers(0, 50_000, size=generator.integers(1, 9)).tolist() for _ in range(rows)]
    # In samples of several turns, answers are not all at the end.
    columns = {
        "input_ids": [a + b + [5] for a, b in zip(asked, answers, strict=True)],
        "loss_mask": [[False] * len(a) + [True] * len(b) + [False] for a, b in zip(asked, answers, strict=True)],
    }
    split = Dataset.from_dict(columns)
    DatasetDict({"train": split, "heldout": split.select([])}).save_to_disk(str(tmp_path))
    assert trained_prompts(tmp_path) == {digest(ids) for ids in asked}


OURS = {"data": "d1", "store": "s1", "seed": 0, "train": {"lr": 0.001, "epochs": 1}}
AGAIN, WARM = {**OURS, "seed": 1}, {**OURS, "train": {**OURS["train"], "init_from": "0123456789abcdef"}}


@pytest.mark.parametrize(
    ("trainings", "expected"),
    [
        ([OURS, AGAIN, {**AGAIN, "seed": 2}], []),
        ([None], ["a may have been trained on these prompts"]),
        (
            [OURS, {**AGAIN, "data": "d2"}],
            ["a may have been trained", "differ in more than their seed: data: d1 there"],
        ),
        ([WARM], ["the weights that a was initialised from may have been trained on these prompts"]),
    ],
)
def test_caveats(trainings, expected):
    found = list(evaluating.caveats({"a": trainings}, "d1"))
    assert len(found) == len(expected)
    assert all(words in caveat for words, caveat in zip(expected, found, strict=True))
