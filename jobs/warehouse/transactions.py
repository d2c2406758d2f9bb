"""The transactions of a Delta table: the last number of each application that has committed to it."""

from __future__ import annotations

from typing import Any

from jobs.warehouse.delta import Warehouse


def transactions(warehouse: Warehouse, table: str) -> dict[str, int]:
    """Return the number of each application's last transaction; none if the table does not exist.

    Delta keeps them in its checkpoints: unlike the history they do not expire.
    """
    if not warehouse.exists(table):
        return {}
    jvm: Any = warehouse.spark._jvm
    session = warehouse.spark._jsparkSession  # type: ignore[attr-defined]
    found = jvm.org.apache.spark.sql.delta.DeltaLog.forTableWithSnapshot(session, warehouse.path(table))
    # One text instead of a call to Java for each of them.
    lines = found._2().transactions().mkString("\n").splitlines()
    return {application: int(number) for application, _, number in (one.rpartition(" -> ") for one in lines)}
