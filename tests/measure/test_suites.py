"""Which workloads a configuration asks for, and how rows of many kinds of sets become prompts."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from talking import make_tokenizer

from eagle31_train.cli import CONFIGS, load_config
from eagle31_train.measure.suites import inputs, workloads
from eagle31_train.schema import UserError

MANIFEST = {"splits": {"heldout": {"conversations": 4}}}
QUESTIONS = ["hello", "how are you?", "what is the question here?", "the quick brown fox jumps over the lazy dog"]


class Place:
    """A target's tokenizer, the data of stage 1 and files of prompts, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = make_tokenizer()
        self.tokenizer.save_pretrained(folder / "target")
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
        file = self.folder / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    def config(self, *more):
        target = [f"target.path={self.folder / 'target'}", f"data_dir={self.folder / 'data'}", "data.max_length=200"]
        return load_config(["name=x", "drafter.intermediate_size=8", "drafter.num_attention_heads=1", *target, *more])

    def workloads(self, *more, longest=5000, data=MANIFEST):
        return workloads(self.config(*more), data, longest)

    def suite(self, *more, **options):
        """The workload of one suite, called `s`."""
        given = [f"evaluate.suites.s.{key}={value}" for key, value in options.items()]
        return self.workloads(*given, *more)[1]

    def texts(self, workload):
        """What the user says in each prompt."""
        return [self.tokenizer.decode(p.ids).split("user\n")[1].split("<|im_end|>")[0] for p in workload.prompts]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


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


# ---------------------------------------------------------------- sets


ROWS = [
    {"question": "hello", "kind": "a", "number": 7, "turns2": ["first", "second"], "talk": [{"value": "deep"}]},
    {"question": "world", "kind": "b", "number": 8, "turns2": ["one", "two"], "talk": [{"value": "deeper"}]},
]


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"prompt": "question"}, ["hello", "world"]),
        ({"prompt": "turns2"}, ["first", "one"]),
        ({"prompt": "'{talk[0][value]}: {question} {{x}}'"}, ["deep: hello {x}", "deeper: world {x}"]),
        ({"prompt": "question", "only.kind": "b"}, ["world"]),
        ({"prompt": "question", "only.kind": "[a,b]", "only.number": 7}, ["hello"]),
        ({"prompt": "question", "placeholder": "hell"}, ["world"]),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "saved", "splits"])
def test_rows_are_read_as_the_suite_says(place, options, texts, form):
    path = place.folder / "rows.jsonl"
    if form == "jsonl":
        place.write("rows.jsonl", *ROWS)
    else:
        path = place.folder / form
        saved = Dataset.from_list(ROWS)
        (saved if form == "saved" else DatasetDict({"test": saved})).save_to_disk(str(path))
    found = place.suite(path=path, id="number", source="kind", **options)
    assert place.texts(found) == texts
    by_number = {row["number"]: row["kind"] for row in ROWS}
    assert [p.source for p in found.prompts] == [by_number[int(p.id)] for p in found.prompts]
    several = [f"of several turns the first is asked, in {len(texts)} of {len(texts)} prompts"]
    hidden = ["1 rows are placeholders of texts that are not public, and left out"]
    assert found.notes == (several if options["prompt"] == "turns2" else hidden if "placeholder" in options else [])


def test_subsets_are_sources_of_their_own(place):
    """A folder that `datasets` loads as it loads the hub's: subsets by its README, splits by their files."""
    folder = place.folder / "exam"
    (folder / "law").mkdir(parents=True)
    (folder / "art").mkdir()
    for name in ("law", "art"):
        place.write(f"exam/{name}/val.jsonl", *({"q": f"{name} {i}"} for i in range(2)))
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: val\n    path: {name}/val.jsonl\n" for name in ("law", "art")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    found = place.suite(path=folder, subset="[law,art]", split="val", prompt="q")
    assert [(p.id, p.source) for p in found.prompts] == [
        ("art-1", "art"), ("law-1", "law"), ("art-2", "art"), ("law-2", "law"),
    ]  # fmt: skip
    assert place.texts(found) == ["art 0", "law 0", "art 1", "law 1"]
    one = place.suite(path=folder, subset="art", split="val", prompt="q")
    assert [(p.id, p.source) for p in one.prompts] == [("s-1", "s"), ("s-2", "s")]


