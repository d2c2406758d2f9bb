"""A DataFrame whose plan is made once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def planned_once(spark: SparkSession, rows: DataFrame) -> DataFrame:
    """Return the same rows as a DataFrame that Spark does not look into when it plans a query of which they are a part.

    Of a stream Spark plans each micro-batch anew, and with it the initial state, which only the first one reads: a
    table there costs a look at its log each time, a tenth of a second.
    """
    java: Any = rows._jdf
    session: Any = spark._jsparkSession  # type: ignore[attr-defined]
    planned = session.internalCreateDataFrame(java.queryExecution().toRdd(), java.schema(), False)
    return DataFrame(planned, spark)
