"""Sources mixed by weight: shares to one row, and choices that nothing else moves."""

import random
from fractions import Fraction

import pytest
from families import says, write_rows

from data_prep.sources import Corpus, quotas
from eagle31_train.config import Config, DataConfig


def write(path, count):
    asked = ({"role": "user", "content": f"{path.stem} {i}"} for i in range(count))
    return write_rows(path, [{"id": f"r{i}", "messages": [one, says("yes")]} for i, one in enumerate(asked)])


def ids(sources, rows=None, seed=0):
    config = Config(name="t", seed=seed, data=DataConfig(sources=sources, rows=rows))
    return [row.id for row in Corpus.open(config, "conversations").read()]


def of(name, identities):
    return [identity for identity in identities if identity.startswith(name + "/")]


def weighed(folder, **sizes):
    """Sources of so many rows and so much weight each."""
    paths = {name: write(folder / f"{name}.jsonl", count) for name, (count, _) in sizes.items()}
    return {name: {"path": paths[name], "weight": weight} for name, (_, weight) in sizes.items()}


@pytest.fixture
def sources(tmp_path):
    return weighed(tmp_path, en=(60, 3), zh=(40, 1), agent=(30, 1))


@pytest.mark.core
def test_shares_are_the_weights_to_one_row_and_nothing_is_left_that_fits(tmp_path):
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
        rows = rng.randint(total * 3 // 4, total)
        assert sum(quotas(weights, have, rows).values()) == rows
    for order in (["a", "b", "c"], ["c", "a", "b"]):  # largest remainders are rounded up, and ties go by name
        weights = {name: Fraction(2 if name == "c" else 1) for name in order}
        assert quotas(weights, dict.fromkeys("abc", 99), 5) == {"a": 1, "b": 1, "c": 3}
        assert quotas(dict.fromkeys(order, Fraction(1)), dict.fromkeys("abc", 99), 4) == {"a": 2, "b": 1, "c": 1}
    decimal = weighed(tmp_path, a=(1, 0.1), b=(2, 0.2), c=(7, 0.7))
    assert len(ids(decimal)) == 10, "in floating point 0.1 + 0.2 + 0.7 loses a row"


def test_the_choice_depends_on_seed_name_and_ids_alone(sources, tmp_path):
    few = ids(sources, rows=40)
    assert ids(dict(reversed(sources.items())), rows=40) == few
    assert sorted(ids(sources, rows=40, seed=1)) != sorted(few)
    more = ids(sources, rows=60)
    assert set(few) < set(more)
    for name in sources:
        assert [i for i in of(name, more) if i in set(few)] == of(name, few), "in another order"
    before = set(of("zh", ids(sources)))
    write(tmp_path / "zh.jsonl", 44)
    after = set(of("zh", ids(sources)))
    assert len(before) == len(after) == 20
    assert len(before - after) <= 4, "rows added to a file displace no more than they take"
    assert all(int(i.removeprefix("zh/r")) >= 40 for i in after - before)


def test_another_source_moves_no_row_and_every_stretch_has_its_shares(sources):
    # Weights of 3 : 1 and 3 : 1 : 1 with totals that leave the first two their numbers.
    two = {name: sources[name] for name in ("en", "zh")}
    before, after = ids(two, rows=40), ids(sources, rows=50)
    for name in two:
        assert of(name, after) == of(name, before)
    assert len(of("agent", after)) == 10
    # The first rows of a file are often of one kind.
    identities = ids(sources)
    places = [int(i.removeprefix("zh/r")) for i in of("zh", identities)]
    assert places == sorted(places), "rows keep the order of their source"
    assert min(places) < 10
    assert max(places) > 30
    # Not source after source: training in the order of the data would forget the first.
    for end in range(1, 101):
        for name, share in (("en", 0.6), ("zh", 0.2), ("agent", 0.2)):
            assert abs(len(of(name, identities[:end])) - share * end) <= 1
