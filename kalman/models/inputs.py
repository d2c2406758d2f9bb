"""Inputs of a process and of a measurement: B u, offsets, and scales of the noise."""

from collections.abc import Mapping, Sequence
from typing import Any

from kalman.linalg.entries import Entry, dot, plus
from kalman.models import checks, columns
from kalman.models.columns import Cell, Cells, resolve, resolve_matrix
from kalman.types import ModelError


def parse_inputs(
    field: str, definition: Mapping[str, Any], n: int, controls: Sequence[str]
) -> tuple[Cells | None, tuple[Cell, ...] | None]:
    """Return B (n x c) and offset (n) of a process, None for a part that is not given. Raises ModelError."""
    B, offset = definition.get("B"), definition.get("offset")
    if B is not None and not controls:
        raise ModelError(f"{field}.B", "there is no control for it", "name the control columns, or remove B")
    return (
        None if B is None else columns.parse_matrix_cells(f"{field}.B", B, n, len(controls), controls),
        None if offset is None else columns.parse_vector_cells(f"{field}.offset", offset, n, controls),
    )


def compute_input(B: Cells | None, offset: Sequence[Cell] | None, n: int, u: Sequence[Entry]) -> list[Entry]:
    """Return B u + offset (n entries)."""
    c: list[Entry] = [0.0] * n if B is None else [dot(row, u) for row in resolve_matrix(B, u)]
    return c if offset is None else [plus(a, b) for a, b in zip(c, resolve(offset, u), strict=True)]


def noise_scale(field: str, definition: Mapping[str, Any], controls: Sequence[str]) -> Cell:
    """Return `noise_scale`, the factor of a noise covariance; 1.0 by default. Raises ModelError."""
    value = definition.get("noise_scale", 1.0)
    if isinstance(value, str):
        return columns.parse_cell(f"{field}.noise_scale", value, controls)
    return checks.parse_positive(f"{field}.noise_scale", value, zero=True)
