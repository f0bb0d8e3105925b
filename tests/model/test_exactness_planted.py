"""Planted mistakes that the properties of test_exactness.py must find, among them some that one fixed shape hides."""

import pytest
import torch
from hypothesis import Phase, given, settings
from model.test_exactness import PROPERTY, cases, check_fp64
from planting import instead_of, replaced

from eagle31_train.model import drafter, layer
from eagle31_train.model import loss as loss_module


@instead_of(drafter, "unrolled_attention")
def scale_by_the_number_of_heads(right, q, *rest, **options):
    return right(q, *rest[:-1], q.shape[1] ** -0.5, **options)


@instead_of(drafter.Drafter, "embed")
def embedding_never_trained(right, self, tokens):
    return right(self, tokens).detach()


@instead_of(loss_module.Objective, "forward")
def teacher_with_the_norm_of_the_drafter(right, self, *args):
    self.teacher.eps = self.drafter.norm.eps
    return right(self, *args)


@instead_of(loss_module, "divergence")
def slope_without_its_lk_share(right, logits, *rest):
    _, slope = right(logits.clone(), *rest[:-1], 0.0)
    return right(logits, *rest)[0], slope


@instead_of(loss_module, "blocks")
def blocks_after_the_first_forgotten(right, *args):
    return right(*args)[:1]


@instead_of(layer.GroupedQueryAttention, "queries")
def groups_interleaved(right, self, project, positions):
    """Query head i reads group i modulo g, where it should read i divided by h / g."""
    return right(self, project, positions).unflatten(1, (-1, self.groups)).transpose(1, 2).flatten(1, 2)


@instead_of(drafter.Drafter, "forward")
def queries_at_packed_positions(right, self, packed):
    """Keys are rotated by their place in the document, queries by their place in the batch."""
    offset = packed.layout.slots - packed.positions[packed.layout.slots]
    with pytest.MonkeyPatch.context() as inner:

        @replaced(inner, layer.GroupedQueryAttention, "queries")
        def moved(queries, attention, project, positions):
            return queries(attention, project, positions + offset)

        return right(self, packed)


@instead_of(drafter, "unrolled_attention")
def own_keys_of_the_last_steps_only(right, q, k0, v0, own_k, own_v, *rest, **options):
    return right(q, k0, v0, own_k[-3:], own_v[-3:], *rest, **options)


def gradients_where_nothing_is_trained(patch):
    """The loss leaves its gradient in the outputs' memory, and there the outputs of rows that it does not read."""
    patch.setattr(torch.Tensor, "masked_fill_", lambda self, *_: self)


MISTAKES = [groups_interleaved, queries_at_packed_positions, own_keys_of_the_last_steps_only]
MISTAKES += [gradients_where_nothing_is_trained]
# Unseen by one fixed shape of four heads of width four, one epsilon, the target's embedding, KL and one chunk:
MISTAKES += [scale_by_the_number_of_heads, embedding_never_trained, teacher_with_the_norm_of_the_drafter]
MISTAKES += [slope_without_its_lk_share, blocks_after_the_first_forgotten]


# The first example that fails is enough: no smaller one is looked for.
@settings(PROPERTY, max_examples=80, phases=[Phase.generate], report_multiple_bugs=False)
@given(cases("llama"))
def all_agree(case):
    check_fp64(case)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_planted_mistake_is_found(mistake, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        all_agree()
