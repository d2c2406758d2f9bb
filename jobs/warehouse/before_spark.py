"""Refuse what the measurements of a local warehouse do not have before Spark starts (`LocalTables`)."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.warehouse.local_tables import local_tables
from jobs.warehouse.positions import check_version
from jobs.warehouse.tables import need_columns, need_measurements


def check_measurements(root: str, model: str, columns: Sequence[str], version: int | None) -> None:
    """Refuse a model without measurements, without the columns of its spec, or without a version of them.

    Of a remote warehouse nothing is known yet; what runs on Spark checks again.

    Raises:
        UserError: there is no such table, column or version.
    """
    tables = local_tables(root)
    if tables is None:
        return
    check_version(tables, need_measurements(tables, model), version)
    need_columns(tables, model, columns)
