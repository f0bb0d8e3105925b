"""Keeps a server no longer than whoever asked for it; with nothing but the standard library.

    python keeper.py GRACE COMMAND …

The command runs in a process group of its own until the other end of this process's standard input is closed, as the
kernel does whichever way its holder ends; then the whole group ends, first asked, and after GRACE seconds made to. Exit
status: the command's.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress


def keep(grace: float, command: list[str]) -> int:
    """Run a command until it ends or nobody holds our standard input; its exit status."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while child.poll() is None:
            if select.select([sys.stdin], [], [], 0.1)[0] and not os.read(sys.stdin.fileno(), 1):
                break
    finally:
        end(child, grace)
    return child.returncode


def end(child: subprocess.Popen, grace: float) -> None:
    """End a process and all of its group: an engine outlives its server otherwise."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace
        with suppress(ProcessLookupError):  # nobody of the group is left
            os.killpg(child.pid, number)
            while time.monotonic() < deadline:
                child.poll()  # or it stays in the group as a zombie
                os.killpg(child.pid, 0)
                time.sleep(0.05)
    child.wait()


def _stop(*_: object) -> None:
    raise SystemExit(143)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    status = keep(float(sys.argv[1]), sys.argv[2:])
    raise SystemExit(status if status >= 0 else 128 - status)
