"""A process that dies, or whose disk is full, at a chosen operation of the file system."""

import sys
from contextlib import contextmanager
from unittest.mock import patch

from eagle31_train.store import tensors

_machine = None


class Killed(BaseException):
    """The process is dead: nothing that it had in mind happens any more, cleaning up neither."""


def kill(machine):
    """Whatever it tries from now on does not happen."""
    machine.at = range(machine.count, sys.maxsize)
    raise Killed


class Machine:
    """Counts the operations that change the file system, and does `what` at number `at`.

    Operations are: making or opening a file to write, half a write, forcing it to the disk, renaming, removing,
    making a folder.
    """

    def __init__(self, at=None, what=None):
        self.at, self.what = range(at, at + 1) if at is not None else (), what
        self.count, self.names = 0, []

    def operation(self, name):
        number, self.count = self.count, self.count + 1
        self.names.append(name)
        if number in self.at:
            self.what(self)


def _audit(event, arguments):
    if _machine is None:
        return
    if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
        _machine.operation(event)
    elif event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        _machine.operation("open")


sys.addaudithook(_audit)  # for good, but it does nothing outside of `running`


@contextmanager
def running(machine):
    """What is done here is done on this machine."""
    global _machine
    write_all = tensors._write_all

    def forced(descriptor):  # this machine loses no power, and the disk's time is not what is tested
        machine.operation("fsync")

    def written(file, data):
        half = memoryview(data).cast("B") if len(data) else memoryview(b"")
        write_all(file, half[: len(half) // 2])
        machine.operation("write")
        write_all(file, half[len(half) // 2 :])

    def write_small(path, data):
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            machine.operation("write")
            file.write(data[len(data) // 2 :])

    with (
        patch("os.fsync", forced),
        patch.object(tensors, "_write_all", written),
        patch("pathlib.Path.write_bytes", write_small),
    ):
        _machine = machine
        try:
            yield machine
        finally:
            _machine = None
