"""Are these the target's own answers? The arg-max that extraction works out anyway tells, before hours of training."""

from collections.abc import Iterable
from dataclasses import dataclass

from numpy.typing import NDArray

from eagle31_train.store.document import Document

FOREIGN = 0.5  # share of the answers' tokens that the target would write itself, below which they are hardly its own
OUTSIDE = 0.2  # share of its choices outside the draft vocabulary, above which that was counted on other words


@dataclass
class Agreement:
    """Supervised positions so far: those whose next token is the target's arg-max, and whose arg-max no draft can be.

    draft_tokens: [V] bool, tokens of the draft vocabulary. conversations: counted so far. bare: those of them with
    nothing to train, at train.oov=mask: no supervised position has an arg-max that a draft can be. regenerated: the
    target of stage 1 wrote the answers.
    """

    draft_tokens: NDArray
    regenerated: bool = False
    positions: int = 0
    own: int = 0
    outside: int = 0
    conversations: int = 0
    bare: int = 0

    def add(self, documents: Iterable[Document]) -> None:
        """Count some documents."""
        for document in documents:
            where = document.supervised
            top1 = document.top1[where]
            inside = self.draft_tokens[top1.numpy()]
            self.positions += len(where)
            self.own += int((top1 == document.tokens[where + 1]).sum())
            self.outside += int((~inside).sum())
            self.conversations += 1
            self.bare += not inside.any()

    def lines(self) -> list[str]:
        """What is to be said of it; nothing where nothing was counted."""
        if self.bare:
            bare = f"extract: {self.bare:,} of {self.conversations:,} conversations have nothing to train"
        if not self.positions:
            return [f"{bare}: their loss masks cover no answer"] if self.bare else []
        own, outside = self.own / self.positions, self.outside / self.positions
        lines = [
            f"extract: the target would itself write {own:.1%} of the {self.positions:,} answer tokens seen here; "
            f"{outside:.1%} of its choices lie outside the draft vocabulary"
        ]
        if self.bare:
            lines.append(f"{bare}: no choice of the target's in their answers is in the draft vocabulary")
        if own < FOREIGN:
            why = "under another chat template, or not regenerated (regenerate=true)"
            if self.regenerated:
                why = "by a server of other weights, or drawn at too high a data.generate.temperature"
            lines.append(
                f"extract: WARNING: hardly its own answers: are they of another target, {why}? A drafter learns little "
                "from them"
            )
        if outside > OUTSIDE:
            lines.append(
                "extract: WARNING: many of its choices can never be drafted: raise data.draft_vocab_size, or count it "
                "on the target's own answers"
            )
        return lines
