"""A file system in memory whose calls fail as told."""

from fsspec.implementations.memory import MemoryFileSystem

CALLS = ("cat_file", "get_file", "pipe_file", "put_file", "info", "ls", "rm_file", "find")


class Flaky(MemoryFileSystem):
    """Before each call of a kind comes the next of its `faults`."""

    def __init__(self, **kwargs):
        super().__init__(global_store=False, **kwargs)
        self.faults = {call: [] for call in CALLS}


def _flaky(call):
    def run(self, *args, **kwargs):
        if self.faults[call]:
            raise self.faults[call].pop(0)
        return getattr(MemoryFileSystem, call)(self, *args, **kwargs)

    return run


for name in CALLS:
    setattr(Flaky, name, _flaky(name))
