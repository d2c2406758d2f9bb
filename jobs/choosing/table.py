"""Read files without a spec: all columns, of all files or of an even sample of the files. No Spark."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.core.errors import UserError
from jobs.landing.csv_parquet import FORMATS, read_dialect, read_settings
from jobs.landing.csv_records import COMMA
from jobs.landing.dialects import ANY
from jobs.landing.file_parts import check_columns
from jobs.landing.file_rows import read_columns, read_columns_schema, take_rows
from jobs.landing.json_rows import is_json
from jobs.landing.raw_rows import RawRows, cut_rows, join_parts
from jobs.landing.values.number_reading import Writing, find_writing
from jobs.specs.files import Files
from jobs.specs.model_spec import DEFAULT_MISSING

MOST_FILES = 1_000
MOST_ROWS = 1_000_000
"""The number of rows to read in total, which is enough to find the columns' roles; below, the limits for one file."""
LEAST_OF_A_FILE, MOST_OF_A_FILE = 2_000, 100_000


class InputTable(NamedTuple):
    """The rows of files.

    files: the files that were read.
    found: the number of files.
    source: N rows with the columns that all files have.
    file: (N,) index of each row's file.
    partial: for each column that not all files have with the same type, why it is left out.
    cut: whether a file has more rows than were read.
    written: the settings that a spec needs for the files' dialect.
    numbers: the notation of the numbers in the columns.
    """

    files: list[Path]
    found: int
    source: RawRows
    file: NDArray[np.int64]
    partial: dict[str, str]
    cut: bool
    written: Files
    numbers: Writing


def read_table(paths: list[Path]) -> InputTable:
    """Read the files, or an even sample of them, each file from its beginning.

    Raises:
        UserError: a file cannot be read, or there is no row.
    """
    chosen = paths
    if len(paths) > MOST_FILES:
        chosen = [paths[i] for i in np.linspace(0, len(paths) - 1, MOST_FILES).astype(int)]
    most = min(MOST_OF_A_FILE, max(LEAST_OF_A_FILE, MOST_ROWS // len(chosen)))
    written = ANY if is_json(chosen[0]) else read_settings(chosen[0])
    names, partial = _list_common_columns(chosen, written)
    if not names:
        raise UserError(f"{chosen[0]}: no column is in every file; give files of one kind")
    read = [_read_beginning(path, names, most, written) for path in chosen]
    sources = [source for source, _ in read]
    if not sum(source.rows for source in sources):
        raise UserError(
            f"{paths[0]}: has no rows"
            + (", nor have the others" if len(paths) > 1 else "")
            + "; give a file with rows"
        )
    file = np.repeat(np.arange(len(chosen)), [source.rows for source in sources])
    source = join_parts(sources, names)
    is_csv = chosen[0].name.lower().endswith(FORMATS[:2])
    separator = read_dialect(chosen[0], (), written).separator if is_csv else COMMA
    numbers = find_writing(source.columns, DEFAULT_MISSING, separator)
    written = numbers.added_to(written)
    some = any(cut for _, cut in read)
    source = source._replace(decimal=written.decimal)
    return InputTable(chosen, len(paths), source, file, partial, some, written, numbers)


def _list_common_columns(paths: list[Path], written: Files) -> tuple[list[str], dict[str, str]]:
    """Return the columns that all files have with the same type, and why other columns are left out."""
    schemas = [read_columns_schema(path, [], written) for path in paths]
    first, partial = schemas[0], dict[str, str]()
    for schema, path in zip(schemas, paths, strict=True):
        check_columns(path, schema.names, schema.names)
        for name in dict.fromkeys([*first.names, *schema.names]):
            if name not in schema.names:
                partial.setdefault(name, f"is not in {path.name}")
            elif name not in first.names:
                partial.setdefault(name, f"is not in {paths[0].name}")
            elif schema.field(name).type != first.field(name).type:
                partial.setdefault(name, f"has another type in {path.name} than in {paths[0].name}")
    return [name for name in first.names if name not in partial], partial


def _read_beginning(path: Path, names: list[str], most: int, written: Files) -> tuple[RawRows, bool]:
    """Return the first rows of a file, and whether the file has more rows."""
    schema = read_columns_schema(path, names, written)
    whole = join_parts(take_rows(read_columns(path, schema, names, written), most + 1), names)
    columns = {name: column for name, column in whole.columns.items() if name in names}
    return cut_rows(whole._replace(columns=columns, left_out=0), 0, most), whole.rows > most
