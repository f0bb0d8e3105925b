"""What each codec costs in bytes, fidelity, tau and acceptance length: `make bench-codecs`.

From one store in bf16 (extracted first, unless --store names one) every pair of codecs is made. On each store, for
each seed, the stages `train.py` and `eagle31_train.evaluate` run as a user would run them. What is done already is
skipped, so a stopped run goes on. Every number stands beside that of bf16 with the same seed: differences are paired.

    tau           of training, teacher-forced over the whole held-out split
    acceptance    real greedy decoding of the held-out prompts; its error comes from a jackknife over prompts
    same drafter  the one trained on bf16, teacher-forced on each store: what encoded states cost as an input,
                  without the noise of another training

What training loses to noise is shown by the same difference between seeds of bf16 itself. `wait` is the largest share
of a training's time that was spent waiting for data.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks import machine, store_plot, transcode, turns
from benchmarks.transcode import EXACT, Pair
from eagle31_train import artifacts, cli, vocab
from eagle31_train.place import open_place
from eagle31_train.schema import Config, UserError
from eagle31_train.store import Store
from train.build import build_objective, shape_of
from train.heldout import evaluate
from train.launch import make_accelerator
from train.parallel import parallelise

ROOT = Path(__file__).resolve().parent.parent
PAIRS = ["bf16:bf16", "fp8:fp8", "int8:int8", "int4:int8", "int4:int4"]
WIDE = 4096  # the hidden size at which bytes are worked out
QUICK = [
    "data.heldout=0.3", "data.draft_vocab_size=256", "train.batch_tokens=1024", "train.eval_samples=2",
    "evaluate.max_new_tokens=8",
]  # fmt: skip


@dataclass(frozen=True)
class Study:
    """One experiment under every pair of codecs.

    folder: for stores and runs. options: for every stage. store: in bf16, by another run; None to extract it here.
    """

    experiment: str
    folder: Path
    options: list[str]
    store: str | None
    launch: list[str]

    def words(self, *more: str) -> list[str]:
        """The options of a stage."""
        return [f"+experiment={self.experiment}", *self.options, *more]

    def run(self, command: Sequence[str], *more: str) -> None:
        """A stage as a process of its own.

        Raises:
            UserError: it failed; what it said stands above.
        """
        words = [*command, *self.words(*more)]
        print("+", " ".join(words), file=sys.stderr, flush=True)
        if subprocess.run([sys.executable, "-m", *words], cwd=ROOT, check=False).returncode:
            raise UserError(f"`python -m {' '.join(words)}` failed: mend that, and run the same command again")

    def prepare(self, slice_of: Path | None) -> "Study":
        """Data, where it is to be a slice; then the store in bf16, where no other is given."""
        study = self
        if slice_of is not None:
            study = replace(self, options=[*self.options, f"data_dir={(self.folder / 'data').absolute()}"])
            self.run(["data_prep"], f"run_dir={self.folder.absolute()}", f"data.conversations={slice_of.absolute()}")
        if self.store is None:
            study.run(["eagle31_train.extract"], f"run_dir={self.folder.absolute()}", study.at(EXACT))
        return study

    def location(self, pair: Pair) -> str:
        """Where the store of a pair lies."""
        if pair.exact and self.store is not None:
            return self.store
        return str((self.folder / f"store-{pair.folder}").absolute())

    def at(self, pair: Pair) -> str:
        """The option that names it."""
        return f"store_dir={self.location(pair)}"

    def open(self, pair: Pair) -> Store:
        """The store of a pair; made from the one in bf16 where it is not there."""
        place = open_place(self.location(pair), self.folder / "cache", 1 << 36)
        if not pair.exact:
            transcode.transcode(self.open(EXACT), place, pair)
        return Store(place)

    def of_run(self, pair: Pair, seed: int) -> list[str]:
        """The options of one training and its evaluation."""
        run_dir = (self.folder / f"{pair.folder}-seed{seed}").absolute()
        return [f"run_dir={run_dir}", self.at(pair), f"seed={seed}"]

    def train(self, pair: Pair, seed: int) -> dict[str, Any]:
        """Train and decode; what both stages measured."""
        more = self.of_run(pair, seed)
        self.run([*self.launch, "train.py"], *more)
        self.run(["eagle31_train.evaluate"], *more)
        folder = Path(more[0].partition("=")[2])
        trained = artifacts.read_json(folder / "train" / artifacts.MANIFEST, "train.py")
        decoded = artifacts.read_json(folder / "evaluate" / artifacts.MANIFEST, "python -m eagle31_train.evaluate")
        return {
            "tau": trained["heldout"]["tau"],
            "prefix": trained["heldout"]["prefix_at_depth"],
            "acceptance": decoded["report"]["acceptance_length"],
            "prompts": [[one["drafts"], sum(one["accepted_per_position"])] for one in decoded["per_prompt"]],
            "steps": trained["steps"],
            "train_seconds": trained["seconds"],
            "waited": trained["waited"] / max(trained["seconds"], 1e-9),
            "evaluate_seconds": decoded["seconds"],
        }

    def forced(self, pair: Pair, seed: int) -> dict[str, Any]:
        """The drafter that was trained on bf16, teacher-forced over the held-out split of a pair's store."""
        config = cli.load_config(self.words(*self.of_run(EXACT, seed)))
        folder = Path(config.run_dir) / "train"
        manifest = artifacts.read_json(folder / artifacts.MANIFEST, "train.py")
        return teacher_forced(config, self.open(pair), folder / manifest["checkpoint"])


