"""config.json files of others' drafts, each from the public source that `published_configs.jsonl` names: each is read,
or refused by name. What they leave out of a draft's tensors, test_published.py and test_peers.py have."""

import copy
import json
from pathlib import Path

import pytest

from eagle31_train import compare
from eagle31_train.checkpoint import contract, published_config
from eagle31_train.common.errors import UserError

LINES = (Path(__file__).parent.parent / "fixtures" / "published_configs.jsonl").read_text().splitlines()
FOUND = [json.loads(line) for line in LINES]


@pytest.mark.parametrize("one", FOUND, ids=[one["draft"] for one in FOUND])
def test_configs_of_others_are_read_or_refused_by_name(one):
    if "refused" in one:
        with pytest.raises(UserError, match=one["refused"]):
            read(one)
        return
    shape = read(one)
    assert {name: getattr(shape, name) for name in one["read"]} == one["read"]
    if "vllm" not in one:  # it can load it
        published_config.check_served(one["config"])


def read(one):
    """The shape, as DrafterCheckpoint.open takes it."""
    layers, counted = one["target_layers"], one["counted"]
    shape = published_config.shape_from_config(one["config"], target_layers=lambda: layers, counted=counted)
    if problems := contract.check_shape(shape):
        raise UserError(problems[0])
    return shape


def test_what_vllm_could_not_load_is_refused_before_it_starts(tmp_path):
    """vLLM 0.32 stops over the width of fc; with the count that the line asks for, it does not."""
    (one,) = (copy.deepcopy(one) for one in FOUND if "vllm" in one)
    four, file = one["config"], tmp_path / "config.json"
    file.write_text(json.dumps(four))
    with pytest.raises(UserError, match=r'config.json has 4 layer ids, .* add "num_aux_hidden_states": 4 beside'):
        compare.exported(str(tmp_path))
    four["transformer_layer_config"]["num_aux_hidden_states"] = 4
    file.write_text(json.dumps(four))
    assert compare.exported(str(tmp_path)) == tmp_path
    assert read(one).aux_layers == [2, 46, 91, 93]
