"""Loss and every gradient of packed documents against the reference, which takes each alone, over random shapes.
Further shapes: test_recurrence.py.

fp64 to 1e-9, fp32 to 1e-5, bf16 against fp32 within bounds that were measured. Planted mistakes must be found, among
them some that one fixed shape hides.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import kept_mask, make_document, make_mla_shape, make_objective, make_shape
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from planting import instead_of, replaced
from reference import norm
from reference_mla import reference_for

from eagle31_train.model import batch, context_attention, drafter, layer
from eagle31_train.model import loss as loss_module
from eagle31_train.model.batch import build_batch

# Repeatable in CI: the examples are a function of the test, not of the day.
PROPERTY = settings(derandomize=True, print_blob=True)
NORMS = ("fc_norm", "norm_output", "norm_before_residual")


@st.composite
def shapes(draw):
    """Any heads, groups and widths; a target of another width has no embedding to share."""
    groups, V = draw(st.integers(1, 3)), draw(st.integers(2, 14))
    D = draw(st.integers(2, 12))
    H = draw(st.one_of(st.just(D), st.integers(2, 12)))
    return make_shape(
        hidden_size=D,
        target_hidden_size=H,
        aux_layers=list(range(1, 1 + draw(st.integers(1, 4)))),
        vocab_size=V,
        draft_vocab_size=draw(st.one_of(st.just(V), st.integers(1, V))),
        intermediate_size=draw(st.integers(1, 9)),
        num_attention_heads=groups * draw(st.integers(1, 3)),
        num_key_value_heads=groups,
        head_dim=draw(st.sampled_from([2, 4, 6])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        rope_theta=draw(st.sampled_from([10.0, 10000.0])),
        share_embedding=H == D and draw(st.booleans()),
        num_layers=draw(st.sampled_from([1, 1, 2, 3])),
        sliding_window=draw(st.sampled_from([None, None, 2, 3, 5])),
        **{name: draw(st.booleans()) for name in (*NORMS, "norm_before_fc", "qk_norm", "attention_bias", "mlp_bias")},
    )


@st.composite
def masks(draw, longest):
    """Which tokens of a document the assistant wrote: all, none, turns, or any."""
    length, kind = draw(st.integers(1, longest)), draw(st.sampled_from(["all", "none", "turns", "turns", "any", "any"]))
    if kind == "any":
        return draw(st.lists(st.booleans(), min_size=length, max_size=length))
    if kind == "turns":  # question, answer, question, …
        turns = draw(st.lists(st.integers(1, 5), min_size=length, max_size=length))
        return [bool(i % 2) for i, turn in enumerate(turns) for _ in range(turn)][:length]
    return [kind == "all"] * length


@st.composite
def yarns(draw):
    """With and without what has a default. Of 16 positions, most pairs turn less than once."""
    given = {
        "beta_fast": st.sampled_from([2.0, 32]),
        "beta_slow": st.sampled_from([0.5, 1]),
        "mscale": st.sampled_from([0.0, 0.7, 1.0]),
        "mscale_all_dim": st.sampled_from([0.0, 0.7, 1.0]),
    }
    chosen = {name: draw(values) for name, values in given.items() if draw(st.booleans())}
    original = draw(st.sampled_from([32, 4096]))
    return {"rope_type": "yarn", "factor": draw(st.sampled_from([1.0, 4.0, 64.0])), **chosen} | {
        "original_max_position_embeddings": original
    }


@st.composite
def mla_shapes(draw):
    """Any widths, full or low rank of the queries; a latent of one number would be a sign after its norm."""
    base = draw(shapes())
    general = ("hidden_size", "target_hidden_size", "aux_layers", "vocab_size", "draft_vocab_size", "intermediate_size")
    general += ("rms_norm_eps", *NORMS, "share_embedding", "norm_before_fc")
    return make_mla_shape(
        **{name: getattr(base, name) for name in general},
        num_layers=draw(st.sampled_from([1, 1, 2])),
        num_attention_heads=draw(st.integers(1, 4)),
        q_lora_rank=draw(st.one_of(st.none(), st.integers(2, 9))),
        kv_lora_rank=draw(st.integers(2, 9)),
        qk_nope_head_dim=draw(st.integers(1, 6)),
        qk_rope_head_dim=draw(st.sampled_from([2, 4, 8])),
        v_head_dim=draw(st.integers(1, 9)),
        rope_theta=draw(st.sampled_from([10.0, 50000.0])),
        rope_scaling=draw(st.one_of(st.none(), yarns())),
    )


KINDS = {
    "llama": shapes(),
    "parallel": shapes().map(lambda shape: replace(shape, parallel=True, ptd_token_id=shape.vocab_size // 2)),
    "mla": mla_shapes(),
}


@st.composite
def cases(draw, kind):
    """What is trained and how; all numbers follow from `seed`. Documents short enough for the reference, long enough
    for step 7 to be trained."""
    documents = draw(st.lists(masks(longest=11), min_size=1, max_size=3))
    shape = draw(KINDS[kind])
    return SimpleNamespace(
        shape=shape,
        masks=documents,
        order=draw(st.permutations(range(len(documents)))),  # in which they are packed
        # At one step there are no mask rows, and mask_hidden has no gradient: training refuses it.
        unroll=draw(st.integers(2 if shape.parallel else 1, 8)),
        gamma=draw(st.sampled_from([0.5, 0.8, 1.0])),
        oov=draw(st.sampled_from(["mask", "keep"])),
        loss=draw(st.sampled_from(["kl", "ce"])),
        lk=draw(st.sampled_from([0.0, 0.5, 0.3, 1.0])),
        teacher_eps=draw(st.sampled_from([1e-5, 1e-2])),
        train_lm_head=draw(st.booleans()),
        recompute=draw(st.booleans()),
        kernel=draw(st.sampled_from(["flash", "plain"])),  # of the attention
        chunk=draw(st.sampled_from([32, 1, 3])),  # taught positions per chunk
        rows=draw(st.sampled_from([(10**6, 10**6), (9, 2), (1, 1)])),  # of logits, in a product and in a part of it
        seed=draw(st.integers(0, 999)),
    )


def make(case, dtype=torch.float64):
    objective = make_objective(case.shape, dtype, case.seed)
    objective.kind, objective.lk, objective.teacher.eps = case.loss, case.lk, case.teacher_eps
    objective.drafter.recompute = case.recompute
    objective.drafter.lm_head.weight.requires_grad_(case.train_lm_head)
    generator = torch.Generator().manual_seed(case.seed + 1)
    documents = []
    for mask in case.masks:
        answer = [place for place, written in enumerate(mask) if written]
        d = make_document(case.shape, len(mask), generator, answer)
        taught = torch.tensor([*mask[1:], False])  # as extraction leaves it: no arg-max elsewhere
        top1 = d.top1.masked_fill(~taught, -1)
        documents.append(replace(d.to(dtype), top1=top1))
    return objective, documents


def weights_of(counts, gamma):
    """gamma^k / N_k, zero where no pair is trained."""
    return torch.tensor([gamma**k / n if n else 0.0 for k, n in enumerate(counts)], dtype=torch.float64)


def train(objective, packed, weights):
    """Loss, gradients by name and measures of one batch."""
    objective.zero_grad()
    loss, measured = objective(packed, weights)
    loss.backward()
    grads = {}
    for name, parameter in objective.drafter.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if parameter.requires_grad:
            grads[name] = parameter.grad
    measured = SimpleNamespace(**dict(zip(loss_module.MEASURES, measured, strict=True)))
    return SimpleNamespace(loss=loss.detach(), grads=grads, measured=measured)


def resources(patch, case):
    """What must change nothing: the attention's kernel, and how the loss is cut."""
    patch.setattr(batch, "CHUNK", case.chunk)
    patch.setattr(loss_module, "LOGITS", {"cpu": tuple(rows * case.shape.draft_vocab_size for rows in case.rows)})
    if case.kernel == "plain":
        patch.setattr(context_attention, "_flash_cpu", lambda q: False)
        patch.setattr(context_attention, "BLOCK", 3)


