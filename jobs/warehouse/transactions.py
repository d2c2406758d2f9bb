"""Append rows to a Delta table in one commit that ends several transactions."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jobs.warehouse.delta import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def append_for_all(
    warehouse: Warehouse,
    frame: DataFrame,
    table: str,
    names: Iterable[tuple[str, int]],
    metadata: str | None = None,
) -> int:
    """Append rows to a table in one commit that ends several transactions (application, number); return its version.

    Spark's writer takes one transaction a commit, so this uses Delta's own. Unlike `Warehouse.append` it does not skip
    what is committed: the caller has looked, under a lock. Delta refuses the commit if another process has ended one of
    the transactions since.
    """
    jvm: Any = warehouse.spark._jvm
    session = warehouse.spark._jsparkSession  # type: ignore[attr-defined]
    delta, option = jvm.org.apache.spark.sql.delta, jvm.scala.Option
    convert = jvm.scala.jdk.javaapi.CollectionConverters
    now = int(time.time() * 1000)
    with warehouse.lock(table):
        transaction = (
            delta.DeltaLog.forTableWithSnapshot(session, warehouse.path(table))._1().startTransaction()
        )
        actions = jvm.java.util.ArrayList()
        for application, number in names:
            transaction.txnVersion(application)
            actions.add(delta.actions.SetTransaction(application, number, option.apply(now)))
        actions.addAll(convert.asJava(transaction.writeFiles(frame._jdf)))  # type: ignore[attr-defined]
        none = option.empty()
        write = getattr(delta, "DeltaOperations$Write")(
            jvm.org.apache.spark.sql.SaveMode.Append,
            *(none, none, option.apply(metadata)),  # no partitions, no predicate
            *[none] * 5,
        )
        return int(transaction.commit(convert.asScala(actions).toSeq(), write))
