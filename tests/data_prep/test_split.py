"""The split: a property of the prompt's text and of nothing else."""

from data_prep.split import is_heldout, prompt_hash


def chat(prompt: str, answer: str = "yes", system: str | None = None) -> list[dict[str, str]]:
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def test_hash_never_moves():
    # Written down once: a change here would move prompts between the splits of existing runs.
    assert prompt_hash(chat("why do cats knead blankets?")) == 2_631_719_248


def test_answers_later_turns_and_white_space_have_no_say():
    first = prompt_hash(chat("why?"))
    assert prompt_hash(chat("why?", "no")) == first
    assert prompt_hash([*chat("why?"), {"role": "user", "content": "and?"}]) == first
    assert prompt_hash(chat("  why?\n")) == first
    assert prompt_hash([{"role": "user", "content": "why?"}]) == first


def test_prompt_and_system_have():
    assert (
        len({prompt_hash(chat("why?")), prompt_hash(chat("who?")), prompt_hash(chat("why?", system="be brief"))}) == 3
    )


def test_share_is_met_and_grows_monotonically():
    prompts = [chat(f"question {i}") for i in range(4000)]
    small = {i for i, prompt in enumerate(prompts) if is_heldout(prompt, 0.05)}
    large = {i for i, prompt in enumerate(prompts) if is_heldout(prompt, 0.2)}
    assert 150 < len(small) < 250
    assert 720 < len(large) < 880
    assert small < large
    assert not any(is_heldout(prompt, 0.0) for prompt in prompts)
