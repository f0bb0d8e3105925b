"""The fidelity gate passes right states, and names the mistake that was planted in wrong ones."""

import pytest
import torch
from pipeline import HIDDEN, LAYERS, VOCAB, tiny_llama
from transformers import Gemma2Config, Gemma2ForCausalLM, GemmaConfig, GemmaForCausalLM

from eagle31_train.fidelity import ROWS, SAMPLE_EVERY, Gate, compare, rebuilt_logits, report, summary
from eagle31_train.schema import ExtractConfig, UserError
from eagle31_train.targets.hf import HiddenStateTarget

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def gemma(model=GemmaForCausalLM, config=GemmaConfig, **changes):
    target = model(config(**SIZES, **changes)).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in target.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return target


def check(model, config=None, plant=None):
    """Run the gate over one padded batch of a model; returns its figures."""
    target = HiddenStateTarget(model, [1])
    if plant:
        plant(target)
    gate = Gate(target, config or ExtractConfig())
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([40, 17, 33, 40, 25])
    mask = (torch.arange(40) < lengths[:, None]).long()
    tokens = torch.randint(0, VOCAB, mask.shape, generator=generator)
    figures = gate.check(tokens, mask, target.states(tokens, mask).last.bfloat16())
    assert gate.passed
    return figures


@pytest.mark.parametrize("make", [tiny_llama, gemma, lambda: gemma(Gemma2ForCausalLM, Gemma2Config)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_states_pass(make, dtype):
    agreement, kl, positions = check(make().to(dtype))
    assert agreement >= 0.99
    assert 0 <= kl < 0.02
    assert 100 < positions <= ROWS


def test_shards_are_sampled_by_their_number_alone():
    gate = Gate(HiddenStateTarget(tiny_llama(), [1]), ExtractConfig(gate_batches=3))
    assert [number for number in range(100) if gate.samples(number)] == [0, SAMPLE_EVERY, 2 * SAMPLE_EVERY]
    assert not gate.passed
    off = Gate(gate.target, ExtractConfig(gate_batches=0))
    assert off.passed
    assert not any(off.samples(number) for number in range(100))


def test_the_report_holds_the_worst():
    assert report([(1.0, 0.002, 256), [0.995, 0.001, 100]]) == {
        "batches": 2,
        "positions": 356,
        "top1_agreement": 0.995,
        "kl": 0.002,
    }
    assert summary(report([[0.995, 0.001, 100]])) == "fidelity: top-1 99.50%, KL 0.001 over 100 positions"
    assert summary(report([])) == "fidelity: not compared (extract.gate_batches=0)"


def take_last_after_the_final_norm(target):
    right = target.states

    def wrong(tokens, mask):
        states = right(tokens, mask)
        return type(states)(states.aux, target.final_norm(states.last))

    target.states = wrong


def misread_norm(by):
    def plant(target):
        weight, kind = target.norm_weight()
        target.norm_weight = lambda: (weight + by, kind)

    return plant


def spoil_states(target):
    right = target.states

    def wrong(tokens, mask):
        states = right(tokens, mask)
        return type(states)(states.aux, states.last.roll(1, 1))

    target.states = wrong


def wide_norm():
    """A final norm whose channels differ, so that norming twice is not the same as once."""
    model = tiny_llama()
    generator = torch.Generator().manual_seed(8)
    model.model.norm.weight.data = torch.randn(HIDDEN, generator=generator) * 2
    return model


MISTAKES = [
    (wide_norm, take_last_after_the_final_norm, "likely cause: the last hidden state was taken after the final norm"),
    (gemma, misread_norm(-1), r"likely cause: the final norm is of the form \(1 \+ w\) but was read as w"),
    (wide_norm, misread_norm(1), r"likely cause: the final norm was read as \(1 \+ w\) but is w"),
    (tiny_llama, spoil_states, "no known mistake explains it: check target.dtype"),
]


@pytest.mark.parametrize(("make", "plant", "cause"), MISTAKES)
def test_a_planted_mistake_stops_the_run_and_is_named(make, plant, cause):
    check(make())
    with pytest.raises(UserError, match=f"^fidelity gate: .*{cause}") as error:
        check(make(), plant=plant)
    assert "\n" not in str(error.value)


def test_softcapped_logits_stop_the_run_and_are_named():
    cap = {"final_logit_softcapping": 2.0}
    with pytest.raises(
        UserError, match=r"config has final_logit_softcapping=2\.0, which EAGLE 3's loss does not model"
    ):
        check(gemma(Gemma2ForCausalLM, Gemma2Config, **cap))


def test_bounds_are_the_configs():
    with pytest.raises(UserError, match="fidelity gate"):
        check(tiny_llama(), ExtractConfig(gate_kl=1e-12))
    check(gemma(), ExtractConfig(gate_top1=0.0, gate_kl=100.0), misread_norm(-1))


def test_logits_that_are_not_numbers_do_not_pass():
    def plant(target):
        right = target.states
        target.states = lambda *a: type(s := right(*a))(s.aux, s.last * float("nan"))

    with pytest.raises(UserError, match="fidelity gate"):
        check(tiny_llama(), ExtractConfig(gate_top1=0.0), plant)


def test_agreement_and_kl_of_known_logits():
    own = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 5.0]])
    rebuilt = torch.tensor([[1.0, 0.0, 0.0], [5.0, 3.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 5.0]])
    agreement, kl = compare(own, rebuilt)
    assert agreement == 0.75, "the tie of the third row counts as agreement, the second row is a miss"
    by_hand = (
        sum(
            torch.nn.functional.kl_div(r.log_softmax(-1), o.softmax(-1), reduction="sum")
            for o, r in zip(own, rebuilt, strict=True)
        )
        / 4
    )
    assert kl == pytest.approx(by_hand.item())


def test_a_choice_within_one_rounding_step_of_the_store_agrees_and_one_beyond_does_not():
    second = torch.tensor([[0.0, 1.0, 0.0]])
    assert compare(torch.tensor([[100.0, 99.5, 0.0]]), second)[0] == 1.0
    assert compare(torch.tensor([[100.0, 99.0, 0.0]]), second)[0] == 0.0


def test_rebuilt_logits_are_the_models_own():
    model = gemma()
    target = HiddenStateTarget(model, [1])
    tokens = torch.arange(10)[None]
    last = target.states(tokens, torch.ones_like(tokens)).last[0]
    torch.testing.assert_close(rebuilt_logits(target, last), model(tokens).logits[0], rtol=1e-4, atol=1e-4)
