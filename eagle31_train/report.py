"""Draw the curves of a training run: pictures, and one self-contained HTML page.

eagle31 report runs/smollm2
eagle31 report runs/smollm2 --out /somewhere/else

The run may still be in progress. The page shows loss, acceptance and state per depth, the optimizer, speed and the
final numbers. It needs no other file, so it can be mailed.
"""

from collections.abc import Sequence
from pathlib import Path

from eagle31_train.common.console import explained, note, parser, tidy
from eagle31_train.reporting.training_page import write


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; exit with status 2 on a UserError."""
    words = parser(__doc__, prog="eagle31 report")
    words.add_argument("run", type=Path, help="the run's folder, such as runs/smollm2, or the folder train in it")
    words.add_argument("--out", type=Path, help="where page and pictures go (default: the folder report in the run's)")
    options = words.parse_args(arguments)
    with explained(), tidy():
        page, notes = write(options.run, options.out)
        note("\n".join([*notes, str(page)]))


if __name__ == "__main__":
    main()