def test_tools_are_rendered_or_their_loss_is_told(place):
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    file = place.write("t.jsonl", {"q": "x", "tools": json.dumps(tools)}, {"q": "y", "tools": "[]"})
    lost = place.suite(path=file, prompt="q", tools="tools")
    assert [p.tools for p in lost.prompts] == [tools, None]
    assert lost.notes == ["the target's chat template reads no tools: those of 1 prompts are lost"]
    reads = place.folder / "reads.jinja"
    reads.write_text(f"{{{{ tools | tojson if tools else '' }}}}{place.tokenizer.chat_template}")
    found = place.suite(f"target.chat_template={reads}", path=file, prompt="q", tools="tools")
    assert found.notes == []
    assert ["look_up" in place.tokenizer.decode(p.ids) for p in found.prompts] == [True, False]


def test_a_file_of_our_own_form_stands_in_for_any_suite(place):
    file = place.write("mt.jsonl", {"question_id": 81, "category": "", "turns": ["hello", "world"]})
    found = place.suite(path=file, prompt="'{problem} {answer}'", id="unique_id", source="subject", tools="functions")
    assert [(p.id, p.source) for p in found.prompts] == [("81", "s")]
    assert place.texts(found) == ["hello"]


def test_a_file_of_prompts_alone_stands_in_for_a_suite_that_names_ids(place):
    file = place.write("mine.jsonl", {"prompt": "hello"}, {"prompt": "world"})
    found = place.suite(path=file, prompt="prompt", id="prompt_id", source="category")
    assert [(p.id, p.source) for p in found.prompts] == [("mine-1", "s"), ("mine-2", "s")]


def test_rows_of_our_own_form_may_call_their_columns_otherwise(place):
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    file = place.write("mine.jsonl", {"prompt": "hello", "key": "k1", "kind": "math", "functions": tools})
    found = place.suite(path=file, id="key", source="kind", tools="functions")
    assert [(p.id, p.source, p.tools) for p in found.prompts] == [("k1", "math", tools)]


def test_a_file_in_another_encoding_is_one_line(place):
    file = place.folder / "latin.jsonl"
    file.write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.jsonl is not UTF-8 text \(.*\): save it as that"):
        place.suite(path=file)


GOOD = {"q": "hello", "n": 1}


@pytest.mark.parametrize(
    ("options", "rows", "message"),
    [
        ({"promt": "q"}, [GOOD], "evaluate.suites.s has no option 'promt': did you mean 'prompt'"),
        ({"zzz": "q"}, [GOOD], "has no option 'zzz': there are path, prompt"),
        ({"prompt": "p"}, [GOOD], r"line 1 has no column 'p' \(it has q, n\)"),
        ({"prompt": "'{q} {p}'"}, [GOOD], "has no column 'p'"),
        ({"prompt": "q", "source": "kind"}, [GOOD], "has no column 'kind'"),
        ({"prompt": "q", "id": "name"}, [GOOD], "has no column 'name'"),
        ({"prompt": "q", "tools": "t"}, [GOOD], "has no column 't'"),
        ({"prompt": "q", "tools": "q"}, [GOOD], "has tools that are no list"),
        ({"prompt": "q", "only.kind": "a"}, [GOOD], "has no column 'kind'"),
        ({"prompt": "q", "only.n": "2"}, [GOOD], "has no prompts: give another file, split or filter"),
        ({"prompt": "q", "placeholder": "hell"}, [GOOD], "has no prompts; all that were found are placeholders"),
        ({"prompt": "q", "id": "n"}, [GOOD, GOOD], "line 2: the id '1' stands there twice"),
        ({"prompt": "n"}, [GOOD], "line 1: n is no text, no texts and no messages"),
        ({"prompt": "q"}, [{"q": " "}], "is no text"),
        ({"prompt": "'{q[3]}'"}, [{"q": []}], "cannot be filled in"),
        ({"prompt": "'{q'"}, [GOOD], "is no template"),
        ({}, [GOOD], "line 1 has no prompt: give prompt"),
        ({"source": "kind"}, [{"prompt": "hello"}], "has no column 'kind'"),
        ({}, [], "has no prompts"),
        ({"prompt": "q"}, ["text"], "line 1 is no object"),
    ],
)
def test_mistakes_are_named_in_one_line(place, options, rows, message):
    file = place.write("rows.jsonl", *rows)
    with pytest.raises(UserError, match=message) as caught:
        place.suite(path=file, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("evaluate.suites.s.path=/nowhere.jsonl", "evaluate.suites.s.path=/nowhere.jsonl is no file"),
        ("evaluate.suites.s={split: test}", "evaluate.suites.s has no path"),
        ("evaluate.suites.s=7", "evaluate.suites.s=7 is no suite"),
        ("evaluate.suites.s={path: [a, b]}", r"evaluate.suites.s.path=\['a', 'b'\] is of the wrong kind"),
        ("evaluate.suites.s={path: a, prompt: 5}", "evaluate.suites.s.prompt=5 is of the wrong kind"),
        ("evaluate.suites.s={path: a, only: math}", "evaluate.suites.s.only=math is of the wrong kind"),
        ("evaluate.suites.heldout.path=x", "'heldout', which is no name"),
        ("evaluate.perturbations=[no_templat]", "did you mean 'no_template'"),
        ("evaluate.perturbations=[context_1,context_1.0]", "twice"),
        ("data_dir=/nowhere", None),
    ],
)
def test_mistakes_in_options(place, given, message):
    data = {"splits": {"heldout": {"conversations": 0}}} if message is None else MANIFEST
    with pytest.raises(UserError, match=message or "holds out no prompts"):
        place.workloads(given, data=data)


