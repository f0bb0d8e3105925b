"""`python -m eagle31_train.launcher`: accelerate's launcher, which Ctrl-C ends without a traceback, with status 130.

It ends after the training, which gets the signal itself and says so.
"""

import signal
from importlib import import_module


def main() -> None:
    """Launch as the command line says; SystemExit with 130 after Ctrl-C."""
    pressed: list[int] = []
    try:
        launch = import_module("accelerate.commands.launch")  # takes seconds, in which Ctrl-C may come
        signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
        launch.main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (Exception, SystemExit) as error:
        # Several processes are launched by torchrun, which turns the signal into an exception of its own.
        if not pressed and getattr(error, "sigval", None) != signal.SIGINT:
            raise
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
