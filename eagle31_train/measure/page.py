"""A result as one HTML page and as PNG files beside it, for people who decide whether to serve a drafter."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle31_train import artifacts, report
from eagle31_train.measure import tables
from eagle31_train.measure.intervals import Interval
from eagle31_train.measure.pictures import ALL, SERVING, Picture, pictures
from eagle31_train.measure.tables import bracket, decoded, sampling
from eagle31_train.report.html import details, document, facts, figure, figures, table

PAGE = "index.html"
RESULT = "result.json"  # of a comparison: what was drawn, and the files of that
Drawn = Mapping[Picture, tuple[bytes, bytes]]  # on light and on dark paper


def write(folder: Path, result: dict[str, Any]) -> list[Path]:
    """Draw a result, of acceptance, of serving, or both; the files that were written.

    Args:
        folder: gets PAGE, and a PNG of every picture; those that an earlier result there lists as its own go.
        result: as `acceptance.tell` makes it, with title, and what else is known: machine, dtype, max_new_tokens,
            command, serving.
    """
    drawn: dict[Picture, tuple[bytes, bytes]] = {}
    for picture in tqdm(list(pictures(result)), desc="page", unit="picture", disable=None):
        drawn[picture] = picture.png("light"), picture.png("dark")
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{picture.name}.png" for picture in drawn]
    for file, (light, _) in zip(files, drawn.values(), strict=True):
        report.write(file, light)
    for file in _earlier(folder) - set(files):
        file.unlink(missing_ok=True)
    artifacts.write_text(folder / PAGE, render(result, drawn))
    return [*files, folder / PAGE]


def _earlier(folder: Path) -> set[Path]:
    """Pictures of the comparison that stands in a folder; whatever else lies there is somebody else's."""
    listed = artifacts.read_json(folder / RESULT, "this command") if (folder / RESULT).is_file() else {}
    return {folder / name for name in listed.get("files", {}) if name.endswith(".png")}


def render(result: dict[str, Any], drawn: Drawn) -> str:
    """The page as text."""
    workloads, title = result.get("workloads", []), result["title"]
    conditions = [str(result[key]) for key in ("machine", "dtype") if key in result]
    if "max_new_tokens" in result:
        conditions.append(f"at most {result['max_new_tokens']:,} tokens per answer")
    parts = [f"<h1>{escape(title)}</h1>", _muted(*conditions)]
    if workloads:
        parts += [
            _facts(result),
            _verdicts(workloads, result["drafters"]),
            "<h2>What the numbers mean</h2>",
            *(f"<p>{escape(line)}</p>" for line in result["definitions"].split("\n")),
            f"<h2>{ALL}</h2>\n{_figures(drawn, ALL)}" if len(workloads) > 1 else "",
            *(part for workload in workloads for part in _workload(workload, result["draft_tokens"], drawn)),
        ]
    if serving := result.get("serving"):
        parts += _serving(serving, drawn)
    if command := result.get("command") or (serving or {}).get("command"):
        parts.append(f"<h2>Repeat</h2>\n<pre>{escape(command)}</pre>")
    return document(title, parts)


def _facts(result: dict[str, Any]) -> str:
    first, depth = result["workloads"][0], str(result["draft_tokens"])
    told = {
        f"{name}, {first['name']}, {depth} draft tokens": bracket(
            numbers["by_depth"][depth]["acceptance_length"], "{:.2f}"
        )
        for name, numbers in first["drafters"].items()
    }
    speeds = first.get("tokens_per_second", {})
    if plain := speeds.get("plain"):
        told |= {f"speed with {name}": f"{speeds[name] / plain:.2f} ×" for name in first["drafters"] if name in speeds}
    # Perturbed forms are of the same prompts.
    told["prompts"] = f"{sum(each['prompts'] for each in result['workloads'] if each['perturbation'] is None):,}"
    return facts(told)


def _verdicts(workloads: Sequence[dict[str, Any]], names: list[str]) -> str:
    rows = [
        [workload["name"], *([name] if len(names) > 2 else []), verdict["text"]]
        for workload in workloads
        for name, verdict in workload["verdict"].items()
    ]
    header = ["workload", *(["drafter"] if len(names) > 2 else []), f"against {names[0]}"]
    return f"<h2>Verdict</h2>\n{table(header, rows, words=True)}" if rows else ""


def _workload(workload: dict[str, Any], draft_tokens: int, drawn: Drawn) -> list[str]:
    found = workload["drafters"]
    depths = list(next(iter(found.values()))["by_depth"])
    rows = []
    for name, numbers in found.items():
        lengths = [numbers["by_depth"][depth]["acceptance_length"] for depth in depths]
        rows.append([f"{name}: acceptance length", *(_cell(length, "{:.2f}") for length in lengths)])
        for training, values in enumerate(numbers.get("by_training", [])):
            rows.append(
                [
                    f"{name}: training {training + 1}",
                    *(_cell([values[depth], None, None], "{:.2f}") for depth in depths),
                ]
            )
        if numbers.get("kept"):
            rows.append(
                [f"{name}: kept, of the plain form", *(_cell(share, "{:.0%}") for share in numbers["kept"].values())]
            )
    for name, differences in workload["differences"].items():
        changes = [differences[depth]["difference"] for depth in depths]
        rows.append([f"{name} - {next(iter(found))}", *(_cell(change, "{:+.2f}") for change in changes)])
        if more := [differences[depth]["kept_ratio"] for depth in depths if "kept_ratio" in differences[depth]]:
            rows.append([f"{name} / {next(iter(found))}: kept", *(_cell(one, "{:.3f}") for one in more)])
    positions = [
        [f"{name}: {label}", *(_cell(share, "{:.0%}") for share in numbers[key])]
        for name, numbers in found.items()
        for key, label in (("cumulative", "accepted"), ("conditional", "if reached"))
    ]
    return [
        f"<h2>{escape(workload['name'])}</h2>",
        _muted(f"{workload['prompts']:,} prompts", sampling(workload), decoded(workload), *workload["notes"]),
        _figures(drawn, workload["name"]),
        table(["draft tokens", *depths], rows),
        table([f"position, of {depths[-1]} draft tokens", *depths], positions),
        details("Drift", _drift(found)),
        _sources(found, str(draft_tokens)),
    ]


