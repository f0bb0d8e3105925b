"""Keeps a server running only as long as the process that asked for it; needs only the standard library.

    python keeper.py GRACE COMMAND …

The command runs in its own process group until the other end of this process's standard input is closed. The kernel
closes it however its holder ends. Then the whole group is ended, by SIGTERM and, after GRACE seconds, by SIGKILL. The
exit status is the command's.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress


def keep(grace: float, command: list[str]) -> int:
    """Run a command until it ends, or until the other end of our standard input is closed. Return its exit status."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while child.poll() is None:
            if select.select([sys.stdin], [], [], 0.1)[0] and not os.read(sys.stdin.fileno(), 1):
                break
    finally:
        end(child, grace)
    return child.returncode


def end(child: subprocess.Popen, grace: float) -> None:
    """End a process and all of its group; otherwise an engine would outlive its server."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace
        with suppress(ProcessLookupError):  # the group has no processes left
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
