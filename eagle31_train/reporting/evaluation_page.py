"""A result as one HTML page and as PNG files beside it, for people who decide whether to serve a drafter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle31_train import artifacts
from eagle31_train.reporting import html, tables
from eagle31_train.reporting.evaluation_figures import pictures
from eagle31_train.reporting.tables import Section

PAGE = "index.html"
RESULT = "result.json"  # of a comparison: what was drawn, and the files of that
TERMS = {  # of docs/glossary.md, which has them all
    "Acceptance length": "tokens per pass of the target, its own included; 1.0 is no gain, 2.0 is two tokens per pass.",
    "[low, high]": "95 % interval over prompts of this kind, by bootstrap; it does not speak of other trainings.",
    "Draft tokens": "how many tokens the drafter proposes for one pass (num_speculative_tokens).",
    "Cumulative, conditional acceptance": "share of drafts whose first k tokens were accepted; of those whose first "
    "k - 1 were.",
    "Better": "the interval of the difference leaves out 0, and each training is ahead of each of the other drafter.",
    "Kept": "acceptance length on a changed form of the prompts, over that on their plain form.",
    "Attention on …": "where the drafter looks: the first four tokens (sink), the rest of the prompt, what the target "
    "has verified, and the drafter's own tokens.",
    "RMS, entropy": "size of the state that a draft step reads; spread of its distribution, in nats.",
    "Tokens/s/user, speed-up": "tokens after the first over the seconds that their user waited; that over the same "
    "without a drafter.",
}


def write(folder: Path, result: dict[str, Any]) -> list[Path]:
    """Draw a result, of acceptance, of serving, or both; the files that were written.

    Args:
        folder: gets PAGE, and a PNG of every picture; those that an earlier result there lists as its own go.
        result: see `evaluation/results.py`, with title, and what else is known: machine, dtype, max_new_tokens,
            command, serving.
    """
    earlier = artifacts.read_json(folder / RESULT, "this command") if (folder / RESULT).is_file() else {}
    listed = [folder / name for name in earlier.get("files", {}) if name.endswith(".png")]
    files, images = html.draw(folder, list(pictures(result)), listed)
    artifacts.write_text(folder / PAGE, render(result, images))
    return [*files, folder / PAGE]


def render(result: dict[str, Any], images: html.Images) -> str:
    """The page as text."""
    command = result.get("command") or result.get("serving", {}).get("command", "")
    sections = [Section("", [" · ".join(conditions(result))], []), *tables.sections(result)]
    return html.page(result["title"], sections, images, {"The command that repeats this": command}, TERMS)


def conditions(result: Mapping[str, Any]) -> list[str]:
    """What was measured on and how, as far as it is known."""
    shown = [f"target {result['target']}"] if "target" in result else []
    shown += [str(result[key]) for key in ("machine", "dtype") if key in result]
    if "max_new_tokens" in result:
        shown.append(f"at most {result['max_new_tokens']:,} tokens per answer")
    return shown
