"""Write a commented recipe into this folder.

eagle31 new mine                           writes mine.yaml
eagle31 run +experiment=mine.yaml
"""

from pathlib import Path

from eagle31_train.common import artifacts
from eagle31_train.common.console import explained, note, parser, tidy
from eagle31_train.common.errors import UserError
from eagle31_train.common.locations import PACKAGE

TEMPLATE = PACKAGE / "recipe.yaml"


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__, prog="eagle31 new")
    options.add_argument("name", help="of the recipe: letters, digits, - and _")
    name = options.parse_args(argv).name.removesuffix(".yaml")
    file = Path(f"{name}.yaml")
    if not name.replace("-", "").replace("_", "").isalnum():
        options.error(f"{name!r} is not a valid recipe name: use letters, digits, - and _")
    with explained(), tidy():
        text = TEMPLATE.read_text(encoding="utf-8").replace("NAME", name)
        if file.exists() and (not file.is_file() or file.read_bytes() != text.encode()):
            raise UserError(f"{file} already exists: choose another name, or move it")
        artifacts.write_text(file, text)
        note(f"wrote {file}: set target.path in it, then")
        note(f"  eagle31 plan +experiment={file}\n  eagle31 run +experiment={file}")


if __name__ == "__main__":
    main()
