"""Sources mixed by weight: shares to one row, choices that nothing else moves, and mistakes by name."""

import json
import random
from fractions import Fraction

import pytest

from data_prep import mixture as module
from data_prep.mixture import Corpus, quotas
from data_prep.sources import open_sources
from eagle31_train.cli import load_config
from eagle31_train.schema import Config, DataConfig, UserError


def write(path, count, **more):
    rows = [{"id": f"r{i}", "messages": chat(f"{path.stem} {i}"), **more} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(question):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": "yes"}]


def corpus(sources, rows=None, seed=0, **more):
    return Corpus.open(
        Config(name="t", seed=seed, data=DataConfig(sources=sources, rows=rows, **more)), "conversations"
    )


def ids(sources, rows=None, seed=0):
    return [row.id for row in corpus(sources, rows, seed).read()]


def of(name, found):
    return [identity for identity in found if identity.startswith(name + "/")]


@pytest.fixture
def sources(tmp_path):
    """Three sources of 60, 40 and 30 rows, weighed 3 : 1 : 1."""
    sizes = {"en": (60, 3), "zh": (40, 1), "agent": (30, 1)}
    return {
        name: {"path": str(write(tmp_path / f"{name}.jsonl", count)), "weight": weight}
        for name, (count, weight) in sizes.items()
    }


# ---------------------------------------------------------------- shares


def test_shares_are_the_weights_to_one_row_and_nothing_is_left_that_fits():
    rng = random.Random(0)
    for _ in range(300):
        names = [f"s{i}" for i in range(rng.randint(1, 5))]
        weights = {name: Fraction(str(rng.choice([0.3, 0.7, 1, 2, 5]))) for name in names}
        have = {name: rng.randint(200, 400) for name in names}
        whole = sum(weights.values())
        taken = quotas(weights, have, None)
        total = sum(taken.values())
        for name in names:
            assert abs(taken[name] - total * weights[name] / whole) < 1
            assert taken[name] <= have[name]
        assert any((total + 1) * weights[name] / whole > have[name] for name in names), "one row more fits"
        asked = rng.randint(total * 3 // 4, total)
        assert sum(quotas(weights, have, asked).values()) == asked


@pytest.mark.parametrize("order", [["a", "b", "c"], ["c", "a", "b"]])
def test_largest_remainders_are_rounded_up_and_ties_go_by_name(order):
    weights = {"a": Fraction(1), "b": Fraction(1), "c": Fraction(2)}
    assert quotas({name: weights[name] for name in order}, dict.fromkeys("abc", 99), 5) == {"a": 1, "b": 1, "c": 3}
    assert quotas({name: Fraction(1) for name in order}, dict.fromkeys("abc", 99), 4) == {"a": 2, "b": 1, "c": 1}


def test_decimal_weights_are_exact(tmp_path):
    some = {
        name: {"path": str(write(tmp_path / f"{name}.jsonl", count)), "weight": weight}
        for name, count, weight in (("a", 1, 0.1), ("b", 2, 0.2), ("c", 7, 0.7))
    }
    assert len(ids(some)) == 10, "in floating point 0.1 + 0.2 + 0.7 loses a row"


def test_rows_of_every_source_are_counted(sources):
    mixed = corpus(sources)
    found = [row.id for row in mixed.read()]
    assert {name: (c["read"], c["taken"]) for name, c in mixed.counts.items()} == {
        "en": (60, 60), "zh": (40, 20), "agent": (30, 20),
    }  # fmt: skip
    assert len(found) == len(set(found)) == 100
    mixed = corpus(sources, rows=10)
    assert [len(of(name, [row.id for row in mixed.read()])) for name in ("en", "zh", "agent")] == [6, 2, 2]


def test_a_source_with_too_few_rows_says_how_many_it_has_and_needs(sources):
    with pytest.raises(
        UserError, match=r"data\.rows=200 .*: data\.sources\.agent is .*, data\.sources\.en is to give 120 and has 60"
    ):
        ids(sources, rows=200)
    sources["zh"]["weight"] = 0.001
    with pytest.raises(UserError, match=r"data\.sources\.zh gives no row \(of data\.rows=10\)"):
        ids(sources, rows=10)


# ---------------------------------------------------------------- choice and order


def test_the_same_rows_in_the_same_order_whatever_the_order_of_the_sources(sources):
    found = ids(sources, rows=40)
    assert ids(dict(reversed(sources.items())), rows=40) == found
    other = ids(sources, rows=40, seed=1)
    assert sorted(other) != sorted(found)
    assert len(other) == 40


def test_another_source_moves_no_row_of_the_others(sources, tmp_path):
    """Weights of 4 : 1 and 4 : 1 : 1 with totals that leave the first two their numbers."""
    two = {name: sources[name] for name in ("en", "zh")}
    before = ids(two, rows=40)
    after = ids(sources, rows=50)
    for name in two:
        assert of(name, after) == of(name, before)
    assert len(of("agent", after)) == 10


def test_more_rows_only_add(sources):
    few, many = ids(sources, rows=30), ids(sources, rows=60)
    assert set(few) < set(many)
    for name in sources:
        kept = of(name, many)
        assert [i for i in kept if i in set(few)] == of(name, few), "in another order"


def test_rows_added_to_a_file_displace_no_more_than_they_take(sources, tmp_path):
    before = set(of("zh", ids(sources)))
    write(tmp_path / "zh.jsonl", 44)
    after = set(of("zh", ids(sources)))
    assert len(before) == len(after) == 20
    assert len(before - after) <= 4
    assert all(int(i.removeprefix("zh/r")) >= 40 for i in after - before)


def test_the_choice_is_no_matter_of_place_in_the_file(sources):
    """The first rows of a file are often of one kind."""
    places = [int(i.removeprefix("zh/r")) for i in of("zh", ids(sources))]
    assert places == sorted(places), "rows keep the order of their source"
    assert min(places) < 10
    assert max(places) > 30


def test_every_stretch_has_its_shares(sources):
    """Not source after source: training in the order of the data would forget the first."""
    found = ids(sources)
    for end in range(1, 101):
        for name, share in (("en", 0.6), ("zh", 0.2), ("agent", 0.2)):
            assert abs(len(of(name, found[:end])) - share * end) <= 1


@pytest.mark.parametrize("mistake", ["by place", "by order of sources", "one after the other", "no remainder"])
def test_planted_mistakes_are_caught(sources, tmp_path, monkeypatch, mistake):
    if mistake == "by place":
        monkeypatch.setattr(module, "rank", lambda seed, name, identity: identity.encode())
        with pytest.raises(AssertionError):
            test_the_choice_is_no_matter_of_place_in_the_file(sources)
        return
    if mistake == "by order of sources":
        calls = iter(range(10**6))
        monkeypatch.setattr(module, "rank", lambda *_: next(calls) * 7919 % 10007)  # a generator that all share
        with pytest.raises(AssertionError):
            test_another_source_moves_no_row_of_the_others(sources, tmp_path)
        return
    if mistake == "one after the other":
        monkeypatch.setattr(module, "placed", lambda rows, count, name: ((0.0, name, row) for row in rows))
        with pytest.raises(AssertionError):
            test_every_stretch_has_its_shares(sources)
        return
    monkeypatch.setattr(module.math, "floor", lambda share: int(share) - 1)
    with pytest.raises(AssertionError):
        test_shares_are_the_weights_to_one_row_and_nothing_is_left_that_fits()


def test_names_are_the_sources_and_ids_stay_apart(tmp_path):
    some = {name: {"path": str(write(tmp_path / f"{name}.jsonl", 3, source="x"))} for name in ("a", "b")}
    rows = list(corpus(some).read())
    assert {row.source for row in rows} == {"a", "b"}
    assert sorted(row.id for row in rows) == ["a/r0", "a/r1", "a/r2", "b/r0", "b/r1", "b/r2"]
    assert {row.where for row in rows} == {f"{name}.jsonl:{i}" for name in "ab" for i in (1, 2, 3)}


def test_rows_that_cannot_be_used_take_no_share_and_come_with_their_reason(sources, tmp_path):
    write(tmp_path / "zh.jsonl", 40)
    bad = {"id": "bad", "messages": [{"role": "wizard", "content": "x"}]}
    (tmp_path / "zh.jsonl").open("a").write(json.dumps(bad) + "\n")
    mixed = corpus(sources)
    *rows, last = mixed.read()
    assert (last.id, last.source, last.problem) == ("zh/bad", "zh", "unknown role 'wizard'")
    assert len(rows) == 100
    assert mixed.counts["zh"] == {"weight": 1.0, "read": 41, "taken": 20}
    (tmp_path / "zh.jsonl").write_text(json.dumps(bad) + "\n")
    with pytest.raises(UserError, match=r"data\.sources\.zh: none of its 1 rows can be used \(unknown role 'wizard'\)"):
        ids(sources)
    (tmp_path / "zh.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"data\.sources\.zh is empty"):
        ids(sources)


def test_globs_formats_and_splits_belong_to_a_source(tmp_path, monkeypatch):
    import datasets

    write(tmp_path / "a1.jsonl", 2)
    (tmp_path / "a2.jsonl").write_text(json.dumps({"instruction": "hi", "output": "yes"}) + "\n")
    asked = []

    def load(spec, split):
        asked.append((spec, split))
        return datasets.Dataset.from_list([{"prompt": "hi", "messages": chat("hello")}] * 2)

    monkeypatch.setattr(datasets, "load_dataset", load)
    some = {
        "files": {"path": str(tmp_path / "a*.jsonl"), "weight": 3},
        "hub": {"path": "org/chats", "weight": 2, "format": "prompt", "split": "test"},
    }
    rows = {row.id: row for row in corpus(some).read()}
    assert asked == [("org/chats", "test")]
    assert set(rows) == {"files/r0", "files/r1", "files/a2-1", "hub/org/chats-1", "hub/org/chats-2"}
    assert rows["hub/org/chats-1"].messages == [{"role": "user", "content": "hi"}], "the format that was asked for"
    corpus({"hub": {"path": "org/chats"}}, split="valid")
    assert asked[-1] == ("org/chats", "valid"), "else data.split"


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"path": "F", "wieght": 1}, "no option 'data.sources.zh.wieght': did you mean 'weight'?"),
        ({"path": "F", "zzz": 1}, "no option 'data.sources.zh.zzz' (there are path, weight, format, split)"),
        ({"weight": 1}, "data.sources.zh.path is missing: give a file, a glob, or a hub id"),
        ({"path": "F", "weight": 0}, "data.sources.zh.weight=0 is no weight: set a number above 0"),
        ({"path": "F", "weight": -1}, "data.sources.zh.weight=-1 is no weight"),
        ({"path": "F", "weight": "two"}, "data.sources.zh.weight=two is no weight"),
        ({"path": "F", "weight": True}, "data.sources.zh.weight=True is no weight"),
        ({"path": "F", "weight": float("nan")}, "data.sources.zh.weight=nan is no weight"),
        ({"path": "F", "weight": float("inf")}, "data.sources.zh.weight=inf is no weight"),
        ({"path": "F", "format": "mesages"}, "data.sources.zh.format=mesages is none of auto, messages"),
        ({"path": "F", "format": "mesages"}, "did you mean 'messages'?"),
        ({"path": "nowhere.jsonl"}, "data.sources.zh.path=nowhere.jsonl is missing: give a file"),
        ("F", "is no set of options: write data.sources.zh='{path: FILE, weight: 1}'"),
    ],
)
def test_a_wrong_source_is_named(tmp_path, value, words):
    file = str(write(tmp_path / "zh.jsonl", 3))
    if isinstance(value, dict) and value.get("path") == "F":
        value = {**value, "path": file}
    with pytest.raises(UserError) as error:
        ids({"zh": value})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_other_contradictions(sources, tmp_path):
    with pytest.raises(UserError, match=r"exclude each other: set data\.conversations=null data\.prompts=null"):
        corpus(sources, conversations="a", prompts="b")
    with pytest.raises(UserError, match=r"data\.rows=0 takes nothing"):
        corpus(sources, rows=0)
    with pytest.raises(UserError, match=r"data\.rows=3 is of data\.sources, which are not given"):
        corpus({}, rows=3, conversations="a")
    with pytest.raises(UserError, match="a source's name is letters"):
        corpus({"a/b": sources["zh"]})
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "zh.jsonl").read_bytes())
    with pytest.raises(UserError, match=r"data\.sources\.copy and \.zh hold the same: zh\.jsonl; name it once"):
        corpus({**sources, "copy": {"path": str(tmp_path / "copy.jsonl")}})
    with pytest.raises(UserError, match=r"no conversations: set data\.conversations or data\.sources"):
        corpus({})


