"""Convert the rows of a wide file, which has a column for each series, into long rows with one measurement each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from jobs.core.errors import UserError
from jobs.landing.raw_rows import BYTES, CORRUPT, FIELDS, RawRows
from jobs.specs.files import Files, Wide
from jobs.state.encoding import arrow

_YEAR = re.compile(r"X?([0-9]{4})( \[YR[0-9]{4}\])?")
"""Pattern of the column name for a year, as in files of the World Bank and of R."""


HOUR_NAME = re.compile(r"(?:h|he|hr|hour)?[ _.]?([0-2]?[0-9])", re.IGNORECASE)
"""Pattern of a column name for an hour of the day, such as H1, HE01, Hour 1 or 01."""


class WideColumns(NamedTuple):
    """Columns of a wide file that become rows.

    names      name of the new column that contains the old column names
    values     name of the new column that contains the values of the cells
    kept       columns that stay columns of the long rows
    listed     columns that become rows; if empty, all columns that are not in `kept` become rows
    by_digits  whether, if `listed` is empty, only columns whose names begin with a digit become rows
    """

    names: str
    values: str
    kept: tuple[str, ...]
    listed: tuple[str, ...]
    by_digits: bool

    def of(self, columns: Sequence[str]) -> list[str]:
        """Return the names of those columns of a file that become rows."""
        if self.listed:
            return list(self.listed)
        others = [name for name in columns if name not in (*self.kept, CORRUPT, FIELDS, BYTES)]
        return [name for name in others if name[:1].isdigit()] if self.by_digits else others

    def label(self, name: str) -> str:
        """Return the text for a column in the long rows: the first day of a year, an hour's number, or the name."""
        year = _YEAR.fullmatch(name) if self.by_digits else None
        hour = HOUR_NAME.fullmatch(name) if self.by_digits else None
        return f"{year[1]}-01-01" if year is not None else hour[1] if hour is not None else name


def find_wide_columns(named: Files, columns: Sequence[str]) -> WideColumns | None:
    """Return the columns that become rows, from the setting `files.wide` of the spec; None without this setting.

    columns: names of the columns of the long rows.
    """
    wide = named.wide
    if wide is None:
        return None
    kept = tuple(name for name in columns if name not in (wide.names, wide.measurement))
    return WideColumns(wide.names, wide.measurement, kept, tuple(wide.columns), wide.time is not None)


def describe_wide(wide: Wide) -> str:
    """Return a description in words of how a row of a wide file becomes long rows."""
    of = "time" if wide.key is None else "series"
    return f"a column for each {of}, each filled cell a row ({wide.names}: its column, {wide.measurement}: its value)"


def build_long_schema(path: Path, schema: pa.Schema, wide: WideColumns) -> pa.Schema:
    """Return the schema of the long rows of a wide file.

    Raises:
        UserError: the file lacks a listed column, no column becomes rows, or the columns that become rows have
            different types.
    """
    series = wide.of(schema.names)
    lacking = [name for name in series if name not in schema.names]
    if lacking or not series:
        what = f"there is no column '{lacking[0]}'" if lacking else "no column is left that could become rows"
        raise UserError(
            f"{path}: {what}; mend files.wide in the spec: columns are {', '.join(schema.names[:20])}"
        )
    kinds = {schema.field(name).type for name in series if not pa.types.is_null(schema.field(name).type)}
    if len(kinds) > 1 and not all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in kinds):
        held = ", ".join(sorted(map(str, kinds)))
        raise UserError(
            f"{path}: columns that files.wide makes rows hold {held}; list those of numbers in its columns"
        )
    kind = kinds.pop() if len(kinds) == 1 else pa.float64() if kinds else pa.null()
    kept = [schema.field(name) for name in schema.names if name in wide.kept]
    return pa.schema([*kept, pa.field(wide.names, pa.string()), pa.field(wide.values, kind)])


def build_long_rows(source: RawRows, wide: WideColumns, columns: Sequence[str] | None) -> RawRows:
    """Return a long row for each filled cell of the columns that become rows, ordered by row and then by column.

    An invalid row, which is misshapen or not UTF-8, stays one row.

    Args:
        source: rows of a wide file.
        wide: columns that become rows.
        columns: names of the columns of the result. None means all columns.
    """
    series = wide.of(list(source.columns))
    kinds = {source.columns[name].type for name in series}
    kind = kinds.pop() if len(kinds) == 1 else pa.float64()
    cells = pa.concat_arrays([source.columns[name].cast(kind) for name in series])
    count, rows = len(series), source.rows
    order = np.arange(rows * count).reshape(count, rows).T.ravel()  # ordered by row, then by column
    filled = arrow.to_numpy(cells.is_valid())[order]
    broken = source.reasons() != None  # noqa: E711 - elementwise
    first = np.tile(np.arange(count) == 0, rows)
    wanted = np.where(np.repeat(broken, count), first, filled)
    place = np.flatnonzero(wanted)
    row, column = place // count, place % count
    names = arrow.build_texts([wide.label(name) for name in series]).take(arrow.build_integers(column))
    kept = {*wide.kept, CORRUPT, FIELDS, BYTES} if columns is None else {*columns}
    found = {
        name: values.take(arrow.build_integers(row))
        for name, values in source.columns.items()
        if name in kept and name not in series
    }
    found |= {wide.names: names, wide.values: cells.take(arrow.build_integers(order[place]))}
    problems = None if source.problems is None else source.problems[row]
    return source._replace(columns=found, rows=len(place), problems=problems)
