"""The settings of a command, the supported stores, and the location of a warehouse in one spelling."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes

from jobs.core.errors import UserError
from jobs.core.redaction import escape_unprintable

STORES = ("abfs", "abfss", "gs")
"""Schemes of the stores in which exactly one of two simultaneous commits of a table's version succeeds."""
S3 = "s3a"
"""The scheme of S3, where this product's log store makes exactly one of two such commits succeed (docs/deploy.md)."""
_OTHER_S3 = ("s3", "s3n")
_MISREAD = re.compile(r"%[0-9A-Fa-f]{2}|[\\\x00-\x1f\x7f\ud800-\udfff]|(?<=/)_delta_log(?=/|$)")
"""Parts that a path must not contain, because delta-rs decodes, splits or cuts the path there, or refuses it."""
_MISREAD_IN_STORE = re.compile(r"[?#]|/(?=/)|/\.\.?(?=/|$)")
"""Parts that a URI must not contain either: a query, a fragment, and folders that only some clients drop."""
_LOCAL = re.compile(r"local\[(\d+)")
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)


def parse_warehouse_root(text: str, base: Path | None = None) -> str:
    """Return a warehouse's root in one spelling: an absolute path (also for a `file:` URI) or the URI of a store.

    base: folder to which relative paths refer, by default the working directory.

    Raises:
        UserError: tables at that location would not be safe, or the URI is not valid.
    """
    scheme, rest = _split(text)
    if scheme is None:
        path = Path(os.path.expanduser(text))
        return _normalize_path(path if base is None else base / path)
    if scheme in _OTHER_S3:
        raise UserError(f"a warehouse in S3 is written {S3}://bucket/folder, and this one is {text}")
    if scheme == S3 and not re.fullmatch(r"//[^/?#@:]+/[^/?#].*", rest, re.DOTALL):
        raise UserError(
            f"a warehouse in S3 is a folder of a bucket, {S3}://bucket/folder, and this one is {text}"
        )
    if scheme == "file":
        local = find_local_path(text)
        if local is None:
            raise UserError(
                f"the warehouse {text} is not understood: write a folder as a path, or as file:///folder"
            )
        return _normalize_path(local)
    if scheme == "hdfs":
        raise UserError(
            f"a warehouse cannot be at {text}: the library that commits to tables may wait for ever for HDFS when it "
            "opens a table (docs/deploy.md); use a folder that all machines share, or an object store"
        )
    if scheme not in (S3, *STORES) or not rest.startswith("/"):
        stores = ", ".join(f"{store}://" for store in (S3, *STORES))
        raise UserError(
            f"a warehouse cannot be at {text}: use a folder that all machines share, as a path or file:///folder, "
            f"or a store, as one of {stores}"
        )
    root = f"{scheme}:{rest if rest.startswith('//') else f'//{rest}'}".rstrip("/")
    found = _MISREAD.search(root) or _MISREAD_IN_STORE.search(root.partition("://")[2])
    if found is not None:
        raise UserError(
            f"a warehouse cannot be at {escape_unprintable(root)}: its URI has '{escape_unprintable(found[0])}' in it, "
            "and the clients of the store would take it for different folders; choose a name without it"
        )
    return root


def _normalize_path(path: Path) -> str:
    """Return the absolute path of a folder in a spelling that Python, Java and delta-rs all read in the same way.

    Raises:
        UserError: no such spelling exists.
    """
    # Java would read a second slash as the beginning of a host, and drop the folder before `..` even if it is a link.
    folder = path.resolve() if ".." in path.parts else path.absolute()
    return refuse_misread(f"/{str(folder).lstrip('/')}")


def refuse_misread(folder: str, what: str = "a warehouse") -> str:
    """Return the path of a local folder after a check that delta-rs reads the path correctly.

    Args:
        folder: an absolute path.
        what: future content of the folder, for the error message.

    Raises:
        UserError: delta-rs would misread the path, or the path to which a link leads.
    """
    real = os.path.realpath(folder)
    found = _MISREAD.search(real)
    if found is None:
        return folder
    leads = "" if real == folder else f", which is {escape_unprintable(real)}"
    part = found[0]
    why = "is not UTF-8" if "\ud800" <= part <= "\udfff" else f"has '{escape_unprintable(part)}' in it"
    meant = unquote(real)
    hint = f" (if {meant} is meant, write that)" if meant != real and os.path.isdir(meant) else ""
    raise UserError(
        f"{what} cannot be at {escape_unprintable(folder)}{leads}: the path {why}, and the library that commits to "
        "Delta tables would take it for another folder, as it does with a percent sign before two hexadecimal digits, "
        f"a backslash, and control characters such as a line break; rename the folder or choose another one{hint}"
    )


def find_local_path(root: str) -> Path | None:
    """Return the path of a local folder that is given as a path or a `file:` URI; None for any other URI."""
    scheme, rest = _split(root)
    if scheme is None:
        return Path(root)
    if scheme != "file":
        return None
    found = re.fullmatch(r"(?://(?:localhost)?/+|/(?!/))([^/].*)?", rest, re.DOTALL)
    return None if found is None else Path("/" + os.fsdecode(unquote_to_bytes(os.fsencode(found[1] or ""))))


def _split(text: str) -> tuple[str | None, str]:
    """Return the scheme of a URI in lower case and the part after its colon; the scheme of a path is None."""
    found = _URI.fullmatch(text)
    if found is None:
        return None, text
    scheme, rest = found[1].lower(), found[2]
    # The name of a folder may contain a colon, too.
    known = rest.startswith("/") or scheme in ("file", "hdfs", S3, *_OTHER_S3, *STORES)
    return (scheme, rest) if known else (None, text)


# The 4 lets Spark retry a failed task, as on a cluster; plain local[*] fails when it first loses a Python worker.
DEFAULT_MASTER = "local[*,4]"


@dataclass(frozen=True, slots=True)
class Settings:
    """The global options of one command.

    Attributes:
        warehouse: root of the tables (`jobs.core.settings`), an absolute local path or a URI such as
            `s3a://bucket/dir`.
        models: folder of the model specs.
        master: URL of Spark's master.
        json: whether to print the report as one JSON document on standard output.
        quiet: whether to suppress progress.
        debug: whether to show tracebacks.
    """

    warehouse: str
    models: Path
    master: str
    json: bool = False
    quiet: bool = False
    debug: bool = False

    @classmethod
    def load(
        cls,
        warehouse: str | None = None,
        models: str | Path | None = None,
        master: str | None = None,
        *,
        json: bool = False,
        quiet: bool = False,
        debug: bool = False,
    ) -> Settings:
        """Build settings from flags, then from the environment (KALMAN_WAREHOUSE, ...), then from defaults.

        Raises:
            UserError: the warehouse's location is not valid, or tables there would not be safe.
        """
        env = os.environ
        return cls(
            warehouse=parse_warehouse_root(warehouse or env.get("KALMAN_WAREHOUSE") or "warehouse"),
            models=Path(os.path.expanduser(models or env.get("KALMAN_MODELS") or "models")).absolute(),
            master=master or env.get("KALMAN_MASTER") or DEFAULT_MASTER,
            json=json,
            quiet=quiet,
            debug=debug,
        )

    @property
    def cores(self) -> int:
        """The number of cores for work without Spark."""
        return count_cores(self.master)


def count_cores(master: str = "") -> int:
    """Return the number of cores of this process; a number of local threads in Spark's master URL is a limit."""
    asked = _LOCAL.match(master)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(asked[1])) if asked else cores)
