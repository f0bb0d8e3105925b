"""Files that stages hand over: written whole or not at all, and identified by what they were made from.

Every stage leaves a `manifest.json`, written last, with a hash of all that its output depends on (provenance.py) and
a list of its files. Output without one does not count as finished.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash

from eagle31_train.common import foreign
from eagle31_train.common.errors import UserError

MANIFEST = "manifest.json"
LARGE, SAMPLES, BLOCK = 1 << 30, 256, 1 << 18  # see `weights_fingerprint`
CHUNK = 1 << 22  # bytes per read


@contextmanager
def explained(doing: str, remedy: str) -> Iterator[None]:
    """Context manager around use of the local disk that turns OSError, except FileNotFoundError, into UserError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"cannot {doing} ({error.strerror or error}): {remedy}") from None


@contextmanager
def located(path: Path) -> Iterator[None]:
    """Context manager around writes that gives an OSError its place: that of an open file has none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, so that their names survive a power cut.

    UserError where no folder can be made, as under /proc."""
    if path.is_dir():
        return
    make_folder(path.parent)
    refuse_dead_link(path)
    try:
        path.mkdir(exist_ok=True)
    except FileNotFoundError:  # which is about the parent; `console.explained` handles other errors
        raise UserError(f"cannot create {path}: choose another folder") from None
    fsync_path(path.parent)


def refuse_dead_link(folder: Path) -> None:
    """Raise UserError for a link to nothing, or to itself: no folder can be made there."""
    if folder.is_symlink() and not os.path.exists(folder):  # noqa: PTH110 (Path's raises for a link to itself)
        raise UserError(f"{folder} is a broken symbolic link: remove it, or choose another folder") from None


def fingerprint(value: Any) -> str:
    """Return 16 hex digits that change whenever the JSON of `value` does."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    return _digest(path, hashlib.sha256())


def checksum(path: Path) -> str:
    """Return the XXH3-128 of a file, as hex. It detects any accident as surely as SHA-256, at the memory's speed."""
    return _digest(path, xxhash.xxh3_128())


def _digest(path: Path, digest: Any) -> str:
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return str(digest.hexdigest())


def fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with located(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget_pages(path: Path) -> None:
    """Let the kernel drop its copy of a file, so that it is read from the disk again, which may have erred once."""
    with suppress(OSError), path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def commit(temporary: Path, final: Path) -> None:
    """Rename a finished file or folder to its final name, so that it survives a power cut.

    Meanwhile a folder's predecessor is kept as `.NAME.old`: a kill at any instant leaves one of them whole."""
    for path in [temporary, *temporary.rglob("*")] if temporary.is_dir() else [temporary]:
        fsync_path(path)
    if final.is_dir():
        back_up(final)
    temporary.replace(final)
    fsync_path(final.parent)
    remove_backup(final)


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Context manager: an empty folder that replaces `folder` when the block ends, and is removed if it fails."""
    folder = _linked(folder)
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(temporary)
    try:
        with located(folder):
            yield temporary
            commit(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_bytes(path: Path, data: bytes) -> None:
    write_parts(path, [data])


def write_parts(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file whole or not at all."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with located(path):
            with temporary.open("wb") as file:
                file.writelines(parts)
            commit(temporary, path)
    except BaseException:  # a full disk, Ctrl-C: nothing half-written stays
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


class MissingKeyError(UserError, LookupError):
    """A record of ours lacks a key. It is a LookupError, too, so that a Jinja template may ask for a missing key."""


class Record(dict[str, Any]):
    """A JSON object that this project wrote, read back. A missing key is a UserError: somebody altered the file."""

    def __init__(self, value: Mapping[str, Any], path: Path, made_by: str) -> None:
        super().__init__(value)
        self._path, self._made_by = path, made_by

    def __missing__(self, key: str) -> Any:
        text = f"{self._path} is damaged (it has no {key}): remove it and run {_quoted(self._made_by)} again"
        raise MissingKeyError(text)


def read_json(path: Path, made_by: str) -> Record:
    """Read a JSON object; `made_by` is the command that makes it, for the error."""
    try:
        if not path.is_file():
            raise FileNotFoundError(path)
        value = foreign.read_object(path)
        if not isinstance(value.get("inputs", {}), dict):
            raise ValueError("its inputs are not an object")  # noqa: TRY004 (of the file)
        return Record(value, path, made_by)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: run {_quoted(made_by)} first") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): remove it and run {_quoted(made_by)} again") from None


def _quoted(command: str) -> str:
    """Return a command as a message shows it; "this command" stays plain words."""
    return command if command == "this command" else f"`{command}`"


def list_files(folder: Path, files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the manifest's `files`: relative name → size in bytes and SHA-256."""
    return {
        str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        for file in sorted(files)
    }


def first_damaged(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Describe the first listed file that is missing or damaged, or return None.

    Files are compared by `sha256`, in checkpoints by `checksum`. One that differs is read from the disk once more."""
    for name, entry in files.items():
        file = folder / name
        if not file.is_file():
            return f"{file} is missing"
        key, digest = ("sha256", file_sha256) if "sha256" in entry else ("checksum", checksum)
        try:
            if (size := file.stat().st_size) != entry["bytes"]:
                return f"{file} has {size} bytes, not {entry['bytes']}: truncated or replaced"
            if digest(file) != entry[key]:
                forget_pages(file)
                if digest(file) != entry[key]:
                    return f"{file} does not match its checksum: damaged or replaced"
        except OSError as error:
            return f"{file} cannot be read ({error})"
    return None


def discard(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that it is gone at once. If it is a link, its target stays, empty."""
    back_up(folder)
    shutil.rmtree(backup_of(folder))


def back_up(folder: Path) -> None:
    """Rename a folder to `.NAME.old`, replacing any earlier backup. If it is a link, its target stays, empty."""
    remove_backup(folder)
    _linked(folder).replace(backup_of(folder))
    if folder.is_symlink():
        _linked(folder).mkdir()


def remove_backup(folder: Path) -> None:
    """Remove a folder's backup, if it has one."""
    shutil.rmtree(backup_of(folder), ignore_errors=True)


def restore_backup(folder: Path) -> bool:
    """Put a folder's backup back in its place. Return whether there was one."""
    if there := (old := backup_of(folder)).exists():
        shutil.rmtree(_linked(folder), ignore_errors=True)
        old.replace(_linked(folder))
    return there


def backup_of(folder: Path) -> Path:
    """Return the path of a folder's backup, which need not exist."""
    folder = _linked(folder)
    return folder.with_name(f".{folder.name}.old")


def _linked(folder: Path) -> Path:
    """Return the folder that a link leads to, perhaps on another disk, or the folder itself if it is no link."""
    return Path(os.path.realpath(folder)) if folder.is_symlink() else folder


def weights_fingerprint(path: str) -> str:
    """Return a fingerprint of a target: names, sizes and contents of a local directory's weights, config and code.

    Of files over LARGE bytes, it has SAMPLES blocks spread over the file. Of a hub id, it has the id alone."""
    kinds = ("*.safetensors", "*.bin", "config.json", "*.py")
    files = sorted(file for kind in kinds for file in Path(path).glob(kind)) if Path(path).is_dir() else []
    return fingerprint([(f.name, f.stat().st_size, _content_sha256(f)) for f in files] or path)


def rendering_fingerprint(path: str) -> str:
    """Return a fingerprint of a local directory's tokenizer and chat template; of a hub id, that of the id alone."""
    kinds = ["tokenizer*", "chat_template*", "additional_chat_templates/*", "special_tokens_map.json"]
    kinds += ["added_tokens.json", "vocab*", "merges*", "*.model", "*.tiktoken"]
    files = sorted({file for kind in kinds for file in Path(path).glob(kind) if file.is_file()})
    return fingerprint([(file.name, file_sha256(file)) for file in files] or path)


def _content_sha256(path: Path) -> str:
    size = path.stat().st_size
    if size <= LARGE:
        return file_sha256(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in range(SAMPLES):
            file.seek((size - BLOCK) * block // (SAMPLES - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def describe_change(
    old: dict[str, Any], new: dict[str, Any], prefix: str = "", options: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Describe what differs between two sets of inputs. `options` maps names in records to their options, if any."""
    changes = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key, "unset"), new.get(key, "unset")  # None is a value of its own
        if isinstance(before, dict) and isinstance(after, dict):
            if inner := describe_change(before, after, f"{prefix}{key}.", options):
                changes.append(inner)
        elif before != after:
            above = options.get(prefix[:-1], prefix[:-1])  # a mapping that is an option as a whole
            name = options.get(f"{prefix}{key}", f"{above}.{key}" if above else key)
            changes.append(f"{name}: {_brief(before)} there, {_brief(after)} here")
    return "; ".join(changes)


def _brief(value: Any) -> Any:
    """Spell a value as the command line takes it, and shorten a hash to as many digits as tell it from another."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value[:12]}…" if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32,}", value) else value
