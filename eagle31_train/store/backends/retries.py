"""Calls to other machines: what is tried again, what is not, and what a person is told in the end.

fsspec's drivers raise what they like: Python's own OSErrors, exceptions of their HTTP libraries, of their vendors'
kits. The drivers are optional, so the classes of errors that last are known here by name.
"""

import errno
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

# A request that is wrong in itself stays wrong. s3fs gives EINVAL, ENOSYS, … to S3's codes of that kind.
WRONG = {errno.EINVAL, errno.ENOSYS, errno.EMSGSIZE, errno.ENAMETOOLONG, errno.EROFS, errno.ENOTEMPTY}
WRONG.add(getattr(errno, "EREMCHG", errno.ENOENT))  # the bucket lives in another region
LASTING = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError, UserError)
CREDENTIALS = re.compile("Credential|Token|Unauthorized|ClientAuthentication|ProfileNotFound")
INVALID = re.compile("Validation|Invalid|Unknown|Unsupported|NotImplemented|NotFound")
NO_BUCKET = re.compile(r"NoSuchBucket|bucket does not exist", re.IGNORECASE)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a little later: of drivers' own errors, all that do not say otherwise."""
    if isinstance(error, LASTING):
        return False
    status = _http_status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    if isinstance(error, OSError):
        return error.errno not in WRONG | FULL
    if type(error).__module__ == "builtins":  # this program's mistakes, and arguments that a driver refuses
        return isinstance(error, EOFError)
    return not (CREDENTIALS.search(_names(error)) or INVALID.search(_names(error)))


def lacks_bucket(error: Exception) -> bool:
    """Whether it is the bucket that is missing, not a file in it."""
    return isinstance(error, FileNotFoundError) and bool(NO_BUCKET.search(f"{error} {error.__cause__!r}"))


def _http_status(error: BaseException) -> int | None:
    for carrier in (error, getattr(error, "response", None)):
        for name in ("status", "status_code", "code"):
            if isinstance(value := getattr(carrier, name, None), int):
                return value
    return None


def _names(error: BaseException) -> str:
    return " ".join(kind.__name__ for kind in type(error).__mro__)


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
    if type(error).__module__ == "builtins" and not isinstance(
        error, OSError | ValueError | NotImplementedError | EOFError
    ):
        return error
    denied = isinstance(error, PermissionError) or _http_status(error) in (401, 403)
    if is_transient(error):
        advice = f"it was tried {TRIES} times; when it can be reached again, run the same command again"
    elif lacks_bucket(error):
        advice = "its bucket does not exist: create it, or correct the address"
    elif denied or CREDENTIALS.search(_names(error)):
        advice = (
            "check the credentials and what they may do there (for s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or a profile)"
        )
    else:
        advice = "correct the address or the driver's settings"
    return UserError(f"{where}: {what} failed ({describe(error)}): {advice}")
