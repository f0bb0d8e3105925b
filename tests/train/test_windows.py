"""Windows of shards: which samples are shuffled together, and when a shard is used up."""

from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from made import message_of

from eagle31_train.common.order import global_batches, schedule
from eagle31_train.store.shard_plan import PlannedShard
from train import launch, windows

ALONE = SimpleNamespace(is_main_process=True, num_processes=1)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def split_of(lengths, per_shard):
    """A split whose shards hold `per_shard` samples each."""
    shards = []
    for number, first in enumerate(range(0, len(lengths), per_shard)):
        end = min(first + per_shard, len(lengths))
        tokens = sum(lengths[first:end])
        shards.append(PlannedShard(f"shards/train-{number}", "train", number + 1, first, end, tokens, 10 * tokens))
    return SimpleNamespace(lengths=lengths, shards=shards, shard_of=lambda index: shards[index // per_shard])


@given(LENGTHS, st.integers(1, 5), st.one_of(st.none(), st.integers(1, 300)), st.integers(0, 9))
@example([10] * 8, 1, 20, 0)  # several windows of several shards
def test_windows_are_whole_shards_of_enough_tokens_each_trained_as_a_whole(lengths, per_shard, tokens, seed):
    split = split_of(lengths, per_shard)
    cut = windows.cut(split, tokens)
    assert [shard for window in cut for shard in window] == split.shards
    if tokens is None:
        assert len(cut) == 1
    else:
        for window in cut[:-1]:
            assert sum(s.tokens for s in window) >= tokens > sum(s.tokens for s in window[:-1])
    ranges = windows.samples(cut)
    owner = {i: number for number, samples in enumerate(ranges) for i in samples}
    assert list(owner) == list(range(len(lengths)))
    for epoch in range(2):
        batches = global_batches(lengths, 60, seed, epoch, ranges)
        order = [i for batch in batches for i in batch]
        assert sorted(order) == list(range(len(lengths)))
        assert all(len({owner[i] for i in batch}) == 1 for batch in batches)
        turns = [owner[i] for i in order]
        visits = [turn for i, turn in enumerate(turns) if i == 0 or turn != turns[i - 1]]
        assert len(visits) == len(ranges), "each window in one go"
        assert epoch or visits == sorted(visits), "the first epoch may follow a store that is being written"


@given(LENGTHS, st.integers(1, 5), st.integers(1, 200), st.integers(1, 2), st.one_of(st.none(), st.integers(1, 20)))
@example([30] * 8, 2, 60, 1, 2)  # some shards are of no step
def test_a_shard_is_used_up_when_no_later_step_reads_it_and_not_before(lengths, per_shard, tokens, epochs, most):
    split = split_of(lengths, per_shard)
    cut = windows.cut(split, tokens)
    batches = schedule(lengths, 60, 1, epochs, most, windows.samples(cut))
    usage = windows.Usage(SimpleNamespace(follow=True, max_bytes=1), split, batches, cut, "")
    for step in range(len(batches) + 1):
        later = {split.shard_of(i) for batch in batches[step:] for i in batch}
        sooner = {split.shard_of(i) for batch in batches[:step] for i in batch}
        assert set(usage.used_up(step)) == sooner - later
        assert {use.name for use in usage.uses_after(step)} == {shard.name for shard in later}
        if epochs == 1 and usage.frees_shards(step, ALONE):
            assert {split.shard_of(i) for i in (batches[step - 1] if step else [])} <= set(usage.used_up(step))
    ends = [step for step in range(len(batches) + 1) if usage.frees_shards(step, ALONE)]
    if most is None:
        assert ends[-1] == len(batches)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 200), st.integers(1, 3))
@example([30] * 8, 2, 120, 2)  # two windows, each in two passes
def test_a_shard_is_fetched_ahead_in_every_pass_for_the_first_step_that_reads_it(lengths, per_shard, tokens, epochs):
    split = split_of(lengths, per_shard)
    cut = windows.cut(split, tokens)
    batches = schedule(lengths, 60, 1, epochs, None, windows.samples(cut))
    usage = windows.Usage(SimpleNamespace(follow=False), split, batches, cut, "")
    owner = {shard: number for number, window in enumerate(cut) for shard in window}
    read = [[split.shard_of(i) for i in batch] for batch in batches]
    turns = [owner[shards[0]] for shards in read]
    begins = [i for i in range(len(turns)) if i == 0 or turns[i] != turns[i - 1]]  # of each window, in each pass
    expected = []
    for begin, end in zip(begins, [*begins[1:], len(turns)], strict=True):
        first = {}
        for step in range(begin, end):
            for shard in read[step]:
                first.setdefault(shard, step + 1)
        expected += [(step, shard.name, shard.bytes) for shard, step in first.items()]
    assert list(usage.uses_after(0)) == expected
    assert list(usage.uses_after(len(batches))) == []


