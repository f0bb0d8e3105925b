"""How a stage ends early: what the user can mend, and a stop that the user asked for."""

from eagle31_train.common import shown


class UserError(ValueError):
    """Something the user can mend. The text says what, where, and what to do, in one line."""

    def __init__(self, text: object) -> None:
        super().__init__(shown.line(text))


class SharedError(UserError):
    """Every process of a launch raises it, and the first has printed it already."""


class Stopped(Exception):  # noqa: N818 (not an error: the run asked for it)
    """The stage saved and left before its end because it was told to; the same command goes on. Exit status 75."""


class Interrupted(Stopped):
    """Likewise, by Ctrl-C. Exit status 130."""


class Refused(Exception):  # noqa: N818 (one of many is left out, and the run goes on)
    """Why a row, a prompt or an answer is of no use; the same text for like cases, which are counted."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says something, with the next where that is announced by a colon, or
    by `datasets` as the names to choose from."""
    first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join([first, *more[:1]]) if first.endswith(":") or first.startswith("Config name is missing") else first
