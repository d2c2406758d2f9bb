"""Matrix entries of a model that take the value of a control column in each row.

A definition has the name of a control column in place of a number. Parsing turns such a name into a `Column`; for the
arithmetic, `resolve` turns the `Column` into the row (K,) of this control.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kalman.linalg.entries import Entry, Vector, dot, is_zero, minus, times
from kalman.linalg.packing import pack_lower, unpack_symmetric
from kalman.models import checks
from kalman.types import ModelError


class Column(NamedTuple):
    """An entry whose value is that of the control input with this index."""

    index: int


Cell = float | Column
"""An entry as a definition writes it: a number, or a column."""
Cells = tuple[tuple[Cell, ...], ...]


def resolve(cells: Sequence[Any], u: Vector) -> list[Entry]:
    """Return the entries of a vector for the controls u (c entries)."""
    return [u[a.index] if isinstance(a, Column) else a for a in cells]


def resolve_matrix(cells: Sequence[Sequence[Any]], u: Vector) -> list[list[Entry]]:
    """Return the entries of a matrix for the controls u (c entries)."""
    return [resolve(row, u) for row in cells]


def find_columns(part: Any) -> set[int]:
    """Return the indices of all columns in a value, which is a cell, a sequence of cells, or a dataclass."""
    if isinstance(part, Column):
        return {part.index}
    if dataclasses.is_dataclass(part):
        return find_columns([getattr(part, field.name) for field in dataclasses.fields(part)])
    if isinstance(part, (list, tuple)):
        return set().union(*(find_columns(a) for a in part))
    return set()


def require_numbers(cells: Sequence[Any]) -> tuple[float, ...]:
    """Return the cells as numbers; the cells must not contain columns."""
    if find_columns(cells):
        raise TypeError("an entry comes from a column")
    return tuple(cells)


def parse_cell(field: str, value: Any, names: Sequence[str]) -> Cell:
    """Return a finite number, or for a text the column of this name among `names`. Raises ModelError."""
    if not isinstance(value, str):
        return checks.parse_number(field, value)
    if value not in names:
        known = (
            f"a number, or one of {', '.join(names)}" if names else "a number, or name the column in control"
        )
        raise ModelError(field, f"{value!r} is not a number and not a control column", f"write {known}")
    return Column(list(names).index(value))


def parse_vector_cells(field: str, value: Any, size: int, names: Sequence[str]) -> tuple[Cell, ...]:
    """Return a vector of cells. Raises ModelError."""
    found = checks.parse_vector(field, _replace_texts(value), size)
    return tuple(_put_back(f"{field}[{i}]", a, value[i], names) for i, a in enumerate(found))


def parse_matrix_cells(
    field: str, value: Any, rows: int | None = None, columns: int | None = None, names: Sequence[str] = ()
) -> Cells:
    """Return a matrix of cells; rows, columns: required numbers, None means any number. Raises ModelError."""
    found = checks.parse_matrix(field, _replace_texts(value), rows, columns)
    return tuple(
        tuple(_put_back(f"{field}[{i}][{j}]", a, value[i][j], names) for j, a in enumerate(row))
        for i, row in enumerate(found)
    )


def parse_covariance_cells(field: str, value: Any, size: int, names: Sequence[str]) -> tuple[Cell, ...]:
    """Return the packed lower triangle of a covariance matrix of cells. Raises ModelError.

    Entries from columns are checked in each row, with `compute_lowest_pivot`.
    """
    if size == 1 and isinstance(value, str):
        value = [[value]]
    if not _has_text(value):
        return checks.parse_covariance(field, value, size)
    full = parse_matrix_cells(field, value, size, size, names)
    if any(full[i][j] != full[j][i] for i in range(size) for j in range(i)):
        raise ModelError(field, "it is not symmetric", "write the same on both sides of the diagonal")
    for i in range(size):
        here = full[i][i]
        if not isinstance(here, Column):
            checks.parse_positive(f"{field}[{i}][{i}]", here, zero=True)
    return tuple(pack_lower(full))


def compute_lowest_pivot(packed: Vector) -> Entry:
    """Return an entry that is zero or more where the packed matrix is positive semidefinite, else negative or NaN.

    The entry comes from the pivots of L D L'. If a pivot is within rounding of zero, its column must be zero too.
    """
    full = unpack_symmetric(packed)
    n = len(full)
    lowest: Entry = full[0][0]
    L: list[list[Entry]] = [[0.0] * n for _ in range(n)]
    d: list[Entry] = []
    for j in range(n):
        pivot = minus(full[j][j], dot([times(a, a) for a in L[j][:j]], d))
        small = np.multiply(1e-10, np.abs(full[j][j]))
        positive = np.greater(pivot, small)
        d.append(np.where(positive, pivot, 0.0))
        lowest = np.minimum(lowest, np.minimum(full[j][j], np.add(pivot, small)))
        for i in range(j + 1, n):
            rest = minus(
                full[i][j], dot([times(a, b) for a, b in zip(L[i][:j], L[j][:j], strict=True)], d[:j])
            )
            if is_zero(rest):
                continue
            L[i][j] = np.where(positive, np.divide(rest, np.where(positive, pivot, 1.0)), 0.0)
            # covariances with a state of zero variance may only be rounding errors
            bound = np.multiply(1e-18, np.abs(np.multiply(full[i][i], full[j][j])))
            lowest = np.where(
                positive, lowest, np.minimum(lowest, np.subtract(bound, np.multiply(rest, rest)))
            )
    return lowest


def _put_back(field: str, number: float, written: Any, names: Sequence[str]) -> Cell:
    return parse_cell(field, written, names) if isinstance(written, str) else number


def _replace_texts(value: Any) -> Any:
    """Return the value with every text in its lists replaced by 0.0."""
    if isinstance(value, (list, tuple)):
        return [0.0 if isinstance(a, str) else _replace_texts(a) for a in value]
    return value


def _has_text(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_text(a) for a in value)
    return isinstance(value, str)
