"""Errors that a person caused and can mend, and how every command shows an error."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from typing import TextIO

INPUT_ERROR = 2  # bad input or usage
RUN_FAILED = 1  # a run that began and failed
ALREADY_RUNNING = 3  # another driver holds the stream, or there is nothing to do

_FULL = ("No space left on device", "Disk quota exceeded")
FULL = (
    "there is no room left on a disk that it writes to (No space left on device): make room and run the command again; "
    "what was half written is not seen, and nothing is lost"
)


class UserError(Exception):
    """Report something that the user can mend, in one clear sentence.

    Args:
        message: what is wrong and what to do; one line for each problem.
        exit_code: the command's exit code: 2 for bad input or usage, 1 for a failed run, 3 for a stream that
            another driver holds.
    """

    def __init__(self, message: str, exit_code: int = INPUT_ERROR) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


class Terminated(BaseException):
    """Unwind the command after SIGTERM; no Exception, so that no handler swallows it."""


def show(error: BaseException, debug: bool = False, stream: TextIO | None = None) -> int:
    """Print `error` as `error: ...` lines, never as a bare traceback, and return the exit code.

    The traceback of an unexpected exception goes to a file that the line names; with `debug` to `stream`.
    """
    out = stream or sys.stderr
    if debug and not isinstance(error, KeyboardInterrupt | Terminated):
        traceback.print_exception(error, file=out)
    if isinstance(error, UserError):
        lines, code = error.message.splitlines() or ["unknown problem"], error.exit_code
    elif isinstance(error, KeyboardInterrupt):
        lines, code = ["interrupted"], 130
    elif isinstance(error, Terminated):
        lines, code = ["stopped by SIGTERM"], 143
    elif _is_model_error(error):
        lines, code = [" ".join(str(error).split())], INPUT_ERROR
    elif is_full(error):
        lines, code = [FULL], RUN_FAILED
    else:
        where = "" if debug else f" (traceback in {_keep_traceback(error)}; --debug shows it)"
        lines, code = [f"{type(error).__name__}: {first_line(error)}{where}"], RUN_FAILED
    for line in lines:
        print(f"error: {line}", file=out)
    return code


def _is_model_error(error: BaseException) -> bool:
    # By looking, not by importing: kalman brings NumPy, which a command that never came so far need not load.
    kalman = sys.modules.get("kalman")
    kind = getattr(kalman, "ModelError", None)
    return isinstance(kind, type) and isinstance(error, kind)


def first_line(error: BaseException, limit: int = 300) -> str:
    """Return the first line that an exception says, cut to `limit` characters."""
    lines = (line.strip().removeprefix(": ") for line in str(error).splitlines() if line.strip())
    # Py4J says first which of its calls it was, which tells a reader nothing.
    text = next(
        (line for line in lines if not line.startswith("An error occurred while calling ")), "no message"
    )
    return text if len(text) <= limit else text[: limit - 3] + "..."


def is_full(error: BaseException | None) -> bool:
    """Tell if an error, or one that led to it, says that a disk is full."""
    while error is not None:
        if any(said in str(error) for said in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def raised_in_python(error: BaseException) -> str:
    """Return what the innermost exception said that Spark's Python workers raised, if there is one of ours."""
    raised = [
        line.strip() for line in str(error).splitlines() if re.match(r"\s*[\w.]*(Error|Mismatch): ", line)
    ]
    return raised[-1].partition(": ")[2] if raised else first_line(error)


def _keep_traceback(error: BaseException) -> str:
    try:
        handle, path = tempfile.mkstemp(prefix="kalman-pipeline-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8") as log:
            traceback.print_exception(error, file=log)
    except OSError:
        return "no file, as the temporary folder is not writable"
    return path
