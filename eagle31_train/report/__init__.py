"""What a training run looks like: its curves as pictures, and one page that shows all of it.

    python -m eagle31_train.report runs/smollm2

Reads what training left in run/train, whether it has ended or not, and writes run/report.
"""

from pathlib import Path

from tqdm import tqdm

from eagle31_train import artifacts
from eagle31_train.report.figures import PLOTS, plots
from eagle31_train.report.history import read
from eagle31_train.report.page import render
from eagle31_train.schema import UserError

PAGE = "report.html"


def make(run: Path, out: Path | None = None) -> tuple[Path, list[str]]:
    """Draw a run.

    Args:
        run: the run's folder, or the folder `train` in it.
        out: where the page and the pictures go; default: the folder `report` in the run's.

    Returns:
        The page, and what the reader should know of the files that it was made from, a line each.

    Raises:
        UserError: there is no run, or one of its files is damaged.
    """
    history = read(run)
    out = out or history.folder.parent / "report"
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give another --out")
    out.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for plot in tqdm(plots(history), desc="report", unit="picture", disable=None):
        drawn[plot] = plot.on("light", history).png(), plot.on("dark", history).png()
        write(out / f"{plot.name}.png", drawn[plot][0])
    for plot in PLOTS:
        if plot not in drawn:  # of an earlier report
            (out / f"{plot.name}.png").unlink(missing_ok=True)
    artifacts.write_text(out / PAGE, render(history, drawn))
    return out / PAGE, history.notes


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(data)
        artifacts.commit(temporary, path)
    except BaseException:  # a full disk, Ctrl-C: nothing half-written stays
        temporary.unlink(missing_ok=True)
        raise
