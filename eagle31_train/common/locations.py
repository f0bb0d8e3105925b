"""Where files are: the project's own, in a checkout or an installed wheel, and those that a glob matches."""

import glob
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent  # of a checkout, or site-packages
IN_CHECKOUT = not (PACKAGE / "configs").is_dir()
CONFIGS = ROOT / "configs" if IN_CHECKOUT else PACKAGE / "configs"
# The folder of data_prep/ and train/, names that are too common for the top of site-packages.
STAGES = ROOT if IN_CHECKOUT else PACKAGE / "stages"
# The folder of targets that the project makes itself, which is never within an installation.
MODELS = (ROOT if IN_CHECKOUT else Path.cwd()) / "models"


def project(path: str) -> str:
    """Resolve a path of `${project:…}` in a recipe: models/… or a file that comes with the packages."""
    first, _, rest = path.partition("/")
    return str(MODELS / rest if first == "models" else STAGES / path)


def matching(pattern: str) -> list[Path]:
    """Return the paths that a glob matches, in order. Existing paths, and existing leading folders, are literal."""
    if not pattern or Path(pattern).exists():
        return [Path(pattern)] if pattern else []
    parts = Path(pattern).parts
    literal = next(n for n in range(len(parts) - 1, -1, -1) if Path(*parts[:n]).is_dir())
    root = Path(*parts[:literal])
    names = glob.glob(str(Path(*parts[literal:])), root_dir=root, recursive=True)  # noqa: PTH207 (takes hidden files too)
    return [root / name for name in sorted(names)]
