"""The draft vocabulary and its maps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from eagle31_train.common.errors import UserError
from eagle31_train.model import vocab
from eagle31_train.model.vocab import DraftVocab, choose, from_maps


@given(st.sets(st.integers(0, 199), min_size=1), st.integers(200, 260))
def test_offsets_and_flags_say_the_same(ids, size):
    draft = DraftVocab(np.array(sorted(ids), dtype=np.int64), size)
    # What vLLM does with d2t: target id = draft id + offset.
    assert [k + int(offset) for k, offset in enumerate(draft.d2t)] == sorted(ids)
    assert np.flatnonzero(draft.t2d).tolist() == sorted(ids)
    assert draft.t2d.shape == (size,)
    assert (draft.d2t.dtype, draft.t2d.dtype) == (np.int64, np.bool_)
    again = from_maps(draft.d2t, draft.t2d)
    assert again.target_ids.tolist() == sorted(ids)
    assert again.pruned == (len(ids) < size)


COUNTS = np.array([0, 50, 0, 30, 10, 10, 0, 0], dtype=np.int64)


def test_most_frequent_first_ties_by_id_forced_always():
    assert choose(COUNTS, [7], size=4).target_ids.tolist() == [1, 3, 4, 7]
    assert choose(COUNTS, [7], size=1).target_ids.tolist() == [7]
    for everything in (choose(COUNTS, [7, 7, 0], size=8), choose(COUNTS, [7], size=9), choose(COUNTS, [])):
        assert everything.target_ids.tolist() == list(range(8))
        assert not everything.pruned
    many = np.arange(3000, dtype=np.int64) * 7 % 5  # sorts that are not stable are so on a few
    wanted = sorted(sorted(range(3000), key=lambda token: (-many[token], token))[:1000])
    assert choose(many, [], size=1000).target_ids.tolist() == wanted


def test_maps_that_contradict_each_other(tmp_path):
    draft = choose(COUNTS, [7], size=4)
    # The commonest mistake: absolute ids where offsets belong.
    with pytest.raises(UserError, match=r"damaged|contradict"):
        from_maps(draft.target_ids, draft.t2d)
    save_file({"d2t": draft.d2t, "t2d": np.roll(draft.t2d, 1)}, tmp_path / "vocab.safetensors")
    with pytest.raises(UserError, match="contradict"):
        vocab.read(tmp_path / "vocab.safetensors")


@pytest.mark.parametrize("ids", [[], [1, 1], [2, 1], [-1, 0], [0, 8]])
def test_ids_that_are_no_vocabulary(ids):
    with pytest.raises(UserError, match="ascending ids"):
        DraftVocab(np.array(ids, dtype=np.int64), 8)
