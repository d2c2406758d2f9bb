"""List and read the reports of a warehouse; no other file of the file system can be reached."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dags.kalman_dags.places import find_warehouse_root
from jobs.core.input_files import UnfitFile, read_regular
from jobs.core.settings import find_local_path
from jobs.specs.model_spec import is_model_name
from jobs.storage.files import REPORTS, open_files

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
LARGEST = 1 << 28
"""The maximum size of a report in bytes."""
_ENDINGS = {".html": "text/html; charset=utf-8", ".json": "application/json"}


def list_report_names(model: str) -> list[str]:
    """Return the names of a model's report pages, sorted."""
    found = open_files(f"{find_warehouse_root()}/{REPORTS}/{model}").names("")
    return [name for name in found if name.endswith(".html") and _NAME.fullmatch(name)]


def read(model: str, name: str) -> tuple[bytes, str] | None:
    """Return the content and the media type of a report; None if there is none, or the name cannot be a report's.

    The name comes from an address that anybody can write. So it must be a plain name without a folder, and a file is
    not read if a link leads to it from outside the model's folder of reports.
    """
    kind = _ENDINGS.get(Path(name).suffix)
    if kind is None or not (is_model_name(model) and _NAME.fullmatch(name)):
        return None
    local = find_local_path(find_warehouse_root())
    try:
        if local is None:
            content = open_files(f"{find_warehouse_root()}/{REPORTS}/{model}").read(name)
            return None if content is None else (content, kind)
        folder = os.path.join(os.path.realpath(local / REPORTS), model)
        return read_regular(Path(folder, name), LARGEST, [folder]), kind
    except (OSError, UnfitFile):
        return None
