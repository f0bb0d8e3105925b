"""A result as sections of remarks and tables, which terminal, page and model card show alike.

`evaluation/results.py` describes the result, `evaluation/serving/report.py` its `serving`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from eagle31_train.evaluation.intervals import NOTHING, bracket

ALL, SERVING = "All workloads", "Serving"  # sections that are not of one workload
INTERVAL = "[low, high]: 95 % interval over five or more prompts"
GLOSSARY = f"{INTERVAL}. What the numbers mean: docs/glossary.md"
DRIFT = ("sink", "prompt", "verified", "own", "rms", "entropy")  # shares of the attention, and two numbers
Result = dict[str, Any]
Columns = dict[str, list[Any]]  # of intervals or text


class Table(NamedTuple):
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class Section(NamedTuple):
    title: str
    remarks: list[str]
    tables: list[Table]


def sections(result: Result) -> Iterator[Section]:
    """Yield all of a result, except its definitions and what was not measured."""
    workloads, depth = result.get("workloads", []), str(result.get("draft_tokens"))
    whole = []
    if workloads:
        whole.append(Section("Verdict", [], [_verdicts(workloads, depth)]))
    if len(workloads) > 1:
        whole.append(Section(ALL, [], list(_overview(workloads, depth))))
    whole += [Section(one["name"], list(_remarks(one, depth)), list(_workload(one, depth))) for one in workloads]
    if serving := result.get("serving"):
        whole.append(Section(SERVING, list(_serving_remarks(serving)), list(_serving(serving))))
    for section in whole:
        # A table of what was not measured has no number.
        shown = [table for table in section.tables if any(cell != "–" for row in table.rows for cell in row[1:])]
        if shown or section.remarks:
            yield section._replace(tables=shown)


def as_text(result: Result) -> str:
    """Return the headline for a terminal: the first table of every section, except of further workloads."""
    lines: list[str] = []
    further = [workload["name"] for workload in result.get("workloads", [])[1:]]
    for section in sections(result):
        if section.title in further:
            continue
        lines += [section.title, *(f"  {remark}" for remark in section.remarks)]
        for table in section.tables[:1]:
            lines += ["", *([f"  {table.title}"] if table.title else [])]
            lines += [f"  {line}" for line in aligned(table.header, table.rows)]
        lines.append("")
    return "\n".join([*lines, f"{GLOSSARY}, and the page."])


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return ["  ".join([one.ljust(widths[0]), *map(str.rjust, more, widths[1:])]) for one, *more in (header, *rows)]


def _verdicts(workloads: Sequence[Result], depth: str) -> Table:
    first = next(iter(workloads[0]["drafters"]))
    header = ["workload", "drafter", f"acceptance length / {first}'s, at {depth}"]
    header += ["better with draft tokens", f"{first} better with"]
    rows = []
    for workload in workloads:
        for name, by_depth in workload["differences"].items():
            better = workload["verdict"][name]["better"]
            won = [", ".join(k for k, winner in better.items() if winner == one) or "–" for one in (name, first)]
            rows.append([workload["name"], name, bracket(by_depth[depth]["ratio"]), *won])
    return Table("", header, rows)


def _overview(workloads: Sequence[Result], depth: str) -> Iterator[Table]:
    rows = [workload["name"] for workload in workloads]
    of = {name: [workload["drafters"][name] for workload in workloads] for name in workloads[0]["drafters"]}
    columns: Columns = {"prompts": [f"{workload['prompts']:,}" for workload in workloads]}
    columns["decoding"] = [sampling(workload) for workload in workloads]
    columns |= {name: [one["by_depth"][depth]["acceptance_length"] for one in some] for name, some in of.items()}
    yield _columns(f"acceptance length with {depth} draft tokens", "workload", rows, columns)
    columns = {name: [one.get("kept", {}).get(depth, NOTHING) for one in some] for name, some in of.items()}
    yield _columns("kept of the plain form's acceptance length", "workload", rows, columns)


def _remarks(workload: Result, draft_tokens: str) -> Iterator[str]:
    verified = f"{workload['verified']:,} decoded by real speculation"
    yield f"{count(workload['prompts'], 'prompt')}, {sampling(workload)}, {verified}"
    yield from workload["notes"]
    if speeds := workload.get("tokens_per_second"):
        ratios = ", ".join(f"{name} {speed:.1f} ({speed / speeds['plain']:.2f}x)" for name, speed in speeds.items())
        timed = workload.get("timed", {})  # earlier results lack it
        length = _number(timed.get("by_depth", {}).get(draft_tokens), "{:.2f}")
        of = f", first {count(timed['prompts'], 'prompt')} (acceptance length {length})" if timed else ""
        yield f"tokens per second of one user, at {draft_tokens}{of}: {ratios}"


def _workload(workload: Result, draft_tokens: str) -> Iterator[Table]:
    """Yield all tables of one workload; a table of what was not measured has no rows."""
    drafters, differences = workload["drafters"], workload["differences"]
    first = next(iter(drafters))
    depths = list(drafters[first]["by_depth"])

    columns: Columns = {
        name: [k["acceptance_length"] for k in of["by_depth"].values()] for name, of in drafters.items()
    }
    columns |= {f"{name} - {first}": [k["difference"] for k in of.values()] for name, of in differences.items()}
    for name, of in differences.items() if workload["perturbation"] else ():
        columns[f"kept: {name} / {first}"] = [k.get("kept_ratio", NOTHING) for k in of.values()]
    for name, numbers in drafters.items():
        for number, lengths in enumerate(numbers.get("by_training", []), 1):
            columns[f"{name}, training {number}"] = [[length, None, None] for length in lengths.values()]
    yield _columns("acceptance length", "draft tokens", depths, columns)

    columns = {f"{name}: {key}": of[key] for name, of in drafters.items() for key in ("cumulative", "conditional")}
    yield _columns(f"acceptance by position, of drafts of {depths[-1]}", "position", depths, columns)

    for name, numbers in drafters.items():
        drift = numbers["drift"] or {}
        columns = {key: [[value, None, None] for value, *_ in drift.get(key, [])] for key in DRIFT}
        yield _columns(f"drift of {name}: attention on …, and its state", "draft step", depths, columns)

    sources = drafters[first]["by_source"]
    columns = {"prompts": [f"{of['prompts']:,}" for of in sources.values()]}
    for name, numbers in drafters.items():
        columns[name] = [of["by_depth"][draft_tokens]["acceptance_length"] for of in numbers["by_source"].values()]
    title = f"acceptance length with {draft_tokens} draft tokens, by source"
    yield _columns(title, "source", list(sources), columns if len(sources) > 1 else {})
    yield _repetition(drafters, draft_tokens)


def _repetition(drafters: Result, draft_tokens: str) -> Table:
    """Return acceptance where the text repeats itself and where not; no rows for sampled drafts and earlier results."""
    columns: Columns = {}
    for name, of in drafters.items():
        kinds = [depths[draft_tokens] for depths in of.get("by_repetition", {}).values()]
        if drafts := sum(kind["drafts"] for kind in kinds):
            columns[name] = [kind["acceptance_length"] for kind in kinds]
            columns[f"of {name}'s drafts"] = [f"{kind['drafts'] / drafts:.1%}" for kind in kinds]
    title = f"acceptance length with {draft_tokens} draft tokens, where the text repeats itself"
    return _columns(title, "text", ["repeating", "new"], columns)


def _columns(title: str, what: str, names: Sequence[str], columns: Columns) -> Table:
    """Return a table of columns of intervals or text, after a first column with the names of the rows."""
    shown = [[cell if isinstance(cell, str) else bracket(cell) for cell in column] for column in columns.values()]
    return Table(title, [what, *columns], list(zip(names, *shown, strict=False)) if columns else [])


def sampling(workload: Result) -> str:
    if not workload["temperature"]:
        return "greedy"
    nucleus = f", top_p {workload['top_p']:g}" if workload["top_p"] < 1 else ""
    likeliest = f", top_k {workload['top_k']}" if workload.get("top_k") else ""
    drafts = ", drafts sampled, too" if workload.get("drafts") else ""
    return f"sampled at temperature {workload['temperature']:g}{nucleus}{likeliest}{drafts}"


def _serving_remarks(serving: Result) -> Iterator[str]:
    prompts = f"{count(serving['prompts'], 'prompt')} of {serving.get('workload', 'a file')}, {sampling(serving)}"
    where = f"vLLM {serving['vllm']} on {serving.get('machine', 'a machine')}, {serving['dtype']}"
    yield f"{where}; {prompts}, at most {serving['max_new_tokens']:,} tokens per answer"
    yield from serving["verdict"]
    yield from serving["notes"]


def _serving(serving: Result) -> Iterator[Table]:
    """Yield speeds, times and acceptance by position, for every drafter, number of draft tokens and concurrency."""
    which, speeds, times, accepted = ["drafter", "draft tokens", "users"], [], [], []
    for row in serving["rows"]:
        key = [row["drafter"] or "none", str(row["draft_tokens"]), str(row["concurrency"])]
        ahead = bracket(row["speedup"] or NOTHING, "{:.2f}")
        different = "–" if row["different"] is None else f"{row['different']} of {row['requests']}"
        speeds.append([*key, bracket(row["per_user"], "{:.1f}"), ahead, f"{row['total']:.1f}", different])
        seconds = [row[kind].get(of) for kind in ("ttft", "tpot") for of in ("mean", "p50", "p95")]
        times.append([*key, *(_number(value and 1000 * value, "{:.1f}") for value in seconds)])
        if acceptance := row["acceptance"]:
            shares = ", ".join(_number(share, "{:.1%}") for share in acceptance["acceptance_at_depth"])
            accepted.append([*key, _number(acceptance["acceptance_length"], "{:.2f}"), shares])
    yield Table("speed", [*which, "tokens/s/user", "speed-up", "total tokens/s", "different answers"], speeds)
    heads = ["TTFT, ms", "p50", "p95", "TPOT, ms", "p50", "p95"]
    yield Table("times", [*which, *heads], times)
    yield Table("acceptance, as vLLM counts it", [*which, "acceptance length", "accepted up to position"], accepted)


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _number(value: float | None, form: str) -> str:
    return bracket([value, None, None], form)
