"""Refuse files outside a user's Delta table. Its log may name any file, and whoever writes the table writes the log."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from jobs.core.errors import UserError, show_name
from jobs.core.input_files import is_below
from jobs.core.settings import find_local_path
from jobs.storage.table_log import open_plain_log
from jobs.storage.table_rows import list_live_files
from jobs.storage.warehouse import Tables

UP = r"(^|[/\\])\.\.([/\\]|$)"
"""A part of a path that leads to the folder above."""


def explain_foreign_file(where: str) -> str:
    """Return the sentence about a file outside a table, without the file's name."""
    said = f"{where}: its log names a file outside the table's folder, so rows of others could be read; "
    if where.startswith("--input "):
        return f"{said}if you trust its writers, copy its rows into a new table, and name that one"
    trust = "if it is a clone whose writers you trust, write `clones: true` beside its name in the spec"
    return f"{said}{trust}, else copy its rows into a new table"


def normalize_folder(root: str) -> str:
    """Return a table's folder as Spark writes it in the names of files: without `.`, `..` and doubled slashes."""
    local, parts = find_local_path(root), root.split("/", 3)
    store, path = ("/".join(parts[:3]), parts[-1]) if local is None else ("", str(local))
    return f"{store}/{os.path.normpath(f'/{path}').lstrip('/')}"


def refuse_foreign_files(files: Iterable[str], root: str, where: str) -> None:
    """Refuse a table if one of its files, without encoding, is not below the table's folder `root`, also by a link.

    Raises:
        UserError: a file is elsewhere.
    """
    local = find_local_path(root)
    folders = [] if local is None else [os.path.realpath(local)]
    for name in files:
        if local is None:
            own = name.startswith(f"{normalize_folder(root)}/") and re.search(UP, name) is None
        else:
            path = re.sub("^file:/+", "/", name)
            own = path.startswith("/") and is_below(path, folders)
        if not own:
            raise UserError(f"{explain_foreign_file(where)} ({show_name(name, 200)})")


def refuse_foreign_table(home: Tables, table: str, where: str) -> int | None:
    """Refuse a table whose log names files elsewhere; return the checked version, or None without a plain log.

    Raises:
        UserError: a file is elsewhere.
    """
    log, root = open_plain_log(home, table), home.path(table)
    if log is None:
        return None
    names: list[str] = list_live_files(log)["path"].to_pylist()
    folder = find_local_path(root) or normalize_folder(root)
    whole = (one if re.match(r"/|[A-Za-z][\w+.-]*:/", one) else f"{folder}/{one}" for one in names)
    refuse_foreign_files(whole, root, where)
    return log.version()