def _drift(found: dict[str, Any]) -> str:
    rows = [
        [f"{name}: {label}", *(_cell(interval, form.replace(".1%", ".0%")) for interval in numbers["drift"][measure])]
        for name, numbers in found.items()
        if numbers["drift"]
        for measure, (label, form) in tables.DRIFT.items()
    ]
    return table(["draft step", *map(str, range(1, len(rows[0])))], rows) if rows else ""


def _sources(found: dict[str, Any], depth: str) -> str:
    sources = next(iter(found.values()))["by_source"]
    if len(sources) < 2:
        return ""
    rows = [
        [
            source,
            f"{sources[source]['prompts']:,}",
            *(
                bracket(n["by_source"][source]["by_depth"][depth]["acceptance_length"], "{:.2f}")
                for n in found.values()
            ),
        ]
        for source in sources
    ]
    return table(["source", "prompts", *(f"{name}, {depth} draft tokens" for name in found)], rows)


def _serving(serving: dict[str, Any], drawn: Drawn) -> list[str]:
    rows = serving["rows"]
    which = ["drafter", "draft tokens", "concurrency"]
    keys = [[row["drafter"] or "none", str(row["draft_tokens"]), str(row["concurrency"])] for row in rows]
    speeds = [
        [
            *key,
            bracket(row["per_user"], "{:.1f}"),
            bracket(row["speedup"], "{:.2f}") if row["speedup"] else "–",
            f"{row['total']:.1f}",
            "–" if row["different"] is None else f"{row['different']} of {row['requests']}",
        ]
        for key, row in zip(keys, rows, strict=True)
    ]
    times = [
        [*key, *(_milliseconds(value) for kind in ("ttft", "tpot") for value in _times(row, kind))]
        for key, row in zip(keys, rows, strict=True)
    ]
    heads = [f"{kind}, ms{of}" for kind in ("TTFT", "TPOT") for of in (", mean", ", p50", ", p95", ", mean by vLLM")]
    return [
        f"<h2>{SERVING}</h2>",
        _muted(
            *([serving["machine"]] if "machine" in serving else []),
            f"vLLM {serving['vllm']}, {serving['dtype']}",
            f"{serving['prompts']:,} prompts{' of ' + serving['workload'] if 'workload' in serving else ''}",
            sampling(serving),
            f"at most {serving['max_new_tokens']:,} tokens per answer",
        ),
        *(f"<p>{escape(sentence)}</p>" for sentence in serving["verdict"]),
        *map(_muted, serving["notes"]),
        _figures(drawn, SERVING),
        table([*which, "tokens/s/user", "speed-up", "total tokens/s", "different answers"], speeds),
        table([*which, *heads], times),
        _accepted(which, [(key, row["acceptance"]) for key, row in zip(keys, rows, strict=True) if row["acceptance"]]),
        _muted(serving["definitions"]),
    ]


def _times(row: dict[str, Any], kind: str) -> list[float | None]:
    """Seconds: by the clock of those who asked, and by vLLM's."""
    return [row[kind]["mean"], row[kind]["p50"], row[kind]["p95"], row["counted"][kind]]


def _accepted(which: list[str], found: list[tuple[list[str], dict[str, Any]]]) -> str:
    """Acceptance by position as vLLM counts it."""
    if not found:
        return ""
    deepest = max(len(told["acceptance_at_depth"]) for _, told in found)
    rows = []
    for key, told in found:
        shares = ["–" if share is None else f"{share:.1%}" for share in told["acceptance_at_depth"]]
        length = bracket([told["acceptance_length"], None, None], "{:.2f}")
        rows.append([*key, f"{told['drafts']:,}", length, *shares, *[""] * (deepest - len(shares))])
    positions = [f"accepted, position {position}" for position in range(1, deepest + 1)]
    return table([*which, "drafts", "acceptance length", *positions], rows)


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.1f}"


def _figures(drawn: Drawn, section: str) -> str:
    return figures(
        [figure(*png, f"{p.title}: {p.section}", p.caption) for p, png in drawn.items() if p.section == section]
    )


def _cell(interval: Interval, form: str) -> str:
    """An interval below its value: eight of them fit side by side."""
    return bracket(interval, form).replace(" [", "\n[")


def _muted(*texts: str) -> str:
    return f'<p class="muted">{escape(" · ".join(texts))}</p>' if texts else ""
