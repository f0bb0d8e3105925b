"""How rows of many kinds of sets become prompts, which workloads a configuration asks for, and what was trained on."""

import numpy as np
import pytest
from configured import configured
from datasets import Dataset, DatasetDict
from families import write_rows
from made import message_of
from talking import make_tokenizer
from transformers import LlamaConfig

from eagle31_train.common.errors import UserError
from eagle31_train.common.locations import CONFIGS
from eagle31_train.compose import load_config
from eagle31_train.config import is_hub_set
from eagle31_train.evaluation import in_process
from eagle31_train.evaluation.prompts import Prompt, choose, from_heldout, suite_of
from eagle31_train.evaluation.trajectories import digest
from eagle31_train.evaluation.workloads import MEASURED, inputs, longest_sample, trained_prompts, workloads

QUESTIONS = ["hello", "how are you?", "what is the question here?", "the quick brown fox jumps over the lazy dog"]


class Place:
    """A target's tokenizer, the data of stage 1 and files of prompts, in a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.tokenizer = make_tokenizer()
        self.tokenizer.save_pretrained(folder / "target")
        LlamaConfig(vocab_size=len(self.tokenizer)).save_pretrained(folder / "target")
        self.write_heldout([[{"role": "user", "content": text}] for text in QUESTIONS])

    def write_heldout(self, prompts, answer="answer {} tells of a river, and why nobody crosses it"):
        asked = [self.tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"] for p in prompts]
        answers = [self.tokenizer.encode(answer.format(i) + "<|im_end|>") for i in range(len(prompts))]
        columns = {
            "id": [f"c{i}" for i in range(len(prompts))],
            "source": ["a", "b"] * (len(prompts) // 2),
            "input_ids": [a + b for a, b in zip(asked, answers, strict=True)],
            "loss_mask": [[False] * len(a) + [True] * len(b) for a, b in zip(asked, answers, strict=True)],
        }
        DatasetDict({"heldout": Dataset.from_dict(columns)}).save_to_disk(str(self.folder / "data" / "dataset"))

    def write(self, name, *rows):
        return write_rows(self.folder / name, rows)

    def config(self, *more):
        target = [f"target.path={self.folder / 'target'}", f"data_dir={self.folder / 'data'}", "data.max_length=200"]
        if any(option.startswith("suite=") for option in more):
            return load_config(["+experiment=smollm2", *target, *more])
        return configured(*target, *more)

    def workloads(self, *more, longest=5000, measured_on=()):
        data = {"splits": {"heldout": {"conversations": 4}}}
        return workloads(self.config(*more), data, longest, measured_on=measured_on)

    def texts(self, workload):
        """What the user says in each prompt."""
        return [self.tokenizer.decode(p.ids).split("user\n")[1].split("<|im_end|>")[0] for p in workload.prompts]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


ROWS = [
    {"question": "hello", "kind": "a", "number": 7, "turns2": ["first", "second"], "talk": [{"value": "deep"}],
     "more": None},
    {"question": "world", "kind": "b", "number": 8, "turns2": ["one", "two"], "talk": [{"value": "deeper"}],
     "more": "x"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"prompt": "question"}, ["hello", "world"]),
        ({"prompt": "turns2"}, ["first", "one"]),
        ({"prompt": "'{talk[0][value]}: {question} {{x}}'"}, ["deep: hello {x}", "deeper: world {x}"]),
        ({"prompt": "'{question}.{more}'"}, ["hello.", "world.x"]),
        ({"prompt": "question", "only.kind": "[a,b]", "only.number": 7}, ["hello"]),
        ({"prompt": "question", "placeholder": "hell"}, ["world"]),
    ],
)
def test_rows_are_read_as_the_suite_says(place, options, texts):
    DatasetDict({"test": Dataset.from_list(ROWS)}).save_to_disk(str(place.folder / "rows"))
    given = {"path": place.folder / "rows", "id": "number", "source": "kind", **options}
    _, found = place.workloads(*(f"evaluate.suites.s.{key}={value}" for key, value in given.items()))
    assert place.texts(found) == texts
    by_number = {row["number"]: row["kind"] for row in ROWS}
    assert [p.source for p in found.prompts] == [by_number[int(p.id)] for p in found.prompts]


@pytest.mark.parametrize(("splits", "asked"), [(["train"], "train"), (["train", "test"], "test")])
def test_prompts_may_be_a_saved_data_set_whose_only_split_is_taken(place, splits, asked):
    saved = place.folder / "saved"
    DatasetDict({name: Dataset.from_list([{"prompt": name}]) for name in splits}).save_to_disk(str(saved))
    (found,) = place.workloads(f"evaluate.prompts={saved}")
    assert place.texts(found) == [asked]
    assert [(prompt.id, prompt.source) for prompt in found.prompts] == [("saved-1", "saved")]


def test_prompts_may_be_a_folder_and_further_turns_and_repeats_are_told(place):
    (place.folder / "asked" / "more").mkdir(parents=True)
    said = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    place.write("asked/a.jsonl", {"prompt": "hello"}, {"messages": said})
    place.write("asked/more/a.jsonl", {"prompt": "world"}, {"prompt": "hello"})
    (found,) = place.workloads(f"evaluate.prompts={place.folder / 'asked'}")
    assert sorted(place.texts(found)) == ["hello", "user", "world"]
    assert sorted(prompt.id for prompt in found.prompts) == ["a-1", "a-2", "more/a-1"]
    assert "only the first of several turns is asked, in 1 of 4 prompts" in "\n".join(found.notes)
    assert "1 of 4 prompts are repeats, and count once" in found.notes


SYSTEM, USER = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}
TURNS = [SYSTEM, USER, {"role": "assistant", "content": "hi"}, USER]


@pytest.mark.parametrize(
    ("asked", "row"),
    [
        ([SYSTEM, USER], {"prompt": "hello", "system": "be brief"}),
        ([SYSTEM, USER], {"turns": ["hello", "world"], "system": "be brief"}),
        ([SYSTEM, USER], {"messages": [USER, {"role": "assistant", "content": "hi"}], "system": "be brief"}),
        ([SYSTEM, USER], {"messages": [SYSTEM, USER], "system": "be long"}),
        ([SYSTEM, USER], {"messages": [SYSTEM, USER], "prompt": "hello"}),
        ([SYSTEM, USER], {"prompt": "hello", "system_prompt": "be brief"}),
        ([SYSTEM, USER], {"prompt": [{"role": "developer", "content": "be brief"}, USER]}),
        (TURNS, {"prompt": "hello", "history": [["hello", "hi"]], "system": "be brief"}),
        (TURNS, {"prompt": [*TURNS[:2], {"role": "assistant", "content": "not asked"}], "history": [["hello", "hi"]]}),
    ],
)
def test_system_text_and_earlier_turns_of_a_row_stand_before_its_question(place, asked, row):
    _, found = place.workloads(f"evaluate.suites.s.path={place.write('own.jsonl', row)}")
    assert found.prompts[0].messages == asked
    assert "be brief" in place.tokenizer.decode(found.prompts[0].ids)
    # A column that is named is read alike, without earlier turns.
    suite = f"{{path: {place.folder / 'own.jsonl'}, prompt: {next(iter(row))}}}"
    _, named = place.workloads(f"evaluate.suites.s={suite}")
    assert [prompt.messages for prompt in named.prompts] == [[SYSTEM, USER]]


@pytest.mark.parametrize(
    ("row", "layout"),
    [
        ({"prompt": "hello"}, None),
        ({"prompt": "hello", "system": "be brief"}, 2),
        ({"prompt": "hello", "system_prompt": "be brief"}, 3),
        ({"prompt": "hello", "tools": []}, 3),
        ({"prompt": "which tools and turns?"}, None),
        ({"prompt": "hello", "history": [["hi", "yes"]]}, 3),
        ({"prompt": "hello", "messages": [USER]}, 3),
    ],
)
def test_what_an_earlier_version_measured_is_out_of_date_where_it_read_the_rows_otherwise(place, row, layout):
    suite = f"evaluate.suites.own.path={place.write('own.jsonl', row)}"
    assert inputs(place.config(suite))["evaluate.suites.own.path"].get("layout") == layout


SUITES = [({}, "path"), (5, ""), ({"path": ""}, "path"), ({"path": "a", "id": 5}, "id"), ({"path": "a", "x": "b"}, "x")]


def test_a_suite_of_other_fields_or_types_or_rows_is_refused_by_name(place):
    for given, field in SUITES:
        with pytest.raises(UserError, match=rf"evaluate\.suites\.s=.* is not a suite \({field}.*\): write"):
            suite_of("s", given)
    own = f"evaluate.suites.s.path={place.write('own.jsonl', {'prompt': 'hello'}, [1])}"
    assert "own.jsonl:2 is not a JSON object" in message_of(place.workloads, own)
    for more in ({"images": ["a.png"]}, {"tools": [{"name": "weather"}]}):
        with pytest.raises(UserError, match=r"own.jsonl:1 .*(eagle31 reads only text|tools is not a list)"):
            place.workloads(f"evaluate.prompts={place.write('own.jsonl', {'prompt': 'hello', **more})}")
    own = place.write("own.jsonl", {"prompt": "hello", "chat_template_kwargs": {"enable_thinking": False}})
    with pytest.raises(UserError, match=r"own.jsonl:1 cannot be rendered \(chat_template_kwargs is only for training"):
        place.workloads(f"evaluate.prompts={own}")
    with pytest.raises(UserError, match=r"own.jsonl has no prompts: choose another file"):
        place.workloads(f"evaluate.prompts={place.write('own.jsonl')}")


def test_tools_of_a_row_are_in_its_prompt_and_a_column_that_is_named_is_there(place):
    template = place.folder / "target" / "chat_template.jinja"
    template.write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + template.read_text())
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    file = place.write("own.jsonl", {"prompt": "hello", "tools": tools})
    (found,) = place.workloads(f"evaluate.prompts={file}")
    assert '"name": "weather"' in place.tokenizer.decode(found.prompts[0].ids)
    assert not found.notes
    (bare,) = place.workloads(
        f"evaluate.prompts={place.write('bare.jsonl', {'prompt': 'hello', 'tools': [tools[0]['function']]})}"
    )
    assert bare.prompts[0].ids == found.prompts[0].ids, "as stage 1 reads them"
    file = place.write("others.jsonl", {"question": "hello"})
    for column in ("source", "id", "tools"):
        suite = f"evaluate.suites.s={{path: {file}, prompt: question, {column}: kind}}"
        assert "others.jsonl:1 has no column 'kind'" in message_of(place.workloads, suite)


def test_a_prompt_with_a_special_token_that_the_target_has_no_row_for_is_refused(place):
    place.tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    place.tokenizer.save_pretrained(place.folder / "target")
    fine, beyond = ({"prompt": text} for text in ("hello", "what is <image>?"))
    place.workloads(f"evaluate.prompts={place.write('asked.jsonl', fine)}")
    with pytest.raises(UserError, match=r"asked.jsonl:2 cannot be rendered .*has no row in the target's embedding"):
        place.workloads(f"evaluate.prompts={place.write('asked.jsonl', fine, beyond)}")


def test_suites_of_the_project_have_known_options(place):
    """Every file in configs/suite/; and rows of our own forms can stand in."""
    for file in (CONFIGS / "suite").glob("*.yaml"):
        for name, given in place.config(f"suite={file.stem}").evaluate.suites.items():
            assert is_hub_set(suite_of(name, given).path), name
    own = place.write("own.jsonl", {"turns": ["hello", "world"], "id": 3})
    _, found = place.workloads("suite=mt_bench", f"evaluate.suites.mt_bench.path={own}")
    assert (place.texts(found), found.prompts[0].id) == (["hello"], "3")


def of(text):
    """Prompts from "a1 b22 …": a letter for the source, and as many tokens as digits."""
    return [Prompt(word, word[0], [int(digit) for digit in word[1:]]) for word in text.split()]


@pytest.mark.parametrize(
    ("given", "count", "chosen", "too_long"),
    [
        ("b4 b5 a1 a2", 3, "a1 b4 a2", ""),  # whichever comes first in the split
        ("a1 a2 a3 b4", 4, "a1 b4 a2 a3", ""),  # one that runs out leaves its turns to the others
        ("a1 a2 b1 b3 c1 c2", 4, "a1 b3 c2", ""),  # the same prompt counts once, for the first whose turn it is
        ("a111 a2 b3 b444", 3, "a2 b3", "a111 b444"),  # the next of the source takes its place
    ],
)
def test_sources_take_turns(given, count, chosen, too_long):
    prompts, longer = choose(of(given), count, 2)
    assert (" ".join(prompt.id for prompt in prompts), " ".join(longer)) == (chosen, too_long)


def test_an_answer_longer_than_all_positions_is_told_from_long_prompts():
    with pytest.raises(UserError, match=r"max_new_tokens leaves no room for a prompt in .*: lower it by 4233 or more"):
        choose(of("a1"), 1, -4232)
    assert "none of 1 prompts has at most 1 tokens" in message_of(choose, of("a11"), 1, 1)


def test_each_set_as_it_is_and_under_each_perturbation(place):
    file = place.write("more.jsonl", {"prompt": "hello"}, {"prompt": "world"})
    found = place.workloads(
        f"evaluate.suites.more.path={file}", "evaluate.perturbations=[system_long,temperature_0.7]",
        "evaluate.num_prompts=3", "evaluate.temperature=0.2", "evaluate.top_p=0.9", "evaluate.top_k=20",
    )  # fmt: skip
    assert [(w.name, w.suite, w.perturbation, len(w.prompts), w.temperature, w.top_p) for w in found] == [
        ("heldout", "heldout", None, 3, 0.2, 0.9),
        ("heldout · system_long", "heldout", "system_long", 3, 0.2, 0.9),
        ("heldout · temperature_0.7", "heldout", "temperature_0.7", 3, 0.7, 0.9),
        ("more", "more", None, 2, 0.2, 0.9),
        ("more · system_long", "more", "system_long", 2, 0.2, 0.9),
        ("more · temperature_0.7", "more", "temperature_0.7", 2, 0.7, 0.9),
    ]
    assert {w.top_k for w in found} == {20}
    for plain, system, warm in (found[:3], found[3:]):
        assert [p.id for p in plain.prompts] == [p.id for p in system.prompts] == [p.id for p in warm.prompts]
        assert all(len(long.ids) > 400 + len(p.ids) for p, long in zip(plain.prompts, system.prompts, strict=True))
        assert warm.prompts == plain.prompts
    assert place.texts(found[1]) == place.texts(found[0]) == QUESTIONS[:3]


def test_what_does_not_fit_is_named_with_the_reason(place):
    answered = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    asked = [[{"role": "user", "content": text}] for text in (QUESTIONS[0], QUESTIONS[1], "so long " * 200)]
    place.write_heldout([asked[0], answered, *asked[1:]])
    plain, long = place.workloads("evaluate.perturbations=[context_2]", longest=600)
    assert ([p.id for p in plain.prompts], list(plain.left_out)) == (["c0", "c1", "c2"], ["c3"])
    assert ([p.id for p in long.prompts], list(long.left_out)) == (["c0", "c2"], ["c1"])
    assert "more than the 600 tokens" in plain.left_out["c3"]
    assert "cannot be recovered from its tokens" in long.left_out["c1"]
    said = message_of(place.workloads, "evaluate.perturbations=[context_2]", longest=300)
    assert "has none of 3 prompts left (more than the 300 tokens" in said


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


def test_prompts_that_training_was_measured_on_are_left_out(place):
    plain, *_ = place.workloads()
    measured = [digest(prompt.ids) for prompt in plain.prompts if prompt.id in ("c1", "c2")]
    file = place.write("more.jsonl", {"prompt": QUESTIONS[1]}, {"prompt": "another"})
    options = (f"evaluate.suites.more.path={file}", "evaluate.perturbations=[system_long]")
    heldout, long, more, *_ = place.workloads(*options, measured_on=measured)
    assert sorted(prompt.id for prompt in heldout.prompts) == ["c0", "c3"]
    assert heldout.left_out == long.left_out == {"c1": MEASURED, "c2": MEASURED}
    assert f"left out 2 (c1, c2): {MEASURED}" in heldout.remarks
    assert place.texts(more) == ["another"]
    assert list(more.left_out.values()) == [MEASURED]
    with pytest.raises(UserError, match="acceptance was measured on all these prompts during training"):
        place.workloads(measured_on=[digest(prompt.ids) for prompt in plain.prompts])


def test_inputs_tell_what_the_prompts_are_made_of(place):
    file, copy = (place.write(name, {"prompt": "hello"}) for name in ("rows.jsonl", "copy.jsonl"))
    before, moved = (inputs(place.config(f"evaluate.suites.s.path={at}")) for at in (file, copy))
    assert before == moved, "wherever it lies"
    assert "layout" not in before["evaluate.suites.s.path"], "results without system texts stay, and others do not"
    place.write("rows.jsonl", {"prompt": "hello", "system": "x"})
    after = inputs(place.config(f"evaluate.suites.s.path={file}"))
    assert (after != before, after["evaluate.suites.s.path"]["layout"]) == (True, 2)
    template = place.folder / "target" / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another #}")
    assert inputs(place.config(f"evaluate.suites.s.path={copy}")) != before
    suite = [f"evaluate.suites.s.path={copy}", "evaluate.perturbations=[context_1]"]
    known = [
        inputs(place.config(*suite, *more)) for more in ([], ["data.max_length=100"], ["target.template_args.x=1"])
    ]
    assert known[1] != known[0] != known[2], "a context's length, and the template's variables"
    assert inputs(place.config(*suite, "evaluate.suites.s.id=prompt")) != known[0], "how its rows are read"
    suite.append(f"target.chat_template={template}")
    given = inputs(place.config(*suite))
    template.write_text(template.read_text() + "{# one more #}")
    assert inputs(place.config(*suite))["template"] != given["template"], "by its content"


def test_held_out_rows_without_an_answer_are_no_prompts(tmp_path):
    tokens = {"input_ids": [[1, 2], [3, 4]], "loss_mask": [[False, False], [False, True]]}
    rows = {"id": ["a", "b"], "source": ["s", "s"], **tokens}
    DatasetDict({"heldout": Dataset.from_dict(rows)}).save_to_disk(str(tmp_path / "rows"))
    assert [prompt.ids for prompt in from_heldout(tmp_path / "rows")] == [[3]]


def test_samples_are_known_by_their_prompts_and_the_longest(tmp_path):
    generator, rows = np.random.default_rng(0), 2500  # more than are read at a time
    asked = [generator.integers(0, 50_000, size=generator.integers(3, 9)).tolist() for _ in range(rows)]
    answers = [generator.integers(0, 50_000, size=generator.integers(1, 9)).tolist() for _ in range(rows)]
    # In samples of several turns, answers are not all at the end.
    columns = {
        "input_ids": [a + b + [5] for a, b in zip(asked, answers, strict=True)],
        "loss_mask": [[False] * len(a) + [True] * len(b) + [False] for a, b in zip(asked, answers, strict=True)],
    }
    DatasetDict({"train": Dataset.from_dict(columns)}).save_to_disk(str(tmp_path))
    assert trained_prompts(tmp_path) == {digest(ids) for ids in asked}
    assert longest_sample(tmp_path) == max(map(len, columns["input_ids"]))


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
        # An option that an older training did not know is a difference only where it changes what is trained.
        ([OURS, {**AGAIN, "train": {**OURS["train"], "optimizer": "adamw"}}], []),
        ([OURS, {**AGAIN, "train": {**OURS["train"], "optimizer": "muon"}}], ["optimizer: adamw there, muon here"]),
    ],
)
def test_caveats(trainings, expected):
    found = list(in_process.caveats({"a": trainings}, "d1"))
    assert len(found) == len(expected)
    assert all(words in caveat for words, caveat in zip(expected, found, strict=True))
