"""Identity of a micro-batch that is published, and the place of each of its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

JSON_TIME = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"


class MicroBatch(NamedTuple):
    """Micro-batch to publish, and the driver that publishes it.

    plan: function that returns a text identifying the rows and their partitions: equal in each attempt to publish them,
    different otherwise; epoch: epoch of the driver.
    """

    generation: str
    batch_id: int
    plan: Callable[[], str]
    epoch: int


def add_ordinals(rows: DataFrame) -> DataFrame:
    """Add a column `ordinal`, the place of a row in its micro-batch: equal in each attempt to publish it.

    A micro-batch that runs again gives its rows in the same partitions and order, because the rows of a bucket are
    sorted before they are filtered. The numbers increase with gaps, so that no rows need be counted or moved.
    """
    return rows.withColumn("ordinal", F.monotonically_increasing_id())
