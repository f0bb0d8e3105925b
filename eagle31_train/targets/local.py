"""Targets that the repository makes itself, for trying everything without a model hub: a folder each, made once."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle31_train import artifacts
from eagle31_train.console import note, tidy
from eagle31_train.errors import UserError
from eagle31_train.provenance import Provenance


def command(make: Callable[[Path], Any], out: Path, description: str, argv: list[str] | None = None) -> None:
    """A command line with `--out`, by default `out`; exit status 2 on a user's mistake."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=out, help=f"folder to make [{out}]")
    arguments = parser.parse_args(argv)
    try:
        with tidy():
            make(arguments.out)
    except UserError as error:
        note(f"error: {error}", error=True)
        raise SystemExit(2) from None


def make_folder(out: Path, identity: str, recipe: dict[str, Any], fill: Callable[[Path], dict[str, Any]]) -> Path:
    """Make a target's folder; do nothing where it is there, whole and by the same recipe; UserError for anything else.

    Args:
        identity: the key of `recipe` whose value marks a folder as this target's, which may be replaced.
        recipe: what the folder depends on, known before it is made; the manifest's `inputs` hold it.
        fill: writes the files into a folder, and returns further inputs.
    """
    # The real path first: `a/..` would mean another folder once `a` exists, and what `out` holds is replaced.
    out = out.resolve()
    manifest: dict[str, Any] = {}
    if (out / artifacts.MANIFEST).is_file():
        manifest = artifacts.read_json(out / artifacts.MANIFEST, "this command")
    inputs = manifest.get("inputs", {})
    ours = inputs.get(identity) == recipe[identity]
    empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not ours and not empty:
        raise UserError(f"{out} exists and was not made by this command: move it away or choose another --out")
    if ours and recipe.items() <= inputs.items() and artifacts.first_damaged(out, manifest["files"]) is None:
        note(f"target: {out} is up to date")
        return out
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    inputs = {**recipe, **fill(temporary)}
    files = artifacts.list_files(temporary, [file for file in temporary.iterdir() if file.is_file()])
    artifacts.write_json(temporary / artifacts.MANIFEST, Provenance(inputs).record(files=files))
    artifacts.commit(temporary, out)
    note(f"target: made {out}")
    return out
