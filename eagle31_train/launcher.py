"""`python -m eagle31_train.launcher`: accelerate's launcher of several processes, which ends without a traceback.

Its exit status is that of the process that failed first. After Ctrl-C it waits for the training, which gets the signal
itself and says so, and ends with 130.
"""

import signal
from importlib import import_module
from subprocess import CalledProcessError

from eagle31_train.console import note


def main() -> None:
    """Launch as the command line says; SystemExit if the training fails or is interrupted."""
    pressed: list[int] = []
    try:
        launch = import_module("accelerate.commands.launch")  # takes seconds, in which Ctrl-C may come
        signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
        launch.main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        # torchrun, which starts the processes, turns the signal into an exception of its own.
        if pressed or getattr(error, "sigval", None) == signal.SIGINT:
            raise SystemExit(130) from None
        elastic = import_module("torch.distributed.elastic.multiprocessing.errors")
        if isinstance(error, elastic.ChildFailedError):
            rank, failure = error.get_first_failure()
            status = failure.exitcode
        elif isinstance(error, CalledProcessError):  # of one process
            rank, status = 0, error.returncode
        else:
            raise
        if status < 0:  # else it has said why itself
            killer, reason = signal.Signals(-status), ", for want of memory perhaps"
            note(f"error: rank {rank} was killed by {killer.name}{reason * (killer == signal.SIGKILL)}", error=True)
        raise SystemExit(status if status > 0 else 128 - status) from None


if __name__ == "__main__":
    main()
