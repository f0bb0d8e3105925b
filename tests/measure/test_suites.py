"""Which workloads a configuration asks for, and what their prompts depend on."""

# ruff: noqa: F811 (fixtures)

import json

import pytest
from datasets import Dataset, DatasetDict

from eagle31_train.measure.suites import inputs
from eagle31_train.schema import UserError
from tests.measure.prompting import GOOD, QUESTIONS, place  # noqa: F401 (fixtures)

# ---------------------------------------------------------------- workloads


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


def test_prompts_of_ones_own_come_in_the_held_out_ones_place(place):
    place.write("one.jsonl", {"prompt": "hello"}, {"turns": ["one", "two"]})
    place.write("two.jsonl", {"messages": [{"role": "user", "content": "x"}], "source": "mine"}, {"prompt": "y"})
    (found,) = place.workloads(f"evaluate.prompts={place.folder}/*.jsonl", data=None)
    assert found.name == "prompts"
    assert [(p.id, p.source) for p in found.prompts] == [
        ("two-1", "mine"), ("one-1", "one"), ("two-2", "two"), ("one-2", "one"),
    ]  # fmt: skip
    assert found.notes == ["of several turns the first is asked, in 1 of 4 prompts"]


def test_the_tokens_of_held_out_prompts_stay_those_of_the_data(place):
    """They are read as the data have them, with no tokenizer, unless a perturbation needs the messages."""
    (plain,) = place.workloads("target.path=/nowhere")
    assert place.texts(plain) == QUESTIONS
    assert [p.messages for p in plain.prompts] == [None] * 4
    again = place.workloads("evaluate.perturbations=[no_template]")
    assert [p.ids for p in again[0].prompts] == [p.ids for p in plain.prompts]
    assert [place.tokenizer.decode(p.ids) for p in again[1].prompts] == QUESTIONS


def test_what_does_not_fit_is_named_with_the_reason(place):
    answered = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    place.write_heldout([[{"role": "user", "content": QUESTIONS[0]}]] * 1 + [answered] * 1 + [
        [{"role": "user", "content": text}] for text in (QUESTIONS[1], "so long " * 200)
    ])  # fmt: skip
    plain, long = place.workloads("evaluate.perturbations=[context_2]", longest=600)
    assert ([p.id for p in plain.prompts], list(plain.left_out)) == (["c0", "c1", "c2"], ["c3"])
    assert ([p.id for p in long.prompts], list(long.left_out)) == (["c0", "c2"], ["c1"])
    assert "more than 600 tokens" in plain.left_out["c3"]
    assert "cannot be told from its tokens" in long.left_out["c1"]
    with pytest.raises(
        UserError, match=r"'heldout · context_2' has none of 3 prompts left: more than 300 tokens.*; its"
    ):
        place.workloads("evaluate.perturbations=[context_2]", longest=300)


def test_contexts_are_filled_with_held_out_answers_of_others(place):
    found = place.workloads("evaluate.perturbations=[context_2,context_0.75]", f"data_dir={place.folder / 'data'}")
    for prompt in found[1].prompts:
        text = place.tokenizer.decode(prompt.ids)
        assert [f"answer {i} " in text for i in range(4)] == [f"c{i}" != prompt.id for i in range(4)]
        assert text.count("<|im_end|>") == 2  # the template's: system and user
        assert abs(len(prompt.ids) - 400) <= 1
    assert ["are repeated to fill 400" in " ".join(w.notes) for w in found] == [False, True, False]


def test_answers_that_loop_fill_no_context(place):
    place.write_heldout([[{"role": "user", "content": text}] for text in QUESTIONS], "again " * 40 + "{}")
    with pytest.raises(UserError, match="there is no other text to put before it"):
        place.workloads("evaluate.perturbations=[context_2]")


def test_without_data_other_prompts_fill_contexts(place):
    file = place.write("own.jsonl", {"prompt": "hello"}, {"prompt": "a question about foxes " * 9})
    _, long = place.workloads(f"evaluate.prompts={file}", "evaluate.perturbations=[context_1]", data=None)
    assert "about foxes" in place.tokenizer.decode(long.prompts[0].ids)


def test_a_perturbation_that_changes_nothing_says_so(place):
    place.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    place.tokenizer.save_pretrained(place.folder / "target")
    place.write_heldout([[{"role": "user", "content": text}] for text in QUESTIONS])
    _, plain = place.workloads("evaluate.perturbations=[no_template]")
    assert plain.notes[-1] == "the same as heldout, token for token"
    place.tokenizer.chat_template = "{% for m in messages %}{{ m.content | replace('hello', 'oh') }}{% endfor %}"
    place.tokenizer.save_pretrained(place.folder / "target")
    file = place.write("q.jsonl", {"prompt": "hello"}, {"prompt": "x"})
    _, plain = place.workloads(f"evaluate.prompts={file}", "evaluate.perturbations=[no_template]")
    assert plain.notes[-1] == "1 of 2 prompts are the same as without it"


