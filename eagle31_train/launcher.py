"""`python -m eagle31_train.launcher`: accelerate's launcher, which ends as the training does, without a traceback.

Its exit status is that of the process that failed first, or 130 after Ctrl-C. Then it ends after the training, which
gets the signal itself and says so.
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
        # Several processes are launched by torchrun, which turns the signal into an exception of its own.
        if pressed or getattr(error, "sigval", None) == signal.SIGINT:
            raise SystemExit(130) from None
        if (failed := failed_process(error)) is None:
            raise
        name, status = failed
        if status < 0:  # else it has said why itself
            killer = f"{name} was killed by {signal.Signals(-status).name}"
            note(f"error: {killer}{', for want of memory perhaps' * (-status == signal.SIGKILL)}", error=True)
        raise SystemExit(status if status > 0 else 128 - status) from None


def failed_process(error: Exception) -> tuple[str, int] | None:
    """Which process failed first, and its exit status or minus its signal; None if the error is of another kind."""
    if isinstance(error, CalledProcessError):  # of the one process
        return "training", error.returncode
    elastic = import_module("torch.distributed.elastic.multiprocessing.errors")
    if not isinstance(error, elastic.ChildFailedError):
        return None
    rank, failure = error.get_first_failure()
    return f"rank {rank}", failure.exitcode


if __name__ == "__main__":
    main()
