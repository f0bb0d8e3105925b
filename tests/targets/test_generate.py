"""Sampling in process: the right distribution, a seed per row, the right end."""

import pytest
import torch
from pipeline import save_quietly, tiny_llama
from random_targets import LONG, random_target

from eagle31_train.config import TargetConfig
from eagle31_train.targets import generate
from eagle31_train.targets.completions import Request, Sampling
from eagle31_train.targets.generate import Generator, draw


def nucleus(logits, top_p, top_k=None):
    """The nucleus distribution of the top_k likeliest in fp64, written the slow way."""
    p = logits.double().softmax(-1).tolist()
    order, kept, mass = sorted(range(len(p)), key=lambda token: -p[token])[:top_k], {}, 0.0
    whole = sum(p[token] for token in order)
    for token in order:
        if mass < top_p * whole:
            kept[token], mass = p[token], mass + p[token]
    return torch.tensor([kept.get(token, 0.0) / mass for token in range(len(p))], dtype=torch.float64)


@pytest.mark.parametrize("top_p", [0.3, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, 7, 50])
@pytest.mark.parametrize("top", [1, 4, 512])
def test_draws_follow_the_nucleus(top_p, top_k, top, monkeypatch):
    """Uniforms on a grid: the share of each token is its probability, whatever the first look holds."""
    monkeypatch.setattr(generate, "NUCLEUS", top)
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 2
    N = 20000
    uniform = (torch.arange(N) + 0.5) / N
    drawn = draw(logits.expand(N, -1).clone(), uniform, top_p, top_k)
    shares = torch.bincount(drawn, minlength=12) / N
    torch.testing.assert_close(shares.double(), nucleus(logits, top_p, top_k), atol=2e-4, rtol=0)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The options of a tiny target, and the model."""
    model = tiny_llama()
    # A target that asks for penalties by default must not get its way: answers are the plain arg-max.
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.max_length = 3
    folder = save_quietly(model, tmp_path_factory.mktemp("target"))
    return TargetConfig(path=str(folder), dtype="float32", device="cpu"), model


def alone(model, request, count, top_p, top_k):
    """The tokens of one answer, each by a forward pass over all that is before it."""
    ids, uniforms = list(request.ids), torch.rand(count, generator=torch.Generator().manual_seed(request.seed))
    with torch.no_grad():
        for uniform in uniforms:
            logits = model(torch.tensor([ids])).logits[:, -1].float()
            if request.temperature:
                ids.append(int(draw(logits / request.temperature, uniform[None], top_p, top_k)))
            else:
                ids.append(int(logits.argmax()))
    return ids[len(request.ids) :]


def requests_of_all_kinds():
    """Prompts of many lengths, the longest first; every third is greedy."""
    random = torch.Generator().manual_seed(7)
    lengths = [23, 17, 17, 9, 8, 5, 4, 3, 2, 1, 1]
    words = [torch.randint(0, 40, (length,), generator=random).tolist() for length in lengths]
    return [Request(ids, 3.0 * (i % 3 > 0), 100 + i) for i, ids in enumerate(words)]


@pytest.fixture(scope="module")
def whole(target):
    """The answers to `requests_of_all_kinds`, each alone."""
    return [alone(target[1], request, 12, 0.9, 3) for request in requests_of_all_kinds()]


@pytest.mark.parametrize(("at_once", "handles_cache"), [(1, True), (3, True), (4, True), (64, True), (4, False)])
def test_every_answer_is_what_it_is_alone(target, whole, at_once, handles_cache, monkeypatch):
    """Whichever rows are beside it, come and leave: those that end early make room for others."""
    options, _ = target
    if not handles_cache:
        monkeypatch.setattr(generate, "why_alone", lambda model: "a cache of its own")
    requests = requests_of_all_kinds()
    ends = {whole[0][2], whole[4][0], whole[7][5]}
    answers = dict(Generator(options).complete(requests, at_once, Sampling(12, 0.9, sorted(ends), top_k=3)))
    assert answers.keys() == set(range(len(requests)))
    lengths = set()
    for index, ids in enumerate(whole):
        end = next((at + 1 for at, token in enumerate(ids) if token in ends), None)
        assert answers[index] == (ids[:end], "length" if end is None else "stop")
        lengths.add(len(ids[:end]))
    assert len(lengths) > 3, "rows leave at different times"
    assert 12 in lengths


def test_a_rope_that_follows_the_longest_row_is_not_set_by_its_neighbours(tmp_path):
    """Beyond 16 positions it takes other angles, for every row of a batch."""
    folder = save_quietly(random_target("llama", rope_parameters=LONG, max_position_embeddings=64), tmp_path)
    generator = Generator(TargetConfig(path=str(folder), dtype="float32", device="cpu"))
    lengths = (40, 5, 6, 3, 4, 7)
    requests = [Request([1 + (7 * i + at * at) % 39 for at in range(n)], 0.0, 0) for i, n in enumerate(lengths)]
    up_to = Sampling(10, 1.0, [0])
    together = dict(generator.complete(requests, 6, up_to))
    for index in range(1, 6):
        assert [(0, together[index])] == list(generator.complete([requests[index]], 1, up_to))


@pytest.mark.parametrize(("limit", "answered"), [(10, [True, False]), (None, [True, True])])
def test_a_prompt_and_its_answer_fit_the_targets_positions(limit, answered):
    generator = Generator.__new__(Generator)
    generator.limit = limit
    assert [generator.refusal(length, 4) is None for length in (6, 7)] == answered


def test_a_target_that_reads_padding_as_text_answers_one_prompt_at_a_time(target, monkeypatch):
    monkeypatch.setattr(generate, "why_alone", lambda model: "recurrent layers")
    monkeypatch.setattr(generate, "PADDING_COUNTS", {"llama"})
    generator, rows = Generator(target[0]), []
    answered = generator.model.generate
    monkeypatch.setattr(generator.model, "generate", lambda **g: rows.append(len(g["input_ids"])) or answered(**g))
    list(generator.complete(requests_of_all_kinds()[:3], 3, Sampling(2, 1.0, [0])))
    assert rows == [1, 1, 1]
