"""A page of the first samples with marks on what a drafter learns: it shows a wrong template or mask at once."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby

from data_prep.dataset import Split
from data_prep.sample import Sample
from eagle31_train.common.errors import Refused
from eagle31_train.reporting import html
from eagle31_train.targets.chat import ChatTemplate

PAGE = "preview.html"
EACH = 5  # samples shown of every split and source
MOST = 4096  # tokens shown of each sample


def page(splits: Mapping[str, Split], template: ChatTemplate) -> str:
    """Render the first samples of every split and source, as the target's tokens spell them."""
    marked = []
    for name, split in splits.items():
        numbers = Counter[str]()
        for identity, source, sample in split.rows:
            numbers[source] += 1
            if numbers[source] <= EACH:
                tokens = f"{len(sample.input_ids):,} tokens, {int(sample.loss_mask.sum()):,} of them learnt"
                marked.append((f"{name}, {source}: {identity} ({tokens})", list(_runs(sample, template))))
    return html.page("Samples, with what a drafter learns marked", [], {}, {}, marked=marked)


def _runs(sample: Sample, template: ChatTemplate) -> Iterator[tuple[str, bool]]:
    """Yield the sample's text in runs of learnt and other tokens, and whether each run is learnt."""
    ids, at = sample.input_ids[:MOST].tolist(), 0
    for learnt, run in groupby(sample.loss_mask[:MOST].tolist()):
        end = at + len(list(run))
        try:
            yield template.decode_after(ids[:at], ids[at:end]), learnt
        except Refused:  # the target's padded rows have no text
            yield f"[{end - at} tokens, some of them not in the tokenizer]", learnt
        at = end
    if len(sample.input_ids) > MOST:
        yield f" … ({len(sample.input_ids) - MOST:,} more tokens)", False
