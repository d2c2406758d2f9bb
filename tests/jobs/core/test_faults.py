"""Faults of the system are recognized in every form in which they arrive, and in no other error."""

from __future__ import annotations

import errno
import io
import os
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from jobs.core.errors import INPUT_ERROR, RUN_FAILED, UserError, show
from jobs.core.faults import find_fault, is_model_error, list_causes, name_file
from kalman import ModelError

READ_ONLY = "the file system is mounted read-only (Read-only file system): mount it for writing"
FORBIDDEN = "has no right to do this there (Permission denied): give the right to the file and its folders"
FULL = "there is no room left on a disk that it writes to (No space left on device): make room"
RUST = "Generic LocalFileSystem error: "
JAVA = "java.util.concurrent.ExecutionException: Boxed Exception\n\tat a.b.C.d(C.java:1)\nCaused by: "


def tell(error: BaseException) -> tuple[int, str]:
    out = io.StringIO()
    code = show(error, stream=out)
    return code, out.getvalue()


def wrap(cause: BaseException, message: str = "/w/t: remove the lock file") -> UserError:
    error = UserError(message)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        (f"{RUST}Unable to open file /w/t/a#1: Permission denied (os error 13)", "/w/t/a", FORBIDDEN),
        ("Unable to create dir /w/t: Read-only file system (os error 30)", "/w/t", READ_ONLY),
        (f"{JAVA}java.io.FileNotFoundException: /w/c/1.delta (Read-only file system)\n\tat", "/w/c/1.delta", READ_ONLY),
        (f"{JAVA}java.nio.file.FileSystemException: /w/c/1: Too many open files\n", "/w/c/1", "may not open"),
        (f"{JAVA}java.nio.file.AccessDeniedException: /w/c/2\n\tat", "/w/c/2", "AccessDeniedException): give"),
        (f"{JAVA}java.io.IOException: No space left on device\n\tat", None, FULL),
        (
            f"Return Message: Traceback:\n  File \"/p/a.py\", line 1\nOSError: {RUST}\n ↳ No space left on device (os "
            f"error 28)\n\njobs.core.errors.UserError: /w/t: the commit failed: {RUST}No space left on device",
            "/w/t",
            FULL,
        ),
        ("OSError: [Errno 27] File too large: '/w/a b.csv'", None, "a file would be larger than"),
        ("Failed to open local file '/w/x.pq'. Detail: [errno 24] Too many open files", "/w/x.pq", "may not open"),
        ("Stale file handle (os error 116)", None, "the network file system lost the file"),
        ("Input/output error (os error 5)", None, "look into the system's log"),
        (
            "Generic S3 error: Error performing PUT http://127.0.0.1:9/b/t in 2s, after 4 retries - Server returned "
            "non-2xx status code: 503 Service Unavailable: <?xml version",
            None,
            "the store did not do it (Generic S3 error: Error performing PUT",
        ),
        (
            "Kernel error -> Generic S3 error\n \x1b[31m↳\x1b[0m Error performing GET http://a:9/b/t - HTTP error\n",
            None,
            "the store did not do it (Generic S3 error: Error performing GET http://a:9/b/t - HTTP error):",
        ),
        ("Server returned non-2xx status code: 403 Forbidden: ", None, "the store refused the request"),
    ],
)  # fmt: skip
def test_a_fault_in_a_librarys_text_is_a_sentence(text: str, place: str | None, said: str) -> None:
    for error in (RuntimeError(text), wrap(RuntimeError(text), "it failed: remove the lock file")):
        code, told = tell(error)
        assert code == RUN_FAILED and said in told and told.count("\n") == 1, told
        assert (
            told.startswith(f"error: {place}: " if place else "error: ") and "remove the lock" not in told
        ), told