def test_a_set_that_cannot_be_loaded(place):
    (place.folder / "empty").mkdir()
    with pytest.raises(UserError, match=r"s.path=.*empty \(test\) cannot be loaded \(.*\): give a file as") as caught:
        place.suite(path=place.folder / "empty", prompt="q")
    assert "\n" not in str(caught.value)
    DatasetDict({"train": Dataset.from_list([GOOD])}).save_to_disk(str(place.folder / "other"))
    with pytest.raises(UserError, match=r"\(test\) cannot be loaded"):
        place.suite(path=place.folder / "other", prompt="q")


# ---------------------------------------------------------------- those that come with the project

# A row of each set as its hub page describes it; none has been fetched.
CARDS = {
    "mt_bench": {"category": "math", "prompt": ["hello", "again"], "prompt_id": 5, "reference": []},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n    pass\n", "test": "", "entry_point": "f"},
    "gsm8k": {"question": "hello", "answer": "world"},
    "math500": {"problem": "hello", "solution": "", "answer": "", "subject": "Algebra", "level": 2, "unique_id": "t/1"},
    "aime_2024": {"id": 60, "problem": "hello", "solution": "", "answer": "33", "url": "", "year": "2024"},
    "aime_2025": {"problem": "hello", "answer": "70", "id": "0"},
    "ceval": {"id": 0, "question": "你好", "A": "1", "B": "2", "C": "3", "D": "4", "answer": "A", "explanation": ""},
    "speed_bench": {"question_id": "q", "category": "rag", "turns": ["hello"], "source": "x", "multiturn": False},
    "tool_calls": {
        "id": "i",
        "conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "hello"}],
        "tools": json.dumps([{"type": "function", "function": {"name": "look_up"}}]),
        "category": "travel",
    },
}


def test_suites_of_the_project_read_their_sets(place):
    """By the columns that the sets are said to have; every file in configs/suite/, and no option that is unknown."""
    names = sorted(file.stem for file in (CONFIGS / "suite").glob("*.yaml"))
    known = place.config(*(f"suite={name}" for name in names[:1])).evaluate.suites
    for name in names:
        known |= place.config(f"suite={name}").evaluate.suites
    assert set(known) == set(CARDS)
    for name, row in CARDS.items():
        group = name.split("_20")[0]
        folder = place.folder / name
        split = known[name].get("split", "test")
        DatasetDict({split: Dataset.from_list([row])}).save_to_disk(str(folder))
        given = [f"evaluate.suites.{other}=null" for other in known if other != name and other.startswith(group)]
        _, found = place.workloads(f"suite={group}", *given, f"evaluate.suites.{name}.path={folder}")
        assert found.name == name
        (text,) = place.texts(found)
        assert "def f()" in text if name == "humaneval" else "hello" in text or "你好" in text
        source = row.get("category") or row.get("subject") or name
        assert found.prompts[0].source == source


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
