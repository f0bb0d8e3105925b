"""Writing and reading hidden states, beside memcpy and one file per sample: `make bench-store`.

Samples with random states and log-normal lengths are written and read back in every format of formats.py. All take
turns in one process. Writing is timed to files, with fsync (ours always; the others' as they do, without, and once
more with). Reading is timed from the page cache, in random order, into batches of about 4,096 tokens, one contiguous
tensor per kind of state, which is what training gets; decoding, which training does on its device, is listed apart.

`first` reads a store that was just opened: its pages are mapped as they are touched. `again` reads it once more, as
later epochs do. Opening a store verifies every checksum. memcpy copies as many bytes in as many pieces, from memory
that lies ready, into memory newly allocated for each batch (`fresh`, which is what reading does) or kept (`warm`).
"""

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import machine, run_main, store_plot, turns
from benchmarks.formats import VOCAB, Format, Ours, Safetensors, State, TorchSave, usage
from benchmarks.shapes import turns as answers
from eagle31_train import artifacts
from eagle31_train.errors import UserError
from eagle31_train.store import shard, writer
from eagle31_train.store.codec import Encoded, encode
from eagle31_train.store.document import Document

AUX = 3
BATCH = 4096  # tokens
CODECS = (("bf16", "bf16"), ("fp8", "fp8"), ("int8", "int8"), ("int4", "int8"))
PARTS = {  # of writing a store
    "encode": (shard, "encode"),
    "join": (shard, "concatenate"),
    "save": (shard, "save_file"),
    "checksum": (writer, "checksum"),
    "fsync": (artifacts, "fsync_path"),
}


@dataclass(frozen=True)
class Case:
    """H, and the share of a sample's tokens that the assistant wrote."""

    hidden: int
    share: float

    @staticmethod
    def parse(text: str) -> "Case":
        """From HIDDEN:SHARE.

        Raises:
            UserError: it is not of that form.
        """
        try:
            hidden, share = text.split(":")
            case = Case(int(hidden), float(share))
        except ValueError:
            raise UserError(f"{text!r} is no case: write HIDDEN:SHARE, like 4096:0.5") from None
        if case.hidden < 1 or not 0 < case.share <= 1:
            raise UserError(f"{text!r} is no case: the hidden size is above 0, the share above 0 and at most 1")
        return case

    def __str__(self) -> str:
        return f"{self.hidden}:{self.share:g}"


def draw_lengths(tokens: int, seed: int = 0) -> list[int]:
    """Log-normal lengths of 16 to 2,048 tokens (median 240, as the demo's conversations), `tokens` together or more."""
    random = np.random.Generator(np.random.PCG64(seed))
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(int(np.clip(random.lognormal(np.log(240), 0.6), 16, 2048)))
    return lengths


def make_documents(case: Case, lengths: Sequence[int], seed: int = 0) -> list[Document]:
    """Samples with random states in bf16, of the sizes of a residual stream's."""
    generator = torch.Generator().manual_seed(seed)

    def states(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).mul_(8).bfloat16()

    def document(length: int) -> Document:
        ids = torch.randint(0, VOCAB, (2, length), generator=generator)
        aux, last = states(length, AUX, case.hidden), states(length, case.hidden)
        return Document(ids[0], answers(length, case.share), ids[1], aux, last)

    return [document(length) for length in lengths]


def make_batches(lengths: Sequence[int], tokens: int, seed: int = 0) -> list[list[int]]:
    """Every sample once, in random order, in batches of at most so many tokens (a longer sample has its own)."""
    batches: list[list[int]] = []
    held = tokens
    for index in np.random.Generator(np.random.PCG64(seed)).permutation(len(lengths)).tolist():
        if held + lengths[index] > tokens:
            batches.append([])
            held = 0
        batches[-1].append(index)
        held += lengths[index]
    return batches


def size_of(state: State) -> int:
    """Bytes of a batch's states as they are kept."""
    parts = [state.values, state.scale] if isinstance(state, Encoded) else [state]
    return sum(part.numel() * part.element_size() for part in parts)


