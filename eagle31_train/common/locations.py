"""Where files are: those of the project, in a checkout or an installed wheel, and those that a glob matches."""

import glob
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent  # of a checkout, or site-packages
IN_CHECKOUT = not (PACKAGE / "configs").is_dir()
CONFIGS = ROOT / "configs" if IN_CHECKOUT else PACKAGE / "configs"
# Where data_prep/ and train/ are: names too common to stand beside other projects' in site-packages.
STAGES = ROOT if IN_CHECKOUT else PACKAGE / "stages"
# Of targets that the project makes itself; never within an installation.
MODELS = (ROOT if IN_CHECKOUT else Path.cwd()) / "models"


def project(path: str) -> str:
    """A path of `${project:…}` in a recipe: models/… or a file that comes with the packages."""
    first, _, rest = path.partition("/")
    return str(MODELS / rest if first == "models" else STAGES / path)


def matching(pattern: str) -> list[Path]:
    """The paths that a glob matches, in order; names of what exists, and of its first folders, are no patterns."""
    if not pattern or Path(pattern).exists():
        return [Path(pattern)] if pattern else []
    parts = Path(pattern).parts
    literal = next(n for n in range(len(parts) - 1, -1, -1) if Path(*parts[:n]).is_dir())
    root = Path(*parts[:literal])
    names = glob.glob(str(Path(*parts[literal:])), root_dir=root, recursive=True)  # noqa: PTH207 (takes hidden files too)
    return [root / name for name in sorted(names)]
