"""What a command prints: lines in order, a bar on a terminal but plain lines in a log, and no chatter of libraries."""

import argparse
import errno
import fcntl
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from eagle31_train.common import shown
from eagle31_train.common.errors import Interrupted, SharedError, Stopped, UserError

EVERY = 30.0  # seconds between two lines of a log
LINE = "{desc}: {percentage:.0f} %, {n_fmt} of {total_fmt}, {rate_fmt}, {remaining} left{postfix}"
COUNT = "{desc}: {n_fmt} {unit}s, {rate_fmt}{postfix}"  # if the total is unknown
BARS = {  # libraries' bars: the module and function that turn them off, and the variable that does before the import
    "datasets.utils": ("disable_progress_bars", "HF_DATASETS_DISABLE_PROGRESS_BARS"),
    "huggingface_hub.utils": ("disable_progress_bars", "HF_HUB_DISABLE_PROGRESS_BARS"),
    "transformers.utils.logging": ("disable_progress_bar", "HF_HUB_DISABLE_PROGRESS_BARS"),
}


# Errors that a user can mend: no room, and a path that cannot be used.
REMEDIES = {errno.ENOSPC: "free some space", errno.EDQUOT: "free some space", errno.EROFS: "choose another place"}
CORRECTED = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP)
REMEDIES |= dict.fromkeys(CORRECTED, "correct the option or permissions")
OURS = ("eagle31_train", "train", "data_prep")
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later
INTERRUPTED = 128 + signal.SIGINT


def parser(description: str | None, **options: Any) -> argparse.ArgumentParser:
    """Make a parser whose help keeps the line breaks of its description."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )


def ranks() -> int:
    """Return how many processes a launcher (accelerate, torchrun) started together; 1 without one."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def rank() -> int:
    """Return which of them this is; 0 for a lone process, whatever RANK a scheduler or a shell left over."""
    return int(os.environ.get("RANK") or 0) if ranks() > 1 else 0


def is_main() -> bool:
    """Return whether this is the first process of its launch, which speaks for all."""
    return rank() == 0


def refuse_lone_process() -> None:
    """Raise UserError if accelerate's launcher started one process where several were asked for.

    It does so with --cpu and for profiles of one process. It then sets MASTER_ADDR, but no WORLD_SIZE."""
    asked = os.environ.get
    if "ACCELERATE_MIXED_PRECISION" in os.environ and asked("MASTER_ADDR") == "127.0.0.1" and not asked("WORLD_SIZE"):
        raise UserError(
            "accelerate started only one of several processes, as it does with --cpu and with profiles of one process: "
            "use configs/accelerate/ddp.yaml (on a CPU with ACCELERATE_USE_CPU=true), or pass --num_processes 1"
        )


@contextmanager
def explained() -> Iterator[None]:
    """Context manager around a command: exit with 2 on a user's mistake, 75 if stopped and saved, 130 on Ctrl-C."""
    _open_streams()
    try:
        yield
    except Stopped as stopped:
        if str(stopped):  # one of several processes speaks for all
            note(str(stopped), error=True)
        raise SystemExit(INTERRUPTED if isinstance(stopped, Interrupted) else STOPPED) from None
    except KeyboardInterrupt:
        _say_once("stopped; run the same command again to resume")
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        if (mistake := _mistake(error)) is None:
            raise
        if mistake:
            _say_once(f"error: {mistake}")
        raise SystemExit(2) from None
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                _lead_nowhere(stream)


def _mistake(error: Exception) -> str | None:
    """Return the user's mistake behind an error, "" if another process has said it; None if it may be ours."""
    match error:
        case SharedError():
            return ""
        case UserError():
            return str(error)
        case OSError() if error.errno in REMEDIES:
            what = f"cannot use {error.filename} ({error.strerror})" if error.filename else error
            return f"{shown.line(what)}: {REMEDIES[error.errno]}"
        case ImportError():  # of a package that a target's weights or code turn out to need, at its first pass
            named = error.name or ""  # none if a library asks for a package in its own words
            ours = named.partition(".")[0] in OURS or (named and not isinstance(error, ModuleNotFoundError))
            return None if ours else f"{shown.line(error)}: install the missing package"
        case RuntimeError() if _said():  # another process has ended and said why, so this one has lost its connection
            return ""
    # Known by name, so as not to import torch. AcceleratorError is for pinned memory, or a device that others fill.
    if type(error).__name__ in ("OutOfMemoryError", "AcceleratorError") and "out of memory" in str(error):
        remedy = "lower data.generate.batch_size, extract.batch_tokens or evaluate.batch_size"
        remedy += "; for training, `eagle31 plan` shows what needs less"
        return f"the device ran out of memory ({shown.line(error)}): {remedy}"
    return None