@pytest.mark.parametrize(
    "number",
    [
        *("EACCES", "EPERM", "EROFS", "EFBIG", "EMFILE", "ENFILE", "ENOSPC", "EDQUOT", "EIO", "ESTALE"),
        *("ENOMEM", "ETXTBSY", "ECONNRESET", "EPIPE", "ETIMEDOUT", "ECONNREFUSED"),
    ],
)
def test_a_number_of_the_system_is_a_sentence_with_its_path(number: str) -> None:
    value = getattr(errno, number)
    later = RuntimeError("a lease could not be given back")
    later.__context__ = OSError(value, os.strerror(value), "/w/t/file")
    code, told = tell(later)
    assert code == RUN_FAILED and told.startswith("error: /w/t/file: ") and f"({os.strerror(value)})" in told


def test_what_is_no_fault_keeps_its_sentence_and_its_code() -> None:
    for cause in (
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/w/t"),
        ValueError("CSV conversion error to double: invalid value 'Permission denied'"),
        pa.ArrowInvalid("invalid value 'No space left on device'"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    ):
        assert tell(wrap(cause, "/w/t: mend the row")) == (INPUT_ERROR, "error: /w/t: mend the row\n")
    quoted = UserError("row 3: 'Read-only file system' is no number")
    assert tell(quoted) == (INPUT_ERROR, f"error: {quoted.message}\n")
    assert find_fault(RuntimeError("a lease could not be given back")) is None
    other = UserError("the spec is refused")
    other.__context__ = PermissionError(
        errno.EACCES, "Permission denied", "/home/x"
    )  # a failed look elsewhere
    assert find_fault(other) is None


def test_the_first_cause_that_is_there_is_followed() -> None:
    full, other = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyError("x")
    error = RuntimeError("it failed")
    error.__cause__, error.__context__, error.__suppress_context__ = other, full, False
    assert list(list_causes(error)) == [error, other] and find_fault(error) is None
    signal = KeyboardInterrupt()
    error.__context__ = signal
    assert list(list_causes(error, handled=True)) == [error, other, signal]
    error._cause = full  # type: ignore[attr-defined]
    assert full not in list_causes(error) and full not in list_causes(error, handled=True)
    error.__cause__, error.__suppress_context__ = None, False
    assert list(list_causes(error)) == [error, full]
    error._cause = "a text"  # type: ignore[attr-defined]
    assert list(list_causes(error)) == [error, signal]
    full.__context__ = full
    assert list(list_causes(full)) == [full]


def test_an_error_of_a_model_is_known_by_its_class() -> None:
    named = type("ModelError", (Exception,), {})("/x: No space left on device")
    assert not is_model_error(named) and find_fault(named) is not None
    own = type("Own", (ModelError,), {})("F", "No space left on device", "make room")
    assert is_model_error(own) and find_fault(own) is None


def test_a_message_that_says_the_fault_keeps_what_else_it_says() -> None:
    cause = OSError(errno.ENOSPC, "No space left on device", "/w/t")
    message = (
        f"micro-batch 3 could not be written to the sink a ({find_fault(cause)}); its estimates are safe"
    )
    code, told = tell(wrap(cause, message))
    assert code == RUN_FAILED and told == f"error: {message}\n"


def test_a_write_to_an_open_file_names_the_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError) as failed, name_file(tmp_path / "a"), open(tmp_path / "a", "wb") as file:
            file.write(b"x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (find_fault(failed.value) or "").startswith(f"{tmp_path}/a: a file would be larger")


def test_a_panic_of_delta_rs_names_the_limit(tmp_path: Path) -> None:
    """The text of delta-rs itself, in a process that may open no further file."""
    write_deltalake(str(tmp_path / "t"), pa.table({"x": [1]}))
    code = (
        "import resource, sys\nfrom deltalake import DeltaTable\nfrom jobs.core.errors import show\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))\n"
        "try:\n    DeltaTable(sys.argv[1])\nexcept BaseException as error:\n    sys.exit(show(error))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "t")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == RUN_FAILED
    assert last.startswith(
        "error: this process may not open more files (Too many open files): raise its limit"
    )
