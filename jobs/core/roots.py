"""Where a warehouse is: its root in one spelling, and the stores that it may be in."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from jobs.core.errors import UserError

STORES = ("abfs", "abfss", "gs")
"""Schemes of the stores in which one of two commits of the same version of a table fails."""
S3 = "s3a"
"""The scheme of S3, where one of two commits fails by the log store of our own (docs/deploy.md)."""
_OTHER_S3 = ("s3", "s3n")
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)


def warehouse_root(text: str, base: Path | None = None) -> str:
    """Return a warehouse's root in one spelling: an absolute path, also of a `file:` URI, or the URI of a store.

    base: the folder that a relative path begins from, by default the working directory.

    Raises:
        UserError: the tables would not be safe there, or the URI is not understood.
    """
    scheme, rest = _split(text)
    if scheme is None:
        path = Path(text).expanduser()
        return _taken_as_written(str((path if base is None else base / path).absolute()))
    if scheme in _OTHER_S3:
        raise UserError(f"a warehouse in S3 is written {S3}://bucket/folder, and this one is {text}")
    if scheme == S3 and not re.fullmatch(r"//[^/?#@:]+/[^/?#].*", rest):
        raise UserError(
            f"a warehouse in S3 is a folder of a bucket, {S3}://bucket/folder, and this one is {text}"
        )
    if scheme == "file":
        local = local_path(text)
        if local is None:
            raise UserError(
                f"the warehouse {text} is not understood: write a folder as a path, or as file:///folder"
            )
        return _taken_as_written(str(local))
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
    return f"{scheme}:{rest if rest.startswith('//') else f'//{rest}'}".rstrip("/")


def _taken_as_written(folder: str) -> str:
    """Return a folder's path, unless the library that commits to tables takes it for another path.

    Raises:
        UserError: it does.
    """
    if "\\" in folder or re.search("%[0-9A-Fa-f]{2}", folder):
        raise UserError(
            f"a warehouse cannot be at {folder}: a backslash, and a percent sign before two hexadecimal digits, name "
            "another folder to the library that commits to its tables; move the folder to a path without them"
        )
    return folder


def local_path(root: str) -> Path | None:
    """Return the path of a local folder, given as a path or a `file:` URI; None for any other URI."""
    scheme, rest = _split(root)
    if scheme is None:
        return Path(root)
    if scheme != "file":
        return None
    found = re.fullmatch(r"(?://(?:localhost)?/+|/(?!/))([^/].*)?", rest, re.DOTALL)
    return None if found is None else Path("/" + unquote(found[1] or ""))


def _split(text: str) -> tuple[str | None, str]:
    """Return the scheme of a URI in lower case and what follows its colon; a path has no scheme."""
    found = _URI.fullmatch(text)
    if found is None:
        return None, text
    scheme, rest = found[1].lower(), found[2]
    # A folder may have a colon in its name.
    known = rest.startswith("/") or scheme in ("file", "hdfs", S3, *_OTHER_S3, *STORES)
    return (scheme, rest) if known else (None, text)
