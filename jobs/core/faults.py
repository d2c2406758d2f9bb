"""Faults of the system around a command: disks, rights, limits and connections.

A fault arrives in many forms: as an OSError of Python, as a text of a library in Rust or C++, or as a Java exception
that other exceptions contain. `find_fault` recognizes all of them, and its sentence names the cause, the place, and the
remedy.
"""

from __future__ import annotations

import errno
import getpass
import os
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_AGAIN = "and run the same command again; nothing is lost"


class _Kind(NamedTuple):
    """A kind of fault.

    numbers: error numbers of the system.
    signs: regular expression for texts of libraries that mean the same, besides the system's texts for the numbers.
    sentence: problem, sign and remedy.
    """

    numbers: Sequence[int]
    signs: str
    sentence: str

    def search(self, text: str) -> re.Match[str] | None:
        """Find the first sign of the fault in a text."""
        # A peer or a worker of Spark, too, may refuse a connection; such texts do not identify the cause.
        texts = [] if self is _CONNECTION else [re.escape(os.strerror(number)) for number in self.numbers]
        return re.search("|".join(filter(None, [*texts, self.signs])) or r"(?!)", text)


_UNREACHABLE = (errno.ECONNREFUSED, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_CONNECTION = _Kind(
    (errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, *_UNREACHABLE),
    "",
    f"a connection was cut or refused ({{sign}}): see that this machine reaches the service, {_AGAIN}",
)
_BUSY = _Kind(
    (),
    "(?:Timed out while waiting for the Python worker|Python worker failed) to connect back",
    "the machine is too busy: a Python process that Spark started did not answer in time: run the same command again, "
    "if possible with less beside it; nothing is lost",
)
_REFUSED = _Kind(
    (),
    "PermissionDeniedError|UnauthenticatedError|InvalidAccessKeyId|SignatureDoesNotMatch|[Ss]tatus [Cc]ode: 40[13]|"
    "403 Forbidden|The operation lacked the necessary privileges",
    "the store refused the request ({sign}): check the credentials and their rights (environment, ~/.aws/credentials "
    "or the machine's role), and the clocks of both machines, and run the same command again",
)
_STORE = _Kind(
    (),
    r"Generic (?:S3|MicrosoftAzure|GCS) error|SdkClientException|AWS\w*(?:IO|Throttled|Status500)Exception|SlowDown|"
    "Status Code: 50[03]|error sending request|HttpHostConnectException",
    "the store did not do it ({sign}): see that it runs, check AWS_ENDPOINT_URL and AWS_REGION (or AZURE_STORAGE_*, "
    f"GOOGLE_*), {_AGAIN}",
)
_FULL = _Kind(
    (errno.ENOSPC, errno.EDQUOT),
    "",
    "there is no room left on a disk that it writes to ({sign}): make room and run the command again; no reader sees "
    "what was half written, and nothing is lost",
)
_OF_SYSTEM = {
    (errno.EROFS,): "the file system is mounted read-only ({sign}): mount it for writing",
    (errno.ENFILE,): "the system has too many open files ({sign}): end other programs, or raise its limit",
    (
        errno.EMFILE,
    ): "this process may not open more files ({sign}): raise its limit of open files ({files} now), for "
    "example `ulimit -n 65536`",
    (
        errno.EFBIG,
    ): "a file would be larger than this process, or the file system, allows ({sign}): raise the limit "
    "(`ulimit -f unlimited`)",
    (
        errno.EIO,
        errno.ENXIO,
        errno.ENODEV,
        errno.ENOTCONN,
    ): "the disk, or the connection to it, failed ({sign}): look into the system's log, repair it",
    (errno.ESTALE,): "the network file system lost the file ({sign}): mount it anew",
    (errno.ENOMEM,): "the system has no memory left ({sign}): end other programs",
    (errno.ETXTBSY, errno.EBUSY): "another process uses it ({sign}): wait for that process",
}
_FORBIDDEN = _Kind(
    (errno.EACCES, errno.EPERM),
    "AccessDeniedException|AccessControlException",
    "user {user} has no right to do this there ({sign}): give the right to the file and its folders, or run the "
    f"command as their owner, {_AGAIN}",
)
_NAMED = [_Kind(numbers, "", f"{sentence}, {_AGAIN}") for numbers, sentence in _OF_SYSTEM.items()]
_KINDS = (_FULL, *_NAMED, _BUSY, _REFUSED, _STORE, _FORBIDDEN, _CONNECTION)
"""Kinds of faults; if a text has signs of several kinds, the first kind counts."""
_LEAST_ROOM = 1 << 20
"""Bytes below which a disk for temporary files counts as full."""
_OF_GATEWAY = "Py4JNetworkError"
"""Error of the connection to Spark's Java process, which is not a fault of a network."""
_PATH = re.compile(r"(?:[a-z][a-z0-9+.-]*:/)?(?<![\w.])/[^\s'\"`:,;()<>]+")


def find_fault(error: BaseException | None) -> str | None:
    """Return a sentence about the fault of the system that caused an error, or None if the system caused none."""
    chain = list(list_causes(error))
    if any(type(each).__name__ == _OF_GATEWAY for each in chain):
        return None
    for number, each in enumerate(chain):
        found = _recognize_number(each) or _recognize_text(each)
        if found is not None:
            kind, shown, place = found
            if kind is _CONNECTION and _is_for_user(chain[0]):
                return None  # its sentence names the service
            return _write_sentence(kind, shown, place or _find_place(chain[:number]))
    return None


def list_causes(error: BaseException | None, handled: bool = False) -> Iterator[BaseException]:
    """Yield an error and its causes.

    The context of an error for the user is not its cause unless stated. With `handled`, all errors count that were
    being handled when an error was raised, besides its stated cause.
    """
    seen: set[int] = set()
    left = [] if error is None else [error]
    while left:
        error = left.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        follow = handled or not (error.__suppress_context__ or _is_for_user(error))
        # PySpark keeps the cause of a Java exception in `_cause`; other libraries may keep anything there.
        stated = error.__cause__, None if handled else getattr(error, "_cause", None)
        found = [
            one for one in (*stated, error.__context__ if follow else None) if isinstance(one, BaseException)
        ]
        left += reversed(found if handled else found[:1])


def find_fault_in_text(text: str) -> str | None:
    """Return a sentence about the first fault whose sign a program's output contains, or None."""
    return find_fault(RuntimeError(text))


def join_causes(text: str) -> str:
    """Return a text of delta-rs, which prints each cause on a line of its own, in color, as one line without color."""
    causes = (line.strip(" \u21b3") for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())
    return ": ".join(cause for cause in causes if cause)


def is_said(fault: str, message: str) -> bool:
    """Return whether a message contains the sentence of a fault."""
    return fault.partition(": ")[2] in message


def find_full_folder(folders: Iterable[str], least: int) -> str | None:
    """Return the first of some local folders whose disk has less than `least` bytes left."""
    present = (folder for folder in folders if os.path.isdir(folder))
    return next((folder for folder in present if shutil.disk_usage(folder).free < least), None)


def require_open_files(count: int) -> None:
    """Check that this process may open at least `count` files.

    Raises:
        OSError: its limit is lower.
    """
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < count:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@contextmanager
def name_file(path: str | Path) -> Iterator[None]:
    """Add the path to an OSError that has none: the system names no file if a write to an open file fails."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def is_model_error(error: BaseException) -> bool:
    """Return whether an error is kalman's `ModelError`."""
    # kalman is looked up and not imported, because it loads NumPy, which a command that failed early does not need.
    kind = getattr(sys.modules.get("kalman"), "ModelError", None)
    return isinstance(kind, type) and isinstance(error, kind)


def _is_for_user(error: BaseException) -> bool:
    """Return whether an error has a sentence for the user, which may quote any text."""
    return hasattr(error, "exit_code") or is_model_error(error)


def _recognize_number(error: BaseException) -> tuple[_Kind, str, str | None] | None:
    """Return the kind, the text and the place of a fault with an error number."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    kind = next((kind for kind in _KINDS if number in kind.numbers), None)
    if kind is None or number is None:
        return None
    named = getattr(error, "filename", None)
    place = os.fsdecode(named) if isinstance(named, str | bytes) else _search_path(str(error))
    return kind, os.strerror(number), place


def _recognize_text(error: BaseException) -> tuple[_Kind, str, str | None] | None:
    """Return the kind, the text and the place of a fault that another library describes."""
    if _is_for_user(error) or isinstance(error, ValueError | LookupError | TypeError):
        return None  # its text may contain values of a file
    # The stack of a Java exception names its causes.
    text = f"{type(error).__name__}: {error}\n{getattr(error, '_stackTrace', None) or ''}"
    for kind in _KINDS:
        found = kind.search(text)
        if found is not None and kind in (_REFUSED, _STORE):
            whole = join_causes(text[found.start() :].partition("<?xml")[0])
            return kind, whole[:300].strip(" :"), None  # the addresses there are no paths
        if found is not None:
            # delta-rs names no file, but the error above it, in a later line of a traceback, does.
            signs = ((line, kind.search(line)) for line in text.splitlines())
            places = (_search_path(line, sign.start()) for line, sign in signs if sign is not None)
            return kind, found[0], next(filter(None, places), None)
    return None


def _search_path(line: str, before: int | None = None) -> str | None:
    """Return the last path of a line before a position, or else the first path of the line."""
    paths = list(_PATH.finditer(line))
    if not paths:
        return None
    earlier = [path for path in paths if before is None or path.start() < before]
    # A file that object stores' client writes before it renames it has a number.
    return re.sub(r"#\d+$", "", (earlier[-1] if earlier else paths[0])[0]).rstrip(".")


def _find_place(outer: Sequence[BaseException]) -> str | None:
    """Return the path that the errors around a fault name."""
    places = (_search_path(line) for each in reversed(outer) for line in str(each).splitlines()[:1])
    return next((place for place in places if place is not None), None)


def _write_sentence(kind: _Kind, sign: str, place: str | None) -> str:
    if place is None and kind is _FULL:
        temporary = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0], tempfile.gettempdir()
        place = find_full_folder(temporary, _LEAST_ROOM)
    where = "" if place is None or kind is _BUSY else f"{place}: "
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return where + kind.sentence.format(sign=sign, files=files, user=_name_user())


def _name_user() -> str:
    """Return the name of the process's user, or the number of a user without a name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.geteuid())