def write_once(kept: Format, documents: Sequence[Document], folder: Path) -> dict[str, float]:
    """Seconds of writing everything, and of its parts in our store; what it left to the disk is forced out after."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()  # nobody pays for what another left behind
    with turns.clocked(**PARTS) as parts:
        total = turns.seconds_of(lambda: kept.write(documents, folder))
    os.sync()
    return {"total": total, **(dict.fromkeys(PARTS, 0.0) | dict(parts) if isinstance(kept, Ours) else {})}


def read_once(kept: Format, folder: Path, batches: Sequence[Sequence[int]]) -> dict[str, float]:
    """Seconds of opening, of a first and of another pass over all batches, and of decoding them."""
    found = {"open": turns.seconds_of(lambda: kept.open(folder)), "decode": 0.0}
    for name in ("first", "again"):
        found[name] = 0.0
        for batch in batches:
            began = time.perf_counter()
            states = kept.read(batch)
            read = time.perf_counter()
            found[name] += read - began
            if name == "again" and isinstance(kept, Ours):
                for state in states:
                    assert isinstance(state, Encoded)
                    state.decode()
                found["decode"] += time.perf_counter() - read
    return found


def copy_once(source: Tensor, pieces: Sequence[int], kept: Tensor | None) -> dict[str, float]:
    """Seconds of copying pieces of `source` one after another, each into fresh memory, or all into `kept`."""
    began, first = time.perf_counter(), 0
    for size in pieces:
        into = torch.empty(size, dtype=torch.uint8) if kept is None else kept[:size]
        into.copy_(source[first : first + size])
        first += size
    return {"first": time.perf_counter() - began}


def check(kept: Format, documents: Sequence[Document], batch: Sequence[int]) -> None:
    """Refuse to time what does not give the states back (a codec's after its rounding)."""
    here = [documents[i] for i in batch]
    if isinstance(kept, Ours):
        wanted = [joined([d.attended_states for d in here]), joined([d.supervised_states for d in here])]
        names = [kept.codecs["aux_codec"], kept.codecs["last_codec"]]
        wanted = [encode(states, name).decode() for states, name in zip(wanted, names, strict=True)]
    else:
        wanted = [joined([d.aux for d in here]).flatten(1), joined([d.last for d in here])]
    for state, states in zip(kept.read(batch), wanted, strict=True):
        assert torch.equal(state.decode() if isinstance(state, Encoded) else state, states)


def joined(states: Sequence[State]) -> Tensor:
    """Tensors, end to end."""
    return torch.cat([state for state in states if isinstance(state, Tensor)])


def measure(case: Case, chosen: argparse.Namespace) -> dict[str, Any]:
    """Everything of one case."""
    row = 2 * case.hidden * (AUX + 1)
    lengths = draw_lengths(int(chosen.mib * 2**20 / row))
    documents, batches = make_documents(case, lengths), make_batches(lengths, BATCH)
    tokens = sum(lengths)
    formats: list[Format] = [Ours(*pair, chosen.shard_tokens) for pair in CODECS]
    formats += [make(fsync) for make in (TorchSave, Safetensors) for fsync in (False, True)]
    folders = {kept.name: chosen.folder / str(number) for number, kept in enumerate(formats)}
    try:
        written = turns.in_turns(
            {kept.name: partial(write_once, kept, documents, folders[kept.name]) for kept in formats},
            chosen.repeats,
            f"{case} write",
        )
        formats = [kept for kept in formats if not kept.name.endswith("fsync")]  # reads the same
        sizes: dict[str, list[int]] = {}
        for kept in formats:
            kept.open(folders[kept.name])
            check(kept, documents, batches[0])
            sizes[kept.name] = [size_of(state) for batch in batches for state in kept.read(batch)]
        source = torch.ones(sum(sizes["ours, bf16"]), dtype=torch.uint8)
        into = torch.ones(max(sizes["ours, bf16"]), dtype=torch.uint8)
        read = turns.in_turns(
            {
                **{kept.name: partial(read_once, kept, folders[kept.name], batches) for kept in formats},
                "memcpy, fresh": partial(copy_once, source, sizes["ours, bf16"], None),
                "memcpy, warm": partial(copy_once, source, sizes["ours, bf16"], into),
            },
            chosen.repeats,
            f"{case} read",
        )
        used = {name: usage(folder) for name, folder in folders.items()}
    finally:
        shutil.rmtree(chosen.folder, ignore_errors=True)
    return {
        "case": str(case), **asdict(case), "samples": len(lengths), "tokens": tokens, "batches": len(batches),
        "memcpy": {
            name.removeprefix("memcpy, "): sum(sizes["ours, bf16"]) / statistics.median(r["first"] for r in read[name])
            for name in ("memcpy, fresh", "memcpy, warm")
        },
        "formats": {
            name: {
                "files": used[name][0],
                "bytes": used[name][1],
                "batch_bytes": sum(sizes.get(name, [])),
                "write": written[name],
                "read": read.get(name, []),
            }
            for name in folders
        },
    }  # fmt: skip


def numbers(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What the table and the picture show of one case, a row per format: rates, and ratios to memcpy."""
    rows = []
    for name, kept in result["formats"].items():
        write, read = turns.medians(kept["write"]), turns.medians(kept["read"])
        row: dict[str, Any] = {
            "name": name,
            "bytes_per_token": kept["bytes"] / result["tokens"],
            "files": kept["files"],
            "write": result["tokens"] / write["total"],
            "write_bytes": kept["bytes"] / write["total"],
            "write_parts": {part: seconds / write["total"] for part, seconds in write.items() if part != "total"},
        }
        if read:
            rate = {turn: kept["batch_bytes"] / read[turn] for turn in ("first", "again")}
            row |= {
                "read": result["tokens"] / read["first"],
                "read_bytes": rate,
                "of_memcpy": {
                    f"{turn}, {memory}": rate[turn] / result["memcpy"][memory]
                    for turn in rate
                    for memory in result["memcpy"]
                },
                "open": read["open"],
                "decode": result["tokens"] / read["decode"] if read["decode"] else None,
            }
        rows.append(row)
    return rows


def named(results: list[dict[str, Any]]) -> list[store_plot.Case]:
    """Every case's numbers, with what the picture calls it."""
    return [(f"H = {one['hidden']}, share {one['share']:g}", numbers(one)) for one in results]


def table(results: Sequence[dict[str, Any]]) -> str:
    """A table per case."""
    head = ["", "B/token", "files", "write tok/s", "MB/s", "read tok/s", "GB/s", "of memcpy", "again", "warm memcpy"]
    head += ["open s", "decode tok/s"]
    parts = []
    for result in results:
        rows = []
        for row in numbers(result):
            cells = [row["name"], f"{row['bytes_per_token']:,.0f}", f"{row['files']:,}", f"{row['write']:,.0f}"]
            cells.append(f"{row['write_bytes'] / 1e6:,.0f}")
            if "read" in row:
                share = row["of_memcpy"]
                cells += [f"{row['read']:,.0f}", f"{row['read_bytes']['first'] / 1e9:.2f}"]
                cells += [f"{share[turn]:.0%}" for turn in ("first, fresh", "again, fresh", "again, warm")]
                cells += [f"{row['open']:.3f}", f"{row['decode']:,.0f}" if row["decode"] else ""]
            rows.append(cells + [""] * (len(head) - len(cells)))
        named = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in result["memcpy"].items())
        shares = [
            f"{row['name']}: " + ", ".join(f"{part} {share:.0%}" for part, share in row["write_parts"].items())
            for row in numbers(result)
            if row["write_parts"]
        ]
        parts.append(
            f"H = {result['hidden']}, {result['share']:.0%} of {result['tokens']:,} tokens the assistant's; "
            f"GB/s of memcpy: {named}\n\n{turns.markdown(head, rows)}\n\n"
            "of writing: " + "; ".join(shares)
        )
    return "\n\n".join(parts)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--cases", nargs="+", metavar="HIDDEN:SHARE", default=["576:1", "576:0.5", "4096:1", "4096:0.5"]
    )
    parser.add_argument("--mib", type=float, default=512, help="MiB of a case's states in bf16, all of them")
    parser.add_argument("--shard-tokens", type=int, default=16384, help="as extract.shard_tokens")
    parser.add_argument("--repeats", type=int, default=7, help="timed turns, after one that warms up")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/bench/storage.tmp"), help="is emptied; on the disk to time"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench/storage"), help="without .json and .png")
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.cases, chosen.mib, chosen.repeats, chosen.shard_tokens = ["64:1", "64:0.5"], 2, 2, 1024
    return chosen


def main() -> None:
    """Every case; the tables and files in the end."""
    chosen = options()
    if chosen.folder.exists() and any(chosen.folder.iterdir()):
        raise UserError(f"--folder {chosen.folder} is not empty: name a new folder, which is removed in the end")
    cases = [Case.parse(text) for text in chosen.cases]
    here = machine.describe()
    results: list[dict[str, Any]] = []
    for case in cases:
        results.append(measure(case, chosen))
        artifacts.write_json(
            chosen.out.with_suffix(".json"), {"machine": here, "batch_tokens": BATCH, "cases": results}
        )
    store_plot.storage_rates(named(results), here, chosen.out.with_suffix(".png"))
    print(machine.summary(here))
    print(table(results))
    print(f"written: {chosen.out}.json and .png")


if __name__ == "__main__":
    run_main(main)
