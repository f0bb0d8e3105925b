"""A store in a folder of this machine."""

import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from eagle31_train import artifacts, foreign
from eagle31_train.errors import UserError
from eagle31_train.store.backends.base import Storage, visible

MOST = 1 << 32  # bytes of a small file: the plan of a hundred million samples


class LocalStorage(Storage):
    """A folder of this machine, or of a file system that it has mounted."""

    remote = False

    def __init__(self, location: str, folder: Path) -> None:
        self.location = location
        self.folder = folder

    def read(self, name: str) -> bytes:
        with self._explained("read", name):
            try:
                foreign.check_file(self.folder / name, MOST)
            except ValueError as error:
                raise UserError(f"{self.folder / name} cannot be read ({error}): remove it") from None
            return (self.folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        with self._explained("write", name):
            self._make((self.folder / name).parent)
            artifacts.write_bytes(self.folder / name, data)

    def scratch(self, name: str) -> Path:
        path = self.folder / name
        with self._explained("write", name):
            self._make(path.parent)
        return path.with_name(f".{path.name}.tmp")

    def lock(self, name: str) -> Path:
        beside = self._beside(name)
        with self._explained("write", ""):
            self._make(beside.parent)
        # Where nothing can be made beside the folder, as beside a mount, `discard` cannot rename it either.
        return beside if os.access(beside.parent, os.W_OK) else self.folder / beside.name

    def put(self, scratch: Path, name: str) -> None:
        with self._explained("write", name):
            artifacts.commit(scratch, self.folder / name)

    def size(self, name: str) -> int | None:
        with self._explained("read", name):
            try:  # one question: another process may remove the file between two
                status = (self.folder / name).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def sizes(self, folder: str) -> dict[str, int]:
        sizes = {}
        with self._explained("list", folder):
            try:
                entries = os.scandir(self.folder / folder)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            with entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # listed, then removed by another process
                        if entry.is_file():
                            sizes[entry.name] = entry.stat().st_size
        return visible(folder, sizes)

    def remove(self, name: str) -> None:
        with self._explained("remove", name):
            (self.folder / name).unlink(missing_ok=True)

    def local(self, name: str) -> Path:
        if self.size(name) is None:
            raise FileNotFoundError(f"{self.folder / name} is missing")
        return self.folder / name

    def forget(self, name: str) -> None:
        artifacts.forget_pages(self.folder / name)

    def discard(self) -> None:
        with self._explained("remove", ""):
            if self.folder.is_dir():
                artifacts.discard(self.folder)

    def clean(self, names: Sequence[str]) -> None:
        super().clean(names)
        shutil.rmtree(self._beside("old"), ignore_errors=True)  # of a killed `discard`

    def _beside(self, end: str) -> Path:
        """A hidden name beside the folder, wherever a link leads."""
        folder = Path(os.path.realpath(self.folder))
        return folder.with_name(f".{folder.name}.{end}")

    def _make(self, folder: Path) -> None:
        """A folder whose own name survives a power cut, like the files in it."""
        if not folder.is_dir():
            self._make(folder.parent)
            folder.mkdir(exist_ok=True)
            artifacts.fsync_path(folder.parent)

    def _explained(self, what: str, name: str) -> AbstractContextManager[None]:
        remedy = "mend that or choose another store_dir, then run the same command again"
        return artifacts.explained(f"{what} {self.folder / name}", remedy)