def ours(case, objective, documents):
    with pytest.MonkeyPatch.context() as patch:
        resources(patch, case)
        packed = build_batch([documents[i] for i in case.order], case.unroll, kept_mask(objective, case.oov))
        return train(objective, packed, weights_of(packed.trained.tolist(), case.gamma))


def cost_of(kind, lk):
    """The definitions: KL or cross-entropy, and -log of the chance that a token drawn from q is accepted."""

    def cost(p, log_q):
        first = (p * (p.log() - log_q)).sum() if kind == "kl" else -(p * log_q).sum()
        return (1 - lk) * first - lk * torch.minimum(p, log_q.exp()).sum().log()

    return cost


def reference(objective, documents, unroll, gamma, oov="mask", eps=1e-5):
    """The same by the reference in fp64, of an objective of any precision; eps: of the teacher's norm."""
    drafter, teacher, shape, exact = objective.drafter, objective.teacher, objective.drafter.shape, torch.float64
    tensors = {name: p.detach().to(exact).requires_grad_(p.requires_grad) for name, p in drafter.named_parameters()}
    shared = drafter.shared_embedding.to(exact) if shape.share_embedding else tensors["embed_tokens.weight"]
    rows, final = teacher.head_rows.to(exact), teacher.norm_weight.to(exact)
    loss, counts = reference_for(shape)(shape, tensors, shared).loss(
        [d.to(exact) for d in documents],
        unroll,
        gamma,
        teacher.target_ids.tolist(),
        lambda y: rows @ norm(y, final, eps),
        oov,
        cost_of(objective.kind, objective.lk),
    )
    if not any(counts["trained"]):  # nothing to train: no loss, and no graph
        loss = sum(tensor.sum() for tensor in tensors.values()) * 0
    loss.backward()
    trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    # A mask row that no pair asks for is not even read there.
    grads = {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in trained.items()}
    return SimpleNamespace(loss=loss.detach(), grads=grads, counts=counts)


