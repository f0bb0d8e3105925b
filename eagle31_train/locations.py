"""Where the project's own files are: in a checkout beside the packages, in an installed wheel within them."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent  # of a checkout, or site-packages
IN_CHECKOUT = (ROOT / "configs").is_dir()
CONFIGS = ROOT / "configs" if IN_CHECKOUT else PACKAGE / "configs"
# Of targets that the project makes itself; never within an installation.
MODELS = (ROOT if IN_CHECKOUT else Path.cwd()) / "models"


def project(path: str) -> str:
    """A path of `${project:…}` in a recipe: models/… or a file that comes with the packages."""
    first, _, rest = path.partition("/")
    return str(MODELS / rest if first == "models" else ROOT / path)
