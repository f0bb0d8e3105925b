"""How a stage ends early: errors that the user can mend, and stops that the user asked for."""

from eagle31_train.common import shown


class UserError(ValueError):
    """An error that the user can mend. The text says in one line what is wrong, where, and what to do."""

    def __init__(self, text: object) -> None:
        super().__init__(shown.line(text))


class SharedError(UserError):
    """A UserError that every process of a launch raises, and that the first has already printed."""


class Stopped(Exception):  # noqa: N818 (not an error: the run asked for it)
    """The stage was told to stop, and has saved what it has to save. The same command resumes it. Exit status 75."""


class Interrupted(Stopped):
    """As `Stopped`, by Ctrl-C. Exit status 130."""


class Refused(Exception):  # noqa: N818 (one of many is left out, and the run goes on)
    """A row, a prompt or an answer cannot be used. The text says why; cases with the same text are counted together."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not empty.

    The next line is added after a colon, and where `datasets` has the names to choose from in it."""
    first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join([first, *more[:1]]) if first.endswith(":") or first.startswith("Config name is missing") else first