def truth_of(case, objective, documents):
    return reference(objective, documents, case.unroll, case.gamma, case.oov, case.teacher_eps)


# ---------------------------------------------------------------- equal to the reference


def check_fp64(case):
    """Each gradient to 1e-9 of its largest entry (measured: 2e-14); 1e-12 is for those that cancel to nothing."""
    objective, documents = make(case)
    mine, truth = ours(case, objective, documents), truth_of(case, objective, documents)
    assert_same_counts(mine, truth)
    assert abs(mine.loss - truth.loss) <= 1e-9 * abs(truth.loss) + 1e-12
    assert mine.grads.keys() == truth.grads.keys()
    for name, wanted in truth.grads.items():
        error = (mine.grads[name] - wanted).abs().max()
        assert error <= 1e-9 * wanted.abs().max() + 1e-12, name


def assert_same_counts(ours, truth, names=None):
    for name in names or truth.counts:
        assert getattr(ours.measured, name).tolist() == truth.counts[name], name


def check_fp32(case):
    """The norm of each gradient's error to 1e-5 of the gradient's norm, and 1e-6.

    Of the norm, not entry by entry, and 1e-6 besides: gradients are sums of differences of probabilities, and
    rounding is in proportion to what cancels, of order one, not to what is left. One case in hundreds is itself
    ill-conditioned (an RMSNorm of two numbers that are next to nothing): there the error may be ten times as
    large as what one rounding of the weights changes in the true gradient.
    """
    objective, documents = make(case, torch.float32)
    mine, truth = ours(case, objective, documents), truth_of(case, objective, documents)
    assert_same_counts(mine, truth, ("trained", "eligible", "eligible_prefix"))
    assert abs(mine.loss - truth.loss) <= 1e-5 * abs(truth.loss) + 1e-6
    assert mine.grads.keys() == truth.grads.keys()
    for name, wanted in truth.grads.items():
        error = (mine.grads[name] - wanted).norm()
        if error > 1e-5 * wanted.norm() + 1e-6:
            assert error <= 10 * sensitivity(case, truth, name), name


def sensitivity(case, truth, name):
    """How far one true gradient moves if every weight moves by a rounding of fp32: the most of three times."""
    generator, moved = torch.Generator().manual_seed(0), []
    for _ in range(3):
        objective, documents = make(case, torch.float32)
        for parameter in objective.drafter.parameters():
            rounding = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 2**-24
            parameter.data = parameter.data.double() * (1 + rounding)
        moved.append(truth_of(case, objective, documents).grads[name] - truth.grads[name])
    return max(each.norm() for each in moved)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", [pytest.param(check_fp64, marks=pytest.mark.core), check_fp32])
@PROPERTY
@given(data=st.data())
def test_loss_and_every_gradient_equal_the_reference(check, kind, data):
    check(data.draw(cases(kind)))


# ---------------------------------------------------------------- bf16


def keep_sizes(objective):
    """Scale the weights so that what they multiply keeps its size; logits of the teacher have a spread of 3."""
    for parameter in objective.drafter.parameters():
        if parameter.dim() > 1:
            parameter.data *= parameter.shape[1] ** -0.5 / 0.3
    objective.teacher.head_rows *= 3 * objective.drafter.shape.target_hidden_size**-0.5


