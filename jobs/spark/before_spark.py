"""Check the measurements table from its log before Spark starts."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.spark.conf import quick_java_conf
from jobs.storage.positions import check_version
from jobs.storage.table_rows import file_sizes
from jobs.storage.tables import measurements, need_columns, need_measurements
from jobs.storage.warehouse import Tables

QUICK_BYTES = 16 << 20
"""Measurements up to so many bytes, about a million rows, are read within seconds."""


def check_measurements(root: str, model: str, columns: Sequence[str], version: int | None) -> None:
    """Refuse a model without measurements, without the columns of its spec, or without a version of them.

    Raises:
        UserError: there is no such table, column or version.
    """
    tables = Tables(root)
    check_version(tables, need_measurements(tables, model), version)
    need_columns(tables, model, columns)


def java_conf(root: str, model: str) -> dict[str, str]:
    """Return the setting of Java for a command that reads all measurements of a model, by their size."""
    sizes = file_sizes(root, measurements(model))
    return quick_java_conf() if sizes is not None and sizes[1] <= QUICK_BYTES else {}
