"""A micro-batch as it is published: its identity, and the place of each of its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

JSON_TIME = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"


class MicroBatch(NamedTuple):
    """A micro-batch that is published, and the driver that does it.

    plan: returns a text that is the same in each attempt to publish the same rows in the same partitions, and in no
    other; epoch: of the driver.
    """

    generation: str
    batch_id: int
    plan: Callable[[], str]
    epoch: int


def numbered(rows: DataFrame) -> DataFrame:
    """Add a column `ordinal`, the place of a row in its micro-batch: the same in each attempt to publish it.

    The rows of a micro-batch that runs again come in the same partitions and the same order, as those of a bucket are
    sorted before they are filtered. The numbers rise with gaps, so no rows are counted or moved for them.
    """
    return rows.withColumn("ordinal", F.monotonically_increasing_id())