@st.composite
def realistic(draw, make, **widths):
    """Sixty tokens, seven steps, weights that keep the size of what they multiply."""
    shape = make(
        hidden_size=64,
        target_hidden_size=64,
        vocab_size=300,
        draft_vocab_size=200,
        intermediate_size=128,
        rope_theta=10000.0,
        **{name: draw(st.booleans()) for name in NORMS},
        **widths,
    )
    kind, lk, seed = draw(st.sampled_from(["kl", "ce"])), draw(st.sampled_from([0.0, 0.5])), draw(st.integers(0, 999))
    objective = make_objective(shape, torch.float32, seed)
    keep_sizes(objective)
    objective.kind, objective.lk = kind, lk
    generator = torch.Generator().manual_seed(seed)
    documents = [make_document(shape, length, generator) for length in (60, 55)]
    return objective, [d.to(torch.float32) for d in documents]


def train_in(low, objective, documents):
    """In bf16 as training runs it (autocast over fp32 weights), or fp32."""
    packed = build_batch(documents, 7, kept_mask(objective))
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        return train(objective, packed, weights_of(packed.trained.tolist(), 0.8))


LLAMA = realistic(make_shape, head_dim=16)
MLA = realistic(
    make_mla_shape, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, q_lora_rank=32, kv_lora_rank=24
)


@pytest.mark.parametrize(("problems", "near", "near_with_lk"), [(LLAMA, 0.05, 0.105), (MLA, 0.13, 0.13)])
@settings(PROPERTY, max_examples=PROPERTY.max_examples // 2)
@given(data=st.data())
def test_bf16_stays_close_to_fp32(problems, near, near_with_lk, data):
    """Twice the worst of 150 seeds and more.

    Measured: loss 2.9e-4 of itself; the norm of any gradient's error 2.5 % of the gradient's norm, and 5.2 % with
    half of the LK loss, whose slope jumps where drafter and target cross; MLA's 6.5 %. bf16 rounds to 0.4 %; seven
    steps amplify it.
    """
    objective, documents = data.draw(problems)
    low, high = (train_in(low, objective, documents) for low in (True, False))
    assert abs(low.loss / high.loss - 1) < 6e-4
    for name, wanted in high.grads.items():
        error = (low.grads[name] - wanted).norm() / wanted.norm()
        assert error < (near_with_lk if objective.lk else near), name


# ---------------------------------------------------------------- planted mistakes


@instead_of(drafter, "unrolled_attention")
def scale_by_the_number_of_heads(right, q, *rest, **options):
    return right(q, *rest[:-1], q.shape[1] ** -0.5, **options)


@instead_of(loss_module.Objective, "forward")
def teacher_with_the_norm_of_the_drafter(right, self, *args):
    self.teacher.eps = self.drafter.norm.eps
    return right(self, *args)


@instead_of(loss_module, "divergence")
def slope_without_its_lk_share(right, logits, *rest):
    _, slope = right(logits.clone(), *rest[:-1], 0.0)
    return right(logits, *rest)[0], slope


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


MISTAKES = {
    "groups interleaved": groups_interleaved,
    "queries at packed positions": queries_at_packed_positions,
    "own keys of the last steps only": own_keys_of_the_last_steps_only,
    # The loss leaves its gradient in the outputs' memory, and there the outputs of rows that it does not read.
    "gradients where nothing is trained": instead_of(torch.Tensor, "masked_fill_")(lambda right, self, *_: self),
    # Unseen by one fixed shape of four heads of width four, one epsilon, the target's embedding, KL and one chunk:
    "scale by the number of heads": scale_by_the_number_of_heads,
    "embedding never trained": instead_of(drafter.Drafter, "embed")(lambda right, *given: right(*given).detach()),
    "teacher with the norm of the drafter": teacher_with_the_norm_of_the_drafter,
    "slope without its LK share": slope_without_its_lk_share,
    "blocks after the first forgotten": instead_of(loss_module, "blocks")(lambda right, *given: right(*given)[:1]),
}


# The first example that fails is enough: no smaller one is looked for.
@settings(PROPERTY, max_examples=80, phases=[Phase.generate], report_multiple_bugs=False)
@given(cases("llama"))
def all_agree(case):
    check_fp64(case)


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_planted_mistake_is_found(mistake, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        all_agree()
