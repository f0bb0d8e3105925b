"""Groups of options on the command line, beside what a recipe has or in its place; and options that are emptied."""

import pytest

from eagle31_train.cli import load_config
from eagle31_train.errors import UserError


def test_a_group_of_the_recipe_is_replaced():
    kimi = load_config(["+experiment=kimi"])
    other = load_config(["+experiment=kimi", "target=kimi_k25", "engine=transformers", "drafter=kimi_llama"])
    assert (kimi.target.path, other.target.path) == ("moonshotai/Kimi-K2.6", "moonshotai/Kimi-K2.5")
    assert (kimi.extract.engine, other.extract.engine) == ("vllm", "transformers")
    assert (kimi.drafter.architecture, other.drafter.architecture) == ("mla", "llama")
    assert (other.drafter.kv_lora_rank, other.train) == (None, kimi.train)


@pytest.mark.parametrize("twice", [["target=qwen3_8b", "target=kimi"], ["experiment=kimi", "experiment=smollm2"]])
def test_the_same_group_given_twice_is_an_error(twice):
    with pytest.raises(UserError, match=f"Multiple values for {twice[0].split('=')[0]}"):
        load_config(["name=x", *twice])


def test_a_free_form_option_is_emptied():
    """As the help of drafter.rope_scaling says: `{}` for none. Merged, it would change nothing, in silence."""
    for words in (["+experiment=kimi", "drafter.rope_scaling={}"], ["drafter.rope_scaling={}", "+experiment=kimi"]):
        assert load_config(words).drafter.rope_scaling == {}
    anew = ["+experiment=kimi", "drafter.rope_scaling={}", "drafter.rope_scaling.rope_type=default"]
    assert load_config(anew).drafter.rope_scaling == {"rope_type": "default"}
    assert load_config(["+experiment=smollm2", "drafter.rope_scaling={}"]).drafter.rope_scaling == {}
    assert load_config(["+experiment=kimi", "extract.engine_args={}"]).extract.engine_args == {}
    assert load_config(["+experiment=kimi", "drafter.rope_scaling.factor=2"]).drafter.rope_scaling["factor"] == 2
