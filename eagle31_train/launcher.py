"""`python -m eagle31_train.launcher`: accelerate's launcher of several processes, which ends without a traceback.

Its exit status is that of the process that failed first: 75 of a training that was told to stop, and saved; 130 after
Ctrl-C. Both signals go on to the processes, which may take as long as they need; torchrun itself would kill them after
30 seconds, and end with 1.
"""

import logging
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from subprocess import CalledProcessError

import psutil

from eagle31_train.common.console import INTERRUPTED, note


def main() -> None:
    """Launch as the command line says; SystemExit if the training fails or is interrupted."""
    pressed: list[int] = []

    def pass_on(number: int, _: object) -> None:
        if number == signal.SIGINT:
            pressed.append(number)
        processes = psutil.Process().children()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        if not processes:  # nothing runs yet
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    try:
        launch = import_module("accelerate.commands.launch")  # takes seconds, during which Ctrl-C may come
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, pass_on)
        # In another thread torchrun leaves signals alone, but warns of it. How a process ended is reported below.
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(launch.main).result()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        if pressed:
            raise SystemExit(INTERRUPTED) from None
        elastic = import_module("torch.distributed.elastic.multiprocessing.errors")
        if isinstance(error, elastic.ChildFailedError):
            rank, failure = error.get_first_failure()
            status = failure.exitcode
        elif isinstance(error, CalledProcessError):  # a launch of one process
            rank, status = 0, error.returncode
        else:
            raise
        if status < 0:  # otherwise the process itself has said why
            killer, reason = signal.Signals(-status), " (out of memory?)"
            note(f"error: rank {rank} was killed by {killer.name}{reason * (killer == signal.SIGKILL)}", error=True)
        raise SystemExit(status if status > 0 else 128 - status) from None


if __name__ == "__main__":
    main()
