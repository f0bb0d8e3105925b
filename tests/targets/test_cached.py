"""Sequences of unequal length, read together: what each would have been alone."""

from functools import partial, wraps

import pytest
import torch
from pipeline import VOCAB
from random_targets import LATENT, random_target
from transformers import cache_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eagle31_train.targets import cached
from eagle31_train.targets.cached import CachedTarget

FAMILIES = {
    "llama": partial(random_target, "llama"),
    "sliding": partial(random_target, "mistral", sliding_window=4),
    "every sixth full": partial(random_target, "gemma3_text", num_hidden_layers=7, sliding_window=4),
    "latent": partial(random_target, "deepseek_v3", LATENT),
}
LENGTHS = [3, cached.FEW + 1, 1, 7]
ROUNDS = [[2, 0, 3, 3], [1, 1, 1, 1], [0, 3, 2, 0], [3, 3, 0, 1], [0, 0, 0, 0]]  # forgotten of 4 new ones


def exactly(model):
    """A target in fp64."""
    model.set_experts_implementation("eager")  # the others know no fp64
    # Eager attention in fp64 takes its softmax in fp32, where the mask's least fp64 is no number.
    exact = model.config._attn_implementation != "eager"
    return CachedTarget(model.to(torch.float64 if exact else torch.float32), [1, 2, 4])


def words(count, seed):
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def read_together(target, lengths, rounds, leave=()):
    """What is read of rows that read 4 tokens a round and forget some: per row, states and logits of what it kept.

    leave: (round, row) after which a row leaves.
    """
    kept = [words(length, row) for row, length in enumerate(lengths)]
    found = [([], []) for _ in lengths]
    there = list(range(len(lengths)))
    target.reset(len(lengths))
    aux, logits = target.read(kept, 1)
    for row in there:
        found[row][0].append(aux[row, aux.shape[1] - lengths[row] :])
        found[row][1].append(logits[row])
    for number, forgotten in enumerate(rounds):
        new = [words(4, 100 * number + row) for row in there]
        aux, logits = target.read(new, 4)
        target.forget([forgotten[row] for row in there])
        for at, row in enumerate(there):
            stay = 4 - forgotten[row]
            kept[row] += new[at][:stay]
            found[row][0].append(aux[at, :stay])
            found[row][1].append(logits[at, :stay])
        staying = [at for at, row in enumerate(there) if (number, row) not in leave]
        if len(staying) < len(there):
            target.select(staying)
            there = [there[at] for at in staying]
    return kept, [(torch.cat(aux), torch.cat(logits)) for aux, logits in found]


def check(target, kept, found, lengths):
    """Against one forward pass of each row alone, without a cache."""
    for tokens, (aux, logits), length in zip(kept, found, lengths, strict=True):
        ids = torch.tensor([tokens])
        # Some norms and scores are in fp32 in any model, and so are the logits that are handed on.
        bar = 1e-5 if aux.dtype == torch.float64 else 1e-3
        torch.testing.assert_close(aux, target.states(ids, None)[0][0], rtol=bar, atol=bar)
        whole = target.model(ids, use_cache=False).logits[0, length - 1 :].float()
        torch.testing.assert_close(logits, whole, rtol=bar, atol=bar)


@pytest.mark.parametrize(
    ("lengths", "leave"),
    [(LENGTHS, ()), ([5, 5, 5, 5], ()), (LENGTHS, {(0, 1), (2, 0), (2, 3)})],  # the longest leaves first
    ids=["unequal", "equal", "some leave, and the cache grows narrower"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_what_they_are_alone(family, lengths, leave):
    target = exactly(FAMILIES[family]())
    check(target, *read_together(target, lengths, ROUNDS, leave), lengths)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_layers_that_choose_their_keys_forget_what_they_choose_by(kind):
    if not hasattr(cache_utils, "DynamicIndexedLayer"):
        pytest.skip("this transformers has no cache for it")
    # Of many heads, so that no two keys have the same score.
    target = exactly(random_target(kind, LATENT, index_topk=5, index_n_heads=64, index_head_dim=8))
    check(target, *read_together(target, [11], [[2], [0], [3], [0]]), [11])


def test_keys_that_heads_share_are_read_otherwise_for_as_long_as_it_decodes():
    """What is computed so: the test of rows."""
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with cached.shared_keys():
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not usual
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is usual


def test_the_cache_is_given_by_the_name_that_the_forward_pass_has():
    target = exactly(FAMILIES["llama"]())
    right, known = target.model.forward, target._cache_argument
    for named in (
        lambda *ids, past_key_values=None, **inputs: right(*ids, **{known: past_key_values}, **inputs),
        lambda *ids, cache=None, **inputs: right(*ids, **{known: cache}, **inputs),
    ):
        del target._cache_argument  # it is remembered
        target.model.forward = named
        check(target, *read_together(target, [5], [[2], [0]]), [5])


def no_shift(target):
    target.forget = lambda counts: (
        setattr(target, "lengths", [n - c for n, c in zip(target.lengths, counts, strict=True)]),
        target._cache.crop(-min(counts)) if min(counts) else None,
        target._narrow(),
    )


def without(name):
    def plant(target):
        right = target.model.forward
        target.model.forward = wraps(right)(lambda **inputs: right(**{k: v for k, v in inputs.items() if k != name}))

    return plant


def others_lengths(target):
    right = target.select
    target.select = lambda rows: (right(rows), target.lengths.reverse())


@pytest.mark.parametrize("mistake", [no_shift, without("attention_mask"), without("position_ids"), others_lengths])
def test_a_planted_mistake_is_seen(mistake):
    target = exactly(FAMILIES["llama"]())
    mistake(target)
    with pytest.raises(AssertionError):
        check(target, *read_together(target, LENGTHS, ROUNDS, {(0, 1)}), LENGTHS)
