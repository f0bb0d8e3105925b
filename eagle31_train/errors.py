"""How a stage ends early: what the user can mend, and a stop that the user asked for."""

from eagle31_train import shown


class UserError(ValueError):
    """Something the user can mend. The text says what, where, and what to do, in one line."""

    def __init__(self, text: object) -> None:
        super().__init__(shown.line(text))


class SharedError(UserError):
    """Every process of a launch raises it, and the first has printed it already."""


class Stopped(Exception):  # noqa: N818 (not an error: the run asked for it)
    """The stage saved and left before its end because it was told to; the same command goes on. Exit status 75."""
