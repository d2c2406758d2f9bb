"""Refuse files outside a user's Delta table. Its log may name any file, and whoever writes the table writes the log.

The log also names the files of deletion vectors: by a URI (storage type `p`), or by a folder below the table and an
encoded UUID (`u`). Vectors of type `i` are in the log itself.
"""

from __future__ import annotations

import base64
import os
import re
import uuid
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import unquote

from deltalake.exceptions import DeltaError

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.input_files import is_below
from jobs.core.redaction import show_name
from jobs.core.settings import find_local_path
from jobs.storage.table_log import open_plain_log
from jobs.storage.table_rows import list_live_files, open_log
from jobs.storage.warehouse import Tables, parse_actions

UP = r"(^|[/\\])\.\.([/\\]|$)"
"""A part of a path that leads to the folder above."""


_UUID_LENGTH = 20
_Z85 = bytes.maketrans(
    b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#",
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~",
)
"""Delta's digits of base 85 (Z85), and those of Python."""


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

    Of a name with `#` or `?`, Hadoop may open what stands before the sign, so that part must be below the folder, too.

    Raises:
        UserError: a file is elsewhere.
    """
    local, folder = find_local_path(root), normalize_folder(root)
    folders = [] if local is None else [os.path.realpath(local)]
    for name in files:
        if local is None:
            own = name.startswith(f"{folder}/") and re.search(UP, name) is None
        else:
            path = re.sub("^file:/+", "/", name)
            whole = next((one for one in (f"{local}/", f"{folder}/") if path.startswith(one)), "")
            part = path.removeprefix(whole)
            own = path.startswith("/") and re.search(UP, part) is None and is_below(path, folders)
            own = own and is_below(whole + re.split("[#?]", part, maxsplit=1)[0], folders)
        if not own:
            raise UserError(f"{explain_foreign_file(where)} ({show_name(name, 200)})")


def name_vector_file(kind: str, name: str, root: str) -> str:
    """Return the file of a deletion vector of a table, from the vector's storage type (`p` or `u`) and name."""
    if kind == "p":
        return unquote(re.split("[?#]", name, maxsplit=1)[0])
    folder, digits = name[:-_UUID_LENGTH], name[-_UUID_LENGTH:].encode().translate(_Z85)
    with suppress(ValueError):  # Spark refuses other digits
        digits = str(uuid.UUID(bytes=base64.b85decode(digits))).encode()
    # Hadoop does not look for an absolute folder below the table's.
    root = "" if re.match(r"/|[A-Za-z][\w+.-]*:", folder) else _locate(root)
    return "/".join(filter(None, (root, folder, f"deletion_vector_{digits.decode()}.bin")))


def refuse_foreign_vectors(home: Tables, table: str, where: str, versions: Iterable[int]) -> None:
    """Refuse a table if a commit of these versions has a deletion vector in a file elsewhere.

    Raises:
        UserError: a file is elsewhere, or a commit of a table with deletion vectors is gone.
    """
    root = home.path(table)
    for version in versions:
        content = home.read_commit(table, version)
        if content is None and _may_have_vectors(home, table):
            raise UserError(
                f"{where}: its log no longer has version {version}, so nobody can tell whose deletion vectors that "
                "version names: keep the log longer than rows take to land (`delta.logRetentionDuration`)",
                RUN_FAILED,
            )
        added = (action.get("add") or {} for action in parse_actions(content or b""))
        vectors = [one["deletionVector"] for one in added if one.get("deletionVector")]
        names = ((str(one["storageType"]), str(one["pathOrInlineDv"])) for one in vectors)
        refuse_foreign_files((name_vector_file(*one, root) for one in names if one[0] != "i"), root, where)


def _may_have_vectors(home: Tables, table: str) -> bool:
    """Return whether a table's present protocol allows deletion vectors, for readers or for writers alone."""
    try:
        protocol = open_log(home.root, table).protocol()
    except (DeltaError, OSError):
        return True
    return "deletionVectors" in (*(protocol.reader_features or ()), *(protocol.writer_features or ()))


def _locate(root: str) -> str:
    """Return a table's folder as a path, or as the URI of a store."""
    return str(find_local_path(root) or normalize_folder(root))


def refuse_foreign_table(home: Tables, table: str, where: str) -> int | None:
    """Refuse a table whose log names files elsewhere; return the checked version, or None without a plain log.

    Raises:
        UserError: a file is elsewhere.
    """
    log, root = open_plain_log(home, table), home.path(table)
    if log is None:
        return None
    names: list[str] = list_live_files(log)["path"].to_pylist()
    whole = (one if re.match(r"/|[A-Za-z][\w+.-]*:/", one) else f"{_locate(root)}/{one}" for one in names)
    refuse_foreign_files(whole, root, where)
    return log.version()