def test_an_id_twice_in_one_source_is_still_a_mistake(tmp_path):
    write(tmp_path / "a.jsonl", 2)
    (tmp_path / "b.jsonl").write_text((tmp_path / "a.jsonl").read_text() + "\n")
    with pytest.raises(UserError, match=r"b\.jsonl:1: id 'r0' is also that of a\.jsonl:1"):
        ids({"x": {"path": str(tmp_path / "*.jsonl")}})


# ---------------------------------------------------------------- command line


def test_sources_on_the_command_line(sources):
    """As a shell hands them on: data.sources.zh='{path: zh.jsonl, weight: 1}'."""
    words = [
        f"data.sources.{name}={{path: {value['path']}, weight: {value['weight']}}}" for name, value in sources.items()
    ]
    recipe = ["+experiment=smollm2", "data.conversations=null", "data.prompts=null", "data.rows=40"]
    config = load_config([*recipe, *words])
    assert config.data.sources == sources
    assert [row.id for row in Corpus.open(config, "conversations").read()] == ids(sources, rows=40)
    by_key = [f"data.sources.{n}.{key}={value}" for n, options in sources.items() for key, value in options.items()]
    assert load_config([*recipe, *by_key]).data.sources == sources
    # Quoted once more than the shell takes off, it is one text.
    config = load_config([*recipe, "data.sources.zh='{path: zh.jsonl, weight: 1}'"])
    with pytest.raises(UserError, match="is no set of options"):
        Corpus.open(config, "conversations")


