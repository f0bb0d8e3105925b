"""Side-by-side measurements that anyone can repeat: what the training step costs, beside peers and the machine."""

from collections.abc import Callable

from eagle31_train.common.errors import UserError


def run_main(main: Callable[[], None]) -> None:
    """Run a benchmark; report a UserError as one line."""
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
