"""The embedded target: unpacked once, never over anything of the user's, and it speaks English."""

import json

import pytest
from made import message_of

from eagle31_train.targets import embedded


@pytest.mark.parametrize("route", ["{0}", "{0}/new/..", "{0}/../theirs"])
@pytest.mark.parametrize("with_manifest", [False, True])
def test_a_folder_of_the_users_is_left_alone(tmp_path, monkeypatch, route, with_manifest):
    """`new/..` must count as the folder it will be, not as one that does not exist yet."""
    monkeypatch.setattr(embedded, "load_gguf", lambda _: pytest.fail("unpacked"))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("ten years of work")
    if with_manifest:  # another stage's output
        (theirs / "manifest.json").write_text(json.dumps({"inputs": {"layout": 1}, "files": {}}))
    assert "was not made by this command" in message_of(embedded.unpack, type(tmp_path)(route.format(theirs)))
    assert (theirs / "thesis.txt").read_text() == "ten years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def test_a_target_is_made_again_where_it_is_damaged_or_of_another_recipe(tmp_path):
    made = []

    def make(**recipe):
        def fill(folder):
            made.append(recipe)
            (folder / "model.safetensors").write_bytes(b"weights")
            return {}

        embedded.make_folder(tmp_path / "target", "package", {"package": "theirs", **recipe}, fill)
        return len(made)

    assert [make(layout=1), make(layout=1), make(layout=2)] == [1, 1, 2]
    weights = tmp_path / "target" / "model.safetensors"
    weights.write_bytes(b"wEights")
    assert make(layout=2) == 3
    assert weights.read_bytes() == b"weights"


@pytest.mark.real_target
def test_target_is_whole_and_speaks_english(real_target):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_target)
    model = AutoModelForCausalLM.from_pretrained(real_target)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.config.rms_norm_eps == 1e-5
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    # SmolLM2 splits digits before anything else, which a GGUF file does not say.
    assert tokenizer.tokenize("   5 12") == ["ĠĠĠ", "5", "Ġ", "1", "2"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
