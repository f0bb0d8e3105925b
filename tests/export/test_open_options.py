"""Options that a recipe leaves open are those of the training; one that is given must be what was trained."""

from types import SimpleNamespace

import pytest
from plan_cases import shape_of

from eagle31_train.config import DrafterConfig
from eagle31_train.errors import UserError
from eagle31_train.export import exported_shape

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 1.0}


def exported(scaling, **options):
    trained = SimpleNamespace(shape=shape_of(rope_scaling=scaling), folder="run/train/checkpoints/step-000001")
    target = SimpleNamespace(aux_layers=None)
    config = SimpleNamespace(drafter=DrafterConfig(**options), target=target, export_sliding_window=None)
    return exported_shape(config, trained)


@pytest.mark.parametrize("scaling", [None, YARN])
def test_what_is_open_is_as_it_was_trained(scaling):
    assert exported(scaling) == shape_of(rope_scaling=scaling)


def test_a_part_of_a_scaling_is_compared_as_a_part():
    assert exported(YARN, rope_scaling={"beta_fast": 1.0}).rope_scaling == YARN
    with pytest.raises(UserError, match="rope_scaling"):
        exported(YARN, rope_scaling={"beta_fast": 32.0})


def test_a_base_that_is_given_without_a_scaling_means_none():
    assert exported(None, rope_theta=1e4).rope_scaling is None
    with pytest.raises(UserError, match="rope_scaling"):
        exported(YARN, rope_theta=1e4)
