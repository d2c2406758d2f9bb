"""A DataFrame that Spark plans only once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def plan_once(spark: SparkSession, rows: DataFrame) -> DataFrame:
    """Return the same rows as a DataFrame whose plan is hidden from queries that contain it.

    Spark plans each micro-batch of a stream anew, including the initial state, which only the first micro-batch reads.
    A table there would cost a read of its log each time, a tenth of a second.
    """
    java: Any = rows._jdf
    session: Any = spark._jsparkSession  # type: ignore[attr-defined]
    planned = session.internalCreateDataFrame(java.queryExecution().toRdd(), java.schema(), False)
    return DataFrame(planned, spark)
