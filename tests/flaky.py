"""A file system in memory whose calls fail as told."""

from fsspec.implementations.memory import MemoryFileSystem

CALLS = ("cat_file", "get_file", "pipe_file", "put_file", "info", "ls", "rm_file", "find")


class Flaky(MemoryFileSystem):
    """Before each call of a kind comes the next of its `faults`: an exception, or a function of the path."""

    def __init__(self, **kwargs):
        super().__init__(global_store=False, **kwargs)
        self.faults = {call: [] for call in CALLS}
        self.made = []

    def _meet(self, call, path):
        self.made.append(call)
        if self.faults[call]:
            fault = self.faults[call].pop(0)
            if isinstance(fault, BaseException):
                raise fault
            return fault(path)
        return None


def _flaky(call):
    def run(self, path, *args, **kwargs):
        where = args[0] if call == "put_file" else path
        answer = self._meet(call, where)
        return getattr(MemoryFileSystem, call)(self, path, *args, **kwargs) if answer is None else answer

    return run


for name in CALLS:
    setattr(Flaky, name, _flaky(name))
