"""Where the project's own files are: in a checkout beside the packages, in an installed wheel within them."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent  # of a checkout, or site-packages
IN_CHECKOUT = not (PACKAGE / "configs").is_dir()
CONFIGS = ROOT / "configs" if IN_CHECKOUT else PACKAGE / "configs"
# Where data_prep/ and train/ are: names too common to stand beside other projects' in site-packages.
STAGES = ROOT if IN_CHECKOUT else PACKAGE / "stages"
# Of targets that the project makes itself; never within an installation.
MODELS = (ROOT if IN_CHECKOUT else Path.cwd()) / "models"
# What a message calls a stage, and what it is where there is no checkout.
INSTALLED = {"python -m data_prep": "eagle31 data", "accelerate launch train.py": "eagle31 train"}


def project(path: str) -> str:
    """A path of `${project:…}` in a recipe: models/… or a file that comes with the packages."""
    first, _, rest = path.partition("/")
    return str(MODELS / rest if first == "models" else STAGES / path)


def as_called_here(message: str) -> str:
    """A message that names commands, with those that there are here."""
    for command, installed in INSTALLED.items():
        message = message if IN_CHECKOUT else message.replace(command, installed)
    return message