def teacher_forced(config: Config, store: Store, checkpoint: Path) -> dict[str, Any]:
    """tau and prefix rates of a trained drafter on a store, by the trainer's own evaluation."""
    kept = vocab.read(config.data_folder / "vocab.safetensors")
    objective = build_objective(config, shape_of(config.drafter, store, kept), store, kept)
    objective.drafter.load_state_dict(load_file(checkpoint / "model.safetensors"))
    parallel = parallelise(make_accelerator(config, checkpoint), objective, config.train)
    heldout, held = store.split("heldout"), torch.from_numpy(kept.t2d)
    found = evaluate(parallel, heldout, config, held, everything=True)
    return {"tau": found["tau"], "prefix": found["prefix_at_depth"], "loss": found["loss"]}


# ---------------------------------------------------------------- what it all says


def differences(runs: dict[str, dict[str, Any]], base: dict[str, dict[str, Any]], name: str) -> list[float]:
    """Relative differences to the runs of the same seed in `base`, seed by seed."""
    return [run[name] / base[seed][name] - 1 for seed, run in runs.items()]


def between_seeds(base: dict[str, dict[str, Any]], name: str) -> float | None:
    """RMS relative difference between two trainings that differ in nothing but the seed; None with one seed."""
    pairs = [(one[name] / other[name] - 1) ** 2 for one, other in combinations(base.values(), 2)]
    return statistics.mean(pairs) ** 0.5 if pairs else None


def jackknife(runs: dict[str, dict[str, Any]], base: dict[str, dict[str, Any]]) -> float | None:
    """Standard error of the acceptance length's relative difference, all seeds together, over the choice of prompts.

    Two codecs decode the same prompts to the same text, so that a prompt that is easy is easy for both.
    """
    count = len(next(iter(runs.values()))["prompts"])
    if count < 2:
        return None

    def length(of: dict[str, dict[str, Any]], without: int) -> float:
        rows = [row for run in of.values() for i, row in enumerate(run["prompts"]) if i != without]
        return 1 + sum(accepted for _, accepted in rows) / max(1, sum(drafts for drafts, _ in rows))

    values = [length(runs, i) / length(base, i) - 1 for i in range(count)]
    mean = statistics.mean(values)
    return ((count - 1) / count * sum((value - mean) ** 2 for value in values)) ** 0.5


