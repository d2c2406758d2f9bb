"""Write the results of an offline command to a CSV or Parquet file atomically."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import csv

from jobs.core.errors import UserError
from jobs.core.input_files import parse_path
from jobs.state.encoding import arrow

FORMATS = (".csv", ".parquet")
Floats = NDArray[np.float64]


def check_target(target: Path, source: Path) -> None:
    """Check that the results of `source` can be written to `target`.

    Raises:
        UserError: the format is unknown, the folder does not exist, the target is a folder or the source itself, or a
            name is not a valid file name.
    """
    for path in (target, source):
        parse_path(str(path))
    if target.suffix.lower() not in FORMATS:
        raise UserError(f"{target}: the file's ending must be .csv or .parquet")
    if not target.parent.is_dir():
        raise UserError(f"{target}: there is no folder {target.parent}; create it first")
    if target.is_dir():
        raise UserError(f"{target}: is a folder; give a file's name")
    if target.exists() and source.exists() and os.path.samefile(source, target):
        raise UserError(f"{target}: is the input itself; give another output")


def build_list_columns(
    path: Path, field: str, values: Floats, valid: NDArray[np.bool_], parts: Sequence[str] | None
) -> dict[str, pa.Array]:
    """Return the columns of values (d, N): a column of lists in Parquet, one for each of d parts in CSV.

    Without parts (and d = 1) the CSV column has the field's name.
    """
    if path.suffix.lower() == ".csv" and parts is None:
        return {field: arrow.build_numbers(values[0])}
    if path.suffix.lower() == ".csv" and parts is not None:
        return {f"{field}_{part}": arrow.build_numbers(row) for part, row in zip(parts, values, strict=True)}
    return {field: arrow.build_vectors(values, valid)}


def save(path: Path, columns: dict[str, pa.Array]) -> None:
    """Write columns as a table, atomically.

    Raises:
        UserError: the file cannot be written.
    """
    write = _build_writer(path, pa.table(columns))
    temporary: Path | None = None
    try:
        # A new file with an unpredictable name: a prepared link under a known name would redirect the rows.
        handle, name = tempfile.mkstemp(".part", ".", path.parent)
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _build_writer(path: Path, table: pa.Table) -> Callable[[Path], None]:
    if path.suffix.lower() == ".parquet":
        return lambda temporary: pq.write_table(table, temporary)

    return lambda temporary: csv.write_csv(table, temporary, csv.WriteOptions(quoting_style="needed"))
