"""What the user reads when the data are there: the splits, the sources, and everything that was refused or cut."""

from collections import Counter
from pathlib import Path
from typing import Any

NAMED = 5  # refused conversations, or sources, that the summary names; the manifest names all
LISTED = 20  # sources in the table


def summary(folder: Path, manifest: dict[str, Any]) -> str:
    """The manifest in words."""
    lines = [f"data: {folder} in {manifest['seconds']} s"]
    for name, split in manifest["splits"].items():
        share = manifest["draft_vocab"]["coverage"][name]
        covered = "" if share is None else f", {share:.2%} within the draft vocabulary"
        lines.append(
            f"  {name:<8} {split['conversations']:>7,} conversations, {split['tokens']:>11,} tokens, "
            f"{split['assistant_tokens']:>11,} of the assistant{covered}"
        )
    draft = manifest["draft_vocab"]
    lines.append(
        f"  draft vocabulary {draft['size']:,} of {draft['target_size']:,} tokens "
        f"({draft['seen_in_train']:,} occur in the training answers)"
    )
    lines += _sources(manifest)
    lines.append(f"  cut at max_length: {manifest['cut']}; answers without end of turn: {manifest['no_end_of_turn']}")
    if manifest["split_turns"]:
        lines.append(
            f"  made one sample per answer, since the template rewrites history: {manifest['split_turns']} "
            f"conversations; answers that it begins with an empty thought: {manifest['inserted']}"
        )
    if manifest["respelt"]:
        lines.append(f"  answers that have not as many tokens as the target wrote: {manifest['respelt']}")
    if unread := manifest["tools_unread"]:
        lines.append(f"  conversations with tools, which the target's chat template does not write: {unread}")
    if shared := manifest["shared_prompts"]["rows"]:
        first, other = manifest["shared_prompts"]["named"][0]
        lines.append(f"  rows whose prompt another source has too, on the same side of the split: {shared} "
                     f"({other} asks what {first} does)")  # fmt: skip
    if missing := manifest["not_held_out"]:
        names = ", ".join(missing[:NAMED]) + (f" and {len(missing) - NAMED} more" if len(missing) > NAMED else "")
        lines.append(
            f"  NOT HELD OUT: no prompt of {names}, which evaluation will not measure: raise data.heldout, or give "
            "more prompts of it"
        )
    lines.append(f"  REFUSED: {len(manifest['refused'])}" if manifest["refused"] else "  refused: 0")
    for reason, count in Counter(entry["reason"] for entry in manifest["refused"]).most_common():
        lines.append(f"    {count} × {reason}")
    for entry in manifest["refused"][:NAMED]:
        lines.append(f"    {entry['id']} ({entry['where']}): {entry['reason']}")
    return "\n".join(lines)


def _sources(manifest: dict[str, Any]) -> list[str]:
    """A line for each source, where there are several: rows, then conversations and tokens that came of them."""
    sources = manifest["sources"]
    if len(sources) < 2:
        return []
    table = [
        ("source", "read", "taken", "refused", "cut", "train", "held out", "tokens", "assistant's", "in vocabulary")
    ]
    for name, counts in list(sources.items())[:LISTED]:
        train, held = (manifest["splits"][split]["by_source"].get(name, {}) for split in ("train", "heldout"))
        share = manifest["draft_vocab"]["coverage_by_source"].get(name)
        cells = [counts[what] for what in ("read", "taken", "refused", "cut")]
        cells += [train.get("conversations", 0), held.get("conversations", 0)]
        cells += [train.get(what, 0) + held.get(what, 0) for what in ("tokens", "assistant_tokens")]
        table.append((name, *(f"{cell:,}" for cell in cells), "-" if share is None else f"{share:.2%}"))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  "
        + "  ".join(
            f"{cell:{'>' if i else '<'}{width}}" for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    if len(sources) > LISTED:
        lines.append(f"  … and {len(sources) - LISTED} more in the manifest")
    return lines
