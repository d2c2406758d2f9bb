"""The reports of a warehouse: which there are, and their content; nothing else of the file system can be reached."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from dags.kalman_dags.places import warehouse
from jobs.core.roots import local_path
from jobs.storage.files import REPORTS, files_of

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ENDINGS = {".html": "text/html; charset=utf-8", ".json": "application/json"}


class Report(NamedTuple):
    """A report's content and its media type."""

    content: bytes
    media_type: str


def names(model: str) -> list[str]:
    """Return the names of a model's pages of reports, sorted."""
    if not _NAME.fullmatch(model):
        return []
    folder = local_path(warehouse())
    try:
        if folder is not None:
            found = [path.name for path in (folder / REPORTS / model).iterdir() if path.is_file()]
        else:
            found = files_of(f"{warehouse()}/{REPORTS}/{model}").names("")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name for name in found if name.endswith(".html") and _NAME.fullmatch(name))


def read(model: str, name: str) -> Report | None:
    """Return a report; None if there is no such report, or the name is none of a report.

    The names come from an address that anybody may have written: they are plain names without a folder, and a file that
    is reached through a link out of the folder of the reports is not read.
    """
    kind = _ENDINGS.get(Path(name).suffix)
    if kind is None or not (_NAME.fullmatch(model) and _NAME.fullmatch(name)):
        return None
    folder = local_path(warehouse())
    try:
        if folder is None:
            content = files_of(f"{warehouse()}/{REPORTS}/{model}").read(name)
            return None if content is None else Report(content, kind)
        base = (folder / REPORTS).resolve()
        path = (base / model / name).resolve(strict=True)
        return Report(path.read_bytes(), kind) if path.is_relative_to(base) and path.is_file() else None
    except (FileNotFoundError, NotADirectoryError):
        return None