@pytest.fixture
def three():
    """A split, its three windows, and a step of each."""
    lengths = [9, 9, 10, 10, 10, 10]
    split = split_of(lengths, 2)
    cut = windows.cut(split, 18)
    return split, cut, schedule(lengths, 20, 1, 1, None, windows.samples(cut))


@pytest.fixture
def usage(three):
    """A function: their usage in a store that is followed, or of which something else is so."""
    split, cut, batches = three
    usual = {"follow": True, "max_bytes": 1, "storage": None, "fingerprint": "", "location": "there"}
    usual["release"] = lambda _: None
    return lambda **more: windows.Usage(SimpleNamespace(**{**usual, **more}), split, batches, cut, "")


def test_a_run_that_goes_on_fetches_ahead_what_is_left_to_train(three, usage, monkeypatch):
    ahead = []
    storage = SimpleNamespace(prefetch=lambda uses: ahead.extend(use.name for use in uses))
    monkeypatch.setattr(windows, "check_consumer", lambda *_: SimpleNamespace(shards=[]))
    usage(follow=False, max_bytes=None, storage=storage).begin(1, remove=True)
    assert ahead == [shard.name for shard in three[0].shards[1:]]


@pytest.mark.parametrize("bound", [None, 1])
def test_a_rank_that_sees_another_bound_saves_where_the_main_process_does(usage, monkeypatch, bound):
    """Extraction ended, and its bound with it, after the main process looked and before this rank did; or the reverse.
    Ranks that save after different steps would wait for one another for ever."""
    ours = usage(max_bytes=bound)
    monkeypatch.setattr(launch, "broadcast_object_list", lambda _: [bound is None, None])  # of the main process
    other = SimpleNamespace(is_main_process=False, num_processes=2)
    assert [ours.frees_shards(step, other) for step in range(4)] == [False, *[bound is None] * 3]


@pytest.mark.parametrize(
    ("given", "epochs", "count", "said"),
    [
        ({"remote": True, "cache": 407}, 2, 3, None),
        ({"remote": True, "cache": 406}, 2, 3, "store.cache_bytes=406 cannot hold two windows"),
        ({"follow": True, "max_bytes": 207}, 1, 3, None),
        ({"follow": True, "max_bytes": 206}, 1, 3, "store.max_bytes=206 cannot hold a window"),
        ({"follow": True, "max_bytes": 207}, 2, 3, "set train.epochs=1"),
        ({"max_bytes": 206, "manifest": {}}, 2, 3, None),  # of an extraction that is over
        ({"follow": True}, 2, 1, "one window holds its whole training split"),
        ({"follow": True, "manifest": {}}, 2, 1, None),
    ],
)
def test_windows_that_do_not_fit_are_refused(three, given, epochs, count, said):
    """The largest take 200 bytes, and the held-out split 7."""
    plan, remote = SimpleNamespace(of=lambda _: [SimpleNamespace(bytes=7)]), given.get("remote", False)
    store = {"follow": False, "manifest": None, "max_bytes": None, **given}
    store = SimpleNamespace(location="there", plan=plan, storage=SimpleNamespace(remote=remote), **store)
    checked = (windows.check, store, three[1][:count], epochs, given.get("cache", 0))
    assert said in message_of(*checked) if said else checked[0](*checked[1:]) is None


def test_steps_whose_shards_were_used_up_are_refused_and_the_last_step_tells_the_end(three, usage, monkeypatch):
    told, unmapped = [], []
    ours = usage(release=unmapped.append)
    gone = SimpleNamespace(shards=[three[0].shards[0].name])
    monkeypatch.setattr(windows, "check_consumer", lambda *_: gone)
    monkeypatch.setattr(windows, "consume", lambda *given: told.append(given[-1]))
    assert "1 shards of there that the steps after 0 need were removed" in message_of(ours.begin, 0, remove=True)
    for done in (1, 2, 3):
        ours.begin(done, remove=True)
    ours.begin(3, remove=False)
    assert told == [False, False, True]
    assert unmapped[0] == three[0].shards[:1], "else its bytes stay on the disk"
