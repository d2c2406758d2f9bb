"""Read the last transaction number of each application from the log of a Delta table, without Spark.

delta-rs returns the number of a named application, but cannot list the applications. Both Delta in Java and delta-rs
copy the transactions into each checkpoint, so that transactions outlive the files of their commits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from jobs.core.errors import RUN_FAILED, UserError, extract_first_line
from jobs.storage.files import WarehouseFiles
from jobs.storage.table_rows import open_log

_TRIES = 5
"""Attempts to read a log while another process removes files from it."""
_RETENTION = "delta.setTransactionRetentionDuration"
_HINT = "_last_checkpoint"
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10})|\.[0-9a-f-]{36})?\.(?:parquet|json)")
"""Name of a checkpoint file. It contains the version, and for a checkpoint in several parts also the number of the part
and the number of parts.
"""


class _Checkpoint(NamedTuple):
    """A checkpoint's version and files. Version -1 without files means that no checkpoint exists."""

    version: int
    names: Sequence[str]


_NONE = _Checkpoint(-1, ())


def read_last_numbers(root: str, table: str, files: WarehouseFiles) -> dict[str, int]:
    """Return the last transaction number of each application; an empty mapping if the table does not exist.

    Transactions that have expired by a setting of the table are left out, as in delta-rs.

    Args:
        root: root of the warehouse.
        table: name of the table.
        files: files of the log's folder.

    Raises:
        UserError: the log cannot be read.
    """
    path = f"{root}/{table}"
    try:
        for _ in range(_TRIES):
            log = open_log(root, table)
            found = _read_numbers(files, log.version())
            if found is not None:
                return _select_unexpired(log, found)
    except TableNotFoundError:
        return {}
    except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {extract_first_line(error)}", RUN_FAILED) from error
    raise UserError(f"{path} cannot be read: files of its log are gone", RUN_FAILED)


def _read_numbers(files: WarehouseFiles, version: int) -> dict[str, int] | None:
    """Return the last numbers up to a version; None if a file that is needed is gone."""
    found = _read_numbers_since(files, _read_pointer(files), version)
    return _read_numbers_since(files, _find_newest(files, version), version) if found is None else found


def _read_numbers_since(
    files: WarehouseFiles, checkpoint: _Checkpoint, version: int
) -> dict[str, int] | None:
    """Return the last numbers up to a version, read from a checkpoint and the commits after the checkpoint.

    Return None if the checkpoint is newer than the version, or a file is gone.
    """
    if checkpoint.version > version:
        return None
    later = [f"{number:020d}.json" for number in range(checkpoint.version + 1, version + 1)]
    found: dict[str, int] = {}
    for name in (*checkpoint.names, *later):
        content = files.read(name)
        if content is None:
            return None
        found.update(_parse_rows(content) if name.endswith(".parquet") else _parse_lines(content))
    return found


def _parse_lines(content: bytes) -> Iterator[tuple[str, int]]:
    """Yield the transactions in a commit, or in a checkpoint in JSON."""
    for line in content.splitlines():
        transaction = json.loads(line).get("txn") if b'"txn"' in line else None
        if transaction is not None:
            yield str(transaction["appId"]), int(transaction["version"])


def _parse_rows(content: bytes) -> Iterator[tuple[str, int]]:
    """Yield the transactions in a checkpoint's Parquet file."""
    file = pq.ParquetFile(pa.BufferReader(content))
    if "txn" in file.schema_arrow.names:
        for one in file.read(["txn"])["txn"].drop_null().to_pylist():
            yield str(one["appId"]), int(one["version"])


def _read_pointer(files: WarehouseFiles) -> _Checkpoint:
    """Return the checkpoint that the log's pointer names; it may be missing, and a newer checkpoint may exist."""
    try:
        hint: dict[str, Any] = json.loads(files.read(_HINT) or b"{}")
        version, parts = int(hint["version"]), int(hint.get("parts") or 0)
        of_second_format = hint.get("v2Checkpoint")
        if of_second_format is not None:
            return _Checkpoint(version, (str(of_second_format["path"]),))
    except (ValueError, KeyError, TypeError):
        return _NONE
    start = f"{version:020d}.checkpoint"
    if not parts:
        return _Checkpoint(version, (f"{start}.parquet",))
    return _Checkpoint(version, [f"{start}.{part:010d}.{parts:010d}.parquet" for part in range(1, parts + 1)])


def _find_newest(files: WarehouseFiles, version: int) -> _Checkpoint:
    """Return the newest complete checkpoint up to a version, according to the names of the log's files."""
    matches = [match for name in files.names("") if (match := _CHECKPOINT.fullmatch(name))]
    groups: dict[tuple[int, int], list[str]] = {}
    for match in matches:
        count = 0 if match[3] is None else int(match[3])
        names = groups.setdefault((int(match[1]), count), [])
        if count or not names:  # of several complete checkpoints of a version, any can be used
            names.append(match[0])
    whole = [
        _Checkpoint(at, names)
        for (at, count), names in groups.items()
        if at <= version and len(names) == max(count, 1)
    ]
    return max(whole, key=lambda one: one.version, default=_NONE)


def _select_unexpired(log: DeltaTable, found: dict[str, int]) -> dict[str, int]:
    """Return the numbers of the transactions that have not expired."""
    if _RETENTION not in log.metadata().configuration:
        return found
    numbers = {application: log.transaction_version(application) for application in found}
    return {application: number for application, number in numbers.items() if number is not None}
