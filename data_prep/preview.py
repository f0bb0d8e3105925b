"""The first samples as a page on which what a drafter learns is marked: a wrong template or mask is seen at once."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

from data_prep.dataset import Split
from data_prep.masks import Sample
from eagle31_train.common import artifacts
from eagle31_train.common.errors import Refused
from eagle31_train.reporting.html import escape
from eagle31_train.targets.chat import ChatTemplate

PAGE = "preview.html"
EACH = 5  # samples of every split and source
MOST = 4096  # tokens of each that are shown

HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Samples</title>
<style>
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 60rem; padding: 1.25rem; font: 1rem/1.5 system-ui, sans-serif; }
h2 { margin-top: 2rem; border-bottom: 1px solid #8884; font-size: 1rem; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
mark { background: #2a95; color: inherit; }
</style>
<h1>Samples</h1>
<p>Marked is what the drafter learns: tokens that the target wrote. All else it only reads.</p>
"""


def write(folder: Path, splits: Mapping[str, Split], template: ChatTemplate) -> None:
    """Write PAGE with the first samples of every split and source, as the target's tokens spell them."""
    artifacts.write_parts(folder / PAGE, (text.encode() for text in [HEAD, *_sections(splits, template)]))


def _sections(splits: Mapping[str, Split], template: ChatTemplate) -> Iterator[str]:
    for name, split in splits.items():
        numbers = Counter[str]()
        for identity, source, sample in split.rows:
            numbers[source] += 1
            if numbers[source] <= EACH:
                tokens = f"{len(sample.input_ids):,} tokens, {int(sample.loss_mask.sum()):,} of them learnt"
                title = escape(f"{name}, {source}: {identity} ({tokens})")
                yield f"<h2>{title}</h2>\n<pre>{''.join(_marked(sample, template))}</pre>\n"


def _marked(sample: Sample, template: ChatTemplate) -> Iterator[str]:
    """The sample's text, run by run of learnt and other tokens."""
    ids, at = sample.input_ids[:MOST].tolist(), 0
    for learnt, run in groupby(sample.loss_mask[:MOST].tolist()):
        end = at + len(list(run))
        try:
            text = escape(template.decode_after(ids[:at], ids[at:end]))
        except Refused:  # the target's padded rows have no text
            text = f"[{end - at} tokens, not all of which the tokenizer has]"
        yield f"<mark>{text}</mark>" if learnt else text
        at = end
    if len(sample.input_ids) > MOST:
        yield f" … ({len(sample.input_ids) - MOST:,} tokens more)"
