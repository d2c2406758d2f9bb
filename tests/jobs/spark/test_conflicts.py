"""The conflicts of commits that are caught are all that Delta has."""

from __future__ import annotations

import delta.exceptions
from pyspark.errors import PySparkException

from jobs.spark.warehouse import CONFLICTS


def test_every_conflict_of_delta_is_caught() -> None:
    found = [one for one in vars(delta.exceptions).values() if isinstance(one, type)]
    assert set(CONFLICTS) == {one for one in found if issubclass(one, PySparkException)}
