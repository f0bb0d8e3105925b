"""Sampling in process: the right distribution, a seed per row, the right end."""

import pytest
import torch
from pipeline import save_quietly, tiny_llama

from eagle31_train.config import TargetConfig
from eagle31_train.targets import generate
from eagle31_train.targets.generate import Generator, Request, draw


def nucleus(logits, top_p):
    """The nucleus distribution, written the slow way."""
    probabilities = logits.softmax(-1).tolist()
    kept, mass = {}, 0.0
    for i in sorted(range(len(probabilities)), key=lambda i: -probabilities[i]):
        kept[i] = probabilities[i]
        mass += probabilities[i]
        if mass >= top_p:
            break
    return torch.tensor([kept.get(i, 0.0) / mass for i in range(len(probabilities))])


@pytest.mark.parametrize("top_p", [0.3, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("top", [1, 4, 512])
def test_draws_follow_the_nucleus(top_p, top, monkeypatch):
    """Uniforms on a grid: the share of each token is its probability, whatever the first look holds."""
    monkeypatch.setattr(generate, "NUCLEUS", top)
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 2
    N = 20000
    uniform = (torch.arange(N) + 0.5) / N
    drawn = draw(logits.expand(N, -1).clone(), uniform, top_p)
    shares = torch.bincount(drawn, minlength=12) / N
    torch.testing.assert_close(shares, nucleus(logits, top_p), atol=2e-4, rtol=0)


def test_answers_end_before_the_end_token_and_say_why(tmp_path):
    model = tiny_llama()
    # A target that asks for penalties by default must not get its way: answers are the plain arg-max.
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.max_length = 3
    save_quietly(model, tmp_path)
    target = TargetConfig(path=str(tmp_path), dtype="float32", device="cpu")

    def reference(ids, count):
        with torch.no_grad():
            for _ in range(count):
                ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
        return ids[-count:]

    prompts = [[5, 6, 7, 8, 9, 10], [11], [3, 2]]
    expected = [reference(prompt, 8) for prompt in prompts]
    nothing = [token for token in range(40) if all(token not in answer for answer in expected)]
    answers = Generator(target, nothing[:1]).answer([Request(p, 0.0, 0) for p in prompts], 8, 1.0)
    assert [answer.ids for answer in answers] == expected  # left padding changes nothing
    assert {answer.finish_reason for answer in answers} == {"length"}
    end = expected[0][2]
    stopped = Generator(target, [end]).answer([Request(prompts[0], 0.0, 0)], 8, 1.0)[0]
    assert stopped.ids == expected[0][: expected[0].index(end)]
    assert stopped.finish_reason == "stop"