def test_perturbations_that_make_the_same_of_a_target_say_so(place):
    """Where the target's own template is chatml, that is no other family's."""
    names = "[no_template,template_chatml,system_absent,temperature_0.7]"
    found = place.workloads(f"evaluate.perturbations={names}", "evaluate.temperature=0.7")
    notes = {workload.perturbation: workload.notes[1:] for workload in found[1:]}
    assert notes == {
        "no_template": [],
        "template_chatml": [],
        "system_absent": ["the same as heldout · template_chatml, token for token"],
        "temperature_0.7": ["the same as heldout, token for token"],
    }


def test_prompts_that_are_in_the_training_data_are_told(place):
    file = place.write("q.jsonl", *({"prompt": text} for text in [*QUESTIONS[:2], "nobody learnt this"]))
    folder = place.folder / "data" / "dataset"
    rows = DatasetDict.load_from_disk(str(folder))["heldout"]
    split = DatasetDict({"train": rows.select([0, 1]), "heldout": rows.select([2, 3])})
    held = {"heldout": {"conversations": 2}, "train": {"conversations": 2}}
    split.save_to_disk(str(place.folder / "both" / "dataset"))
    found = place.workloads(
        f"evaluate.suites.s.path={file}", f"data_dir={place.folder / 'both'}", data={"splits": held}
    )
    assert [w.notes[:-1] for w in found] == [[], ["2 of 3 prompts are in the training data, too"]]


def test_prompts_beyond_what_was_trained_on_are_told(place):
    """data.max_length is where samples are cut, and none need be that long."""
    folder = place.folder / "data" / "dataset"
    heldout = DatasetDict.load_from_disk(str(folder))["heldout"]
    lengths = (90, 150, 100)
    samples = {"input_ids": [[1] * n for n in lengths], "loss_mask": [[False] + [True] * (n - 1) for n in lengths]}
    split = DatasetDict({"train": Dataset.from_dict(samples), "heldout": heldout})
    split.save_to_disk(str(place.folder / "both" / "dataset"))
    data = {"splits": {"heldout": {"conversations": 4}, "train": {"conversations": 3}}}
    asked = "evaluate.perturbations=[context_0.6,context_5,context_130_tokens,temperature_0.7]"
    given = [asked, f"data_dir={place.folder / 'both'}"]
    found = place.workloads(*given, "evaluate.max_new_tokens=30", data=data)
    told = {w.perturbation: [n for n in w.notes if "trained on" in n] for w in found}
    trained = "the longest sample trained on has 150, the median 100"
    assert told == {
        None: [],
        "context_0.6": [],
        "context_5": [f"prompts of 1,000 tokens and up to 30 more: {trained}"],
        "context_130_tokens": [f"prompts of 130 tokens and up to 30 more: {trained}"],
        "temperature_0.7": [],
    }
    plain, *_ = place.workloads(*given, "evaluate.max_new_tokens=149", data=data)
    asked = [len(p.ids) for p in plain.prompts]
    assert plain.notes == [f"prompts of {min(asked)}–{max(asked)} tokens and up to 149 more: {trained}"]


def test_a_system_message_in_place_of_the_templates_own_is_told(place):
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    file = place.write("own.jsonl", {"messages": messages})
    options = f"evaluate.suites.own.path={file}", "evaluate.perturbations=[system_long]"
    _, heldout, _, own = place.workloads(*options)
    assert heldout.notes[1:] == [
        "in 4 of 4 prompts it also takes the place of the system turn that the chat template would put in by itself"
    ]
    assert own.notes[1:] == []


# ---------------------------------------------------------------- what a stage's output depends on


def test_inputs_tell_what_the_prompts_are_made_of(place):
    file = place.write("rows.jsonl", GOOD)
    given = [f"evaluate.suites.s.path={file}", "evaluate.suites.s.prompt=q"]
    before = inputs(place.config(*given))
    place.write("copy.jsonl", GOOD)
    moved = [f"evaluate.suites.s.path={place.folder / 'copy.jsonl'}", "evaluate.suites.s.prompt=q"]
    assert inputs(place.config(*moved)) == before  # wherever it lies
    assert "leave_out" not in before, "what was evaluated before there was this option is not out of date"
    one, same = (inputs(place.config(*given, f"evaluate.leave_out={ids}")) for ids in ("[c1,c2]", "[c2,c1,c2]"))
    assert one == same
    changes = [
        [*given, "evaluate.suites.s.prompt=n"],
        [*given, "evaluate.perturbations=[context_1]"],
        [*given, "target.template_args.x=1"],
        [*given, f"evaluate.prompts={file}"],
        ["evaluate.suites.s.path=org/name", "evaluate.suites.s.prompt=q"],
        [*given, "evaluate.leave_out=[c1,c2]"],
        [],
    ]
    found = [inputs(place.config(*change)) for change in changes]
    place.write("rows.jsonl", GOOD, GOOD)
    found += [before, inputs(place.config(*given))]
    template = place.folder / "target" / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another #}")
    found += [inputs(place.config(*given))]
    assert found[-1] != found[-2], "prompts are rendered with the target's own template"
    assert inputs(place.config()) == found[6], "and tokens of held-out prompts are stage 1's"
    spelt = [json.dumps(each, sort_keys=True) for each in found]
    assert len(set(spelt)) == len(spelt)
