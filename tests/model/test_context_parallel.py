"""Ranks that share documents, or have their own, take the step of one process, to rounding, and less memory each.

How real launches average gradients over ranks: test_profiles.py.
"""

from functools import cache

import pytest
import sharing
import torch
from forking import served
from plan_cases import LOGITS
from sharing import DEEP, LONG, MASKS, PLANTED, RANKS, WHOLE, Mesh

from eagle31_train.model.context_parallel import owners
from eagle31_train.planning.footprint import Step, activations
from eagle31_train.planning.work import count_work

# Sums of what was measured are fp32 in every precision.
FP64, FP32, BF16 = 1e-12, 2e-6, 5e-2


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of four ranks found."""
    folder = tmp_path_factory.mktemp("sharing")
    (output := folder / "said").touch()
    with served(sharing.all_ranks, folder, output) as process:
        process.join(600)
        assert process.exitcode == 0, output.read_text()[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


def distance(ours, theirs):
    """The largest distance of two steps' gradients, each relative to its norm, and that of what they measured. A norm
    of next to nothing is rounding alone: with one key attention has no slope in its query."""
    gradients, sums = zip(ours, theirs, strict=True)
    assert gradients[0].keys() == gradients[1].keys()
    least = 1e-3 * max(whole.norm() for whole in gradients[1].values()) + 1e-30
    apart = [(gradients[0][n] - whole).norm() / whole.norm().clamp(min=least) for n, whole in gradients[1].items()]
    return float(max(apart)), float(((sums[0] - sums[1]).abs() / sums[1].abs().clamp(min=1)).max())


@cache
def alone(name):
    """The step of one process, on everything at once."""
    return sharing.step(WHOLE.get(name, name), Mesh())


def tolerance(name):
    """How far two steps of this precision may be apart. In fp32: the rounding of both, which depends on the machine."""
    return 2 * distance(alone("fp32"), alone("gqa"))[0] if name == "fp32" else BF16 if name == "bf16" else FP64


@pytest.mark.parametrize(("name", "context"), sharing.CASES)
def test_four_ranks_take_the_step_of_one_process(found, name, context):
    """Each has documents of its own; twos share, and there are two of them; or four share."""
    for rank in found:
        gradients, sums = distance(rank[name, context], alone(name))
        assert gradients < tolerance(name)
        assert sums < (BF16 if name == "bf16" else FP32)


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_seen(found, mistake):
    assert max(distance(found[0][mistake], alone(PLANTED[mistake][0]))) > 1e-3


@pytest.mark.parametrize("count", [3, 5])
def test_ranks_share_muons_matrices_and_all_update_them_as_one_process_does(found, count):
    one, everything = sharing.muon(count)
    worked_out = [rank["muon"][count][1] for rank in found]
    for rank in found:
        assert all(map(torch.equal, rank["muon"][count][0], one))
    assert sorted(size for mine in worked_out for size in mine) == sorted(everything), "none is worked out twice"
    assert sum(map(bool, worked_out)) == min(count, RANKS)
    assert not all(map(torch.equal, found[0]["muon of each alone"][0], sharing.muon(5)[0]))


@pytest.mark.parametrize("kind", LONG)
def test_two_ranks_take_at_most_three_fifths_each_as_the_plan_says(found, kind):
    """Bytes that torch allocates, after the forward pass and at the worst moment; MLA recomputes."""
    unshared = sharing.memory(kind, Mesh())
    shared = [max(bytes) for bytes in zip(*(rank["memory", kind] for rank in found[:2]), strict=True)]
    assert all(ours <= 0.6 * whole for ours, whole in zip(shared, unshared, strict=True))

    work = count_work([mask.numpy() for mask in MASKS], DEEP)
    step = Step(4, recompute=kind == "mla", logits=LOGITS, flash=False, context=2)
    reckoned = activations(LONG[kind], work, step)
    assert reckoned.after_forward == pytest.approx(shared[0], rel=0.01)
    assert reckoned.peak == pytest.approx(shared[1], rel=0.1)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_position_has_one_owner_and_slots_and_the_keys_that_they_see_are_shared_evenly(ranks):
    slots = torch.zeros(997, dtype=torch.bool)
    slots[300:340] = slots[600:] = True  # a prompt, a short answer, a prompt, a long answer
    owner = owners(slots, ranks)
    counts = [torch.bincount(owner[some], minlength=ranks) for some in (slots, ~slots)]
    assert all(int(count.max() - count.min()) <= 2 for count in counts)
    seen = torch.stack([(slots.nonzero()[:, 0] + 1)[owner[slots] == rank].sum() for rank in range(ranks)]).double()
    assert seen.max() / seen.mean() < 1.1
