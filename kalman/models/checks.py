"""Checks of the values in a model definition; each raises a ModelError that names the field."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kalman.linalg.packing import pack_lower
from kalman.types import ModelError

Numbers = tuple[tuple[float, ...], ...]


def parse_number(field: str, value: Any) -> float:
    """Return a finite float."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise ModelError(field, f"{value!r} is not a number", "write a number such as 1.0")
    if not math.isfinite(value):
        raise ModelError(field, f"{value!r} is not finite", "write a finite number")
    return float(value)


def parse_positive(field: str, value: Any, *, zero: bool = False) -> float:
    """Return a float above zero; with `zero`, zero is also valid."""
    result = parse_number(field, value)
    if result < 0.0 or (result == 0.0 and not zero):
        bound = "zero or more" if zero else "above zero"
        raise ModelError(field, f"{result!r} is not {bound}", f"write a number {bound}")
    return result


def parse_integer(field: str, value: Any, low: int, high: int) -> int:
    """Return an integer within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ModelError(field, f"{value!r} is not a whole number from {low} to {high}", "write one that is")
    return value


def parse_vector(field: str, value: Any, size: int) -> tuple[float, ...]:
    """Return `size` finite floats."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, (list, tuple)) or len(value) != size:
        found = str(len(value)) if isinstance(value, (list, tuple)) else repr(value)
        wanted = format_count(size, "number")
        raise ModelError(field, f"needs {wanted}, found {found}", f"write a list of {wanted}")
    return tuple(parse_number(f"{field}[{i}]", entry) for i, entry in enumerate(value))


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 state`, `2 states`."""
    return f"{number} {noun}{'s'[: number != 1]}"


def parse_matrix(field: str, value: Any, rows: int | None = None, columns: int | None = None) -> Numbers:
    """Return a matrix as rows of finite floats; rows, columns: required numbers, None means any number."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    shape = f"{rows or 'n'} x {columns or 'n'}"
    remedy = (
        f"write a list of rows, {shape}, such as {format_example(rows or columns or 2, columns or rows or 2)}"
    )
    if (
        not isinstance(value, (list, tuple))
        or not value
        or not all(isinstance(r, (list, tuple)) for r in value)
    ):
        raise ModelError(field, f"{value!r} is not a matrix", remedy)
    rows = len(value) if rows is None else rows
    columns = len(value[0]) if columns is None else columns
    if len(value) != rows or any(len(row) != columns for row in value):
        raise ModelError(field, f"{rows} x {columns} is needed, found {_format_shape(value)}", remedy)
    return tuple(parse_vector(f"{field}[{i}]", row, columns) for i, row in enumerate(value))


def format_example(rows: int, columns: int) -> str:
    """Return the text of an example matrix with ones on the diagonal; the text of a large matrix is shortened."""
    shown = [[float(i == j) for j in range(min(columns, 4))] for i in range(min(rows, 4))]
    text = str(shown)
    if columns > 4:
        text = text.replace("]", ", ...]").removesuffix(", ...]") + "]"
    return text if rows <= 4 else text.removesuffix("]") + ", ...]"


def _format_shape(value: Sequence[Sequence[Any]]) -> str:
    """Return the size of a list of rows in words."""
    lengths = [len(row) for row in value]
    if len(set(lengths)) == 1:
        return f"{len(value)} x {lengths[0]}"
    return f"{len(value)} rows of different lengths, {', '.join(map(str, lengths[:8]))}" + (
        ", ..." if len(lengths) > 8 else ""
    )


def parse_covariance(field: str, value: Any, size: int) -> tuple[float, ...]:
    """Return the packed lower triangle of a covariance matrix, which may be written as a number if size is 1."""
    if size == 1 and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = [[value]]
    full = np.array(parse_matrix(field, value, size, size))
    if not np.allclose(full, full.T, rtol=1e-10, atol=0.0):
        raise ModelError(field, "it is not symmetric", "write the same number on both sides of the diagonal")
    scale = np.sqrt(np.maximum(np.diag(full), 0.0))
    unit = np.divide(full, np.outer(scale, scale), out=np.zeros_like(full), where=np.outer(scale, scale) > 0)
    # a state with zero variance has no covariances; otherwise check correlations, which do not depend on units
    for at in np.flatnonzero(np.diag(full) < 0):
        raise ModelError(
            f"{field}[{at}][{at}]",
            f"{full[at, at]:g} is a variance below zero",
            "write a number zero or more",
        )
    apart = np.argwhere((unit == 0) & (full != 0) | (np.abs(unit) > 1.0 + 1e-10))
    if len(apart):
        i, j = (int(place) for place in apart[0])
        raise ModelError(
            f"{field}[{i}][{j}]",
            f"a covariance of {full[i, j]:g} is too large for variances of {full[i, i]:g} and {full[j, j]:g}",
            f"write one of at most {math.sqrt(full[i, i] * full[j, j]):g} in size",
        )
    smallest = float(np.linalg.eigvalsh(unit).min())
    if smallest < -1e-10:
        raise ModelError(
            field,
            f"is no covariance: its correlations contradict one another (smallest eigenvalue {smallest:.3g})",
            "make the covariances smaller in size, or compute the matrix from data or as L L'",
        )
    return tuple(float(a) for a in pack_lower(full.tolist()))


def check_keys(field: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise ModelError unless `value` is a mapping with only the allowed keys."""
    allowed = sorted(allowed)
    if not isinstance(value, Mapping):
        raise ModelError(
            field, f"{value!r} is not a mapping", f"write the keys {', '.join(allowed)} under it"
        )
    for key in value:
        if key not in allowed:
            raise ModelError(f"{field}.{key}", "is not known here", f"known are {', '.join(allowed)}")


def require_key(field: str, value: Mapping[str, Any], key: str) -> Any:
    """Return value[key]. Raises ModelError if the key is missing."""
    if key not in value:
        raise ModelError(f"{field}.{key}", "is missing", f"add {key} under {field}")
    return value[key]
