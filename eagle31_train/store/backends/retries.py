"""Calls to other machines: what is tried again, what is not, and what a person is told in the end.

fsspec's drivers raise what they like: Python's own OSErrors, exceptions of their HTTP libraries, of their vendors'
kits. What says by its class that it will stay is raised at once; of all others a later try may succeed.
"""

import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

from eagle31_train.console import note
from eagle31_train.errors import UserError
from eagle31_train.store.backends.base import FULL

T = TypeVar("T")
TRIES = 5  # in all, the first one included
FIRST_WAIT = 1.0  # seconds; doubled from try to try
LASTING = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError, UserError)
NO_BUCKET = re.compile(r"NoSuchBucket|bucket does not exist", re.IGNORECASE)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a little later."""
    if isinstance(error, LASTING):
        return False
    if isinstance(error, OSError):
        return error.errno not in FULL
    # Python's own are this program's mistakes, and arguments that a driver refuses.
    return isinstance(error, EOFError) or type(error).__module__ != "builtins"


def lacks_bucket(error: Exception) -> bool:
    """Whether it is the bucket that is missing, not a file in it."""
    return isinstance(error, FileNotFoundError) and bool(NO_BUCKET.search(f"{error} {error.__cause__!r}"))


def describe(error: BaseException) -> str:
    """An exception in one line of moderate length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def retry(what: str, where: str, call: Callable[[], T], sleep: Callable[[float], object] = time.sleep) -> T:
    """The result of `call()`, tried TRIES times in all where it fails for a passing reason.

    Every failed try but the last prints a line on standard error.

    Args:
        what, where: for messages, such as "reading" and an address.
        call: the call.
        sleep: waits the given seconds.

    Raises:
        FileNotFoundError: nothing is there (but a bucket that is missing is a UserError).
        OSError: with an errno of FULL: a disk is full, and only the caller knows which.
        UserError: anything else that stays, or passes not soon enough.
    """
    for number in range(1, TRIES + 1):
        try:
            return call()
        except Exception as error:
            if number == TRIES or not is_transient(error):
                raise _explained(error, what, where) from error
            # Half of the wait is drawn: ranks that failed together shall not come back together.
            wait = FIRST_WAIT * 2 ** (number - 1) * random.uniform(0.5, 1.0)
            said = f"{where}: {what} failed ({describe(error)}), try {number} of {TRIES}, next in {wait:.1f} s"
            note(said, error=True)
        sleep(wait)
    raise AssertionError("at least one try")


def _explained(error: Exception, what: str, where: str) -> Exception:
    """What to raise in the end; mistakes of this program keep their own face."""
    full = isinstance(error, OSError) and error.errno in FULL
    if full or isinstance(error, UserError) or (isinstance(error, FileNotFoundError) and not lacks_bucket(error)):
        return error
    drivers = (OSError, ValueError, NotImplementedError, EOFError)
    if type(error).__module__ == "builtins" and not isinstance(error, drivers):
        return error
    if lacks_bucket(error):
        advice = "its bucket does not exist: create it, or correct the address"
    else:
        advice = "check the address, the network and the credentials, then run the same command again"
    tried = f", tried {TRIES} times" if is_transient(error) else ""
    return UserError(f"{where}: {what} failed{tried} ({describe(error)}): {advice}")