def numbers(results: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per pair, with all differences to bf16 of the same seed."""
    base = results["pairs"][str(EXACT)]
    rows = []
    for name, found in results["pairs"].items():
        row: dict[str, Any] = {"name": name, **found["bytes"], **found["fidelity"]}
        for what, key in (("runs", "tau"), ("runs", "acceptance"), ("forced", "tau")):
            label = "forced" if what == "forced" else key
            values = [run[key] for run in found[what].values()]
            row[label] = statistics.mean(values)
            row[f"{label}_differences"] = differences(found[what], base[what], key)
        row["acceptance_error"] = None if name == str(EXACT) else jackknife(found["runs"], base["runs"])
        row["waited"] = max(run["waited"] for run in found["runs"].values())
        rows.append(row)
    return rows


def table(results: dict[str, Any]) -> str:
    """In markdown, and under it what noise there is."""
    head = ["aux:last", "B/token", f"KiB at H={WIDE}", "top-1", "KL", "aux error", "same drafter", "Δ", "tau", "Δ"]
    head += ["acceptance", "Δ", "± prompts", "wait"]
    rows = []
    for row in numbers(results):
        error = row["acceptance_error"]
        exact = row["name"] == str(EXACT)
        rows.append(
            [
                row["name"],
                f"{row['measured']:,.0f}",
                f"{row['wide'] / 1024:.2f}",
                f"{row['top1']:.2%}",
                f"{row['kl']:.1e}",
                f"{row['aux_error']:.2%}",
                *(
                    cell
                    for label in ("forced", "tau", "acceptance")
                    for cell in (f"{row[label]:.4f}", "" if exact else spread(row[f"{label}_differences"]))
                ),
                "" if error is None else f"{error:.2%}",
                f"{row['waited']:.2%}",
            ]
        )
    base = results["pairs"][str(EXACT)]["runs"]
    noise = {label: between_seeds(base, label) for label in ("tau", "acceptance")}
    known = {label: value for label, value in noise.items() if value is not None}
    said = ", ".join(f"{label} {value:.2%}" for label, value in known.items()) or "one seed tells nothing of it"
    return (
        f"{turns.markdown(head, rows)}\n\nΔ: to bf16 of the same seed, mean over seeds {', '.join(base)} "
        f"[least, most]. Between two seeds of bf16 (RMS): {said}."
    )


def spread(values: Sequence[float]) -> str:
    """Mean, and least and most where there are several."""
    mean = f"{statistics.mean(values):+.2%}"
    return mean if len(values) < 2 else f"{mean} [{min(values):+.2%}, {max(values):+.2%}]"


def sizes(pair: Pair, store: Store) -> dict[str, float]:
    """Bytes per token: of this store, and at H = WIDE where every position, or a share as here, needs its states."""
    assert store.manifest is not None
    layers, (aux, last) = store.shape.aux_layers, transcode.shares(store)
    return {
        "measured": store.manifest["bytes_per_token"],
        "wide": transcode.bytes_per_token(pair, WIDE, layers),
        "wide_as_here": transcode.bytes_per_token(pair, WIDE, layers, aux, last),
        "aux_share": aux,
        "last_share": last,
    }


# ---------------------------------------------------------------- the command


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--experiment", default="smollm2", help="the recipe; its data stage must be done")
    parser.add_argument("--options", nargs="*", default=[], metavar="KEY=VALUE", help="further options of the stages")
    parser.add_argument("--store", help="a finished store in bf16; default: extract one into --folder")
    parser.add_argument("--pairs", nargs="+", default=PAIRS, metavar="AUX:LAST", help="bf16:bf16 is always among them")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, help="train.max_steps; default: the recipe's")
    parser.add_argument("--prompts", type=int, default=1000, help="held-out prompts decoded; default: all")
    parser.add_argument("--launch", default="configs/accelerate/cpu.yaml", help="accelerate's configuration")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench/codecs"), help="for stores and runs; kept")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/codecs"), help="without .json and .png")
    parser.add_argument("--quick", action="store_true", help="a smoke test: a slice of the data, four steps")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.folder, chosen.out = chosen.folder / "quick", chosen.out.with_name("codecs-quick")
        chosen.pairs, chosen.seeds, chosen.steps, chosen.prompts = ["bf16:bf16", "int4:int8"], [1, 2], 4, 2
        chosen.options = [*chosen.options, *QUICK]
    return chosen


def begin(chosen: argparse.Namespace) -> Study:
    """The study, with its data and its store in bf16."""
    given = cli.load_config([f"+experiment={chosen.experiment}", *chosen.options])
    words = [*chosen.options, f"name=codecs-{given.name}", "train.wandb=disabled"]
    words += [f"evaluate.num_prompts={chosen.prompts}"]
    words += [f"train.max_steps={chosen.steps}"] if chosen.steps else []
    piece = None
    if chosen.quick:
        piece = chosen.folder / "conversations.jsonl"
        piece.parent.mkdir(parents=True, exist_ok=True)
        lines = Path(str(given.data.conversations)).read_text(encoding="utf-8").splitlines(keepends=True)
        artifacts.write_text(piece, "".join(lines[:: len(lines) // 20]))
    else:
        words += [f"data_dir={given.data_folder.absolute()}"]
    launch = ["accelerate.commands.launch", "--quiet", "--config_file", chosen.launch]
    return Study(chosen.experiment, chosen.folder, words, chosen.store, launch).prepare(piece)


def main() -> None:
    """Every pair, then every seed; the JSON is written anew after each run."""
    chosen = options()
    pairs = list(dict.fromkeys([EXACT, *map(Pair.parse, chosen.pairs)]))
    study = begin(chosen)
    head = turns.here("accelerate", "safetensors", "xxhash")
    exact = study.open(EXACT)
    found: dict[str, Any] = {}
    for pair in pairs:
        store = study.open(pair)
        lost = transcode.fidelity(exact, store)
        found[str(pair)] = {"bytes": sizes(pair, store), "fidelity": lost, "runs": {}, "forced": {}}
    results = {**head, "experiment": chosen.experiment, "options": study.options, "pairs": found}
    for seed in chosen.seeds:
        for pair in pairs:
            found[str(pair)]["runs"][str(seed)] = study.train(pair, seed)
            found[str(pair)]["forced"][str(seed)] = study.forced(pair, seed)
            turns.write(chosen.out, results)
    print(machine.summary(head["machine"]))
    print(table(results))
    print(turns.picture(chosen.out, lambda file: store_plot.codecs(numbers(results), head["machine"], file)))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