def test_a_source_of_the_recipe_that_is_null_is_left_out(sources):
    recipe = ["+experiment=smollm2", "data.conversations=null", "data.prompts=null"]
    words = [f"data.sources.{name}={{path: {value['path']}}}" for name, value in sources.items()]
    config = load_config([*recipe, *words, "data.sources.agent=null"])
    found = {row.source for row in Corpus.open(config, "conversations").read()}
    assert found == {"en", "zh"}
    with pytest.raises(UserError, match=r"no conversations: set data\.conversations or data\.sources"):
        corpus({"zh": None})


def test_what_the_rows_depend_on_is_known(sources, tmp_path):
    """The stage's fingerprint: everything that moves a row, and no more."""
    one = corpus(sources).inputs()
    assert corpus(dict(reversed(sources.items()))).inputs() == one
    assert corpus(sources, rows=5).inputs() != one != corpus(sources, seed=1).inputs()
    sources["zh"]["weight"] = 2
    assert corpus(sources).inputs() != one
    plain = Config(name="t", data=DataConfig(conversations=sources["en"]["path"]))
    whole = Corpus.open(plain, "conversations").inputs()
    plain.seed = 1
    assert Corpus.open(plain, "conversations").inputs() == whole, "nothing is chosen, so the seed says nothing"
    assert whole["sources"] == [[s.name, s.fingerprint] for s in open_sources(sources["en"]["path"], "train", "x")]
