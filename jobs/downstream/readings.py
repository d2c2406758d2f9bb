"""Readings of estimates as Spark columns, by the names of `jobs.specs.readings`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.specs.model_spec import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import Column


def build_reading_column(spec: ModelSpec, name: str) -> Column:
    """Return the column of a reading; null in estimates without it."""
    found = spec.readings.by_name[name]
    column = F.col(found.column)
    return column if found.index is None else F.get(column, found.index)


def check_columns(spec: ModelSpec, names: Iterable[str], columns: Iterable[str]) -> None:
    """Refuse readings of columns that the estimates table does not have yet.

    Raises:
        UserError: the stream has written no estimates since the spec's `outputs` name these columns.
    """
    missing = {spec.readings.by_name[name].column for name in names} - set(columns)
    if missing:
        raise UserError(
            f"the estimates of {spec.name} have no column {' and no column '.join(sorted(missing))} yet: its stream "
            f"writes it from its next micro-batch on (`kalman-pipeline stream --model {spec.name}`)"
        )
