"""Do all contenders compute the same? Equal weights and data at a tiny shape, fp32: `python -m benchmarks.parity`.

Three questions for each peer, the first two with a bound that stops the benchmark:

* logits: every step's, at every slot where both have read real tokens;
* loss: our step, given the peer's mask and mean, must give the peer's loss. That explains the whole difference;
* gradients: of that loss, for every parameter that the peer trains.

What differs is set aside in the open, and benchmarks/README.md has the table of it; RULES say it below. A pair (t, k)
is taught by the target at position j = t+1+k and predicts token j+1.
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks import contenders
from benchmarks.contenders.ours import Ours
from benchmarks.shapes import GAMMA, UNROLL, Case, Material, make_material, turns
from eagle31_train.store.document import Document

TOKENS = 48
LOGITS, LOSS, GRADIENTS = 1e-5, 1e-5, 1e-4  # largest differences: absolute, relative, relative to a tensor's largest


@dataclass(frozen=True)
class Rules:
    """How a peer counts: a pair is counted if the assistant wrote token j - lag; `kind` and mean of its loss."""

    lag: int
    kind: str
    norm_output: bool
    eps: float = 0.0
    over_all_rows: bool = False


RULES = {
    "speculators": Rules(lag=0, kind="kl", norm_output=True, eps=1e-5),
    "specforge": Rules(lag=1, kind="ce", norm_output=False, over_all_rows=True),
}


def make_tiny(rules: Rules) -> Material:
    shape = replace(
        Case("tiny", TOKENS, 0.5).drafter(), vocab_size=300, draft_vocab_size=200, norm_output=rules.norm_output
    )
    return make_material(shape, turns(TOKENS, 0.5), seed=1)


def longer(material: Material, extra: int, mask: Tensor) -> Material:
    """Append `extra` tokens 0 to the document, as the peers pad, and replace its mask. Attention is causal, so nothing
    before them changes."""
    d, (aux, last) = material.document, material.states
    aux, last = pad(aux, (0, 0, 0, 0, 0, extra)), pad(last, (0, 0, 0, extra))
    document = Document.of(pad(d.tokens, (0, extra)), mask, pad(d.top1, (0, extra)), aux, last)
    return replace(material, document=document, states=(aux, last))


def compare(name: str) -> dict[str, Any]:
    rules = RULES[name]
    material = make_tiny(rules)
    T, K = len(material.document), UNROLL
    peer = contenders.build(name, material, K)

    every_slot = longer(material, K + 1, torch.ones(T + K + 1, dtype=torch.bool))
    ours, theirs = Ours(every_slot, K).logits()[:, :T], peer.logits()
    defined = ours.isfinite().all(-1) & theirs.isfinite().all(-1)
    by_step = [float((ours[k] - theirs[k])[defined[k]].abs().max()) for k in range(K)]

    # Our mask is of token j+1; shifted by lag + 1 it counts the same pairs as the peer.
    moved = pad(material.document.loss_mask, (rules.lag + 1, 0))
    mine = Ours(longer(material, rules.lag + 1, moved), K, kind=rules.kind)
    pairs = mine.batch.trained
    decay = torch.tensor([GAMMA**k for k in range(K)])
    mine.weights = decay / (torch.full((K,), float(T)) if rules.over_all_rows else pairs + rules.eps)
    loss, peer_loss = mine.loss(), peer.loss()
    loss.backward()
    peer_loss.backward()
    trained = mine.parameters()
    own = Ours(material, K, kind=rules.kind)
    return {
        "peer": name,
        "rows compared": defined.sum(1).tolist(),
        "largest logit": float(theirs[defined].abs().max()),
        "logits": by_step,
        "loss": float(peer_loss.detach()),
        "loss of ours by its rules": float(loss.detach()),
        "loss difference": abs(float(loss.detach()) / float(peer_loss.detach()) - 1),
        "loss of ours by our rules": float(own.loss().detach()),
        "pairs by its rules": pairs.tolist(),
        "pairs by our rules": own.batch.trained.tolist(),
        "gradients": {
            parameter: relative_difference(trained[parameter].grad, p.grad)
            for parameter, p in peer.parameters().items()
        },
    }


def relative_difference(ours: Tensor | None, theirs: Tensor | None) -> float:
    """Return the largest difference over the peer's largest value; both must have a gradient."""
    assert ours is not None
    assert theirs is not None
    return float((ours - theirs).abs().max() / theirs.abs().max())


def failures(result: dict[str, Any]) -> list[str]:
    """Describe what is out of bounds. A NaN is out of bounds."""
    checks = {
        "logits": (max(result["logits"]), LOGITS),
        "loss": (result["loss difference"], LOSS),
        **{f"gradient of {name}": (value, GRADIENTS) for name, value in result["gradients"].items()},
    }
    found = [
        f"{result['peer']}: {what} differ by {v:.1e}, over {bound:.0e}"
        for what, (v, bound) in checks.items()
        if not v <= bound
    ]
    if min(result["rows compared"]) < TOKENS - UNROLL - 1:
        found.append(f"{result['peer']}: only {min(result['rows compared'])} rows of a step could be compared")
    return found


def run(names: Iterable[str] = RULES) -> list[dict[str, Any]]:
    """Compare peers and print a table; exit if a difference is out of bounds."""
    results = [compare(name) for name in names]
    print(f"parity at a tiny shape, fp32, unroll {UNROLL}: largest differences")
    columns = " ".join(f"{column:>9s}" for column in ("logits", "(largest)", "gradients", "loss"))
    print(f"{'':20s} {columns}   its loss = ours by its rules; ours by ours")
    for r in results:
        print(
            f"{r['peer']:20s} {max(r['logits']):9.1e} {r['largest logit']:9.2f} {max(r['gradients'].values()):9.1e} "
            f"{r['loss difference']:9.1e}   {r['loss']:.6f} = {r['loss of ours by its rules']:.6f}; "
            f"{r['loss of ours by our rules']:.6f}"
        )
    for r in results:
        print(f"{r['peer']}: logits by step {' '.join(f'{d:.1e}' for d in r['logits'])}")
        print(f"{r['peer']}: pairs by its rules {r['pairs by its rules']}, by ours {r['pairs by our rules']}")
    if found := [line for result in results for line in failures(result)]:
        sys.exit("\n".join(["parity FAILED", *found]))
    return results


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    run()
