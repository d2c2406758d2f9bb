"""Errors that the user can fix, and the way in which commands show errors."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from typing import TextIO

from jobs.core.faults import find_fault, is_model_error, is_said, list_causes
from jobs.core.redaction import escape_unprintable, redact_secrets, show_name

INPUT_ERROR = 2  # the input or the usage of the command is wrong
RUN_FAILED = 1  # a run began and failed
ALREADY_RUNNING = 3  # another driver runs the stream, or there is nothing to do


class UserError(Exception):
    """An error that the user can fix, with a message of one clear sentence.

    Args:
        message: problem and remedy, with one line for each problem.
        exit_code: exit code of the command: 2 for bad input or usage, 1 for a failed run, 3 for a stream that another
            driver already runs.
    """

    def __init__(self, message: str, exit_code: int = INPUT_ERROR) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


class Terminated(BaseException):
    """An exception that ends a command after SIGTERM; it is not an Exception, so that no handler swallows it."""


def show(error: BaseException, debug: bool = False, stream: TextIO | None = None) -> int:
    """Print `error` as lines that begin with `error:`, never as a bare traceback, and return the exit code.

    The traceback of an unexpected exception goes to a file, which a line names; with `debug` it goes to `stream`.
    """
    error, where = _interrupt(error) or _find_failure_of_spark(error) or error, ""
    out = stream or sys.stderr
    if debug and not isinstance(error, KeyboardInterrupt | Terminated):
        out.write(redact_secrets("".join(traceback.format_exception(error))))
    lines, code = describe_error(error)
    if not lines:
        where = "" if debug else f" (traceback in {_keep_traceback(error)}; --debug shows it)"
        lines = [f"{type(error).__name__}: {extract_first_line(error)}"]
    for line in lines:
        print(escape_unprintable(f"error: {redact_secrets(line)}{where}"), file=out)
    return code


def describe_error(error: BaseException) -> tuple[list[str], int]:
    """Return the lines and the exit code of an error that has a sentence; no lines if the error is unexpected.

    If a fault of the system caused the error, the lines name the fault, because other advice would mislead.
    """
    fault = None if isinstance(error, KeyboardInterrupt | Terminated) else find_fault(error)
    if isinstance(error, UserError):
        if fault is None:
            return error.message.splitlines() or ["unknown problem"], error.exit_code
        return error.message.splitlines() if is_said(fault, error.message) else [fault], RUN_FAILED
    if isinstance(error, KeyboardInterrupt):
        return ["interrupted"], 130
    if isinstance(error, Terminated):
        return ["stopped by SIGTERM"], 143
    if is_model_error(error):
        return [" ".join(str(error).split())], INPUT_ERROR
    return [] if fault is None else [fault], RUN_FAILED


def _interrupt(error: BaseException) -> BaseException | None:
    """Return the signal that interrupted the code before an error was raised, or None.

    A signal may interrupt a call to Java. Further calls to Java while the command ends then fail with meaningless
    errors.
    """
    causes = list_causes(error, handled=True)
    return next((each for each in causes if isinstance(each, KeyboardInterrupt | Terminated)), None)


def _find_failure_of_spark(error: BaseException) -> UserError | None:
    """Return an error for the user if a failure of Spark caused an error whose sentence does not name the failure."""
    failures = sys.modules.get("jobs.spark.failures")  # not imported, because it loads PySpark
    failure = None if failures is None else failures.find_failure(error)
    if failure is None or (isinstance(error, UserError) and failure in error.message):
        return None
    return UserError(failure, RUN_FAILED)


def extract_first_line(error: BaseException, limit: int = 300) -> str:
    """Return the first line of an exception's message, without secrets and shortened to `limit` characters."""
    lines = (line.strip().removeprefix(": ") for line in str(error).splitlines() if line.strip())
    # Py4J's message begins with the name of the Java call, which does not help a reader.
    text = next(
        (line for line in lines if not line.startswith("An error occurred while calling ")), "no message"
    )
    return show_name(text, limit)


def print_note(text: str) -> None:
    """Print a line on standard error, with unprintable characters escaped."""
    print(escape_unprintable(text), file=sys.stderr, flush=True)


def extract_python_error(error: BaseException) -> str:
    """Return the message of the innermost exception in Spark's Python workers, or else the error's first line."""
    raised = [
        line.strip() for line in str(error).splitlines() if re.match(r"\s*[\w.]*(Error|Mismatch): ", line)
    ]
    return raised[-1].partition(": ")[2] if raised else extract_first_line(error)


def _keep_traceback(error: BaseException) -> str:
    try:
        handle, path = tempfile.mkstemp(prefix="kalman-pipeline-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8") as log:
            log.write(redact_secrets("".join(traceback.format_exception(error))))
    except OSError:
        return "no file, as the temporary folder is not writable"
    return path