def _lead_nowhere(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, as Python at exit would try to write the rest, and make the exit status 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_streams() -> None:
    """Open standard streams that a scheduler, or `>&-`, closed, on /dev/null.

    For Python they are None, on which every command and library fails. And a file of ours would be given their numbers,
    which child processes write to."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their numbers
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 (stays open)


def _ends_told() -> Path | None:
    """Return the file in which the processes of one torchrun launch tell one another why they end; None without one."""
    own = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in this process's folder, which is in the launch's
    return Path(own).parent.parent / "said" if own else None


def _said() -> bool:
    """Return whether another process of the launch has told why it ends."""
    file = _ends_told()
    return file is not None and file.is_file() and file.stat().st_size > 0


def _say_once(line: str) -> None:
    """Print why a command ends, once: of the processes of one torchrun launch, only the first prints a given line.

    The others wait until it has, since torchrun ends all when one has ended."""
    entry = " ".join(line.split()).encode(errors="replace")
    with ExitStack() as files:
        said = None
        if file := _ends_told():
            with suppress(OSError):
                said = files.enter_context(file.open("ab+", buffering=0))
                fcntl.flock(said, fcntl.LOCK_EX)
                said.seek(0)
                if entry in said.read().splitlines():
                    return
        note(line, error=True)
        if said is not None:
            with suppress(OSError):
                said.write(entry + b"\n")


@contextmanager
def tidy() -> Iterator[None]:
    """Context manager around a command: lines come in order, `| head` ends it without a traceback, no bars in logs."""
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    for module, (off, variable) in BARS.items():
        if module.startswith("datasets") or not sys.stderr.isatty():
            os.environ.setdefault(variable, "1")
            if module in sys.modules:
                getattr(sys.modules[module], off)()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Print the number of a letter that the terminal's encoding lacks: LANG=en_US is Latin-1, which has no arrows.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    record, warning = logging.getLogRecordFactory(), warnings.formatwarning
    logging.setLogRecordFactory(lambda *given, **named: _cleaned(record(*given, **named)))
    warnings.formatwarning = lambda *given, **named: shown.clean(warning(*given, **named))
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _lead_nowhere(sys.stdout)
        raise SystemExit(1) from None
    finally:
        logging.setLogRecordFactory(record)
        warnings.formatwarning = warning


def _cleaned(record: logging.LogRecord) -> logging.LogRecord:
    """Clean what a library logs, which may quote files that others made."""
    with suppress(Exception):  # the message does not fit its values: logging itself says so
        record.msg, record.args = shown.clean(record.getMessage()), None
    return record


class Progress(tqdm):
    """tqdm's bar on a terminal; in a log, a line every EVERY seconds, and none for what takes less."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.in_log = not sys.stderr.isatty()
        options["desc"] = shown.clean(options.get("desc", ""))
        if self.in_log:
            total = options.get("total") or (len(args[0]) if args and hasattr(args[0], "__len__") else None)
            options |= {"bar_format": LINE if total else COUNT, "mininterval": EVERY, "miniters": 1, "delay": EVERY}
        super().__init__(*args, **options, dynamic_ncols=True)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self.in_log:
            print(self, file=sys.stderr, flush=True)
        else:
            super().display(msg, pos)

    def close(self) -> None:
        """End the bar. It is for the command to say what was done."""
        if self.in_log:
            self.delay = float("inf")  # a log has no bar to end
        super().close()


def note(text: str, error: bool = False) -> None:
    """Print text on lines of its own, above the bar; with `error`, on standard error."""
    text = shown.clean(text)
    file = sys.stderr if error else sys.stdout
    try:
        if sys.stderr.isatty():
            tqdm.write(text, file=file)
        else:
            print(text, file=file, flush=True)
    except OSError as failure:  # /dev/full, or a log on a full disk
        if error:  # nobody can be told
            return
        if isinstance(failure, BrokenPipeError):  # see `tidy`
            raise
        reason = failure.strerror or failure
        raise UserError(f"cannot write to standard output ({reason}): free some space where it goes") from None


def say(text: str, error: bool = False) -> None:
    """`note` in the first process of a launch only."""
    if is_main():
        note(text, error)
